"""The target's hidden rows of the last positions of a sequence: what a prediction head needs besides tokens.

Rows are kept until the head has read them; a head that has not been asked for long has to do without the
oldest. Knows neither tokens nor llama.cpp. tests/llama/test_hidden_rows.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]  # [n, E]

MOST = 512  # rows that are kept at least, if there were so many: a part of a prompt
TAIL = 65  # rows kept of a text that has ended: the head has not read its last round


class HiddenRows:
    """Rows of consecutive positions, the last ones of a sequence."""

    def __init__(self) -> None:
        self.first = 0  # position of the first row
        self.end = 0  # position behind the last row
        self._rows: Rows = np.empty((0, 0), dtype=np.float32)  # [capacity, E] the first `end - first` count

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
            kept = self.rows(max(self.first, self.end - MOST), self.end)
            grown = np.empty((2 * (len(kept) + n_new), rows.shape[1]), dtype=np.float32)
            if len(kept):
                grown[: len(kept)] = kept
            self._rows, self.first, n = grown, self.end - len(kept), len(kept)
        self._rows[n : n + n_new] = rows
        self.end = start + n_new  # last, so that an interruption leaves what was known before

    def cut(self, n: int) -> None:
        """Forget the rows of positions from `n` on."""
        self.end = min(self.end, n)
        self.first = min(self.first, self.end)

    def tail(self, n: int) -> HiddenRows:
        """A copy of the last rows before position `n`."""
        tail, end = HiddenRows(), max(self.first, min(self.end, n))
        tail.first, tail.end = max(self.first, end - TAIL), end
        tail._rows = self.rows(tail.first, tail.end).copy()
        return tail
