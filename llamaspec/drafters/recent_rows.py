"""The target's hidden rows of the last positions of a sequence, which a drafter keeps for its draft model."""

from __future__ import annotations

import numpy as np

from llamaspec.values import HiddenRows, Rows

KEPT_ROWS = 512  # minimum number of last rows that are kept: a chunk of a prompt


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
