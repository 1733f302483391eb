"""Seconds of a target evaluation, by its width and the depth of its sequences, and of a draft step.

A width is the number of positions of one evaluation, over all sequences. A depth is the number of cached
tokens that a position attends to.

    seconds = scale * (ratio[width] + attention * (first + share * others))

`scale` is a plain evaluation without cached tokens, and ratio[1] is 1. `first` adds up the depths of the
first position of each sequence, `others` those of all other positions. `attention` is what a cached token
costs the first, and `share` of that each other one: 1 if every position reads the cache anew. So what is
learnt at one depth, or while the machine is slow, holds at every other. The logarithms of these numbers are
estimated together (`Belief`). docs/architecture.md has the constants. Knows no model and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import exp, hypot, log, log2, sqrt

import numpy as np

from llamaspec.length.cost_curve import LONGEST, PROBED, SHORTEST, WIDEST, CostCurve, credible
from llamaspec.length.estimates import Array, Belief, Expected
from llamaspec.values import NO_ATTENTION, Attention

DENSE = 16  # up to this, each width has its own ratio; beyond, each power of two
PLAIN_SECONDS = 0.03  # first guess of width 1
STEP, POSITION = 0.12, 0.2  # first guesses of a draft step and one more position, relative to width 1
READING = 0.1  # first guess of a prompt token of the draft model, in draft steps
CACHED, SHARE = 5e-5, 0.4  # first guesses: 20,000 cached tokens take as long as the weights
TIMED = 2  # timings of plain decoding before anything is drafted; of a width before it is known
CALIBRATED = (2, 4, 8, 16)  # widths that are timed by padding plain rounds
AGAIN = 4.0  # multiple of its cost that a second timing waits for: the first one may have compiled kernels
LAG = 2  # tokens that a draft model usually has to process before its next step
PROMPT = 64  # minimum positions of a prompt chunk whose time is used for its width

# Standard deviations of logarithms
ANYTHING, GUESS = 3.0, 0.7  # of the scale, which may be anything; of other first guesses
NOISE, FIRST = 0.08, 0.1  # of a timing; of the first one of a width
CHUNK, BUSY = 0.2, 0.3  # of a prompt chunk, or a draft step before all; of a timing beside other programs
AGED = 0.12  # what a kept timing gains until the next run
DRIFT, WEAR = 0.01, 0.003  # what the scale, and each ratio, gains from one evaluation to the next
STALE = 0.2  # a width that is less certain is timed again
OUTLIER, LASTING = 0.25, 3  # larger surprises are clipped, unless as many of a width come in a row
IMPLAUSIBLE = 3 * GUESS  # the same for what is only guessed, or beside other programs
STEPPING = 0  # stands for draft steps among the widths of outliers


class Costs:
    """Costs of one pair on one machine, refined by every evaluation.

    Parameters
    ----------
    prior : CostCurve, optional
        From a probe or an earlier run.
    pads : bool
        Plain rounds may be padded to time a width.
    """

    def __init__(self, prior: CostCurve | None = None, *, pads: bool = True) -> None:
        prior = prior or CostCurve((1,), (PLAIN_SECONDS,), 0.0)
        plain, step, reading = prior.verify_seconds[0], prior.draft_step_seconds, prior.draft_reading_seconds
        believed, self._belief = _kept_or_guessed, Belief()
        add = self._belief.add
        self._scale = add(log(plain), ANYTHING)
        self._attention = add(*believed(prior.attention, CACHED))
        self._share = add(*believed(prior.attention_share, SHARE))
        self._step = add(log(step / plain or STEP), hypot(prior.draft_deviation, AGED) if step else GUESS)
        self._step_attention = add(*believed(prior.draft_attention, prior.attention or CACHED))
        self._reading = add(*believed(reading / plain, READING * (step / plain or STEP)))
        self._ratios: dict[int, int] = {}  # width -> index of its logarithm
        self._n: Counter[int] = Counter()  # timings of each width, of which a prior counts as `TIMED`
        self._n_outliers: Counter[int] = Counter()  # in a row; negative if they were too fast
        self.knows_step, self._knows_reading = step > 0, reading > 0
        if len(prior.widths) > 1:
            self._n[1] = TIMED
            deviations = prior.deviations or (PROBED,) * len(prior.widths)
            for width, seconds, deviation in zip(
                prior.widths[1:], prior.verify_seconds[1:], deviations[1:], strict=True
            ):
                knot = _knot(width)
                ratio = log(seconds / plain * knot / width)
                self._ratios[knot] = add(ratio, hypot(deviation, AGED if prior.deviations else 0.0))
                self._n[knot] = TIMED
        self._pads = pads
        self._timed: Counter[int] = Counter()  # timings of each width in this run
        self.n_timed = 0  # evaluations of the target in this run
        self.is_disturbed = False  # other programs took cores from the latest evaluation
        self.is_surprised = False  # the latest timing was an outlier: a hiccup, or the first sign of a change
        self._every: Array = np.empty(0)  # [1 + w] seconds of width w without cached tokens; a cache

    def widest_timed(self, most: int = WIDEST) -> int:
        """Return the widest width up to `most` that was timed."""
        return max((width for width, n in self._n.items() if n and width <= most), default=1)

    @property
    def knows_plain(self) -> bool:
        """Whether enough evaluations were timed, now or in a prior, to plan drafts."""
        return self._n.total() >= TIMED

    @property
    def is_step_certain(self) -> bool:
        """Whether a draft step was timed, not too many runs ago."""
        return self.knows_step and self._belief.deviation(self._step) <= STALE

    def seconds(self, width: int, attention: Attention = NO_ATTENTION) -> float:
        """Seconds of an evaluation of this width."""
        return float(self.seconds_of(width, width)[0]) + self.attention_seconds(attention)

    def seconds_of(self, first: int, last: int, stride: int = 1) -> Array:
        """Seconds of `first`, `first` + `stride`, ... `last` positions without cached tokens."""
        if last >= len(self._every):
            widths, times = self._curve()
            every = np.arange(1 + max(2 * last, 2 * widths[-1], 2 * DENSE))
            self._every = np.interp(every, widths, times)  # beyond the widest known, the cost stays the same
        return self._every[first : last + 1 : stride]

    def attention_seconds(self, attention: Attention) -> float:
        """Seconds that an evaluation takes for its cached tokens."""
        means = self._belief.means
        return exp(means[self._scale] + means[self._attention]) * (
            attention.first + self._share_of(means) * attention.others
        )

    def drafting_seconds(self, n_steps: float, n_unread: int = 0, depth: float = 0.0) -> float:
        """Seconds of draft steps at a depth, the first of which also processes `n_unread` tokens."""
        step = self._of(self._scale) * self._of(self._step)
        return (
            n_steps * step * (1.0 + self._of(self._step_attention) * depth) + n_unread * self.reading_seconds
        )

    @property
    def reading_seconds(self) -> float:
        """Seconds of one prompt token of the draft model."""
        if self._knows_reading:
            return self._of(self._scale) * self._of(self._reading)
        return READING * self._of(self._scale) * self._of(self._step)

    def next_untimed(self) -> tuple[int, float] | None:
        """The next width to time by padding a plain round, and the seconds that must be to spare for it.

        None if all are certain, or plain decoding was not timed. On a busy machine, each is timed once.
        """
        if not self._pads or not self.n_timed:
            return None
        n_least = 1 if self.is_disturbed else TIMED
        uncertain = [w for w in CALIBRATED if self._n[w] < n_least or self._is_stale(w)]
        if not uncertain:
            return None
        width = min(uncertain, key=self._timed.__getitem__)
        if width in self._ratios:
            patience = AGAIN if self._timed[width] else 1.0
            return width, patience * (self.seconds(width) - self.seconds(1))
        below = max((known for known in self._ratios if known < width), default=2)
        return width, (width - 1) * (self.seconds(below) - self.seconds(1)) / (below - 1)

    def observe_verify(
        self, width: int, seconds: float, attention: Attention = NO_ATTENTION, *, is_disturbed: bool = False
    ) -> float:
        """Learn from one evaluation of the target; return its seconds without a stall of the machine.

        If it was disturbed, because other programs took cores, the ratio of its width is only learnt as long
        as it is uncertain, and stays so.
        """
        if seconds <= 0:
            return 0.0
        self.n_timed, self.is_disturbed = self.n_timed + 1, is_disturbed
        self._age()
        noise = NOISE if self._n[_knot(width)] else FIRST
        return self._learn_evaluation(width, seconds, attention, noise, is_disturbed=is_disturbed)

    def observe_prompt(self, width: int, seconds: float, attention: Attention = NO_ATTENTION) -> None:
        """Learn from a prompt chunk of the target. It computes no logits, so its time tells less."""
        if width >= PROMPT and seconds > 0:
            self._learn_evaluation(width, seconds, attention, CHUNK)

    def observe_first_step(self, seconds: float) -> None:
        """Learn from a draft step that was timed before the first completion.

        A known step stays if this one was slower: it was held up. One that is believed too slow would never
        be used, and so never be corrected.
        """
        surprise = log(max(seconds, SHORTEST) / self.drafting_seconds(1))
        if seconds <= 0 or (self.knows_step and surprise > 0):
            return
        self._belief.doubt(self._step, abs(surprise))
        self._belief.learn(self._product(self._scale, self._step), surprise, CHUNK)
        self.knows_step = True

    def observe_reading(self, n: int, seconds: float) -> None:
        """Learn from `n` prompt tokens that the draft model processed."""
        if n < PROMPT // 2 or seconds <= 0:
            return
        surprise = log(seconds / n / self.reading_seconds)
        if not self._knows_reading:
            self._belief.means[self._reading] = log(READING) + self._belief.means[self._step]
            self._knows_reading, limit = True, IMPLAUSIBLE
        else:
            limit = OUTLIER
        self._belief.learn(self._product(self._scale, self._reading), min(surprise, limit), CHUNK)

    def observe_draft(self, n_steps: float, n_unread: int, seconds: float, depth: float = 0.0) -> float:
        """Learn from the draft model's time in one round; return it without a stall of the machine.

        Nothing is learnt if most of it was prompt processing, nor from a first step that is too slow to be
        believed: it may have waited for the disk, and a draft that seems so slow would never be tried again.
        """
        expected = self.drafting_seconds(max(n_steps, 1), n_unread, depth)
        is_learnt = n_steps > 0 and n_unread <= LAG
        limit = OUTLIER if is_learnt and self.knows_step else IMPLAUSIBLE
        credible = min(seconds, expected * exp(limit))
        if not is_learnt or seconds <= 0:
            return credible
        if not self.knows_step and credible < seconds and not self._n_outliers[STEPPING]:
            self._n_outliers[STEPPING] = 1
            return credible
        surprise = log(credible / expected)
        if surprise < -OUTLIER:  # nothing makes a step faster by chance: the earlier ones were held up
            self._belief.doubt(self._step, -surprise)

        def expect(means: Array) -> Expected:
            attended = exp(means[self._step_attention]) * depth
            share = attended / (1.0 + attended)
            return means[self._scale] + means[self._step] + log(1.0 + attended), {
                self._scale: 1.0, self._step: 1.0, self._step_attention: share,
            }  # fmt: skip

        self._belief.doubt(self._step, WEAR)
        self._belief.learn(expect, surprise, 2 * NOISE if self.knows_step else FIRST)
        self.knows_step = True
        return credible

    def learned(self) -> CostCurve:
        """Return what the next run should start with."""
        known = sorted(width for width in self._ratios if self._n[width])
        scale = self._of(self._scale)
        return CostCurve(
            (1, *known),
            credible(_possible(scale * self._ratio(width)) for width in (1, *known)),
            _possible(self.drafting_seconds(1)) if self.knows_step else 0.0,
            _possible(self.reading_seconds) if self._knows_reading else 0.0,
            (0.0, *(min(self._deviation(width), GUESS) for width in known)),
            min(self._of(self._attention), 0.9),
            self._share_of(self._belief.means),
            min(self._of(self._step_attention), 0.9),
            self._belief.deviation(self._step),
        )

    def _of(self, i: int) -> float:
        """Return a number whose logarithm is believed."""
        return exp(self._belief.means[i])

    def _ratio(self, width: int) -> float:
        return self._of(self._ratios[width]) if width in self._ratios else 1.0

    def _is_stale(self, width: int) -> bool:
        return not self.is_disturbed and self._deviation(width) > STALE

    def _deviation(self, width: int) -> float:
        return self._belief.deviation(self._ratios[width])

    def _share_of(self, means: Array) -> float:
        return min(exp(means[self._share]), 1.0)

    def _product(self, *factors: int) -> Callable[[Array], Expected]:
        """Return what to expect of the logarithm of a product."""
        effects = dict.fromkeys(factors, 1.0)
        return lambda means: (float(sum(means[i] for i in factors)), effects)

    def _age(self) -> None:
        """Let everything be a little less certain, because the machine changes."""
        self._belief.doubt(self._scale, DRIFT)
        self._belief.doubt(slice(self._reading + 1, None), WEAR)  # all ratios

    def _learn_evaluation(
        self, width: int, seconds: float, attention: Attention, noise: float, *, is_disturbed: bool = False
    ) -> float:
        """Learn from an evaluation; return its seconds without a stall of the machine."""
        knot = _knot(width)
        if knot != 1 and knot not in self._ratios:
            self._ratios[knot] = self._belief.add(*self._guessed(knot))

        def expect(means: Array) -> Expected:
            """Return the logarithm of the seconds; the effects are shares of the seconds."""
            of_weights = (exp(means[self._ratios[knot]]) if knot != 1 else 1.0) * width / knot
            of_first = exp(means[self._attention])
            of_others = of_first * self._share_of(means) * attention.others
            total = of_weights + of_first * attention.first + of_others
            effects = {
                self._scale: 1.0,
                self._attention: 1.0 - of_weights / total,
                self._share: of_others / total,
            }
            if knot != 1:
                effects[self._ratios[knot]] = of_weights / total
            return means[self._scale] + log(total), effects

        expected, effects = expect(self._belief.means)
        surprise = log(seconds) - float(expected)
        self._n[knot] += 1
        self._timed[knot] += 1
        if is_disturbed:
            limit = IMPLAUSIBLE
            if surprise > limit:
                limit = max(limit, 3 * self._belief.spread(effects))
            credible = min(surprise, limit)
            uncertain = {self._ratios[knot]} if knot != 1 and self._deviation(knot) > STALE else set()
            self._belief.learn(expect, credible, BUSY if uncertain else noise, only={self._scale, *uncertain})
        else:
            credible = self._learn_credible(knot, expect, surprise, noise, effects)
        # Held at 1, not only read as 1: from there it must still follow evaluations that are faster.
        self._belief.means[self._share] = min(self._belief.means[self._share], 0.0)
        self._every = np.empty(0)
        return seconds * exp(min(credible - surprise, 0.0))  # nothing makes it faster by chance

    def _learn_credible(
        self,
        knot: int,
        expect: Callable[[Array], Expected],
        surprise: float,
        noise: float,
        effects: Mapping[int, float],
    ) -> float:
        """Learn from an evaluation, but little from an outlier; return how much of the surprise is believed.

        A stall of the machine is clipped. Surprises of the same kind in a row show that something has
        changed, and nothing makes an evaluation faster by chance.
        """
        limit = OUTLIER
        if abs(surprise) > OUTLIER:
            limit = max(OUTLIER, 3 * hypot(self._belief.spread(effects), noise))
        sign = (surprise > limit) - (surprise < -limit)
        self.is_surprised = sign != 0
        n_in_row = self._n_outliers[knot] = sign * (max(sign * self._n_outliers[knot], 0) + 1)
        unsure = self._scale if knot == 1 else self._ratios[knot]
        has_changed = abs(n_in_row) >= (2 if knot == 1 else LASTING) or (
            sign < 0 and self._n[knot] <= LASTING
        )
        if sign and has_changed:
            self._belief.doubt(unsure, abs(surprise))
            self._n_outliers[knot] = 0
        elif sign:
            surprise = sign * limit
        self._belief.learn(expect, surprise, noise)
        if sign and not has_changed and knot != 1:
            self._belief.doubt(unsure, OUTLIER)  # so it is timed again soon
        return surprise

    def _guessed(self, knot: int) -> tuple[float, float]:
        """Return a first guess of the logarithm of a ratio, and its standard deviation."""
        widest = max(self._ratios, default=1)
        ratio = self.seconds(knot) / self._of(self._scale)
        if knot <= DENSE or knot <= widest:
            return log(ratio), GUESS
        return log(ratio * sqrt(knot / widest)), hypot(GUESS, log(knot / widest) / 2)

    def _curve(self) -> tuple[list[int], list[float]]:
        """Return the widths and seconds between which the others are interpolated."""
        scale, known = self._of(self._scale), sorted(self._ratios)
        if not known:
            return [1, 2], [scale, (1 + POSITION) * scale]
        return [1, *known], [scale, *(scale * self._ratio(width) for width in known)]


def _kept_or_guessed(kept: float, guess: float) -> tuple[float, float]:
    """Return the logarithm of a number, and its standard deviation."""
    return (log(kept), hypot(PROBED, AGED)) if kept > 0 else (log(guess), GUESS)


def _possible(seconds: float) -> float:
    return max(SHORTEST, min(seconds, LONGEST))


def _knot(width: int) -> int:
    """Return the width whose ratio is used for this one."""
    return width if width <= DENSE else 1 << round(log2(width))
