"""Measures what a wider batch costs, for one pair on one machine: the saturation probe.

Behind the same context every width is asked again and again, in shuffled order, so that a machine that warms
up slows all alike. Where time is short, the widest batches, long contexts and further turns are left out.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llamaspec.app.identity import LANE, Difference, compare_widths
from llamaspec.app.pair import Pair
from llamaspec.app.sample import sample_tokens
from llamaspec.drafters.model import ModelDrafter
from llamaspec.llama.model import LlamaModel
from llamaspec.protocols import Use
from llamaspec.rules.dice import SeededDice
from llamaspec.rules.lengths import FixedLength
from llamaspec.rules.sampling import distribution
from llamaspec.rules.verify import RULES
from llamaspec.values import Ask, CostCurve, Sampling, TokenArray

Clock = Callable[[], float]  # seconds
Report = Callable[[float], None]  # the finished fraction, 0 to 1
FULL_WIDTHS = (*range(1, 18), 24, 32, 48, 64)  # kernels change at 2, 4, 5, 8, 9
QUICK_WIDTHS = (*range(1, 10), 12, 16)
FULL_DEPTHS = (64, 1024)  # tokens in memory
QUICK_DEPTHS = (64, 320)  # more than 256, where kernels change
CATCH_UPS = (2, 4, 8, 16)  # tokens that the draft has missed, and the one before its guess
DRAFT_STEPS = 4  # guesses in a row, as in a round
COMPARING = 0.4  # part of the time for finding out which widths are bit-identical
READING = 0.5  # part of the time left that reading on to a longer context may take


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure."""

    widths: tuple[int, ...] = FULL_WIDTHS
    depths: tuple[int, ...] = FULL_DEPTHS
    most_turns: int = 15
    seconds: float = 100.0  # for all together; one turn may go over
    n_compared: int = 64  # positions at each depth that are also evaluated one by one


