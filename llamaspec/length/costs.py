"""Seconds of a target evaluation by width, and of a draft step.

A width is the number of positions of one evaluation, over all sequences. Each width that was timed has a
moving average of the logarithm of its seconds; widths between them are interpolated. All averages share a
scale, because a machine gets slower and faster as a whole. Knows no model and no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import exp, log, log2

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

WIDEST = 1 << 16  # positions
SHORTEST, LONGEST = 1e-12, 1e6  # seconds: other times cannot have been measured
DENSE = 16  # up to this, each width has its own average; beyond, each power of two
PLAIN_SECONDS = 0.03  # first guess of width 1
STEP, POSITION = 0.12, 0.2  # first guesses of a draft step and one more position, relative to width 1
TIMED = 2  # timings of a width before it is known; of plain decoding, before anything is drafted
PROBED, MOST = 2, 15  # timings that a prior counts as; that an average remembers
CALIBRATED = (2, 4, 8, 16)  # widths that are timed by padding plain rounds, `TIMED` times each
AGAIN = (
    4.0  # a second timing, in case the first one also compiled kernels, waits for this many times its cost
)
TOGETHER = 0.1  # share of a surprise that moves all widths
OUTLIER, LASTING = 0.25, 3  # of a logarithm: larger surprises are clipped, unless as many come in a row
LAG = 2  # tokens that a draft model usually has to process before its next step
READING = 0.1  # first guess of a prompt token of the draft model, in draft steps
PROMPT = 64  # minimum positions of a prompt chunk whose time is used for its width


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Costs of one pair on one machine, as a probe or earlier runs have measured them.

    Raises
    ------
    ValueError
        The widths do not ascend from 1 to at most `WIDEST`, or a time cannot have been measured.
    """

    widths: tuple[int, ...]  # positions in one evaluation of the target, ascending, the first is 1
    verify_seconds: tuple[float, ...]  # one for each width
    draft_step_seconds: float  # one draft token; 0 if draft tokens cost nothing
    draft_reading_seconds: float = 0.0  # one prompt token of the draft model; 0 if unknown

    def __post_init__(self) -> None:
        if len(self.widths) != len(self.verify_seconds) or self.widths[:1] != (1,):
            raise ValueError("a cost curve needs one time for each width, from width 1 on")
        if any(b <= a for a, b in zip(self.widths, self.widths[1:], strict=False)):
            raise ValueError(f"widths must ascend, got {self.widths}")
        if self.widths[-1] > WIDEST:
            raise ValueError(f"widths must be <= {WIDEST}, got {self.widths[-1]}")
        times = (
            *self.verify_seconds, self.draft_step_seconds or LONGEST, self.draft_reading_seconds or LONGEST,
        )  # fmt: skip
        if not all(SHORTEST <= seconds <= LONGEST for seconds in times):
            raise ValueError(f"seconds must be positive, from {SHORTEST:g} to {LONGEST:g}")


@dataclass(slots=True)
class Average:
    """Moving average of the logarithm of seconds, relative to the common scale."""

    log: float
    n: int  # timings, at most `MOST`
    n_outliers: int = 0  # in a row; negative if they were too fast

    def learn(self, surprise: float) -> None:
        """Include one more timing, which differed by `surprise`."""
        self.n = min(self.n + 1, MOST)
        self.log += surprise / self.n


