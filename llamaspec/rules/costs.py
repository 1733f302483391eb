"""What evaluating costs: seconds for every width of the target, for a step of the draft, for the rest.

The one idea: a Gaussian belief over the *logarithms* of all these times at once. Its covariance says what
one measurement tells about the others: all times share a scale (the machine, the length of the context),
neighbouring widths share a slope, and every width has a step or a dip of its own. One timing of width 1
then corrects a foreign prior at every width, and a width never met is interpolated.

Knows no model and no clock: seconds come with the rounds. tests/rules/test_costs.py feeds it curves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
import numpy.typing as npt

from llamaspec.values import CostCurve

Array = npt.NDArray[np.float64]

NOISE = 0.07  # standard deviation of the logarithm of one timing
OUTLIER = 2.5  # a timing further off than this many standard deviations is doubted
LASTING, CHANGE = 3, 0.3  # as many doubted timings in a row mean a change, of this size in logarithms
FEW = 3  # timings that a shorter one still corrects at once
UNSEEN_SECONDS = 0.03  # width 1 before anything is known; only ratios matter until the first round
FOREIGN = 4.0  # the first timing of a width that is further off drops the prior
REPLAYED = 200  # timings kept for the day the prior is dropped
SCALE = 0.4  # ... and so does a time of width 1 that is further off than this, in logarithms
PAD = 0.96  # padding must save this much: a saving within the noise is none
PAD_PLAIN = 0.8  # the same for width 1, which would not be timed again
EXPONENT, EXPONENT_SPREAD = 0.5, 0.3  # t(w) = t(1) * w^EXPONENT where nothing is known
TILE = 4  # positions that llama.cpp's CPU kernels take at once: a full tile costs less than a part of one
TILE_GAIN, TILE_SPREAD = 0.2, 0.15  # by how much, in logarithms, where nothing is known
FREE_STEP = 1e-6  # seconds of a guess that costs nothing
STEP_RATIO, STEP_SPREAD = 0.12, 1.0  # a draft step, as a part of t(1), where nothing is known


@dataclass(frozen=True, slots=True)
class CostBelief:
    """What a run believes of times: logarithms of seconds of widths 1, 2, ... and, last, of a draft step.

    Raises
    ------
    ValueError
        The parts do not belong together, or are not finite.
    """

    log_seconds: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    catch_up: tuple[float, ...]  # parts of a draft step for each unread token: for one token, for many

    def __post_init__(self) -> None:
        n = len(self.log_seconds)
        if n < 2 or len(self.catch_up) != 2 or np.shape(self.covariance) != (n, n):
            raise ValueError("the parts of a belief do not belong together")
        if not all(np.isfinite(part).all() for part in (self.log_seconds, self.covariance, self.catch_up)):
            raise ValueError("a belief must be finite")


class CostModel:
    """Times of one pair on one machine, refined by every round.

    Parameters
    ----------
    prior : CostCurve or CostBelief, optional
        What a probe measured, or an earlier run, perhaps on another day or another machine.
    n_widths : int
        Widths 1 .. n_widths are modelled.
    allowed : collection of int, optional
        The only widths that may be evaluated.
    """

    def __init__(
        self, prior: CostCurve | CostBelief | None, n_widths: int, allowed: Collection[int] | None = None
    ) -> None:
        self.n_widths = n_widths
        self._allowed = [w for w in range(1, n_widths + 1) if allowed is None or w in allowed]
        self._mean, self._covariance = _blank(n_widths) if prior is None else _informed(prior, n_widths)
        self._drift = _drift(n_widths)
        self._catch_up = list(prior.catch_up) if isinstance(prior, CostBelief) else [0.4, 0.15]
        self.rest_seconds = 0.0
        self.n_observed = [0] * (n_widths + 1)  # timings of each width; [n_widths] = of the draft
        self._prior_plain = float(self._mean[0])
        self._plain_timings: list[float] = []  # logarithms of the first two of width 1
        self._second_timing = 0.0  # logarithm of the first of width 2
        self._strange = 0  # outliers in a row
        self.has_prior = prior is not None  # until a timing contradicts it
        self._timings: list[tuple[int, float, float]] = []
        self._refresh()

    def _refresh(self) -> None:
        times = np.exp(self._mean).tolist()
        self.verify_seconds: list[float] = times[:-1]  # [w - 1] of width w
        self.draft_step_seconds: float = times[-1]
        self._padded = [0] * self.n_widths  # [n - 1] the cheapest width of at least n
        best = 0
        for width in range(self.n_widths, 0, -1):
            least = PAD if width > 1 else PAD_PLAIN
            if width in self._allowed and (not best or times[best - 1] > least * times[width - 1]):
                best = width
            self._padded[width - 1] = best
        self.batch_seconds = [times[w - 1] if w else float("inf") for w in self._padded]  # [n - 1], padded

    def belief(self) -> CostBelief:
        """All that is believed now."""
        mean, covariance = self._mean.tolist(), self._covariance.tolist()
        return CostBelief(tuple(mean), tuple(map(tuple, covariance)), tuple(self._catch_up))

    def allows(self, width: int) -> bool:
        """Whether a width may be evaluated."""
        return width in self._allowed

    def cheapest_width(self, n: int) -> int:
        """The width, n or wider, that costs least; `n` itself where no wider one is known."""
        return (self._padded[n - 1] or n) if n <= self.n_widths else n

    def verify_seconds_with(self, z: float) -> list[float]:
        """`verify_seconds` if every width cost `z` standard deviations more than it does, next to width 1."""
        c = self._covariance  # variance of log t(w) - log t(1):
        spread = np.sqrt(np.maximum(np.diag(c)[:-1] + c[0, 0] - 2 * c[0, :-1], 0.0))
        times: list[float] = np.exp(self._mean[:-1] + z * spread).tolist()
        return times

    def batch_seconds_with(self, z: float) -> list[float]:
        """`batch_seconds` under the same condition."""
        times = self.verify_seconds_with(z)
        best, batches = float("inf"), [0.0] * self.n_widths
        for width in range(self.n_widths, 0, -1):
            if width in self._allowed:
                best = min(best, times[width - 1])
            batches[width - 1] = best
        return batches

    @property
    def hopeful_step_seconds(self) -> float:
        """A draft step, one standard deviation cheaper than believed, next to width 1."""
        c = self._covariance
        return self.draft_step_seconds / exp(sqrt(max(float(c[-1, -1] + c[0, 0] - 2 * c[0, -1]), 0.0)))

    @property
    def plain_spread(self) -> float:
        """Standard deviation of the logarithm of the time of width 1."""
        return sqrt(float(self._covariance[0, 0]))

    def catch_up_seconds(self, n_unread: int) -> float:
        """What reading tokens that the draft has missed adds to its next step."""
        return self.draft_step_seconds * n_unread * self._catch_up[n_unread > 1]

    def observe_verify(self, width: int, seconds: float) -> None:
        """Learn from one evaluation of the target."""
        self._covariance += self._drift
        if 1 <= width <= self.n_widths and seconds > 0:
            self._learn(width - 1, log(seconds), NOISE**2)
        self._refresh()

    def observe_draft(self, n_guesses: int, n_unread: int, seconds: float) -> None:
        """Learn from drawing guesses, the first of which had to read `n_unread` tokens more than one."""
        if seconds <= 0 or n_guesses < 1:
            return
        steps = n_guesses + n_unread * self._catch_up[n_unread > 1]
        if n_unread and self.n_observed[-1] >= 2:
            part = (seconds / self.draft_step_seconds - n_guesses) / n_unread
            old = self._catch_up[n_unread > 1]
            self._catch_up[n_unread > 1] = old + 0.2 * (min(max(part, 0.0), 2.0) - old)
        trust = n_guesses / steps
        self._learn(self.n_widths, log(seconds / steps), (NOISE / trust) ** 2)
        self._refresh()

    def observe_rest(self, seconds: float) -> None:
        """Learn what a round costs besides the models."""
        if not self.rest_seconds:
            self.rest_seconds = seconds
        self.rest_seconds += 0.1 * (min(seconds, 3 * self.rest_seconds) - self.rest_seconds)

    def _learn(self, i: int, value: float, noise: float) -> None:
        """Learn from a measurement of entry `i`; a prior that it contradicts is dropped.

        Only a first timing can contradict: later ones are set against what was measured here. Of width 1,
        on which everything rests, the first two must agree about it.
        """
        self.n_observed[i] += 1
        if i == 0 and self.n_observed[0] <= 2:
            self._plain_timings.append(value)
        elif i == 1 and self.n_observed[1] == 1:
            self._second_timing = value
        if self.has_prior:
            if len(self._timings) < REPLAYED:
                self._timings.append((i, value, noise))
            if i == 0:
                is_foreign = self.n_observed[0] == 2 and self._plain_is_foreign()
            else:
                limit = FOREIGN * sqrt(float(self._covariance[i, i]) + noise)
                is_foreign = self.n_observed[i] == 1 and abs(value - float(self._mean[i])) > limit
            if is_foreign:
                self.has_prior = False
                self._mean, self._covariance = _blank(self.n_widths)
                for timing in self._timings:
                    self._condition(*timing)
                return
        self._condition(i, value, noise)

    def _plain_is_foreign(self) -> bool:
        """Whether even the shortest of the first timings of width 1 is not what the prior says."""
        return abs(min(self._plain_timings) - self._prior_plain) > SCALE

    @property
    def doubts_plain(self) -> bool:
        """Whether the only timing of width 1 looks wrong: one hiccup must not make guessing look cheap."""
        if self.n_observed[0] != 1:
            return False
        if self.has_prior:
            return self._plain_is_foreign()
        return self.n_observed[1] > 0 and self._plain_timings[0] > self._second_timing + log(PAD)

    def _condition(self, i: int, value: float, noise: float) -> None:
        """Learn entry `i`; a single outlier is hardly believed, several in a row change the scale of all."""
        surprise = value - float(self._mean[i])
        doubt = surprise**2 / ((float(self._covariance[i, i]) + noise) * OUTLIER**2)
        self._strange = self._strange + 1 if doubt > 1 else 0
        if self._strange >= LASTING:
            self._strange = 0
            self._covariance = self._covariance + CHANGE**2
        elif doubt > 1 and surprise < 0 and self.n_observed[i] <= FEW:
            # A hiccup only ever makes a timing longer, so the few before this one were hiccups.
            self._covariance = self._covariance.copy()
            self._covariance[i, i] += surprise**2
        elif doubt > 1:
            noise *= doubt
        column = self._covariance[:, i]
        variance = float(column[i]) + noise
        limit = OUTLIER * sqrt(variance)
        surprise = min(max(surprise, -limit), limit)
        self._mean = self._mean + column * (surprise / variance)
        self._covariance = self._covariance - np.outer(column, column / variance)


def _kernel(
    n: int, scale: float, exponent: float, bend: float, step: float, draft: float, tile: float = 0.0
) -> Array:
    """Covariance of [log t(1) .. log t(n), log t_draft] from six standard deviations."""
    logs = np.log(np.arange(1, n + 1))
    covariance = np.full((n + 1, n + 1), scale**2)
    covariance[:n, :n] += exponent**2 * np.outer(logs, logs)
    covariance[:n, :n] += bend**2 * np.minimum.outer(logs, logs)
    covariance[:n, :n] += np.diag(np.where(logs > 0, step**2, 0.0))
    covariance[:n, :n] += tile**2 * np.outer(_is_full(n), _is_full(n))
    covariance[n, n] += draft**2
    return covariance


def _blank(n: int) -> tuple[Array, Array]:
    """The belief where nothing was measured: a power of the width, full tiles below it."""
    verify = EXPONENT * np.log(np.arange(1, n + 1)) - TILE_GAIN * _is_full(n)
    mean = np.append(verify, log(STEP_RATIO)) + log(UNSEEN_SECONDS)
    return mean, _kernel(n, 3.0, EXPONENT_SPREAD, 0.12, 0.12, STEP_SPREAD, TILE_SPREAD)


def _is_full(n: int) -> Array:
    """[n] 1 where a width is made of full tiles."""
    full: Array = (np.arange(1, n + 1) % TILE == 0).astype(np.float64)
    return full


def _informed(prior: CostCurve | CostBelief, n: int) -> tuple[Array, Array]:
    """The belief after a probe or a run: its curve, with doubts about scale, slope and every step."""
    if isinstance(prior, CostBelief):
        if len(prior.log_seconds) != n + 1:
            raise ValueError(f"the belief is about {len(prior.log_seconds) - 1} widths, not {n}")
        doubts = _kernel(n, 3.0, 0.1, 0.05, 0.04, 0.3)
        return np.array(prior.log_seconds), np.array(prior.covariance) + doubts
    widths = np.arange(1, n + 1)
    times = np.interp(widths, prior.widths, prior.verify_seconds)
    last = prior.widths[-1]
    times = np.where(widths > last, prior.verify_seconds[-1] * widths / last, times)
    mean = np.log(np.append(times, max(prior.draft_step_seconds, FREE_STEP)))
    step_spread = 0.4 if prior.draft_step_seconds > FREE_STEP else 3.0
    return mean, _kernel(n, 3.0, 0.15, 0.08, 0.06, step_spread)


def _drift(n: int) -> Array:
    """What a round adds to the covariance: times wander, mostly together."""
    return _kernel(n, 0.006, 0.002, 0.001, 0.002, 0.003)
