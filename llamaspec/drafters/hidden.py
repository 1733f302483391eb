"""Draft tokens from a model that reads the target's hidden rows (MTP, EAGLE-3), one after the other.

The model evaluates a token with the hidden row of the position before it: the target's, and its own rows
after the text. The loop reports the target's rows (`committed`); the last ones are kept, because the model
may lack them when it drafts. If it lacks older ones, it no longer sees the tokens before those that are kept.
tests/drafters/test_hidden.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from llamaspec.drafters.model import DeferredPrompt, ModelDrafter, lasting_fault
from llamaspec.errors import EVALUATION_FAULTS, RowsMissingError
from llamaspec.protocols import Asking, Drafting, FindingRow, Preparing, SequenceLength
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import Draft, ForwardRequest, HiddenInput, HiddenRows, Rows, TokenArray

KEPT_ROWS = 512  # minimum number of last hidden rows that are kept: a chunk of a prompt
NO_ROWS: Rows = np.empty((0, 0), dtype=np.float32)


class RecentRows:
    """Hidden rows of the last positions, without gaps."""

    def __init__(self) -> None:
        self.first = 0  # position of the first row
        self.end = 0  # position after the last row
        self._rows: Rows = np.empty((0, 0), dtype=np.float32)  # [capacity, F], of which end - first are used

    @property
    def known(self) -> HiddenRows:
        """All rows: a view that `add` changes."""
        return HiddenRows(self.first, self._rows[: self.end - self.first])

    def add(self, start: int, rows: Rows) -> None:
        """Add the rows of positions from `start` on; after a gap, forget those before it."""
        if start != self.end:
            self.first = self.end = start
        n, n_new = self.end - self.first, len(rows)
        if n + n_new > len(self._rows):
            kept = self._rows[max(0, n - KEPT_ROWS) : n]
            grown = np.empty((2 * (len(kept) + n_new), rows.shape[1]), dtype=np.float32)
            grown[: len(kept)] = kept.reshape(len(kept), rows.shape[1])
            self._rows, self.first, n = grown, self.end - len(kept), len(kept)
        self._rows[n : n + n_new] = rows
        self.end = start + n_new


@dataclass(slots=True)
class RowWindow:
    """The hidden rows of one sequence for a draft model, and the part of the sequence that it sees."""

    model: str  # its name in requests
    lag: int  # positions between a token and its row: 1 = the row before the token, 0 = its own row
    is_asleep: bool = False  # the model may never process the prompt, so only its last rows are wanted
    begin: int = field(init=False)  # the first token that the model sees
    rows: RecentRows = field(init=False, default_factory=RecentRows)

    def __post_init__(self) -> None:
        self.begin = self.lag

    def first_row(self, prompt: TokenArray) -> FindingRow:
        """Return the first position whose row the model needs: after the tokens that it has cached."""
        n_cached = len(prompt) - 1
        if n_cached > self.begin:
            try:
                yield ForwardRequest(self.model, prompt[:-1], 0, hidden=self.input())
            except RowsMissingError as error:
                n_cached = error.n_cached
        first = max(n_cached - self.lag, 0)
        return max(first, len(prompt) - 1 - KEPT_ROWS) if self.is_asleep else first

    def reaches(self, context: TokenArray) -> bool:
        """Whether the row before the last token is known."""
        return self.rows.first < self.rows.end == len(context) - 1

    def input(self, own: Rows = NO_ROWS) -> HiddenInput:
        """Return the rows for a request."""
        return HiddenInput(self.begin, self.rows.known, own)

    def start_behind(self) -> None:
        """Let the model see only the tokens whose rows are kept."""
        self.begin = self.rows.first + self.lag


def asking(window: RowWindow, n_text: int, request: Callable[[], ForwardRequest]) -> Asking:
    """Make a request for `n_text` tokens and drafted ones; if rows are missing, begin behind them."""
    try:
        return (yield request())
    except RowsMissingError:
        window.start_behind()
        if window.begin >= n_text:  # until there are more rows
            raise
        return (yield request())


class KeepsRows(ABC):
    """The part of a drafter that gets the target's hidden rows and keeps them for its model."""

    row_window: RowWindow
    sampler: Sampler
    deferred: DeferredPrompt | None
    fault: str | None

    @property
    def reads_rows(self) -> bool:
        """Whether the model is still used."""
        return self.fault is None

    def first_row(self, prompt: TokenArray) -> FindingRow:
        """Return the first position whose row the model needs."""
        try:
            return (yield from self.row_window.first_row(prompt))
        except EVALUATION_FAULTS as error:
            self.fault = lasting_fault(error)
            return 0

    def committed(self, tokens: TokenArray, rows: Rows, position: int) -> None:
        """Keep rows for the model."""
        self.row_window.rows.add(position, rows)

    def prepare(self, context: TokenArray) -> Preparing:
        """Process all but the last token, or report them to the length policy if the model sleeps."""
        if self.deferred is None:
            yield from self._process(context[:-1])
        else:
            self.deferred.start(context, self.sampler.n_prompt)

    @abstractmethod
    def _process(self, prefix: TokenArray) -> Preparing:
        """Have the model process some tokens."""


@dataclass(slots=True)
class HiddenDrafter(KeepsRows, ModelDrafter):
    """Draws draft tokens from a model with hidden rows."""

    row_window: RowWindow = field(kw_only=True)
    _own: Rows = field(init=False, default_factory=lambda: NO_ROWS)  # [k, E] the model's own, after the text

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting:
        """Draft until the policy wants no more; nothing without the row before the last token."""
        self._own = NO_ROWS
        if not self.row_window.reaches(context):
            return Draft(source=self.source)
        return (yield from ModelDrafter.propose(self, context, length))

    def _ask(self, path: TokenArray, n_drafted: int) -> Asking:
        """Return the logits after a path; compute the rows before it that a forced token has left out."""
        n_text = len(path) - n_drafted
        while True:
            n = len(self._own)
            forward = yield from self._evaluated(path[: n_text + n], 1)
            assert forward.hidden is not None
            row = forward.hidden.rows[-1:]
            self._own = np.concatenate((self._own, row)) if n else row.copy()
            if n == n_drafted:
                return forward

    def _process(self, prefix: TokenArray) -> Preparing:
        if len(prefix) > self.row_window.begin:
            yield from ModelDrafter._process(self, prefix)

    def _evaluated(self, tokens: TokenArray, n_logits: int) -> Asking:
        window, own = self.row_window, self._own

        def request() -> ForwardRequest:
            return ForwardRequest(self.model, tokens, n_logits, hidden=window.input(own))

        return (yield from asking(window, len(tokens) - len(own), request))
