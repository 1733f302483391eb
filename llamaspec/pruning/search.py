"""Which smaller copy of a target is its best draft: how many layers less, and with how many bits.

Layers go in the order of how little they change, so a copy is a number of layers and a type. A few copies far
apart first, then steps from the best one, each half as long as the last; then other types. Knows no files and
no clock: it asks what a copy is worth. tests/pruning/test_search.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FIRST = (0.5, 0.75, 0.25, 0.875)  # shares of the layers that the first copies leave out
SILENT = 1e-3  # a layer that changes less than this is left out before anything else is tried


@dataclass(frozen=True, slots=True)
class Candidate:
    """A smaller copy of a target."""

    pruned: tuple[int, ...]  # layers that it lacks, ascending
    file_type: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a candidate is worth here."""

    candidate: Candidate
    n_layers: int  # that are left
    n_bytes: int
    cost_ratio: float  # seconds of a draft step next to one token of the target
    acceptance: float  # of draft tokens, on the target's own texts
    n_guesses: int  # the best constant number of draft tokens
    speed_up: float  # predicted; below 1 it does not pay


Measure = Callable[[Candidate], "Found | None"]  # None: llama.cpp cannot use it, or time is up


def search(influence: Sequence[float], types: Sequence[str], measure: Measure) -> list[Found]:
    """Measure candidates until no neighbour of the best is better; those measured, the best first.

    Parameters
    ----------
    influence : [n_layers]
        What each layer changes; 0 = nothing.
    types : sequence of str
        The type to begin with, then others.
    measure : callable
        What a candidate is worth.
    """
    found: dict[Candidate, Found | None] = {}
    least_first = sorted(range(len(influence)), key=lambda layer: (influence[layer], -layer))
    most = len(influence) - 1

    def value(n_pruned: int, file_type: str) -> float:
        candidate = Candidate(tuple(sorted(least_first[:n_pruned])), file_type)
        if candidate not in found:
            found[candidate] = measure(candidate)
        result = found[candidate]
        return 0.0 if result is None else result.speed_up

    n_silent = sum(changes < SILENT for changes in influence)
    first = [n_silent, *(n_silent + round(share * (most - n_silent)) for share in FIRST)]
    best = max((min(n, most) for n in first), key=lambda n: value(n, types[0]))
    step = max(1, round((most - n_silent) / 8))
    while step >= 1:
        near = [n for n in (best - step, best + step) if 0 <= n <= most]
        better = max(near, key=lambda n: value(n, types[0]), default=best)
        if value(better, types[0]) > value(best, types[0]):
            best = better
        else:
            step //= 2
    for file_type in types[1:]:
        value(best, file_type)
    results = [result for result in found.values() if result is not None]
    return sorted(results, key=lambda result: (-result.speed_up, result.n_bytes))
