"""Who gets the next position of the batch: the row where it buys most expected tokens, or nobody.

A position costs what the evaluation of all rows becomes dearer by it, at what they have pledged so far; it
pays where the probability that its token is accepted exceeds that cost times the tokens per second of the
whole batch. As rows fill the batch, everybody's drafts vanish by themselves; one row alone has the
stopping rule of a single text. Knows no beliefs. tests/length/test_allocator.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from math import inf
from operator import mul

from llamaspec.length.cost_model import CostModel


@dataclass(eq=False, slots=True)
class Pledge:
    """One row's part of the coming evaluation."""

    n_draft: int = 0  # draft tokens so far, or the one being made
    is_drafting: bool = False  # has not had enough yet
    is_asking: bool = False  # its round has begun
    last_evaluation: int = -1  # that it took part in


@dataclass(slots=True)
class Allocator:
    """The pledges of all rows, priced."""

    costs: CostModel
    longest: int
    pledges: list[Pledge] = field(default_factory=list)
    latest: int = -1  # evaluation

    def present(self) -> list[Pledge]:
        """Rows that are expected in the coming evaluation."""
        return [p for p in self.pledges if p.is_asking or p.last_evaluation >= max(self.latest - 1, 0)]

    @property
    def n_rows(self) -> int:
        """How many these are, at least one."""
        return max(len(self.present()), 1)

    def start_evaluation(self, number: int) -> None:
        """All rows begin a new round; the first goes on before the others have learnt of it."""
        self.latest = number
        for pledge in self.pledges:
            pledge.is_drafting, pledge.n_draft = pledge.n_draft > 0, 0

    def level_seconds(self, own: Pledge, step_seconds: float, z: float = 0.0) -> list[float]:
        """[m] a row's share of what 0, 1, ... more tokens for it, and for those level with it, cost.

        Where the curve has steps, one position alone never pays for the step that all would share.
        `step_seconds`: one draft step, which all rows that are drafting share. `z`: standard deviations.
        """
        n_level, n_drafting, total = 1, 1, 1 + own.n_draft
        for other in self.present():
            if other is not own:
                total += 1 + other.n_draft
                n_drafting += other.is_drafting
                n_level += other.is_drafting and other.n_draft <= own.n_draft
        n_foreseen = max((self.costs.reach - total) // n_level, 1)
        n_more = max(min(self.longest - own.n_draft, n_foreseen), 0)
        times = self.costs.batch_seconds(range(total, total + n_more * n_level + 1, n_level), z)
        base, step = times[0], step_seconds / n_drafting
        return [m * step + (seconds - base) / n_level for m, seconds in enumerate(times)]

    def plain_rate(self, n_rows: int) -> float:
        """Tokens per second of rows that do not draft."""
        return n_rows / (self.costs.batch_seconds([n_rows])[0] + n_rows * self.costs.overhead_seconds)


def expected_accepted(acceptance: float, longest: int) -> list[float]:
    """Draft tokens that are accepted, on average, of 0 .. longest.

    Examples
    --------
    >>> expected_accepted(0.5, 3)
    [0.0, 0.5, 0.75, 0.875]
    """
    return [*accumulate(accumulate(repeat(acceptance, longest), mul), initial=0.0)]


def stopping_threshold(costs: Sequence[float], gains: Sequence[float], rate: float) -> float:
    """How likely all draft tokens so far must be accepted for one more to pay.

    One more, or several: at a dip of the curve the next token may not pay by itself, but on the way to a
    width that is cheaper for each token. `m` more tokens gain s * gains[m], where s is the probability that
    those before are accepted; their seconds, costs[m], could have given `rate` tokens a second.
    """
    least = inf
    for cost, gain in zip(costs, gains, strict=False):
        if rate * cost < least * gain:
            least = rate * cost / gain
    return least


def speed_up(costs: Sequence[float], gains: Sequence[float], plain_rate: float) -> float:
    """Of the best number of draft tokens, next to none: tokens of a row over its share of the time."""
    return max((1.0 + gain) / (1.0 + plain_rate * cost) for cost, gain in zip(costs, gains, strict=False))
