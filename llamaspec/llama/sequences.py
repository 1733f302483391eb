"""Token sequences that a KV cache holds, and the hidden rows that prediction heads read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llamaspec.values import NO_TOKENS, TokenArray, n_common

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.float32]  # [n, E] hidden rows

KEPT_ROWS = 512  # hidden rows kept of a running text, if there were so many: one chunk of a prompt
TAIL_ROWS = 65  # hidden rows kept of a text that ended: what a round may have left unread


class HiddenRows:
    """Hidden rows of the last positions of a sequence, which prediction heads read."""

    def __init__(self) -> None:
        self.first = 0  # position of the first row
        self.end = 0  # position behind the last row
        self._rows: Rows = np.empty((0, 0), dtype=np.float32)  # [capacity, E]; the first `end - first` count

    def has(self, start: int, end: int) -> bool:
        """Whether the rows of some positions are known."""
        return start >= end or self.first <= start < end <= self.end

    def rows(self, start: int, end: int) -> Rows:
        """The rows of some positions, all of them known: a view."""
        return self._rows[start - self.first : end - self.first]

    def add(self, start: int, rows: Rows) -> None:
        """Note the rows of positions from `start` on, in place of what was known from there on."""
        self.cut(start)
        if start != self.end:
            self.first = self.end = start
        n, n_new = self.end - self.first, len(rows)
        if n + n_new > len(self._rows):
            kept = self.rows(max(self.first, self.end - KEPT_ROWS), self.end)
            grown = np.empty((2 * (len(kept) + n_new), rows.shape[1]), dtype=np.float32)
            grown[: len(kept)] = kept.reshape(len(kept), rows.shape[1])
            self._rows, self.first, n = grown, self.end - len(kept), len(kept)
        self._rows[n : n + n_new] = rows
        self.end = start + n_new  # last, so that an exception leaves what was known before

    def cut(self, n: int) -> None:
        """Forget the rows of positions from `n` on."""
        self.end = min(self.end, n)
        self.first = min(self.first, self.end)

    def tail(self, n: int) -> HiddenRows:
        """A copy of the last rows before position `n`."""
        tail, end = HiddenRows(), max(self.first, min(self.end, n))
        tail.first, tail.end = max(self.first, end - TAIL_ROWS), end
        tail._rows = self.rows(tail.first, tail.end).copy()
        return tail


@dataclass(slots=True, eq=False)
class CachedSequence:
    """Tokens whose keys and values are cached, and for whom."""

    number: int  # llama.cpp's seq_id
    row: int | None = None  # the row that uses it; None = a text that has ended
    last_used: int = 0
    n_reserved: int = 0  # cells that its row will fill next
    n_padding: int = 0  # of these, cells for padding
    n: int = 0
    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [capacity]; the first n count
    cells: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [capacity] index of each token's cell
    hidden: HiddenRows = field(default_factory=HiddenRows)

    def append(self, tokens: TokenArray, cells: TokenArray) -> None:
        """Hold more tokens. The length is set last, so an exception leaves what was held before."""
        end = self.n + len(tokens)
        self.hidden.cut(self.n)
        if end > len(self.tokens):
            grown = np.empty((2, max(2 * end, 256)), dtype=np.int32)
            grown[0, : self.n], grown[1, : self.n] = self.tokens[: self.n], self.cells[: self.n]
            self.tokens, self.cells = grown
        self.tokens[self.n : end], self.cells[self.n : end] = tokens, cells
        self.n = end

    def shared(self, tokens: TokenArray) -> int:
        """Length of the common beginning with other tokens."""
        return n_common(self.tokens[: self.n], tokens)
