"""What evaluations cost: seconds for every number of positions of the target, and for a draft step.

The one idea: a Gaussian posterior over the *logarithms* of all these times at once. Its covariance says what
one timing tells about the others: all times share a scale (the machine, the length of the context),
neighbouring widths share a slope, and every width has a step or a dip of its own. A width is the total over
all rows of an evaluation. Knows no model and no clock. tests/length/test_cost_model.py feeds it curves.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt

import numpy as np
import numpy.typing as npt

from llamaspec.length.cost_curve import CostCurve

Array = npt.NDArray[np.float64]

GRID = (*range(1, 18), 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 512)  # widths with a belief
LOGS = np.log(np.array(GRID, dtype=np.float64))
NOISE = 0.07  # standard deviation of the logarithm of one timing
OUTLIER = 2.5  # a timing further off than this many standard deviations is clipped
SCALE = 0.4  # two evaluations that are further off than this, in logarithms, drop the prior
LASTING, CHANGE = 3, 0.3  # as many outliers in a row mean a change, of this size in logarithms
FEW = 3  # timings that a shorter one still corrects at once, for a hiccup only makes a timing longer
UNSEEN_SECONDS = 0.03  # width 1 before anything is known; only ratios matter until the first round
PAD = 0.96  # padding must save this much; a single position is never padded: it would not be timed again
EXPONENT, STEP_RATIO = 0.5, 0.12  # where nothing is known: t(w) = t(1) * w^EXPONENT, draft step / t(1)
FREE_STEP = 1e-6  # seconds of a draft step that costs nothing


@dataclass(frozen=True, slots=True)
class CostBelief:
    """What a run believes of times: logarithms of seconds of the widths in GRID and, last, of a draft step.

    Raises
    ------
    ValueError
        The parts do not belong together, or are not finite.
    """

    log_seconds: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    catch_up: tuple[float, ...]  # parts of a draft step for each unread token: for one token, for many

    def __post_init__(self) -> None:
        n = len(GRID) + 1
        if len(self.log_seconds) != n or len(self.catch_up) != 2 or np.shape(self.covariance) != (n, n):
            raise ValueError("the parts of a belief do not belong together")
        if not all(np.isfinite(part).all() for part in (self.log_seconds, self.covariance, self.catch_up)):
            raise ValueError("a belief must be finite")


class CostModel:
    """Times of one pair on one machine, refined by every evaluation.

    Parameters
    ----------
    prior : CostCurve or CostBelief, optional
        What a probe measured, or an earlier run, perhaps on another day or another machine.
    allowed : collection of int, optional
        The only widths that may be evaluated.
    """

    def __init__(
        self, prior: CostCurve | CostBelief | None = None, allowed: Collection[int] | None = None
    ) -> None:
        self._allowed = allowed
        self._mean, self._covariance = _belief(prior)
        self._catch_up = list(prior.catch_up) if isinstance(prior, CostBelief) else [0.4, 0.15]
        self.has_prior = prior is not None  # until the first two evaluations contradict it
        self._prior_plain = float(self._mean[0])
        self.overhead_seconds = 0.0  # of a row's round, besides the models
        self.n_timed: dict[int, int] = {}  # width -> evaluations
        self.n_steps_timed = 0
        self._range = range(1, GRID[16] + 1)  # widths with a price; grows on demand
        self._n_far = 0  # outliers in a row
        self._h = np.empty((0, len(GRID) + 1))  # [len(_range), len(GRID) + 1]
        self._is_stale = True  # prices are older than the belief

    def seconds(self, width: int) -> float:
        """An evaluation of exactly this width."""
        return exp(float(_weights(width) @ self._mean))

    def batch_seconds(self, positions: Sequence[int], z: float = 0.0, base: int = 1) -> list[float]:
        """Evaluations of at least so many positions, padded where that is cheaper; inf where not allowed.

        `z`: standard deviations by which each is dearer than believed, next to width `base`.
        """
        self._cover(max(positions))
        if not z:
            return [self._batch[n] for n in positions]
        padded = np.array([self._width[n] for n in positions])
        h = self._h[padded - 1]
        apart = h - _weights(base)
        spread = np.sqrt(np.maximum(((apart @ self._covariance) * apart).sum(axis=1), 0.0))
        dear: list[float] = np.where(padded > 0, np.exp(h @ self._mean + z * spread), inf).tolist()
        return dear

    def cheapest_width(self, n: int) -> int | None:
        """The allowed width, n or wider, that costs least; None where none is."""
        self._cover(n)
        return self._width[n] or None

    def draft_step_seconds(self, z: float = 0.0) -> float:
        """One evaluation of the draft, `z` standard deviations dearer than believed, next to width 1."""
        if not z:
            return exp(float(self._mean[-1]))
        apart = _UNITS[-1] - _UNITS[0]
        return exp(float(self._mean[-1]) + z * sqrt(max(float(apart @ self._covariance @ apart), 0.0)))

    def catch_up_seconds(self, n_unread: int) -> float:
        """What reading tokens that the draft has missed adds to its next step."""
        return self.draft_step_seconds() * n_unread * self._catch_up[n_unread > 1]

    @property
    def plain_spread(self) -> float:
        """Standard deviation of the logarithm of the time of width 1."""
        return sqrt(float(self._covariance[0, 0]))

    def doubts(self, width: int) -> bool:
        """Whether the only timing of a width looks wrong: a hiccup of plain decoding flatters drafts."""
        if self._is_off_scale(1):
            return True
        wider = [self.seconds(w) for w in self.n_timed if w > width]
        return self.n_timed.get(width) == 1 and min(wider, default=inf) < PAD * self.seconds(width)

    def belief(self) -> CostBelief:
        """All that is believed now."""
        covariance = tuple(map(tuple, self._covariance.tolist()))
        return CostBelief(tuple(self._mean.tolist()), covariance, tuple(self._catch_up))

    def observe_verify(self, width: int, seconds: float) -> None:
        """Learn from one evaluation of the target."""
        self._covariance = self._covariance + _DRIFT
        if width >= 1 and seconds > 0:
            self._learn(_weights(width), log(seconds), NOISE**2, self.n_timed.get(width, 0))
            self.n_timed[width] = self.n_timed.get(width, 0) + 1
            if self._is_off_scale(2):  # of another machine, whose steps and slopes say nothing of this one
                plain, self.has_prior = float(self._mean[0]), False
                self._mean, self._covariance = _belief(None)
                for weights, value in ((_UNITS[0], plain), (_weights(width), log(seconds))):
                    self._learn(weights, value, NOISE**2, FEW)
        self._is_stale = True

    def observe_draft(self, n_steps: int, n_unread: int, seconds: float) -> None:
        """Learn from draft steps, the first of which had to read `n_unread` tokens more than one."""
        if seconds <= 0 or n_steps < 1:
            return
        steps = n_steps + n_unread * self._catch_up[n_unread > 1]
        if n_unread and self.n_steps_timed >= 2:
            part = (seconds / self.draft_step_seconds() - n_steps) / n_unread
            old = self._catch_up[n_unread > 1]
            self._catch_up[n_unread > 1] = old + 0.2 * (min(max(part, 0.0), 2.0) - old)
        noise = (NOISE * steps / n_steps) ** 2
        self._learn(_UNITS[-1], log(seconds / steps), noise, self.n_steps_timed)
        self.n_steps_timed += 1
        self._is_stale = True

    def observe_overhead(self, seconds: float) -> None:
        """Learn what a round costs besides the models."""
        if not self.overhead_seconds:
            self.overhead_seconds = seconds
        self.overhead_seconds += 0.1 * (min(seconds, 3 * self.overhead_seconds) - self.overhead_seconds)

    def _is_off_scale(self, n_timed: int) -> bool:
        """Whether after as many evaluations the prior looks like that of another machine."""
        is_off = self.has_prior and abs(float(self._mean[0]) - self._prior_plain) > SCALE
        return is_off and sum(self.n_timed.values()) == n_timed

    def _learn(self, h: Array, value: float, noise: float, n_before: int) -> None:
        """Bayes' rule for the entry that `h` weighs. One outlier is hardly believed."""
        surprise, variance = value - float(h @ self._mean), float(h @ self._covariance @ h) + noise
        doubt = surprise**2 / (variance * OUTLIER**2)
        self._n_far = self._n_far + 1 if doubt > 1 else 0
        if self._n_far >= LASTING:
            self._n_far, self._covariance = 0, self._covariance + CHANGE**2
        elif doubt > 1 and surprise < 0 and n_before < FEW:  # the few before this one were hiccups
            self._covariance = self._covariance + surprise**2 * np.outer(h, h)
        elif doubt > 1:
            noise *= doubt
        column = self._covariance @ h
        variance = float(h @ column) + noise
        limit = OUTLIER * sqrt(variance)
        self._mean = self._mean + column * (min(max(surprise, -limit), limit) / variance)
        self._covariance = self._covariance - np.outer(column, column / variance)

    def _cover(self, n: int) -> None:
        if n > len(self._range):
            self._range, self._is_stale = range(1, 2 * n + 1), True
        if self._is_stale:
            self._refresh()

    def _refresh(self) -> None:
        self._is_stale = False
        if len(self._h) != len(self._range):
            self._h = np.array([_weights(width) for width in self._range])
        times = np.exp(self._h @ self._mean).tolist()
        self._width = [0] * (len(times) + 1)  # [n] the cheapest allowed width of at least n; 0: none
        best = 0
        for width in reversed(self._range):
            least = PAD if width > 1 else 0.0
            if (self._allowed is None or width in self._allowed) and (
                not best or times[best - 1] > least * times[width - 1]
            ):
                best = width
            self._width[width] = best
        self._batch = [times[width - 1] if width else inf for width in self._width]
        self._batch[0] = 0.0


