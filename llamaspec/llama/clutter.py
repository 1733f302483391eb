"""When cells that no row needs have cost as much as being rid of them costs.

llama.cpp's attention goes over all cells up to the last full one, whoever needs them: garbage, and prefixes
that nobody uses, slow every evaluation down. Moving what is needed to the beginning takes its time, too. Who
moves once the one has cost as much as the other pays at most twice what the best plan would have (ski rental;
Karlin et al. 1988, Competitive Snoopy Caching). Counts cells, and knows no clock.
tests/llama/test_clutter.py; scripts/clutter_costs.py measures.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamaspec.llama.cached_sequence import CachedSequence
from llamaspec.llama.held_cells import HeldCells

BLOCK = 256  # cells: llama.cpp's attention goes over whole ones
LOOK = 8  # evaluations between two looks
MOVE = 16.0  # evaluations of one position that pass over a cell while it is copied out and back
DENSE = 0.5  # times as many without flash attention: it passes over cells more slowly than it moves them
MOVE_FAR = 1024.0  # the same where cells are in the memory of a GPU: assumed
POSITION, WIDEST = 0.25, 16  # of a pass, what each further position adds to it; up to so many count


class Clutter:
    """What cells that no row needs have cost since all were moved, in cells passed over.

    Parameters
    ----------
    held : HeldCells
    price : float
        Of copying a cell out and back, in evaluations of one position that pass over it.
    """

    def __init__(self, held: HeldCells, price: float) -> None:
        self._held, self._price = held, price
        self._n_evaluations = 0
        self._paid = 0.0

    def is_due(self) -> bool:
        """Whether it is time to look; asked before every evaluation."""
        self._n_evaluations += 1
        return self._n_evaluations % LOOK == 0

    def is_dear(self, n_reserved: int, unused: Sequence[CachedSequence]) -> bool:
        """Whether it is time to move: rows will fill so many more cells, and nobody uses these sequences."""
        held = self._held
        n_needed = held.n_live - sum(map(held.n_alone, unused))
        n_clutter = _blocks(held.top + n_reserved) - _blocks(n_needed + n_reserved)
        self._paid += LOOK * n_clutter * (1.0 + POSITION * (min(max(n_reserved, 1), WIDEST) - 1))
        n_moved = n_needed + sum(sequence.n for sequence in unused) / 2  # these are only copied out
        if not n_clutter or self._paid < self._price * n_moved:
            return False
        self._paid = 0.0
        return True


def _blocks(n: int) -> int:
    """Cells that attention goes over where the first `n` may be full."""
    return -(-n // BLOCK) * BLOCK
