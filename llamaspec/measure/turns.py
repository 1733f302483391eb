"""Measures several ways in turns, so that a machine that warms up or is busy slows all of them alike.

Every measurement uses `take_turns` and `Spread`. tests/cli/test_compare.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

T = TypeVar("T")
Name = TypeVar("Name", bound=Hashable)
Progress: TypeAlias = Callable[[float], None]  # receives the finished fraction, 0 to 1


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of several runs."""

    low: float  # lower quartile
    median: float
    high: float  # upper quartile

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Compute the spread of one or more values."""
        return cls(*np.quantile(list(values), [0.25, 0.5, 0.75]).tolist())

    @property
    def half(self) -> float:
        """Half of the interquartile range."""
        return (self.high - self.low) / 2


def in_turn(arms: Sequence[T], turn: int) -> Sequence[T]:
    """Return the arms in the order of one turn; each turn begins with the next arm."""
    shift = turn % len(arms)
    return [*arms[shift:], *arms[:shift]]


class TurnsInterrupted(KeyboardInterrupt):
    """Ctrl-C ended the turns; `found` has the results of those that were complete, at least of one."""

    def __init__(self, found: dict[Any, list[Any]]) -> None:
        super().__init__()
        self.found = found


def take_turns(
    ways: Mapping[Name, Callable[[int], T]],
    n_turns: int,
    report: Progress = lambda fraction: None,
    used: Callable[[], float] = lambda: 0.0,
) -> dict[Name, list[T]]:
    """Call each way once in every turn, with the turn's number, and return the results of each way.

    Turn -1 warms up and does not count. `used` returns the fraction of the time limit that has passed. From
    turn 1 on, no turn begins that would exceed the limit if it took as long as the turn before it.

    Raises
    ------
    TurnsInterrupted
        Ctrl-C after at least one turn. Before that, it is a plain KeyboardInterrupt.
    """
    found: dict[Name, list[T]] = {name: [] for name in ways}
    latest = 0.0  # fraction of the time limit
    for turn in range(-1, n_turns):
        begin = used()
        if turn > 0 and begin + latest > 1:
            break
        try:
            for i, name in enumerate(in_turn([*ways], turn)):
                result = ways[name](turn)
                if turn >= 0:
                    found[name].append(result)
                report(((turn + 1) * len(ways) + i + 1) / ((n_turns + 1) * len(ways)))
        except KeyboardInterrupt:
            if turn < 1:
                raise
            raise TurnsInterrupted({name: results[:turn] for name, results in found.items()}) from None
        latest = used() - begin
    return found
