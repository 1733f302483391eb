"""What evaluations cost: seconds for every number of positions of the target, and for a draft step.

Logarithms of seconds: that of width 1 is a number of its own, every other width that was timed and a draft
step are known next to it. So one timing corrects the scale of all, and steps and dips are kept. Between the
known widths lie straight lines over the logarithm of the width. A width is the total over all rows of an
evaluation. Knows no model and no clock. tests/length/test_cost_model.py feeds it curves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import exp, inf, log, sqrt

import numpy as np
import numpy.typing as npt

from llamaspec.length.prior import UNSEEN_VARIANCES, LearnedPrior

FloatArray = npt.NDArray[np.float64]

PLAIN, STEP = 0, 1  # places of width 1 and of a draft step
NOISE = 0.07  # standard deviation of the logarithm of one timing, on a quiet machine
OUTLIER, LASTING = 2.5, 3  # standard deviations; as many in a row are no hiccups
DRIFT, OWN_DRIFT = 0.004, 0.001  # how far times wander between evaluations: all together, each alone
POWER, BEND, OWN = 0.5, 0.3, 0.18  # of the width, where nothing is known; standard deviations of both
DENSE, CLOSE = 17, OWN**2 + (BEND * 0.1) ** 2  # widths up to here are known each; wider ones, 10 % apart
FOREIGN = 0.4  # a prior whose width 1 is further off than this, in logarithms, is of another machine
PAD = 0.96  # padding must save this much; a single position is never padded: it would not be timed again
CATCH_UP = 0.2  # of a draft step, for each token that the draft has not read


class CostModel:
    """Times of one pair on one machine, refined by every evaluation.

    Parameters
    ----------
    prior : LearnedPrior
        From a probe or an earlier run, perhaps on another machine; or nothing but the usual.
    allowed : collection of int, optional
        The only widths that may be evaluated.
    """

    _mean: FloatArray  # [n] log of: seconds of width 1; a draft step next to it; each known width next to it
    _covariance: FloatArray  # [n, n]
    _place: dict[int, int]  # of a known width > 1 in these
    _seconds: list[float]  # [w] an evaluation of exactly this width; empty: not up to date
    _width: list[int]  # [w] the cheapest allowed width of at least this one; 0: none

    def __init__(self, prior: LearnedPrior, allowed: Collection[int] | None = None) -> None:
        self._allowed = allowed
        self._n_widths = max([DENSE, *(allowed or ())])  # with a price; grows on demand
        self._believe(prior)
        self._prior_plain = float(self._mean[PLAIN])
        self.overhead_seconds = 0.0  # of a row's round, besides the models
        self.n_timed: dict[int, int] = {}  # width -> evaluations
        self._n_steps_timed = self._n_far = 0  # the latter: outliers in a row

    def spread(self, width: int) -> float:
        """Standard deviation of the logarithm of the time of a width."""
        self._cover(width)
        return sqrt(float(self._weights[width] @ self._covariance @ self._weights[width]) + self._bend[width])

    def knows(self, n: int) -> bool:
        """Whether evaluations of at least `n` positions have been timed, or nearly as wide ones."""
        width = self.cheapest_width(n)
        return width is None or self._is_known(width)

    @property
    def is_blank(self) -> bool:
        """Whether any width may be evaluated, and nothing is known of them."""
        return self._allowed is None and not self._has_prior and not self.n_timed

    @property
    def doubts_plain(self) -> bool:
        """Whether width 1 looks dearer than a wider one after few timings: rather a hiccup than a fact."""
        self._cover(1)
        return self.n_timed.get(1, 0) < LASTING and self._seconds[1] > min(self._seconds[2:])

    @property
    def knows_step(self) -> bool:
        """Whether more is known of a draft step than its order of magnitude."""
        return bool(self._covariance[STEP, STEP] < UNSEEN_VARIANCES[STEP])

    def looks_foreign(self, n_timed: int) -> bool:
        """Whether after as many evaluations the prior looks like that of another machine."""
        is_far = bool(self._has_prior) and abs(float(self._mean[PLAIN]) - self._prior_plain) > FOREIGN
        return is_far and sum(self.n_timed.values()) == n_timed

    def seconds(self, width: int) -> float:
        """An evaluation of exactly this width."""
        self._cover(width)
        return self._seconds[width]

    def batch_seconds(self, positions: Sequence[int], z: float = 0.0) -> list[float]:
        """Evaluations of at least so many positions, padded where that is cheaper; inf where not allowed.

        `z`: standard deviations by which each is dearer than believed, next to the first.
        """
        self._cover(positions[-1])
        widths = [self._width[n] for n in positions]
        seconds = self._seconds
        if not z or not widths[0]:
            return [seconds[w] for w in widths]
        return [seconds[w] * dearer for w, dearer in zip(widths, self._factors(widths, z), strict=True)]

    def cheapest_width(self, n: int) -> int | None:
        """The allowed width, n or wider, that costs least; None where none is."""
        self._cover(n)
        return self._width[n] or None

    def draft_step_seconds(self, z: float = 0.0) -> float:
        """One evaluation of the draft, `z` standard deviations dearer than believed, next to width 1."""
        mean = float(self._mean[PLAIN] + self._mean[STEP])
        return exp(mean + z * sqrt(float(self._covariance[STEP, STEP])))

    def wide_step_seconds(self, widest: int) -> FloatArray:
        """[1 + widest] draft steps that read 0, 1, ... tokens: dearer as the target's evaluations are."""
        self._cover(widest)
        wide = np.array(self._seconds[: widest + 1])
        wide[0] = 0.0
        return np.maximum.accumulate(wide / wide[1]) * self.draft_step_seconds()

    def narrow_steps(self, n_steps: int, n_scored: int) -> float:
        """What some draft steps cost that score so many positions together, in steps that score one."""
        if n_scored <= n_steps:
            return n_steps
        wide = self.wide_step_seconds(-(-n_scored // n_steps))
        return n_steps * float(np.interp(n_scored / n_steps, np.arange(len(wide)), wide)) / float(wide[1])

    def drafting_seconds(self, n_steps: float, n_unread: int) -> float:
        """Draft steps, the first of which has to read `n_unread` tokens more than one."""
        return (n_steps + CATCH_UP * n_unread) * self.draft_step_seconds()

    def learned(self, log_odds: tuple[float, float, float]) -> LearnedPrior:
        """What the next run should begin with."""
        places = [PLAIN, STEP, *self._place.values()]
        variances = self._covariance.diagonal()[places].tolist()
        return LearnedPrior.after(list(self._place), self._mean[places].tolist(), variances, log_odds)

    def observe_verify(self, width: int, seconds: float) -> None:
        """Learn from one evaluation of the target."""
        if seconds <= 0:
            return
        self._cover(width)
        if not self._is_known(width):
            self._add(width)
        surprise = log(seconds / self.seconds(width))
        self._covariance += self._drift
        n_before = self.n_timed.get(width, 0)
        self._learn(self._weights[width], PLAIN, n_before, surprise, NOISE**2 + float(self._bend[width]))
        self.n_timed[width] = n_before + 1
        if self.looks_foreign(2):
            plain = self._mean[PLAIN], self._covariance[PLAIN, PLAIN]
            self._believe(LearnedPrior())
            self._mean[PLAIN], self._covariance[PLAIN, PLAIN] = plain

    def observe_draft(self, n_steps: float, n_unread: int, seconds: float) -> None:
        """Learn from draft steps, the first of which had to read `n_unread` tokens more than one."""
        if seconds > 0 and n_steps > 0:
            surprise = log(seconds / self.drafting_seconds(n_steps, n_unread))
            noise = NOISE * (1.0 + CATCH_UP * n_unread / n_steps)
            self._learn(self._step_weights, STEP, self._n_steps_timed, surprise, noise**2)
            self._n_steps_timed += 1

    def observe_overhead(self, seconds: float) -> float:
        """Learn what a round costs besides the models; returns it, less what looks like a hiccup."""
        seconds = min(seconds, 3 * self.overhead_seconds or seconds)
        self.overhead_seconds += (0.1 if self.overhead_seconds else 1.0) * (seconds - self.overhead_seconds)
        return seconds

    def _is_known(self, width: int) -> bool:
        return bool(self._bend[width] <= (0.0 if width <= DENSE else CLOSE))

    def _believe(self, prior: LearnedPrior) -> None:
        self._mean, self._covariance = np.array(prior.means), np.diag(prior.variances)
        self._place = {width: STEP + 1 + i for i, width in enumerate(prior.widths)}
        self._has_prior = bool(prior.widths)
        self._lay_out()

    def _add(self, width: int) -> None:
        """Know a width: it begins where its neighbours let expect it."""
        weights, n = self._weights[width] - self._weights[1], len(self._mean)
        column = self._covariance @ weights
        covariance = np.empty((n + 1, n + 1))
        covariance[:n, :n], covariance[:n, n], covariance[n, :n] = self._covariance, column, column
        covariance[n, n] = weights @ column + self._bend[width]
        self._mean = np.append(self._mean, weights @ self._mean + self._offsets[width])
        self._covariance, self._place = covariance, dict(sorted([*self._place.items(), (width, n)]))
        self._lay_out()

    def _learn(self, weights: FloatArray, part: int, n_before: int, surprise: float, noise: float) -> None:
        """Learn a logarithm. An outlier is hardly believed, unless few were longer: these were hiccups."""
        covariance = self._covariance
        expected = float(weights @ covariance @ weights) + noise
        doubt = surprise**2 / (expected * OUTLIER**2)
        self._n_far = self._n_far + 1 if doubt > 1 else 0
        if doubt > 1 and (self._n_far >= LASTING or (surprise < 0 and n_before < LASTING)):
            changes = self._changed_with(part)
            covariance += surprise**2 * np.outer(changes, changes)
        elif doubt > 1:
            noise *= doubt
        column = covariance @ weights
        expected = float(weights @ column) + noise
        self._mean += column * (surprise / expected)
        covariance -= np.outer(column, column / expected)
        self._seconds = []

    def _changed_with(self, part: int) -> FloatArray:
        """Which numbers change, and how, where one was wrong.

        Where that is the one of width 1, the others, which are next to it, go the other way for widths that
        were timed: their own seconds were right.
        """
        changes: FloatArray = np.eye(len(self._mean))[part]
        if part == PLAIN and self._n_far < LASTING:
            changes[[place for width, place in self._place.items() if width in self.n_timed]] = -1.0
        return changes

    def _lay_out(self) -> None:
        """What each number weighs in each width: lines between the known widths, a power behind the last."""
        known, n = [1, *self._place], len(self._mean)
        x, at = np.log(np.maximum(np.arange(self._n_widths + 1), 1)), np.log(known)
        behind = np.maximum(x - at[-1], 0.0)
        self._weights, self._step_weights = np.zeros((len(x), n)), np.eye(n)[STEP]
        self._weights[:, PLAIN] = self._step_weights[PLAIN] = 1.0
        for i, width in enumerate(known[1:], 1):
            self._weights[:, self._place[width]] = np.interp(x, at, np.eye(len(at))[i])
        if len(known) > 1:
            self._weights[:, self._place[known[-1]]] += behind / at[-1] / 2
        self._offsets = behind * (POWER / 2 if len(known) > 1 else POWER)
        near = np.abs(x[:, None] - at).min(axis=1)
        self._bend = np.where(near > 0, OWN**2 + (BEND * near) ** 2, 0.0)
        self._drift = np.diag([DRIFT**2, *[OWN_DRIFT**2] * (n - 1)])
        self._seconds = []

    def _factors(self, widths: list[int], z: float) -> list[float]:
        """How much dearer each width may be next to the first, in `z` standard deviations."""
        apart, bend = self._weights[widths] - self._weights[widths[0]], self._bend[widths]
        variances = ((apart @ self._covariance) * apart).sum(axis=1) + bend + bend[0]
        variances[np.array(widths) == widths[0]] = 0.0
        factors: list[float] = np.exp(z * np.sqrt(np.maximum(variances, 0.0))).tolist()
        return factors

    def _cover(self, n: int) -> None:
        """Bring the prices up to date, and up to `n` positions."""
        if n > self._n_widths:
            self._n_widths = 2 * n
            self._lay_out()
        if self._seconds:
            return
        seconds = np.exp(self._offsets + self._weights @ self._mean).tolist()
        self._width, best = [0] * len(seconds), 0
        for width in range(len(seconds) - 1, 0, -1):
            is_allowed, least = self._allowed is None or width in self._allowed, PAD if width > 1 else 0.0
            if is_allowed and (not best or seconds[best] > least * seconds[width]):
                best = width
            self._width[width] = best
        seconds[0] = inf
        self._seconds = seconds
