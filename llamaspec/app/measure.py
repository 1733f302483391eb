"""Measures what a wider batch costs, for one pair on one machine: the saturation probe.

The same question is asked again and again: `depth` tokens that the memory keeps, and `width` more that it
must evaluate. Widths take turns in shuffled order, so that a machine that warms up slows all of them alike.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llamaspec.app.pair import Pair
from llamaspec.llama.model import LlamaModel
from llamaspec.protocols import Use
from llamaspec.rules.dice import SeededDice
from llamaspec.rules.sampling import distribution
from llamaspec.values import Ask, CostCurve, Logits, Sampling, TokenArray

FULL_WIDTHS = (*range(1, 17), 24, 32, 48, 64)  # kernels change at 2, 4, 5, 8, 9
QUICK_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
FULL_DEPTHS = (64, 1024)  # tokens in memory
QUICK_DEPTHS = (64, 512)
LEAST_TURNS = 3  # of every width at every depth, however little time there is
DRAFT_STEPS = 16  # guesses timed in a row


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure."""

    widths: tuple[int, ...] = FULL_WIDTHS
    depths: tuple[int, ...] = FULL_DEPTHS
    most_turns: int = 9
    seconds: float = 100.0  # no further turn begins after this


FULL = Effort()
QUICK = Effort(QUICK_WIDTHS, QUICK_DEPTHS, most_turns=5, seconds=12.0)


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


@dataclass(frozen=True, slots=True)
class Probe:
    """What the probe found."""

    depths: tuple[int, ...]
    widths: tuple[WidthTiming, ...]
    draft_step: Timing | None  # one guess; None without a draft
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
        """Widths whose scores are those of width 1, bit for bit."""
        return frozenset(timing.width for timing in self.widths if timing.logit_difference == 0)


def measure(
    pair: Pair, effort: Effort, clock: Callable[[], float], on_progress: Callable[[float], None] | None = None
) -> Probe:
    """Measure a pair. The memories of both models are emptied."""
    report = on_progress or (lambda fraction: None)
    target = pair.target
    room = min(target.context_size, pair.draft.context_size if pair.draft else target.context_size)
    widths = tuple(w for w in effort.widths if w <= min(target.options.max_scored, room // 2))
    depths = tuple(sorted({min(depth, room - max(*widths, DRAFT_STEPS)) for depth in effort.depths}))
    tokens = _tokens(target, max(depths) + max(*widths, DRAFT_STEPS))
    target.forget()
    differences = logit_differences(target, tokens[: min(depths) + max(widths)], widths)
    report(0.1)
    times = _time_widths(target, tokens, widths, depths, effort, clock, report)
    return Probe(
        depths=depths,
        widths=tuple(
            WidthTiming(w, tuple(Timing.of(times[depth, w]) for depth in depths), differences[w])
            for w in widths
        ),
        draft_step=_time_draft(pair.draft, tokens[: depths[0] + DRAFT_STEPS], clock) if pair.draft else None,
        sampling_seconds=_time_sampling(target, tokens[: depths[0]], clock),
    )


def exact_widths(pair: Pair) -> frozenset[int]:
    """Widths that are bit-identical with width 1 here, found on the spot, without timing anything."""
    widths = range(1, min(17, pair.target.options.max_scored + 1, pair.target.context_size // 2))
    tokens = _tokens(pair.target, 32 + max(widths))
    pair.target.forget()
    differences = logit_differences(pair.target, tokens, tuple(widths))
    return frozenset(width for width, difference in differences.items() if difference == 0)


def _tokens(target: LlamaModel, n: int) -> TokenArray:
    """Ordinary tokens, always the same ones: int32 [n]."""
    chosen = np.random.default_rng(0).integers(0, target.vocabulary_size, n)
    return chosen.astype(np.int32)


def logit_differences(target: LlamaModel, tokens: TokenArray, widths: tuple[int, ...]) -> dict[int, float]:
    """For each width the largest difference to the scores of the same positions, evaluated one by one."""
    depth = len(tokens) - max(widths)
    target.logits([Ask(0, tokens[:depth], 0)])  # else the first single would be part of a wide batch
    singles = [target.logits([Ask(0, tokens[: depth + i + 1], 1)])[0][0].copy() for i in range(max(widths))]
    alone: Logits = np.array(singles)
    found = {}
    for width in widths:
        together = target.logits([Ask(0, tokens[: depth + width], width)])[0]
        found[width] = float(np.abs(together - alone[:width]).max())
    return found


def _time_widths(
    target: LlamaModel,
    tokens: TokenArray,
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    effort: Effort,
    clock: Callable[[], float],
    report: Callable[[float], None],
) -> dict[tuple[int, int], list[float]]:
    """Seconds of every turn, by (depth, width)."""
    times: dict[tuple[int, int], list[float]] = {(d, w): [] for d in depths for w in widths}
    shuffle = random.Random(0).sample
    begin = clock()
    for turn in range(effort.most_turns + 1):  # the first one warms up
        if turn > LEAST_TURNS and clock() - begin > effort.seconds:
            break
        for depth in depths:
            target.logits([Ask(0, tokens[:depth], 0)])
            for width in shuffle(widths, len(widths)):
                ask = Ask(0, tokens[: depth + width], width)
                start = clock()
                target.logits([ask])
                if turn:
                    times[depth, width].append(clock() - start)
        report(0.1 + 0.9 * max((turn + 1) / (effort.most_turns + 1), (clock() - begin) / effort.seconds))
    return times


def _time_draft(draft: LlamaModel, tokens: TokenArray, clock: Callable[[], float]) -> Timing:
    draft.forget()
    draft.logits([Ask(0, tokens[:-DRAFT_STEPS], 0)])
    times = []
    for _ in range(3):
        for n in range(len(tokens) - DRAFT_STEPS + 1, len(tokens) + 1):
            start = clock()
            draft.logits([Ask(0, tokens[:n], 1)])
            times.append(clock() - start)
    return Timing.of(times)


def _time_sampling(target: LlamaModel, tokens: TokenArray, clock: Callable[[], float]) -> float:
    scores = target.logits([Ask(0, tokens, 1)])[0][0]
    dice, times = SeededDice(0), []
    for position in range(25):
        start = clock()
        dice.choose(distribution(scores, Sampling()), Use.TOKEN, position)
        times.append(clock() - start)
    return statistics.median(times)
