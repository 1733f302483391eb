"""Sequences whose cells move: to the beginning of a KV cache, so that garbage falls out, or to a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llamaspec.llama.cached_sequence import CachedSequence, shared
from llamaspec.llama.cells import Bytes, Cells, Scratch


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A sequence whose cells are moved."""

    sequence: CachedSequence
    n: int
    trunk: CachedSequence | None  # moved before, and holds the first `n_shared` cells too
    n_shared: int
    content: Bytes | None


def copied_out(
    cells: Cells, sequences: Sequence[CachedSequence], scratch: Scratch | None = None
) -> Iterator[Moved]:
    """The content of some sequences, in this order; what one shares with an earlier one, once.

    The sequences hold less and less of it: empty the cells afterwards.
    """
    moved: list[CachedSequence] = []
    for sequence in sequences:
        trunk, n_shared = _trunk(sequence, moved)
        content = cells.copy_out(sequence.number, n_shared, scratch)
        moved.append(sequence)
        yield Moved(sequence, sequence.n, trunk, n_shared, content)


def _trunk(sequence: CachedSequence, others: Sequence[CachedSequence]) -> tuple[CachedSequence | None, int]:
    """The sequence among others that holds most of the same cells, and how many of the first."""
    cells = sequence.cells[: sequence.n]
    n, i = max(
        ((shared(other.cells[: other.n], cells), i) for i, other in enumerate(others)), default=(0, -1)
    )
    return (others[i], n) if n else (None, 0)
