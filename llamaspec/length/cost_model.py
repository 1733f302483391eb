"""What evaluations cost: seconds for every number of positions of the target, and for a draft step.

Each width that was timed, or that a probe knows, has a running average of the logarithm of its seconds;
others lie on straight lines between these, over the logarithm of the width. A timing that is off moves its
own width, and all times together a little, because machines get slower and faster as a whole. So steps and
dips are kept. A width is the total over all rows of an evaluation. Knows no model and no clock.
tests/length/test_cost_model.py feeds it curves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt

from llamaspec.length.cost_curve import LONGEST, SHORTEST, CostCurve

POWER = 0.45  # of the width, where nothing is known
PLAIN_SECONDS, STEP_RATIO = 0.03, 0.12  # where nothing is known: of width 1; draft step / width 1
PROBED, MOST, MOST_STEPS = 4, 20, 8  # timings that a prior counts for; that an average remembers; of steps
TOGETHER = 0.1  # part of a surprise by which all times move
NOISE, OUTLIER, LASTING = 0.07, 0.25, 3  # of a logarithm: usual, and a hiccup, unless as many come in a row
LINEAR = 1.1  # times as many evaluations of one position: more, a width is not believed to cost
FOREIGN = 0.4  # of a logarithm: a guess further off is doubted, a prior is of another machine
STEP_GUESSED = 0.005  # timings that a guess of a draft step is worth: a factor of 2.7
APART, FAR = 0.1, 0.2  # standard deviations of an untimed width: at its neighbour; and for each logarithm
DENSE, GAP = 17, 1.15  # known by itself: each width up to the first, then so far apart
PAD = 0.96  # padding must save this much; widths that are doubted are not padded: they would stay untimed
STALE = 0.01  # of a logarithm: prices are computed anew after as much has changed
CATCH_UP = 0.1  # of a draft step, for each token that the draft has not read


@dataclass(slots=True)
class Average:
    """Of the logarithm of seconds, besides what moves all of them."""

    log: float
    n: int  # timings that it stands for; 0 = a guess


class CostModel:
    """Times of one pair on one machine, refined by every evaluation.

    Parameters
    ----------
    prior : CostCurve, optional
        From a probe or an earlier run, perhaps on another machine.
    allowed : collection of int, optional
        The only widths that may be evaluated.
    """

    def __init__(self, prior: CostCurve | None = None, allowed: Collection[int] | None = None) -> None:
        self._allowed, self.is_blank = allowed, allowed is None and prior is None  # nothing said of widths
        self._widths = {1: Average(log(PLAIN_SECONDS), 0)}
        for width, seconds in zip(prior.widths, prior.verify_seconds, strict=True) if prior else ():
            place = _place(width)
            self._widths[place] = Average(log(seconds) - POWER * log(width / place), PROBED)
        step = prior.draft_step_seconds if prior else 0.0
        self._step = Average(log(step or STEP_RATIO * exp(self._widths[1].log)), PROBED if step else 0)
        self._scale = 0.0  # logarithm, of all times
        self.n_timed: dict[int, int] = {}  # width -> evaluations
        self.overhead_seconds = 0.0  # of a row's round without drafts, besides the models
        self._n_far = 0  # outliers in a row, those below as negative
        self._stale = inf  # by how much the prices below may be wrong
        self._seconds: list[float] = []  # [w] an evaluation of exactly this width, without the scale
        self._width: list[int] = []  # [w] the cheapest allowed width of at least this one; 0: none

    def knows(self, n: int) -> bool:
        """Whether evaluations of at least `n` positions have been timed, or nearly as wide ones."""
        width = self.cheapest_width(n)
        return width is None or self._timings(width) > 0

    @property
    def reach(self) -> int:
        """Positions up to which costs can be foreseen: twice the widest evaluation that is known."""
        return 2 * max((place for place, average in self._widths.items() if average.n), default=1)

    @property
    def knows_step(self) -> bool:
        """Whether a draft step has been timed."""
        return self._step.n > 0

    @property
    def is_surprised(self) -> bool:
        """Whether the latest timing was an outlier: a hiccup, or the first sign of a change."""
        return self._n_far != 0

    def seconds(self, width: int) -> float:
        """An evaluation of exactly this width."""
        self._cover(width)
        return self._seconds[width] * exp(self._scale)

    def batch_seconds(self, positions: Sequence[int], z: float = 0.0) -> list[float]:
        """Evaluations of at least so many positions, padded where that is cheaper; inf where not allowed.

        `z`: standard deviations by which each but the first is dearer than believed.
        """
        self._cover(positions[-1])
        widths, scale = [self._width[n] for n in positions], exp(self._scale)
        seconds = [scale * self._seconds[width] for width in widths]
        if z:
            for i, width in enumerate(widths):
                if width and width != widths[0]:
                    seconds[i] *= exp(z * self._doubt(width))
        return seconds

    def cheapest_width(self, n: int) -> int | None:
        """The allowed width, n or wider, that costs least; None where none is."""
        self._cover(n)
        return self._width[n] or None

    def draft_step_seconds(self, z: float = 0.0) -> float:
        """One evaluation of the draft, `z` standard deviations dearer than believed."""
        return exp(self._step.log + self._scale + z * NOISE / sqrt(self._step.n or STEP_GUESSED))

    def wide_steps(self, widest: int) -> list[float]:
        """[1 + widest] what draft steps that read 0, 1, ... tokens cost, in steps that read one.

        They get dearer as the target's evaluations do.
        """
        self._cover(widest)
        ratios = [0.0, 1.0]
        for seconds in self._seconds[2 : widest + 1]:
            ratios.append(max(ratios[-1], seconds / self._seconds[1]))
        return ratios

    def narrow_steps(self, n_steps: int, n_scored: int) -> float:
        """What some draft steps cost that score so many positions together, in steps that score one."""
        if n_scored <= n_steps:
            return n_steps
        width, part = divmod(n_scored / n_steps, 1)
        wide = self.wide_steps(int(width) + 1)
        return n_steps * (wide[int(width)] + part * (wide[int(width) + 1] - wide[int(width)]))

    def drafting_seconds(self, n_steps: float, n_unread: int) -> float:
        """Draft steps, the first of which has to read `n_unread` tokens more than one."""
        return (n_steps + CATCH_UP * n_unread) * self.draft_step_seconds()

    def learned(self) -> CostCurve:
        """What the next run should begin with."""
        known = sorted({1, *(place for place, average in self._widths.items() if average.n)})
        step = self.draft_step_seconds() if self.knows_step else 0.0
        seconds = (exp(self._widths[width].log + self._scale) for width in known)
        within = (max(SHORTEST, min(each, LONGEST)) for each in seconds)
        return CostCurve(tuple(known), tuple(within), step and max(SHORTEST, min(step, LONGEST)))

    def observe_verify(self, width: int, seconds: float) -> None:
        """Learn from one evaluation of the target."""
        if seconds <= 0:
            return
        place = _place(width)
        self._cover(max(width, place))
        off = log(seconds / self.seconds(width))
        average = self._widths.setdefault(place, Average(log(self._seconds[place]), 0))
        is_first, is_second = not self.n_timed, [*self.n_timed.values()] == [1]
        if is_first or (self.n_timed == {width: 1} and off < -OUTLIER):  # as busy as the machine is today
            self._scale += off
            self._n_far = int(is_first and self._is_foreign)  # or was held up
            average.n = max(average.n, 1)
        else:
            if not average.n and width > 1:  # many positions cost no more than one by one
                off = min(off, log(LINEAR * width * self._seconds[1] / self._seconds[width]))
            self._scale += self._learn(average, off, self.n_timed.get(width, 0))
        if is_second and self._is_foreign:
            self._widths = {1: Average(self._widths[1].log, 0), place: average}
            self._step, self._stale = Average(self._widths[1].log + log(STEP_RATIO), 0), inf
        self.n_timed[width] = self.n_timed.get(width, 0) + 1
        if self.n_timed[width] in (1, LASTING):  # it is doubted from now on, or no longer
            self._stale = inf

    def observe_draft(self, n_steps: float, n_unread: int, seconds: float) -> None:
        """Learn from the draft steps of one round."""
        if not n_steps or seconds <= 0:
            return
        step, off = self._step, log(seconds / self.drafting_seconds(n_steps, n_unread))
        own = 1.0 if not step.n or (off < 0 and step.n < LASTING) else 1.0 / (step.n + 1)
        step.log += own * (off if own == 1.0 else max(-OUTLIER, min(off, OUTLIER)))
        step.n = min(step.n + 1, MOST_STEPS)

    def observe_overhead(self, seconds: float, *, drafted: bool) -> float:
        """Learn what a plain round costs besides the models; returns it, less what looks like a hiccup."""
        usual = self.overhead_seconds
        seconds = min(seconds, 3 * usual or seconds)
        if not drafted:
            self.overhead_seconds += (0.1 if usual else 1.0) * (seconds - usual)
        return seconds

    def _learn(self, average: Average, off: float, n_timed: int) -> float:
        """Learn that a timing was off; returns by how much all times move."""
        own = 1.0 / (average.n + 1)
        if abs(off) <= (OUTLIER if average.n else FOREIGN):
            self._n_far = 0
        else:
            self._n_far = max(self._n_far, 0) + 1 if off > 0 else min(self._n_far, 0) - 1
            if off < 0 and n_timed < LASTING:
                own = 1.0  # few were longer: these were the hiccups
            elif average.n and abs(self._n_far) < LASTING:
                off = max(-OUTLIER, min(off, OUTLIER))
            elif n_timed >= LASTING:
                return off  # it lasts: the machine has changed
        together = TOGETHER * (1.0 - own)
        average.log += own * off
        average.n = min(average.n + 1, MOST)
        self._stale += abs(own * off)
        return together * off

    @property
    def _is_foreign(self) -> bool:
        """Whether what was known before is of another machine."""
        return not self.is_blank and abs(self._scale) > FOREIGN

    def _timings(self, width: int) -> int:
        average = self._widths.get(_place(width))
        return average.n if average else 0

    def _doubt(self, width: int) -> float:
        """Standard deviation of the logarithm of its seconds next to width 1."""
        if n := self._timings(width):
            return NOISE / sqrt(n)
        return APART + FAR * min(
            abs(log(width / place)) for place, each in self._widths.items() if each.n or place == 1
        )

    def _cover(self, n: int) -> None:
        """Bring the prices up to date, and up to `n` positions."""
        if n < len(self._seconds) and self._stale < STALE:
            return
        size = max(2 * n, len(self._seconds) - 1, 2 * DENSE, *(self._allowed or ()))
        self._stale, places = 0.0, sorted(self._widths)
        first, last = self._widths[1].log, places[-1]
        slope = max((self._widths[last].log - first) / log(last), POWER) if last > 1 else POWER
        seconds = [inf]
        for low, high in zip(places, [*places[1:], None], strict=True):
            at = self._widths[low].log
            rise = slope if high is None else (self._widths[high].log - at) / log(high / low)
            seconds += [exp(at + rise * log(w / low)) for w in range(low, high or max(size, low) + 1)]
        size = len(seconds) - 1
        self._seconds, self._width, best = seconds, [0] * (size + 1), 0
        doubted = {1, *(width for width, n_timed in self.n_timed.items() if n_timed < LASTING)}
        for width in range(size, 0, -1):
            is_allowed, least = self._allowed is None or width in self._allowed, PAD * (width not in doubted)
            if is_allowed and (not best or seconds[best] > least * seconds[width]):
                best = width
            self._width[width] = best


def _place(width: int) -> int:
    """Of a width, or the nearest that is known by itself."""
    if width <= DENSE:
        return width
    return round(DENSE * GAP ** round(log(width / DENSE) / log(GAP)))