FULL = Effort()
QUICK = Effort(QUICK_WIDTHS, QUICK_DEPTHS, most_turns=5, seconds=15.0, n_compared=32)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one thing measured several times."""

    median: float
    low: float  # lower quartile
    high: float  # upper quartile

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, relative to the median."""
        return (self.high - self.low) / 2 / self.median

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Fold measurements; at least one."""
        low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class WidthTiming:
    """One width of the target's evaluation."""

    width: int
    timings: tuple[Timing, ...]  # one for each depth
    logit_difference: float  # largest against width 1, over the same positions; 0 = bit-identical
    n_compared: int  # positions


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The draft reads several tokens at once and scores the last."""

    n_tokens: int
    seconds: float  # median


@dataclass(frozen=True, slots=True)
class Probe:
    """What the probe found."""

    depths: tuple[int, ...]
    left_out_depths: tuple[int, ...]  # reading so many tokens would have taken too long
    widths: tuple[WidthTiming, ...]
    draft_step: Timing | None  # one guess, drawing included; None without a draft
    catch_ups: tuple[CatchUp, ...]
    sampling_seconds: float  # the distribution and the draw of one scored position, default sampling

    @property
    def curve(self) -> CostCurve:
        """The costs at the first depth, for the automatic length."""
        return CostCurve(
            tuple(timing.width for timing in self.widths),
            tuple(timing.timings[0].median for timing in self.widths),
            self.draft_step.median if self.draft_step else 0.0,
        )

    @property
    def identical_widths(self) -> frozenset[int]:
        """Widths whose scores are those of width 1, bit for bit, at every depth.

        Only width 1 where the long context was left out: kernels change with the length of the context.
        """
        if self.left_out_depths:
            return frozenset({1})
        return frozenset(timing.width for timing in self.widths if timing.logit_difference == 0)


def measure(pair: Pair, effort: Effort, clock: Clock, on_progress: Report | None = None) -> Probe:
    """Measure a pair. The memories of both models are emptied."""
    report, begin = on_progress or (lambda fraction: None), clock()
    target = pair.target
    room = min(model.context_size for model in (target, pair.draft) if model is not None)
    widths = tuple(w for w in effort.widths if w <= min(target.options.max_scored, room // 2))
    longest = max(*widths, *CATCH_UPS, DRAFT_STEPS)
    depths = sorted({max(1, min(depth, room - longest)) for depth in effort.depths})
    tokens = sample_tokens(target.vocabulary, min(room, depths[-1] + max(longest, effort.n_compared)))
    target.forget()
    parts: list[_Part] = []
    left_out: list[int] = []
    for i, depth in enumerate(depths):
        left = effort.seconds - (clock() - begin)
        if parts and parts[-1].reading_seconds(depth) > READING * left:
            left_out.append(depth)
            continue
        part = _Part(pair, effort, clock, tokens, depth)

        def tell(done: float, i: int = i) -> None:
            report((i + done) / len(depths))

        part.run(widths, left / (len(depths) - i), with_draft=i == 0, report=tell)
        parts.append(part)
    return _folded(parts, tuple(left_out), _time_sampling(target, tokens[: depths[0]], clock))


class _Part:
    """Measures behind a context of one length."""

    def __init__(self, pair: Pair, effort: Effort, clock: Clock, tokens: TokenArray, depth: int) -> None:
        self._pair, self._effort, self._clock, self._tokens = pair, effort, clock, tokens
        self.depth = depth
        self.differences: Mapping[int, Difference] = {}
        self.seconds: dict[tuple[str, int], list[float]] = {}  # by what is timed, and its width

    def run(self, widths: Sequence[int], seconds: float, *, with_draft: bool, report: Report) -> None:
        """Compare, warm up, and take times until some seconds have passed."""
        clock, start, effort, target = self._clock, self._clock(), self._effort, self._pair.target
        target.logits([Ask(LANE, self._tokens[: self.depth], 1)])
        read, left = clock(), seconds - (clock() - start)
        self.differences = compare_widths(
            target,
            self._tokens[: self.depth + effort.n_compared],
            self.depth,
            widths,
            lambda part: clock() - read < part * COMPARING * left,
            lambda done: report(COMPARING * done),
        )
        jobs = [("target", width) for width in self.differences]
        if with_draft and self._pair.draft is not None:
            jobs += [("step", 1), *(("catch-up", n) for n in CATCH_UPS)]
        shuffled = random.Random(0)
        for turn in range(effort.most_turns + 1):  # the first one warms up
            begin = clock()
            for what, width in shuffled.sample(jobs, len(jobs)):
                taken = self._time(what, width)
                if turn:
                    self.seconds.setdefault((what, width), []).append(taken)
            report(COMPARING + (1 - COMPARING) * (turn + 1) / (effort.most_turns + 1))
            if turn and clock() - start + (clock() - begin) > seconds:
                break

    def reading_seconds(self, depth: int) -> float:
        """What reading on to a longer context will take, at most."""
        each = min(
            statistics.median(s) / width for (what, width), s in self.seconds.items() if what == "target"
        )
        return (depth - self.depth) * each

    def _time(self, what: str, width: int) -> float:
        if what == "step":
            return self._time_steps()
        model = self._pair.target if what == "target" else self._pair.draft
        assert model is not None
        # A draft may lack some of the target's tokens.
        tokens = np.where(self._tokens < model.vocabulary_size, self._tokens, np.int32(0))
        model.logits([Ask(LANE, tokens[: self.depth], 0)])
        ask = Ask(LANE, tokens[: self.depth + width], width if what == "target" else 1)
        start = self._clock()
        model.logits([ask])
        return self._clock() - start

    def _time_steps(self) -> float:
        """Seconds of one guess among some in a row, with all that a drafter does."""
        draft, context = self._pair.draft, self._tokens[: self.depth]
        assert draft is not None
        n_target = self._pair.target.vocabulary_size
        drafter = ModelDrafter(draft, Sampling(), RULES["coupled"], SeededDice(0), n_target)
        drafter.prepare(context)
        start = self._clock()
        drafter.propose(context, FixedLength(DRAFT_STEPS))
        return (self._clock() - start) / DRAFT_STEPS


def _folded(parts: Sequence[_Part], left_out: tuple[int, ...], sampling_seconds: float) -> Probe:
    """One answer from all depths; widths that the time did not allow at some depth are left out."""
    first = parts[0]
    widths = [w for w in first.differences if all(("target", w) in part.seconds for part in parts)]
    step = first.seconds.get(("step", 1))
    return Probe(
        depths=tuple(part.depth for part in parts),
        left_out_depths=left_out,
        widths=tuple(
            WidthTiming(
                width,
                tuple(Timing.of(part.seconds["target", width]) for part in parts),
                max(part.differences[width].largest for part in parts),
                sum(part.differences[width].n_compared for part in parts),
            )
            for width in widths
        ),
        draft_step=Timing.of(step) if step else None,
        catch_ups=tuple(
            CatchUp(n, statistics.median(first.seconds["catch-up", n])) for n in CATCH_UPS if step
        ),
        sampling_seconds=sampling_seconds,
    )


def _time_sampling(target: LlamaModel, tokens: TokenArray, clock: Clock) -> float:
    scores = target.logits([Ask(LANE, tokens, 1)])[0][0]
    dice, times = SeededDice(0), []
    for position in range(25):
        start = clock()
        dice.choose(distribution(scores, Sampling()), Use.TOKEN, position)
        times.append(clock() - start)
    return statistics.median(times)
