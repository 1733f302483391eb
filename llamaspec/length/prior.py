"""What a policy believes before its first round: nothing but the usual, a probe, or an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from llamaspec.length.cost_curve import CostCurve

UNSEEN = (log(0.03), log(0.12))  # width 1; draft step next to it: only ratios matter until the first round
UNSEEN_VARIANCES = (9.0, 1.0)  # anything; a factor of 2.7
OTHER_DAY = (9.0, 0.1, 0.006)  # what these, and the ratio of a width, gain by a probe or a run being over
LOG_ODDS = (0.4, 0.2, 0.6)  # an acceptance of 0.6; a confidence of 0.9 is worth 0.82, one of 0.1 0.25
FREE_LOG_ODDS = (-0.4, -0.8, 0.9)  # of an n-gram: a match of 2 goes on in 46 %
LARGEST = 50.0  # beyond, seconds and probabilities are no numbers


@dataclass(frozen=True, slots=True)
class LearnedPrior:
    """Costs as `CostModel` sums them up, and the acceptance of a draft model's tokens.

    Raises
    ------
    ValueError
        The parts do not belong together, or are not finite.
    """

    widths: tuple[int, ...] = ()  # that are known, ascending from 2
    means: tuple[float, ...] = UNSEEN  # log of: seconds of width 1, draft step / width 1, widths / width 1
    variances: tuple[float, ...] = UNSEEN_VARIANCES
    log_odds: tuple[float, float, float] = LOG_ODDS  # of any draft token; level and slope of a confidence's

    def __post_init__(self) -> None:
        if not len(self.means) == len(self.variances) == len(self.widths) + len(UNSEEN):
            raise ValueError("the parts of a prior do not belong together")
        if list(self.widths) != sorted({w for w in self.widths if 2 <= w < 1 << 20}):
            raise ValueError(f"widths must ascend from 2, got {self.widths}")
        numbers = (*self.means, *self.variances, *self.log_odds)
        if min(self.variances) < 0 or not all(abs(number) < LARGEST for number in numbers):
            raise ValueError("a prior must be finite")

    @classmethod
    def after(
        cls,
        widths: Sequence[int],
        means: Sequence[float],
        variances: Sequence[float],
        log_odds: tuple[float, float, float] = LOG_ODDS,
    ) -> LearnedPrior:
        """What was believed of costs, on another day."""
        doubts = (*OTHER_DAY[:2], *OTHER_DAY[2:] * len(widths))
        doubted = (min(v + doubt, LARGEST - 1) for v, doubt in zip(variances, doubts, strict=True))
        return cls(tuple(widths), tuple(means), tuple(doubted), log_odds)

    @classmethod
    def of_probe(cls, curve: CostCurve) -> LearnedPrior:
        """What a probe found."""
        first, widths = curve.verify_seconds[0], curve.widths[1:]
        ratios = [log(seconds / first) for seconds in curve.verify_seconds[1:]]
        has_draft = curve.draft_step_seconds > 0
        step = log(curve.draft_step_seconds / first) if has_draft else UNSEEN[1]
        variances = (0.0, 0.0 if has_draft else UNSEEN_VARIANCES[1], *(0.0 for _ in widths))
        return cls.after(widths, (log(first), step, *ratios), variances)