@functools.lru_cache(maxsize=1024)
def _weights(width: int) -> Array:
    """[len(GRID) + 1] what the beliefs count for at a width: the two around it, on a logarithmic scale."""
    i = min(int(np.searchsorted(GRID, width, side="right")), len(GRID) - 1)
    part = (log(width) - LOGS[i - 1]) / (LOGS[i] - LOGS[i - 1])
    weights: Array = (1.0 - part) * _UNITS[i - 1] + part * _UNITS[i]
    return weights


def _kernel(scale: float, exponent: float, bend: float, step: float, draft: float) -> Array:
    """Covariance of all logarithms from five standard deviations."""
    n = len(GRID)
    covariance = np.full((n + 1, n + 1), scale**2)
    covariance[:n, :n] += exponent**2 * np.outer(LOGS, LOGS) + bend**2 * np.minimum.outer(LOGS, LOGS)
    covariance[:n, :n] += np.diag(np.where(LOGS > 0, step**2, 0.0))
    covariance[n, n] += draft**2
    return covariance


def _belief(prior: CostCurve | CostBelief | None) -> tuple[Array, Array]:
    """Mean and covariance before the first timing: doubts about scale, slope, every step, the draft."""
    if prior is None:
        mean = np.append(EXPONENT * LOGS, log(STEP_RATIO)) + log(UNSEEN_SECONDS)
        return mean, _kernel(3.0, 0.3, 0.12, 0.12, 1.0)
    if isinstance(prior, CostBelief):
        return np.array(prior.log_seconds), np.array(prior.covariance) + _kernel(3.0, 0.1, 0.05, 0.04, 0.3)
    times = np.interp(GRID, prior.widths, prior.verify_seconds)
    last = prior.widths[-1]
    times = np.where(np.array(GRID) > last, prior.verify_seconds[-1] * np.array(GRID) / last, times)
    mean = np.log(np.append(times, max(prior.draft_step_seconds, FREE_STEP)))
    return mean, _kernel(3.0, 0.15, 0.08, 0.06, 0.4 if prior.draft_step_seconds > FREE_STEP else 3.0)


_UNITS = np.eye(len(GRID) + 1)
_DRIFT = _kernel(0.006, 0.002, 0.001, 0.002, 0.003)  # of a round: times wander, mostly together
