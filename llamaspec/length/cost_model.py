"""What evaluations cost: seconds for every number of positions of the target, and for a draft step.

A Gaussian process over the logarithm of the width gives the logarithm of the seconds: a scale that all share,
a straight line whose slope is little known, a wandering around it, and of each width something of its own. So
one timing corrects the scale of all, steps and dips are kept, and a width that was never timed lies between
its neighbours. A draft step shares the scale. A width is the total over all rows of an evaluation. Knows no
model and no clock. (Rasmussen and Williams, Gaussian Processes for Machine Learning, chapter 2.)
tests/length/test_cost_model.py feeds it curves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import exp, inf, log, sqrt

import numpy as np
import numpy.typing as npt

from llamaspec.length.prior import UNSEEN, UNSEEN_VARIANCES, LearnedPrior

FloatArray = npt.NDArray[np.float64]

NOISE = 0.07  # standard deviation of the logarithm of one timing, on a quiet machine
OUTLIER, LASTING = 2.5, 3  # standard deviations; as many in a row are no hiccups
OFTEN = 8  # timings after which a width is well known: then one that is as foreseen is not worth learning
DRIFT, OWN_DRIFT = 0.004, 0.001  # how far times wander between evaluations: all together, each alone
POWER = 0.45  # of the width, where nothing is known
SLOPE, WANDER, OWN = 0.25, 0.1, 0.12  # standard deviations: of this power; around its line; of each width
DENSE, APART, WIDEST = 17, 1.15, 1024  # known: each width up to the first, then so far apart, to the last
FOREIGN = 0.4  # a prior whose width 1 is further off than this, in logarithms, is of another machine
PAD = 0.96  # padding must save this much; widths that are doubted are not padded: they would stay untimed
CERTAIN = 1e-9  # variance of what is taken for granted
CATCH_UP = 0.2  # of a draft step, for each token that the draft has not read

PLAIN, STEP = 0, -1  # places of width 1 and of a draft step
N_WIDE = int(log(WIDEST / DENSE) / log(APART))
LOGS = np.log([*range(1, DENSE + 1), *(DENSE * APART**i for i in range(1, N_WIDE + 1))])  # [place] of widths


class CostModel:
    """Times of one pair on one machine, refined by every evaluation.

    Parameters
    ----------
    prior : LearnedPrior
        From a probe or an earlier run, perhaps on another machine; or nothing but the usual.
    allowed : collection of int, optional
        The only widths that may be evaluated.
    """

    _mean: FloatArray  # [n] logarithms of the seconds: by place, and of a draft step
    _covariance: FloatArray  # [n, n]
    _seconds: list[float]  # [w] an evaluation of exactly this width; empty: not up to date
    _width: list[int]  # [w] the cheapest allowed width of at least this one; 0: none

    def __init__(self, prior: LearnedPrior, allowed: Collection[int] | None = None) -> None:
        self._allowed = allowed
        self._n_widths = max([DENSE, *(allowed or ())])  # with a price; grows on demand
        self._believe(prior)
        self._prior_plain = float(self._mean[PLAIN])
        self.overhead_seconds = 0.0  # of a row's round without drafts, besides the models
        self.n_timed: dict[int, int] = {}  # width -> evaluations
        self._n_steps_timed = self._n_far = 0  # the latter: outliers in a row, those below as negative
        self._n_drifting = 0  # evaluations since the latest that was learnt

    def knows(self, n: int) -> bool:
        """Whether evaluations of at least `n` positions have been timed, or nearly as wide ones."""
        width = self.cheapest_width(n)
        return width is None or _place(width) in self._known

    @property
    def reach(self) -> int:
        """Positions up to which costs can be foreseen: twice the widest evaluation that is known."""
        return 2 * round(exp(LOGS[max(self._known, default=PLAIN)]))

    @property
    def is_blank(self) -> bool:
        """Whether any width may be evaluated, and nothing is known of them."""
        return self._allowed is None and not self._has_prior and not self.n_timed

    @property
    def knows_step(self) -> bool:
        """Whether more is known of a draft step than its order of magnitude."""
        return self._step_variance() < UNSEEN_VARIANCES[1]

    @property
    def is_surprised(self) -> bool:
        """Whether the latest timing was an outlier: a hiccup, or the first sign of a change."""
        return self._n_far != 0

    def looks_foreign(self, n_timed: int) -> bool:
        """Whether after as many evaluations the prior looks like that of another machine."""
        is_far = self._has_prior and abs(float(self._mean[PLAIN]) - self._prior_plain) > FOREIGN
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
        return exp(float(self._mean[STEP]) + (z * sqrt(self._step_variance()) if z else 0.0))

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
        places = np.array([PLAIN, STEP, *sorted(self._known - {PLAIN})])
        ratios = (self._mean[places] - self._mean[PLAIN]).tolist()[1:]
        variances = self._apart(places).tolist()[1:]
        widths = np.rint(np.exp(LOGS[places[2:]])).astype(int).tolist()
        plain, doubt = float(self._mean[PLAIN]), float(self._covariance[PLAIN, PLAIN])
        return LearnedPrior.after(widths, [plain, *ratios], [doubt, *variances], log_odds)

    def observe_verify(self, width: int, seconds: float) -> None:
        """Learn from one evaluation of the target."""
        if seconds <= 0:
            return
        place, n_before = _place(width), self.n_timed.get(width, 0)
        surprise = log(seconds / self.seconds(width))
        self._n_drifting += 1
        if n_before < OFTEN or abs(surprise) > NOISE or self._n_far:
            self._covariance += self._n_drifting * DRIFT**2
            self._covariance.flat[:: len(self._mean) + 1] += self._n_drifting * OWN_DRIFT**2
            self._n_drifting = 0
            self._learn(place, n_before, surprise, NOISE**2)
            self._known.add(place)
        self.n_timed[width] = n_before + 1
        if self.looks_foreign(2):
            means = float(self._mean[PLAIN]), UNSEEN[1]
            variances = float(self._covariance[PLAIN, PLAIN]), UNSEEN_VARIANCES[1]
            self._believe(LearnedPrior(means=means, variances=variances))

    def observe_draft(self, n_steps: float, n_unread: int, seconds: float) -> None:
        """Learn from draft steps, the first of which had to read `n_unread` tokens more than one."""
        if seconds > 0 and n_steps > 0:
            surprise = log(seconds / self.drafting_seconds(n_steps, n_unread))
            noise = NOISE * (1.0 + CATCH_UP * n_unread / n_steps)
            self._learn(STEP, self._n_steps_timed, surprise, noise**2)
            self._n_steps_timed += 1

    def observe_overhead(self, seconds: float, *, drafted: bool) -> float:
        """Learn what a plain round costs besides the models; returns it, less what looks like a hiccup."""
        usual = self.overhead_seconds
        seconds = min(seconds, 3 * usual or seconds)
        if not drafted:
            self.overhead_seconds += (0.1 if usual else 1.0) * (seconds - usual)
        return seconds

    def _believe(self, prior: LearnedPrior) -> None:
        """Begin anew. What a prior says of widths is certain for it, and then doubted by its variances."""
        plain, step, *ratios = prior.means
        scale, of_step, *variances = prior.variances
        self._mean = plain + np.append(POWER * LOGS, step)
        self._covariance = covariance = np.full([len(self._mean)] * 2, scale)
        covariance[STEP, STEP] += of_step
        covariance[:STEP, :STEP] += SLOPE**2 * np.outer(LOGS, LOGS) + WANDER**2 * np.minimum.outer(LOGS, LOGS)
        covariance[:STEP, :STEP] += np.diag(OWN**2 * (LOGS > 0))
        self._known, self._has_prior = {_place(width) for width in prior.widths}, bool(prior.widths)
        for width, ratio, variance in zip(prior.widths, ratios, variances, strict=True):
            place = _place(width)
            column = covariance[place] - covariance[PLAIN]
            surprise = ratio - float(self._mean[place] - self._mean[PLAIN])
            self._correct(column, surprise, float(column[place] - column[PLAIN]) + CERTAIN)
            covariance[place, place] += variance
        self._seconds = []

    def _learn(self, place: int, n_before: int, surprise: float, noise: float) -> None:
        """Learn a logarithm. An outlier is hardly believed, unless few were longer: these were hiccups."""
        covariance = self._covariance
        variance = float(covariance[place, place]) + noise
        doubt = surprise**2 / (variance * OUTLIER**2)
        if doubt <= 1:
            self._n_far = 0
        else:
            self._n_far = max(self._n_far, 0) + 1 if surprise > 0 else min(self._n_far, 0) - 1
            if abs(self._n_far) >= LASTING or (surprise < 0 and n_before < LASTING):
                wrong = self._wrong_with(place, n_before)
                covariance += surprise**2 * np.outer(wrong, wrong)
                variance = float(covariance[place, place]) + noise
            else:
                variance *= doubt
        self._correct(covariance[place].copy(), surprise, variance)

    def _wrong_with(self, place: int, n_before: int) -> FloatArray:
        """[n] what was wrong where a timing was: of a well-known width the scale, if that lasts.

        Of another, what no other timing tells. That may be a single one: not if this width was never timed,
        and so was believed on its account.
        """
        wrong: FloatArray = np.eye(len(self._mean))[STEP] if place == STEP else np.ones(len(self._mean))
        if place != STEP and (n_before < LASTING or abs(self._n_far) < LASTING):
            enough = 1 if n_before else LASTING
            wrong[[_place(width) for width, n in self.n_timed.items() if n >= enough]] = 0.0
            wrong[place] = 1.0
        return wrong

    def _correct(self, column: FloatArray, surprise: float, variance: float) -> None:
        """Condition on one number: its covariance with all, how far off it was, and its variance."""
        self._mean += column * (surprise / variance)
        self._covariance -= np.outer(column, column / variance)
        self._seconds = []

    def _step_variance(self) -> float:
        """Of the logarithm of a draft step, next to width 1."""
        covariance = self._covariance
        both = covariance[STEP, STEP] + covariance[PLAIN, PLAIN] - 2 * covariance[PLAIN, STEP]
        return max(float(both), 0.0)

    def _apart(self, places: npt.NDArray[np.int_]) -> FloatArray:
        """Variances of logarithms next to the first of some places."""
        covariance, variances, first = self._covariance, self._covariance.diagonal(), places[0]
        both: FloatArray = variances[places] + variances[first] - 2 * covariance[first, places]
        return np.maximum(both, 0.0)

    def _factors(self, widths: list[int], z: float) -> list[float]:
        """How much dearer each width may be next to the first, in `z` standard deviations."""
        places = np.array([_place(width) for width in widths])
        factors: list[float] = np.exp(z * np.sqrt(self._apart(places))).tolist()
        return factors

    def _cover(self, n: int) -> None:
        """Bring the prices up to date, and up to `n` positions."""
        if n > self._n_widths:
            self._n_widths, self._seconds = 2 * n, []
        if self._seconds:
            return
        logs = np.log(np.arange(1, self._n_widths + 1))
        beyond = POWER * np.maximum(logs - LOGS[-1], 0.0)
        seconds = [inf, *np.exp(np.interp(logs, LOGS, self._mean[:STEP]) + beyond).tolist()]
        self._width, best = [0] * len(seconds), 0
        doubted = {1, *(width for width, n in self.n_timed.items() if n < LASTING)}
        for width in range(len(seconds) - 1, 0, -1):
            is_allowed, least = self._allowed is None or width in self._allowed, PAD * (width not in doubted)
            if is_allowed and (not best or seconds[best] > least * seconds[width]):
                best = width
            self._width[width] = best
        self._seconds = seconds


def _place(width: int) -> int:
    """Of a width, or the nearest that has one."""
    beyond = round(log(width / DENSE) / log(APART)) if width > DENSE else 0
    return min(width, DENSE) - 1 + min(beyond, N_WIDE)
