"""Sequences whose cells move together to the beginning of a KV cache, so that garbage falls out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamaspec.llama.cached_sequence import CachedSequence, shared
from llamaspec.llama.cells import Bytes, Cells


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A sequence whose cells are moved."""

    sequence: CachedSequence
    n: int
    trunk: CachedSequence | None  # moved before, and holds the first `n_shared` cells too
    n_shared: int
    content: Bytes | None


def copied_out(cells: Cells, sequences: Sequence[CachedSequence]) -> list[Moved]:
    """The content of some sequences, in the order in which it goes back; what they share, once."""
    moved: list[Moved] = []
    for sequence in sorted(sequences, key=lambda sequence: sequence.last_used):
        trunk, n_shared = _trunk(sequence, [before.sequence for before in moved])
        content = cells.copy_out(sequence.number, n_shared)
        moved.append(Moved(sequence, sequence.n, trunk, n_shared, content))
    return moved


def _trunk(sequence: CachedSequence, others: Sequence[CachedSequence]) -> tuple[CachedSequence | None, int]:
    """The sequence among others that holds most of the same cells, and how many of the first."""
    cells = sequence.cells[: sequence.n]
    n, i = max(
        ((shared(other.cells[: other.n], cells), i) for i, other in enumerate(others)), default=(0, -1)
    )
    return (others[i], n) if n else (None, 0)
