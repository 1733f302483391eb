"""As many draft tokens as pay.

Stops where one more draft token would gain fewer tokens than its time is worth, does not draft where that is
never so, and learns both sides, acceptance and costs, from the rounds. Rounds that draft only to explore are
few, and no round is made that could make the texts slower than plain decoding by more than the regret budget
allows. Knows no model and no clock: the same rounds give the same decisions.
tests/length/test_speed.py sets it against the best policy there is, found by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Collection

from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.cost_model import CostModel
from llamaspec.length.prior import LearnedPrior
from llamaspec.length.row_length import AutoRow
from llamaspec.length.shared import Shared
from llamaspec.values import Source


class AutoLength:
    """As many draft tokens as pay, decided token by token; none where drafting does not pay.

    Parameters
    ----------
    prior : CostCurve or LearnedPrior, optional
        From a probe, or from an earlier run. A stale or foreign one is corrected, or dropped, within a few
        rounds.
    widths : collection of int, optional
        The only numbers of positions that may be evaluated at once; 1 must be among them.
    longest : int
        Never more draft tokens in a row's round than this.
    sources : collection of Source
        Who drafts.
    trees : bool
        Draft tokens may branch where that pays.

    Raises
    ------
    ValueError
        Width 1 is not allowed, or `longest` is not positive.
    """

    def __init__(
        self,
        prior: CostCurve | LearnedPrior | None = None,
        widths: Collection[int] | None = None,
        longest: int = 15,
        sources: Collection[Source] = frozenset({Source.MODEL}),
        *,
        trees: bool = True,
    ) -> None:
        if longest < 1:
            raise ValueError(f"the longest draft must be >= 1, got {longest}")
        if widths is not None and 1 not in widths:
            raise ValueError(f"width 1 must be allowed, got {sorted(widths)}")
        if not isinstance(prior, LearnedPrior):
            prior = LearnedPrior(prior)
        costs = CostModel(prior.curve, widths)
        self.shared = Shared(costs, longest, sources, prior.log_odds, branches=trees)  # others only look

    def start_row(self, *, drops: bool = False) -> AutoRow:
        """A text begins."""
        return AutoRow(self.shared, drops=drops)

    def plain_seconds(self, n_rows: int = 1) -> float | None:
        """What a round of so many texts without drafts is believed to take; None before one was seen."""
        rate = self.shared.plain_rate(n_rows) if self.shared.knows_plain else 0.0
        return n_rows / rate if rate else None

    def experience(self) -> LearnedPrior:
        """What has been learnt up to now."""
        usual, own = (each[self.shared.drafting] for each in (self.shared.usual, self.shared.calibrations))
        return LearnedPrior(self.shared.costs.learned(), (usual.level, own.level, own.slope))
