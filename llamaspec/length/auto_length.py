"""As many draft tokens as pay.

Stops where one more draft token would gain fewer tokens than its time is worth, does not draft where that is
never so, and learns both sides, acceptance and costs, from the rounds. Rounds that draft only to explore are
few, and no round is made that could make the texts slower than plain decoding by more than the regret budget
allows. Knows no model and no clock: the same rounds give the same decisions.
tests/length/test_speed.py sets it against the best policy there is, found by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from llamaspec.length.acceptance import KNOTS, KNOWN_COUNT, SourceBelief
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.cost_model import CostBelief
from llamaspec.length.planning import break_even
from llamaspec.length.reasons import EDGES, ConfidenceBin, LengthCount, Reasons, WidthCost
from llamaspec.length.row_length import AutoRow
from llamaspec.length.shared import Shared
from llamaspec.values import Source

SURE = 1.64  # standard deviations of cost within which a verdict must hold


@dataclass(frozen=True, slots=True)
class LearnedPrior:
    """What a policy has learnt about a pair on a machine, for the next run.

    Raises
    ------
    ValueError
        The acceptance is no probability, or there are not as many levels as the calibration has knots.
    """

    costs: CostBelief
    acceptance: float  # probability that a draft token is accepted
    confidence_levels: tuple[float, ...]  # log-odds of that, by the draft's confidence

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1 or len(self.confidence_levels) != len(KNOTS):
            raise ValueError("this is not what a policy learns")


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

    Raises
    ------
    ValueError
        Width 1 is not allowed, or `longest` is not positive.
    """

    def __init__(
        self,
        prior: CostCurve | LearnedPrior | None = None,
        widths: Collection[int] | None = None,
        longest: int = 16,
        sources: Collection[Source] = frozenset({Source.MODEL}),
    ) -> None:
        if longest < 1:
            raise ValueError(f"the longest draft must be >= 1, got {longest}")
        if widths is not None and 1 not in widths:
            raise ValueError(f"width 1 must be allowed, got {sorted(widths)}")
        if isinstance(prior, LearnedPrior):
            known = SourceBelief(prior.acceptance, prior.confidence_levels, KNOWN_COUNT)
            self._shared = Shared(prior.costs, widths, longest, sources, known)
        else:
            self._shared = Shared(prior, widths, longest, sources, SourceBelief())

    def start_row(self) -> AutoRow:
        """A text begins."""
        return AutoRow(self._shared)

    @property
    def n_tokens(self) -> int:
        """Tokens made in all rows."""
        return self._shared.n_tokens

    def plain_seconds(self, n_rows: int = 1) -> float | None:
        """What a round of so many texts without drafts is believed to take; None before one was seen."""
        return self._shared.allocator.plain_seconds(n_rows) if self._shared.knows_plain else None

    def experience(self) -> LearnedPrior:
        """What has been learnt up to now."""
        model = self._shared.beliefs[Source.MODEL]
        return LearnedPrior(self._shared.costs.belief(), model.usual.probability, model.calibration.levels)

    def explain(self) -> Reasons:
        """Costs, acceptance and choices up to now."""
        shared, costs, tally = self._shared, self._shared.costs, self._shared.tally
        calibration = shared.beliefs[Source.MODEL].calibration
        break_even_acceptance, *bounds = (break_even(self._rounds(z)) for z in (0.0, -SURE, SURE))
        return Reasons(
            lengths=tuple(LengthCount(n, count) for n, count in sorted(tally.lengths.items())),
            widths=tuple(
                WidthCost(w, costs.seconds(w), costs.n_timed.get(w, 0), costs.cheapest_width(w) or w)
                for w in range(1, shared.allocator.longest + 2)
            ),
            draft_step_seconds=costs.draft_step_seconds(),
            overhead_seconds=costs.overhead_seconds,
            bins=tuple(
                ConfidenceBin(
                    a, b, tally.verified[i], tally.accepted[i], calibration.probability((a + b) / 2)
                )
                for i, (a, b) in enumerate(pairwise(EDGES))
            ),
            acceptance=shared.ahead if shared.has_model else None,
            n_ngram_verified=tally.verified[-1],
            n_ngram_accepted=tally.accepted[-1],
            break_even_acceptance=break_even_acceptance,
            break_even_is_known={b is None for b in bounds} == {break_even_acceptance is None},
            n_predicted_tokens=tally.n_tokens,
            predicted_seconds=tally.predicted_seconds,
            measured_seconds=tally.measured_seconds,
            gained_seconds=shared.budget.gain * shared.allocator.plain_seconds(1),
            n_tries=tally.n_tries,
            explored_seconds=tally.explored_seconds,
        )

    def _rounds(self, z: float) -> list[float]:
        """[K] of one row with K draft tokens, `z` standard deviations dearer than believed."""
        costs = self._shared.costs
        batch = costs.batch_seconds(range(1, self._shared.allocator.longest + 2), z)
        return [
            seconds + n * costs.draft_step_seconds(z) + costs.overhead_seconds
            for n, seconds in enumerate(batch)
        ]
