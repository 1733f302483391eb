"""A draft model that has a draft of its own: the same loop, one level down.

What the draft model writes is a text, too. Somebody drafts for it, it evaluates its own text and that draft
at once, and the rule leaves its law as it was; under the coupled rule the noise is the same, so it drafts the
very tokens that it would draft alone. A length policy of its own decides when that pays. To any depth,
because whoever drafts for it may have a draft as well. tests/engine/test_staged.py, test_exact_law.py.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamaspec.drafters.coroutines import preparing
from llamaspec.drafters.model import ModelDrafter
from llamaspec.engine.row import Clock, Row, unpadded
from llamaspec.engine.speculate import Speculation, Verified, next_round
from llamaspec.errors import ContextFullError, ScoresError
from llamaspec.protocols import Drafter, Drafting, Preparing, RowLength
from llamaspec.sampling.distributions import confidence
from llamaspec.sampling.random_streams import StageStreams
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import NO_DRAFT, Distribution, Draft, Forward, Round, Source, TokenArray

LONGEST = 1 << 16  # draft tokens; every policy stops sooner


@dataclass(slots=True)
class StagedDrafter:
    """Draws draft tokens from a model, with help.

    Parameters
    ----------
    model : ModelDrafter
        The model, as it would draft alone.
    drafter : Drafter
        Who drafts for it, with the chance of `streams`.
    length : RowLength
        How much of that pays. Whoever ends the text closes it.
    streams : StageStreams
        Made from the model's own streams.
    clock : callable
        Seconds.
    max_scored : int, optional
        Positions of one evaluation that the model scores.
    """

    model: ModelDrafter
    drafter: Drafter
    length: RowLength
    streams: StageStreams
    clock: Clock
    max_scored: int | None = None

    def prepare(self, context: TokenArray) -> Preparing:
        """Let the model and its drafter take in a prompt."""
        yield from self.model.prepare(context)
        yield from preparing(self.drafter, self.model.known(context))

    def propose(self, context: TokenArray, length: RowLength) -> Drafting:
        """Draft until the policy has enough."""
        self.streams.start = len(context)
        row: Row[Any] = Row(0, self._write(context, length), unpadded, self.model.model)
        answer: Forward | None = None
        error: ContextFullError | ScoresError | None = None
        while True:
            try:
                row.go_on(self.clock, answer, error)
            except StopIteration as end:
                draft: Draft = end.value
                return draft
            assert row.request is not None
            answer = error = None
            try:
                answer = yield row.request
                row.cost(answer.seconds)
            except (ContextFullError, ScoresError) as raised:
                error = raised

    def _write(self, context: TokenArray, wanted: RowLength) -> Generator[Any, Any, Draft]:
        """Write a draft speculatively, as a text whose rounds the clock is told of."""
        model, draft = self.model, Draft(source=Source.STAGE)
        context, length = model.known(context), _Wanted(self.length, wanted)
        sampler = Sampler(model.sampling, model.n_prompt, model.constraint, model.n_drawn)
        speculation = Speculation(
            self.drafter,
            length,
            model.rule,
            model.sampling,
            self.streams,
            model.context_size,
            self.max_scored,
            model=model.model,
            n_tokens=model.n_drawn,
            shown=model.window,
        )
        while not model.is_silent and wanted.wants_more(draft):
            length.draft = draft
            path = np.concatenate((context, draft.tokens))
            only = sampler.only_allowed(path)
            if only is not None:
                draft = draft.plus(only, Distribution.certain(only), 1.0)
                continue
            try:
                verified = yield from next_round(path, LONGEST, speculation, sampler)
            except ContextFullError:
                break
            except ScoresError:
                model.is_silent = True
                break
            longer = _longer(draft, verified, sampler, context, wanted)
            self.length.observe(_used(verified.round, len(longer) - len(draft)))
            draft = longer
        return draft


def _longer(
    draft: Draft, verified: Verified, sampler: Sampler, context: TokenArray, wanted: RowLength
) -> Draft:
    """The draft with what a round has made of it, as far as it is wanted."""
    round_, verification, logits = verified
    nodes = (-1, *verification.path)
    for node, token, q in zip(nodes, round_.tokens.tolist(), verification.distributions, strict=True):
        if node >= 0 and not wanted.wants_more(draft):
            break
        allowed = sampler.allowed(np.concatenate((context, draft.tokens)))
        draft = draft.plus(token, q, confidence(logits[node + 1], token, q, allowed))
    return draft


def _used(round_: Round, n: int) -> Round:
    """A round of which only `n` tokens were wanted: the others have bought nothing, as if rejected."""
    if n >= len(round_.tokens):
        return round_
    n_accepted = max(n - 1, 0)
    return replace(round_, path=round_.path[:n_accepted], next_token=int(round_.tokens[n_accepted]))


@dataclass(slots=True, eq=False)
class _Wanted:
    """The length of a draft's draft: no more of it than the draft itself is wanted long."""

    length: RowLength
    wanted: RowLength  # how long that is
    draft: Draft = NO_DRAFT  # what there is of it

    def wants_more(self, draft: Draft) -> bool:
        """Whether the model could use one more token; the one after them it makes itself."""
        return self.length.wants_more(draft) and self.wanted.wants_more(_joined(self.draft, draft))

    def n_verified(self, draft: Draft) -> int:
        """As the draft's draft's policy decides."""
        return self.length.n_verified(draft)

    def width(self, n_positions: int) -> int:
        """Only evaluations of the target are padded."""
        return n_positions

    def observe(self, round_: Round) -> None:
        """The length observes what was used of a round."""

    def close(self) -> None:
        self.length.close()


def _joined(draft: Draft, more: Draft) -> Draft:
    """A draft, if `more` is right and another token after it is sure."""
    tokens = np.concatenate((draft.tokens, more.tokens, np.zeros(1, np.int32)))
    return Draft(tokens, (), (*draft.confidences, *more.confidences, 1.0), draft.source)
