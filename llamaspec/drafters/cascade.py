"""A draft model that has a draft of its own: speculative decoding, one level down.

A helper drafts for the draft model, and the draft model verifies by the same rule. So its draft tokens keep
their distribution; under the coupled rule they are the tokens that it would draft without a helper. A
separate length policy chooses how much the helper drafts. The helper may be a cascade, too.
tests/drafters/test_cascade.py.
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
    """Draft tokens from a model that verifies the drafts of a helper; both have the target's vocabulary."""

    model: ModelDrafter  # drafts for the target
    helper: Drafter  # drafts for the model, with `streams`
    length: SequenceLength  # chooses how much the helper drafts
    streams: CascadeStreams  # derived from the streams of the model
    max_scored: int | None = None  # positions that the model can score in one evaluation; None = any number

    @property
    def fault(self) -> str | None:
        """The error after which the model or its helper is not used again."""
        return fault_of(self.model, self.helper)

    def prepare(self, context: TokenArray) -> Preparing:
        """Let the model and its helper process a prompt."""
        yield from self.model.prepare(context)
        if self.model.fault is None:
            yield from preparing(self.helper, self.model.tokens.translate(context))

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting:
        """Draft until the policy wants no more."""
        model, draft = self.model, Draft(source=Source.STAGE)
        self.streams.start = len(context)
        context = model.tokens.translate(context)
        sampler = replace(model.sampler, n_tokens=model.tokens.n_drawable)
        while model.fault is None and length.wants_more(draft):
            path = np.concatenate((context, draft.tokens))
            allowed = sampler.allowed(path)
            if allowed is not None and len(allowed) == 1:
                draft = draft.plus(int(allowed[0]))
                continue
            try:
                draft = yield from self._extended(draft, path, sampler, length)
            except EVALUATION_FAULTS as error:
                model.note_fault(error)
                break
        return draft

    def close(self) -> None:
        """End the sequence."""
        self.length.close()
        if isinstance(self.helper, Closing):
            self.helper.close()

    def _extended(self, draft: Draft, path: TokenArray, sampler: Sampler, wanted: SequenceLength) -> Drafting:
        """Extend a draft by one round of the model and its helper, while `wanted` wants more."""
        model, window = self.model, self.model.window(path)
        limit = min(model.context_size - len(window), (self.max_scored or model.context_size) - 1)
        length = _HelperLength(limit, self.length, wanted, draft)
        made, spent = yield from metered(drafting(self.helper, path, length))
        made = made.first(limit)
        verified = made.first(max(self.length.n_verified(made), 0))
        forward = yield ForwardRequest(model.model, window, draft=verified.tokens, parents=verified.parents)
        logits = forward.logits[:, : sampler.n_tokens]
        p = LogitsTarget(logits, path, verified, sampler)
        verification = model.rule.verify(verified, p, self.streams, len(path))
        round_ = replace(
            round_of(made, verified, forward, verification, model.rule, p),
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
    """Return a round of which only `n` tokens were used. The others count as rejected: they saved nothing."""
    if n >= len(round_.tokens):
        return round_
    n_accepted = max(n - 1, 0)
    return replace(round_, path=round_.path[:n_accepted], next_token=int(round_.tokens[n_accepted]))


@dataclass(slots=True, eq=False)
class _HelperLength(SequenceAtMost):
    """Limits the helper by its own policy, and by the policy of the draft that it extends."""

    wanted: SequenceLength  # the policy of the draft
    draft: Draft  # drawn so far

    def wants_more(self, draft: Draft) -> bool:
        """Whether one more token is wanted, besides the one that the model adds itself."""
        if len(draft) >= self.limit or not self.sequence.wants_more(draft):
            return False
        tokens = np.concatenate((self.draft.tokens, draft.tokens, np.zeros(1, np.int32)))
        confidences = (*self.draft.confidences, *draft.confidences, 1.0)
        return self.wanted.wants_more(Draft(tokens, (), confidences, self.draft.source))
