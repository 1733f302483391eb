"""Whether the cost model foresees what each width costs: for scripts/bench.py --widths.

It learns from round to round, as a run does, and every width is predicted before it is measured. A mixture
of experts is the hard case: what a width costs depends on how many experts its tokens touch.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from llamaspec.length.cost_model import CostModel
from llamaspec.values import Round

WARM_UP = 2  # evaluations of a width that do not count: the model has only its neighbours to go by
TOLERANCE = 0.10


@dataclass(frozen=True, slots=True)
class WidthCost:
    """What evaluations of one width should have cost, and what they cost."""

    width: int
    n: int
    predicted_seconds: float  # median
    measured_seconds: float  # median

    @property
    def ratio(self) -> float:
        """Predicted divided by measured."""
        return self.predicted_seconds / self.measured_seconds


def width_costs(rounds: Iterable[Round]) -> list[WidthCost]:
    """Every width that was timed often enough, ascending."""
    costs = CostModel()
    pairs: dict[int, list[tuple[float, float]]] = {}
    for round_ in rounds:
        foreseen = costs.seconds(round_.width)
        if costs.n_timed.get(round_.width, 0) >= WARM_UP:
            pairs.setdefault(round_.width, []).append((foreseen, round_.verify_seconds))
        costs.observe_verify(round_.width, round_.verify_seconds)
    return [
        WidthCost(width, len(found), *(statistics.median(seconds) for seconds in zip(*found, strict=True)))
        for width, found in sorted(pairs.items())
    ]


def show_costs(costs: Sequence[WidthCost]) -> None:
    """A table on stderr, and the largest error."""
    table = Table(box=None, pad_edge=False, title="what an evaluation costs: foreseen, then measured")
    for title in ("width", "times", "foreseen ms", "measured ms", "ratio", "next to width 1"):
        table.add_column(title, justify="right")
    for cost in costs:
        table.add_row(
            str(cost.width),
            str(cost.n),
            f"{1e3 * cost.predicted_seconds:.2f}",
            f"{1e3 * cost.measured_seconds:.2f}",
            f"{cost.ratio:.3f}",
            f"{cost.measured_seconds / costs[0].measured_seconds:.2f}",
        )
    console = Console(file=sys.stderr, width=120)
    console.print(table)
    worst = max(costs, key=lambda cost: abs(cost.ratio - 1))
    verdict = "within" if abs(worst.ratio - 1) <= TOLERANCE else "NOT within"
    console.print(f"{verdict} {TOLERANCE:.0%}: width {worst.width} is off by {worst.ratio - 1:+.1%}")
