"""Draft tokens from a model that computes a block of them at once (DFlash, DSpark, DFlash2).

One evaluation gives a row of scores for each token of the block, whatever was drawn before it. DFlash2 gives
candidates and a score for each pair of neighbours instead, so its distributions depend on the token before.
Both are proper distributions, so every rule may verify them. tests/drafters/test_block.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from llamaspec.drafters.hidden import KeepsRows, RowWindow, asking
from llamaspec.drafters.model import DeferredPrompt, draft_distribution, lasting_fault
from llamaspec.errors import EVALUATION_FAULTS
from llamaspec.protocols import Drafting, Preparing, RandomStreams, Rule, SequenceLength
from llamaspec.sampling.filters import confidence
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import DRAFT, Draft, Forward, ForwardRequest, Logits, Source, TokenArray


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a block consists of."""

    vocabulary_size: int  # V
    n_positions: int  # the last token and the open positions after it
    mask: int  # the token at open positions
    from_anchor: bool = False  # the row of the last token predicts, too
    has_confidence: bool = False  # the model returns the confidence of each token
    n_candidates: int | None = (
        None  # of each position in a lattice (DFlash2); None = the model returns logits
    )


@dataclass(slots=True)
class BlockDrafter(KeepsRows):
    """Draws the tokens of a block."""

    shape: BlockShape
    row_window: RowWindow
    sampler: Sampler  # usually the target's
    rule: Rule  # draws the tokens
    streams: RandomStreams  # the same as the target's
    model: str = DRAFT  # its name in requests
    source: Source = Source.BLOCK
    deferred: DeferredPrompt | None = None  # None: the model gets the rows of the prompt at once
    fault: str | None = field(default=None, init=False)  # the error after which the model is not used again

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting:
        """Draft a block, or as much of it as the policy wants."""
        draft, window, deferred = Draft(source=self.source), self.row_window, self.deferred
        if self.fault is not None or not window.reaches(context) or not length.wants_more(draft):
            return draft
        if deferred is not None and deferred.is_pending:
            prefix, is_instead = deferred.next_part(context[:-1])
            yield from self._process(prefix)
            if is_instead or self.fault is not None:
                return draft
        open_ = np.full(self.shape.n_positions - 1, self.shape.mask, dtype=np.int32)
        try:
            forward = yield from asking(
                window,
                len(context),
                lambda: ForwardRequest(self.model, context, 1, open_, hidden=window.input()),
            )
        except EVALUATION_FAULTS as error:
            self.fault = lasting_fault(error)
            return draft
        return self._drawn(draft, context, forward, length)

    def _process(self, prefix: TokenArray) -> Preparing:
        """Give the model the rows of some tokens; a failure only ends the use of the model."""
        n, window = len(prefix), self.row_window
        if self.fault is not None or n <= window.begin:
            return
        try:
            forward = yield from asking(
                window, n, lambda: ForwardRequest(self.model, prefix, 0, hidden=window.input())
            )
        except EVALUATION_FAULTS as error:
            self.fault = lasting_fault(error)
            return
        if self.deferred is not None:
            self.deferred.observe(n, forward)

    def _drawn(self, draft: Draft, context: TokenArray, forward: Forward, length: SequenceLength) -> Draft:
        """Draw tokens while the policy wants more."""
        sampler, rows = self.sampler, None if forward.hidden is None else forward.hidden.rows
        for row in range(0 if self.shape.from_anchor else 1, self.shape.n_positions):
            if not length.wants_more(draft):
                break
            sequence = np.concatenate((context, draft.tokens))
            logits = self._logits(forward, row, int(sequence[-1]))
            allowed = sampler.allowed(sequence)
            q = None if logits is None else draft_distribution(sampler, logits, sequence, allowed)
            if logits is None or q is None:
                break
            token = self.rule.draw(q, self.streams, len(context), len(draft))
            if self.shape.has_confidence and rows is not None:
                draft = draft.plus(token, q, float(rows[row, 0]))
            else:
                draft = draft.plus(token, q, confidence(logits, token, q, allowed))
        return draft

    def _logits(self, forward: Forward, row: int, previous: int) -> Logits | None:
        """Return the scores of a position, [V]; None if the lattice does not contain the token before it."""
        k = self.shape.n_candidates
        if k is None:
            scores: Logits = forward.logits[row]
            return scores
        assert forward.hidden is not None
        lattice, before = forward.hidden.rows, 0
        if row > 1:  # the first row has the same scores after each candidate
            found = np.flatnonzero(lattice[row - 1, :k] == previous)
            if not len(found):
                return None
            before = int(found[0])
        logits: Logits = np.full(self.shape.vocabulary_size, -np.inf, dtype=np.float32)
        tokens = lattice[row, :k].astype(np.int32)
        known = tokens < self.shape.vocabulary_size  # a draft may have more tokens than the target
        logits[tokens[known]] = lattice[row, k * (1 + before) : k * (2 + before)][known]
        return logits
