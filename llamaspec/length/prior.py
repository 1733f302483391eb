"""What a policy believes before its first round: nothing but the usual, a probe, or an earlier run."""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.length.cost_curve import CostCurve

LOG_ODDS = (0.4, 0.2, 0.6)  # an acceptance of 0.6; a confidence of 0.9 is worth 0.82, one of 0.1 0.25
FREE_LOG_ODDS = (-0.4, -0.8, 0.9)  # of an n-gram: a match of 2 goes on in 46 %
LARGEST = 50.0  # beyond, probabilities are no numbers


@dataclass(frozen=True, slots=True)
class LearnedPrior:
    """Costs, and the acceptance of a draft model's tokens.

    Raises
    ------
    ValueError
        A number is not finite.
    """

    curve: CostCurve | None = None
    log_odds: tuple[float, float, float] = LOG_ODDS  # of any draft token; level and slope of a confidence's

    def __post_init__(self) -> None:
        if not all(abs(number) < LARGEST for number in self.log_odds):
            raise ValueError("a prior must be finite")
