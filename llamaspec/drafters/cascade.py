"""A draft model that has a draft of its own: the same draft and verify, one level down.

A helper drafts for the draft model, which verifies by the same rule, so its draft tokens keep their
distribution; under the coupled rule they are the tokens that it would draft alone. A separate length policy
decides how much the helper drafts. The helper may be a cascade, too. tests/drafters/test_cascade.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llamaspec.drafters.fallback import drafting, fault_of, metered, preparing
from llamaspec.drafters.model import ModelDrafter
from llamaspec.errors import EVALUATION_FAULTS
from llamaspec.length.fixed import SequenceAtMost
from llamaspec.protocols import Closing, Drafter, Drafting, Preparing, SequenceLength
from llamaspec.sampling.acceptance_rules import round_of
from llamaspec.sampling.filters import confidence
from llamaspec.sampling.random_streams import CascadeStreams
from llamaspec.sampling.sampler import LogitsTarget, Sampler
from llamaspec.values import Draft, ForwardRequest, Round, Source, TokenArray


@dataclass(slots=True)
class CascadeDrafter:
    """Draft tokens from a model that verifies the drafts of a helper."""

    model: ModelDrafter  # as it would draft alone
    helper: Drafter  # drafts for it, with the randomness of `streams`
    length: SequenceLength  # how much the helper drafts
    streams: CascadeStreams  # made from the model's own
    max_scored: int | None = None  # positions of one evaluation that the model scores

    @property
    def fault(self) -> str | None:
        """The error that stopped the model or its helper."""
        return fault_of(self.model, self.helper)

    def prepare(self, context: TokenArray) -> Preparing:
        """Process a prompt in the model and its helper."""
        yield from self.model.prepare(context)
        if self.model.fault is None:
            yield from preparing(self.helper, self.model.known(context))

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting:
        """Draft until the policy wants no more."""
        model, draft = self.model, Draft(source=Source.STAGE)
        self.streams.start = len(context)
        context = model.known(context)
        sampler = Sampler(model.sampling, model.n_prompt, model.constraint, model.n_drawn)
        while model.fault is None and length.wants_more(draft):
            path = np.concatenate((context, draft.tokens))
            allowed = sampler.allowed(path)
            if allowed is not None and len(allowed) == 1:
                draft = draft.plus(int(allowed[0]))
                continue
            try:
                draft = yield from self._longer(draft, path, sampler, length)
            except EVALUATION_FAULTS as error:
                model.note_fault(error)
                break
        return draft

    def close(self) -> None:
        """End the sequence."""
        self.length.close()
        if isinstance(self.helper, Closing):
            self.helper.close()

    def _longer(self, draft: Draft, path: TokenArray, sampler: Sampler, wanted: SequenceLength) -> Drafting:
        """Extend a draft by one round of the model and its helper, as far as more is wanted."""
        model, shown = self.model, self.model.window(path)
        limit = min(model.context_size - len(shown), (self.max_scored or model.context_size) - 1)
        asked = _HelperLength(limit, self.length, wanted, draft)
        made, spent = yield from metered(drafting(self.helper, path, asked))
        made = made.first(limit)
        helped = made.first(max(self.length.n_verified(made), 0))
        forward = yield ForwardRequest(model.model, shown, draft=helped.tokens, parents=helped.parents)
        logits = forward.logits[:, : model.n_drawn]
        p = LogitsTarget(logits, path, helped, sampler)
        verification = model.rule.verify(helped, p, self.streams, len(path))
        round_ = replace(
            round_of(made, helped, forward, verification, model.rule, p),
            n_draft_steps=sum(request.n_scored > 0 for request, _ in spent),
            draft_seconds=sum(seconds for _, seconds in spent),
            verify_seconds=forward.seconds,
        )
        nodes, n_before = (-1, *verification.path), len(draft)
        for node, token, q in zip(nodes, round_.tokens.tolist(), verification.distributions, strict=True):
            if node >= 0 and not wanted.wants_more(draft):
                break
            allowed = sampler.allowed(np.concatenate((path, draft.tokens[n_before:])))
            draft = draft.plus(token, q, confidence(logits[node + 1], token, q, allowed))
        self.length.observe(used(round_, len(draft) - n_before))
        return draft


def used(round_: Round, n: int) -> Round:
    """A round of which only `n` tokens were used: the others count as rejected, since they saved nothing."""
    if n >= len(round_.tokens):
        return round_
    n_accepted = max(n - 1, 0)
    return replace(round_, path=round_.path[:n_accepted], next_token=int(round_.tokens[n_accepted]))


@dataclass(slots=True, eq=False)
class _HelperLength(SequenceAtMost):
    """The helper's length, limited by the length that is wanted of the draft itself."""

    wanted: SequenceLength  # how long the draft is wanted
    draft: Draft  # as far as it is drawn

    def wants_more(self, draft: Draft) -> bool:
        """Whether the model could use one more token; it adds the token after them itself."""
        if len(draft) >= self.limit or not self.sequence.wants_more(draft):
            return False
        tokens = np.concatenate((self.draft.tokens, draft.tokens, np.zeros(1, np.int32)))
        confidences = (*self.draft.confidences, *draft.confidences, 1.0)
        return self.wanted.wants_more(Draft(tokens, (), confidences, self.draft.source))
