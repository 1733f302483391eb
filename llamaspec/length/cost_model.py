"""What evaluations cost: seconds for every number of positions of the target, and for a draft step.

The logarithm of an evaluation's seconds is a sum: that of width 1, a power of the width, and an offset of the
width's own; a draft step has an offset to width 1. So one timing corrects the scale of all times, two the
slope, and steps and dips are kept. A width is the total over all rows of an evaluation. Knows no model and no
clock. tests/length/test_cost_model.py feeds it curves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import exp, inf, log, sqrt

import numpy as np

from llamaspec.length.beliefs import Belief, Part, learn
from llamaspec.length.prior import UNSEEN_VARIANCES, LearnedPrior

NOISE = 0.07  # standard deviation of the logarithm of one timing, on a quiet machine
OUTLIER, LASTING = 2.5, 3  # standard deviations; as many in a row are no hiccups
DRIFT, OWN_DRIFT = 0.006, 0.001  # how far times wander between evaluations: all together, each alone
OWN = 0.2  # standard deviation of a width's offset, next to that of the width half as wide
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

    _plain: Belief
    _power: Belief
    _step: Belief
    _own: dict[int, Belief]  # width -> offset

    def __init__(self, prior: LearnedPrior, allowed: Collection[int] | None = None) -> None:
        self._allowed = allowed
        self._believe(prior)
        self._prior_plain = self._plain.mean
        self.overhead_seconds = 0.0  # of a row's round, besides the models
        self.n_timed: dict[int, int] = {}  # width -> evaluations
        self._n_far = 0  # outliers in a row
        self._seconds: list[float] = []  # [w] an evaluation of exactly this width; empty: not up to date
        self._width: list[int] = []  # [n] the cheapest allowed width of at least n; 0: none
        self._size = 17  # widths with a price; grows on demand

    @property
    def plain_spread(self) -> float:
        """Standard deviation of the logarithm of the time of width 1."""
        return sqrt(self._plain.variance)

    @property
    def knows_step(self) -> bool:
        """Whether more is known of a draft step than its order of magnitude."""
        return self._step.variance < UNSEEN_VARIANCES[2]

    def looks_foreign(self, n_timed: int) -> bool:
        """Whether after as many evaluations the prior looks like that of another machine."""
        is_far = bool(self._own) and abs(self._plain.mean - self._prior_plain) > FOREIGN
        return is_far and sum(self.n_timed.values()) == n_timed

    def seconds(self, width: int) -> float:
        """An evaluation of exactly this width."""
        self._cover(width)
        return self._seconds[width]

    def batch_seconds(self, positions: Sequence[int], z: float = 0.0, base: int = 1) -> list[float]:
        """Evaluations of at least so many positions, padded where that is cheaper; inf where not allowed.

        `z`: standard deviations by which each is dearer than believed, next to width `base`.
        """
        self._cover(max(positions))
        widths = [self._width[n] for n in positions]
        if not z:
            return [self._seconds[w] if w else inf for w in widths]
        return [self._seconds[w] * exp(z * self._spread(w, base)) if w else inf for w in widths]

    def cheapest_width(self, n: int) -> int | None:
        """The allowed width, n or wider, that costs least; None where none is."""
        self._cover(n)
        return self._width[n] or None

    def draft_step_seconds(self, z: float = 0.0) -> float:
        """One evaluation of the draft, `z` standard deviations dearer than believed, next to width 1."""
        return exp(self._plain.mean + self._step.mean + z * sqrt(self._step.variance))

    def drafting_seconds(self, n_steps: int, n_unread: int) -> float:
        """Draft steps, the first of which has to read `n_unread` tokens more than one."""
        return (n_steps + CATCH_UP * n_unread) * self.draft_step_seconds()

    def learned(self, log_odds: tuple[float, float, float]) -> LearnedPrior:
        """What the next run should begin with."""
        beliefs = (self._plain, self._power, self._step, *self._own.values())
        return LearnedPrior.after(
            [*self._own], [b.mean for b in beliefs], [b.variance for b in beliefs], log_odds
        )

    def observe_verify(self, width: int, seconds: float) -> None:
        """Learn from one evaluation of the target."""
        if seconds <= 0:
            return
        known = self.seconds(width)
        parts = [(self._plain, 1.0)]
        if width > 1:
            if width not in self._own:  # it begins where its neighbours let expect it
                offset = log(known) - self._plain.mean - self._power.mean * log(width)
                self._own = dict(sorted([*self._own.items(), (width, Belief(offset, self._variance(width)))]))
            parts += [(self._own[width], 1.0), (self._power, log(width))]
        self.n_timed[width] = self.n_timed.get(width, 0) + 1
        self._learn(parts, log(seconds / known), NOISE**2)
        if self.looks_foreign(2):
            plain = self._plain
            self._believe(LearnedPrior())
            self._plain = plain

    def observe_draft(self, n_steps: int, n_unread: int, seconds: float) -> None:
        """Learn from draft steps, the first of which had to read `n_unread` tokens more than one."""
        if seconds > 0 and n_steps > 0:
            surprise = log(seconds / self.drafting_seconds(n_steps, n_unread))
            noise = NOISE * (1.0 + CATCH_UP * n_unread / n_steps)
            self._learn([(self._step, 1.0), (self._plain, 1.0)], surprise, noise**2)

    def observe_overhead(self, seconds: float) -> float:
        """Learn what a round costs besides the models; returns it, less what looks like a hiccup."""
        seconds = min(seconds, 3 * self.overhead_seconds or seconds)
        self.overhead_seconds += (0.1 if self.overhead_seconds else 1.0) * (seconds - self.overhead_seconds)
        return seconds

    def _believe(self, prior: LearnedPrior) -> None:
        beliefs = [Belief(m, v) for m, v in zip(prior.means, prior.variances, strict=True)]
        self._plain, self._power, self._step = beliefs[:3]
        self._own = dict(zip(prior.widths, beliefs[3:], strict=True))

    def _learn(self, parts: list[Part], surprise: float, noise: float) -> None:
        """Learn a logarithm. An outlier is hardly believed, unless it is shorter: hiccups make longer."""
        for belief, _ in parts:
            belief.variance += (DRIFT if belief is self._plain else OWN_DRIFT) ** 2
        expected = noise + sum([weight**2 * belief.variance for belief, weight in parts])
        doubt = surprise**2 / (expected * OUTLIER**2)
        self._n_far = self._n_far + 1 if doubt > 1 else 0
        if doubt > 1 and (surprise < 0 or self._n_far >= LASTING):
            parts[0][0].variance += surprise**2
        elif doubt > 1:
            noise *= doubt
        learn(parts, surprise, noise)
        self._seconds = []

    def _spread(self, width: int, base: int) -> float:
        """Standard deviation of the logarithm of the ratio of two widths."""
        if width == base:
            return 0.0
        own = self._variance(width) + self._variance(base)
        return sqrt(own + self._power.variance * log(width / base) ** 2)

    def _variance(self, width: int) -> float:
        """Of a width's offset: the further from those known, the more."""
        if width == 1 or width in self._own:
            return self._own[width].variance if width > 1 else 0.0
        return OWN**2 * min(1.0, *(abs(log(width / known)) / log(2) for known in (1, *self._own)))

    def _cover(self, n: int) -> None:
        """Bring the prices up to date, and up to `n` positions."""
        if self._seconds and n <= self._size:
            return
        self._size = self._size if n <= self._size else 2 * n
        x = np.log(np.arange(1, self._size + 1))
        offsets = np.interp(x, np.log([1, *self._own]), [0.0, *(b.mean for b in self._own.values())])
        self._seconds = [0.0, *np.exp(self._plain.mean + self._power.mean * x + offsets).tolist()]
        self._width, best = [0] * len(self._seconds), 0
        for width in range(self._size, 0, -1):
            is_allowed, least = self._allowed is None or width in self._allowed, PAD if width > 1 else 0.0
            if is_allowed and (not best or self._seconds[best] > least * self._seconds[width]):
                best = width
            self._width[width] = best
