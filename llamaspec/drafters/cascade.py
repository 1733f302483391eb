"""A draft model that has a draft of its own: the same draft and verify, one level down.

What the draft model writes is a text, too. A helper drafts for it, it evaluates its own text and that draft
at once, and the rule keeps its law; under the coupled rule the noise is the same, so it drafts the very
tokens that it would draft alone. A length policy of its own decides when that pays. To any depth, because the
helper may be a cascade, too. tests/drafters/test_cascade.py.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from llamaspec.drafters.fallback import drafting, preparing
from llamaspec.drafters.model import ModelDrafter
from llamaspec.errors import ContextFullError, ScoresError
from llamaspec.protocols import Closing, Drafter, Drafting, Preparing, RowLength
from llamaspec.sampling.acceptance_rules import counterfactual
from llamaspec.sampling.filters import confidence
from llamaspec.sampling.random_streams import CascadeStreams
from llamaspec.sampling.sampler import LogitsTarget, Sampler
from llamaspec.values import Distribution, Draft, Forward, ForwardRequest, Round, Source, TokenArray

Metered: TypeAlias = Generator[ForwardRequest, Forward, tuple[Draft, "_Spent"]]


@dataclass(slots=True)
class CascadeDrafter:
    """Draws draft tokens from a model, with help."""

    model: ModelDrafter  # as it would draft alone
    helper: Drafter  # drafts for it, with the chance of `streams`
    length: RowLength  # how much of that pays
    streams: CascadeStreams  # made from the model's own
    max_scored: int | None = None  # positions of one evaluation that the model scores

    def prepare(self, context: TokenArray) -> Preparing:
        """Let the model and its helper read a prompt."""
        yield from self.model.prepare(context)
        yield from preparing(self.helper, self.model.known(context))

    def propose(self, context: TokenArray, length: RowLength) -> Drafting:
        """Draft until the policy has enough."""
        model, draft = self.model, Draft(source=Source.STAGE)
        self.streams.start = len(context)
        context = model.known(context)
        sampler = Sampler(model.sampling, model.n_prompt, model.constraint, model.n_drawn)
        while not model.is_silent and length.wants_more(draft):
            path = np.concatenate((context, draft.tokens))
            only = sampler.only_allowed(path)
            if only is not None:
                draft = draft.plus(only, Distribution.certain(only), 1.0)
                continue
            try:
                draft = yield from self._longer(draft, path, sampler, length)
            except ContextFullError:
                break
            except ScoresError:
                model.is_silent = True
        return draft

    def close(self) -> None:
        """The sequence has ended."""
        self.length.close()
        if isinstance(self.helper, Closing):
            self.helper.close()

    def _longer(self, draft: Draft, path: TokenArray, sampler: Sampler, wanted: RowLength) -> Drafting:
        """The draft with what a round of the model and its helper adds to it, as far as that is wanted."""
        model, shown = self.model, self.model.window(path)
        limit = min(model.context_size - len(shown), (self.max_scored or model.context_size) - 1)
        asked = _HelperLength(self.length, wanted, draft, limit)
        made, spent = yield from _metered(drafting(self.helper, path, asked))
        made = made.first(limit)
        helped = made.first(max(self.length.n_verified(made), 0))
        forward = yield ForwardRequest(model.model, shown, draft=helped.tokens, parents=helped.parents)
        logits = forward.logits[:, : model.n_drawn]
        p = LogitsTarget(logits, path, helped, sampler)
        verification = model.rule.verify(helped, p, self.streams, len(path))
        round_ = Round(
            helped.without_distributions(),
            verification.path,
            verification.next_token,
            forward.n_positions,
            forward.n_rows,
            forward.evaluation,
            n_draft_steps=spent.n_steps,
            draft_seconds=spent.seconds,
            verify_seconds=forward.seconds,
            n_draft_scored=spent.n_scored,
            n_beside=forward.n_beside,
            n_dropped=len(made) - len(helped),
            shadow=counterfactual(made, helped, verification, model.rule, p),
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
    """A round of which only `n` tokens were wanted: the others count as rejected, for they gained nothing."""
    if n >= len(round_.tokens):
        return round_
    n_accepted = max(n - 1, 0)
    return replace(round_, path=round_.path[:n_accepted], next_token=int(round_.tokens[n_accepted]))


@dataclass(slots=True)
class _Spent:
    """What the helper's evaluations have cost."""

    seconds: float = 0.0
    n_steps: int = 0
    n_scored: int = 0  # positions


def _metered(proposing: Drafting) -> Metered:
    """A draft, and what it has cost."""
    spent = _Spent()
    try:
        request = next(proposing)
        while True:
            try:
                forward = yield request
            except (ContextFullError, ScoresError) as error:  # the helper can do without
                request = proposing.throw(error)
                continue
            spent.seconds += forward.seconds
            spent.n_steps += bool(request.n_scored)
            spent.n_scored += request.n_scored
            request = proposing.send(forward)
    except StopIteration as end:
        return end.value, spent


@dataclass(frozen=True, slots=True, eq=False)
class _HelperLength:
    """The helper's length: no more than the draft itself is wanted long."""

    length: RowLength
    wanted: RowLength  # how long that is
    draft: Draft  # what there is of it
    limit: int

    def wants_more(self, draft: Draft) -> bool:
        """Whether the model could use one more token; the one after them it makes itself."""
        if len(draft) >= self.limit or not self.length.wants_more(draft):
            return False
        tokens = np.concatenate((self.draft.tokens, draft.tokens, np.zeros(1, np.int32)))
        confidences = (*self.draft.confidences, *draft.confidences, 1.0)
        return self.wanted.wants_more(Draft(tokens, (), confidences, self.draft.source))

    def n_verified(self, draft: Draft) -> int:
        """As the helper's policy decides."""
        return self.length.n_verified(draft)

    def width(self, n_positions: int) -> int:
        """Only evaluations of the target are padded."""
        return n_positions

    def observe(self, round_: Round) -> None:
        """The policy itself observes what was used of a round."""

    def close(self) -> None:
        """The policy itself is closed."""