class Costs:
    """Costs of one pair on one machine, refined by every evaluation.

    Parameters
    ----------
    prior : CostCurve, optional
        From a probe or an earlier run.
    pads : bool
        Plain rounds may be padded to time a width.
    is_settled : bool
        The prior was measured in enough runs. Otherwise the narrow widths are timed again, in case the
        machine was busy.
    """

    def __init__(
        self,
        prior: CostCurve | None = None,
        *,
        pads: bool = True,
        is_settled: bool = True,
    ) -> None:
        prior = prior or CostCurve((1,), (PLAIN_SECONDS,), 0.0)
        n, step = (PROBED if is_settled else 1) * (len(prior.widths) > 1), prior.draft_step_seconds
        self.averages = {
            _knot(width): Average(log(seconds * _knot(width) / width), n)
            for width, seconds in zip(prior.widths, prior.verify_seconds, strict=True)
        }
        self._step = Average(log(step or STEP * prior.verify_seconds[0]), PROBED if step else 0)
        reading = prior.draft_reading_seconds
        self._reading = Average(log(reading), PROBED) if reading else None
        self._early: list[Callable[[], None]] = []  # timings that came before plain decoding set the scale
        self._scale = 0.0  # logarithm
        self._untimed = set(CALIBRATED if pads else ()) - (set(prior.widths) if is_settled else set())
        self.n_timed = 0  # evaluations of the target in this run
        self.is_surprised = False  # the latest timing was an outlier: a hiccup, or the first sign of a change
        self._every: Array = np.empty(0)  # [1 + w] seconds of width w; a cache

    def widest_timed(self, most: int = WIDEST) -> int:
        """Return the widest width up to `most` that was timed."""
        timed = (width for width, average in self.averages.items() if average.n and width <= most)
        return max(timed, default=1)

    @property
    def knows_plain(self) -> bool:
        """Whether enough evaluations were timed, now or in a prior, to plan drafts."""
        return sum(average.n for average in self.averages.values()) >= TIMED

    @property
    def knows_step(self) -> bool:
        """Whether a draft step was timed."""
        return self._step.n > 0

    @property
    def step_seconds(self) -> float:
        """Seconds of a draft step, which processes one token."""
        return exp(self._step.log + self._scale)

    @property
    def reading_seconds(self) -> float:
        """Seconds of one prompt token of the draft model."""
        if self._reading is not None:
            return exp(self._reading.log + self._scale)
        return READING * self.step_seconds

    def drafting_seconds(self, n_steps: float, n_unread: int) -> float:
        """Seconds of draft steps, the first of which also processes `n_unread` tokens."""
        return n_steps * self.step_seconds + n_unread * self.reading_seconds

    def seconds(self, width: int) -> float:
        """Seconds of an evaluation of this width."""
        return float(np.interp(width, *self._curve()))

    def seconds_of(self, first: int, last: int, stride: int = 1) -> Array:
        """Seconds of evaluations of `first`, `first` + `stride`, ... `last` positions."""
        if last >= len(self._every):
            every = np.arange(1 + max(2 * last, 2 * max(self.averages), 2 * DENSE))
            self._every = np.interp(every, *self._curve())  # beyond the widest known: as long as that one
        return self._every[first : last + 1 : stride]

    def plain_seconds(self, n_sequences: int) -> float | None:
        """Expected seconds of a round of `n_sequences` without drafts; None before one was timed."""
        return float(self.seconds_of(n_sequences, n_sequences)[0]) if self.n_timed else None

    def next_untimed(self) -> tuple[int, float] | None:
        """The next width to time by padding a plain round, and the seconds that must be to spare for it.

        None if all were timed, or plain decoding was not.
        """
        if not self._untimed or not self.n_timed:
            return None
        n_timings = {
            width: self.averages[width].n if width in self.averages else 0 for width in self._untimed
        }
        width = min(sorted(self._untimed), key=n_timings.__getitem__)
        if n_timings[width] == 1:
            return width, AGAIN * (self.seconds(width) - self.seconds(1))
        below = max((known for known in self.averages if 1 < known < width), default=2)
        return width, (width - 1) * (self.seconds(below) - self.seconds(1)) / (below - 1)

    def observe_verify(self, width: int, seconds: float) -> None:
        """Learn from one evaluation of the target."""
        if seconds <= 0:
            return
        knot, is_first = _knot(width), not self.n_timed
        surprise = log(seconds / self.seconds(width))
        if knot not in self.averages:
            self.averages[knot] = Average(log(self.seconds(knot)) - self._scale, 0)
        average = self.averages[knot]
        self.n_timed += 1
        if is_first:  # the machine may be slower than ever before
            self._scale += surprise
            average.n = max(average.n, 1)
        elif not average.n:
            average.learn(surprise)
        else:
            self._learn(average, surprise)
        if average.n >= TIMED:
            self._untimed.discard(width)
        self._every = np.empty(0)
        while self._early:
            self._early.pop(0)()

    def observe_prompt(self, width: int, seconds: float) -> None:
        """Learn the cost of a wide evaluation from a prompt chunk of the target.

        It computes no logits, so it counts as one timing, and a later one replaces it.
        """
        if width < PROMPT or seconds <= 0:
            return
        if not self.n_timed:
            self._early.append(partial(self.observe_prompt, width, seconds))
            return
        knot = _knot(width)
        if knot not in self.averages or self.averages[knot].n <= 1:
            self.averages[knot] = Average(log(seconds * knot / width) - self._scale, 1)
            self._every = np.empty(0)

    def observe_first_step(self, seconds: float) -> None:
        """Learn from a draft step that was timed before the first completion."""
        if seconds <= 0:
            return
        if not self.n_timed:
            self._early.append(partial(self.observe_first_step, seconds))
            return
        first = log(seconds) - self._scale
        if (
            not self.knows_step or first < self._step.log
        ):  # a step believed too slow is never used, so never corrected
            self._step = Average(first, LASTING)

    def observe_reading(self, n: int, seconds: float) -> None:
        """Learn from `n` prompt tokens that the draft model processed."""
        if n < PROMPT // 2 or seconds <= 0:
            return
        found = log(seconds / n) - self._scale
        if self._reading is None:
            self._reading = Average(found, 1)
        else:
            self._reading.learn(min(found - self._reading.log, OUTLIER))

    def _learn(self, average: Average, surprise: float) -> None:
        sign = (surprise > OUTLIER) - (surprise < -OUTLIER)
        self.is_surprised = sign != 0
        average.n_outliers = sign * (max(sign * average.n_outliers, 0) + 1)
        n_lasting = abs(average.n_outliers)
        if n_lasting >= 2 and average is self.averages[1]:  # the whole machine has changed
            self._scale += surprise
        elif n_lasting >= LASTING or (average.n < 3 and surprise < 0 and average is not self.averages[1]):
            average.log += surprise  # the average was wrong: for example, the first timing was held up
            average.n, average.n_outliers = min(average.n + 1, MOST), 0
        else:
            surprise = max(-OUTLIER, min(surprise, OUTLIER))
            self._scale += TOGETHER * surprise
            average.learn((1.0 - TOGETHER) * surprise)

    def observe_draft(self, n_steps: float, n_unread: int, seconds: float) -> None:
        """Learn from the draft steps of one round, unless most of the time was prompt processing."""
        if n_steps and seconds > 0 and n_unread <= LAG:
            surprise = log(seconds / self.drafting_seconds(n_steps, n_unread))
            self._step.learn(min(surprise, OUTLIER) if self._step.n >= LASTING else surprise)

    def learned(self) -> CostCurve:
        """Return what the next run should start with."""
        known = sorted({1, *(width for width, average in self.averages.items() if average.n)})
        times = [max(SHORTEST, min(exp(self.averages[w].log + self._scale), LONGEST)) for w in known]
        step = max(SHORTEST, min(self.step_seconds, LONGEST)) if self.knows_step else 0.0
        reading = 0.0 if self._reading is None else max(SHORTEST, min(self.reading_seconds, LONGEST))
        return CostCurve(tuple(known), tuple(times), step, reading)

    def _curve(self) -> tuple[list[int], list[float]]:
        """Return the widths and seconds between which the others are interpolated."""
        known = sorted(self.averages)
        times = [exp(self.averages[w].log + self._scale) for w in known]
        return (known, times) if len(known) > 1 else ([1, 2], [times[0], (1 + POSITION) * times[0]])


def _knot(width: int) -> int:
    """Return the width whose average is used for this one."""
    return width if width <= DENSE else 1 << round(log2(width))
