"""The saturation probe: what a wider batch costs on this machine, and which widths are bit-identical.

Behind the same context every width is evaluated again and again, in shuffled order, so that a machine that
warms up slows all alike. A wider batch may run another kernel, which adds in another order: so the same
positions are evaluated one at a time and in batches, and their logits compared bit by bit. Where time is
short, the widest batches, long contexts and further turns are left out. Measurements are coroutines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np

from llamaspec.drafters.fallback import drafting, preparing
from llamaspec.length.costs import CostCurve
from llamaspec.length.fixed import FixedLength
from llamaspec.pair import Pair
from llamaspec.protocols import Vocabulary
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import TARGET, Forward, ForwardRequest, Logits, Source, TokenArray

Result = TypeVar("Result")
Measurement: TypeAlias = Generator[ForwardRequest, Forward, Result]
Progress = Callable[[float], None]  # the finished fraction, 0 to 1
STEP = 0  # in place of a width: a draft step
DRAFT_STEPS = 4  # draft tokens in a row, as in a round
COMPARING = 0.3  # part of the time for finding out which widths are bit-identical
READING = 0.25  # part of the time left that reading on to a longer context may take
MOST_SECONDS, MOST_TOKENS = 1e6, 1 << 30  # what a probe can find; a stored one with more is damaged
# Ordinary text, because a mixture of experts sends random tokens through more of its experts.
TEXT = """\
def moving_average(values, size):
    total = sum(values[:size])
    for i in range(size, len(values)):
        yield total / size
        total += values[i] - values[i - size]

The river had risen in the night, and in the morning the lower fields lay under water. Two of the
neighbours came with a boat; they counted the sheep, 114 in all, and brought them up to the old mill.
"Will it hold?" asked the younger. "It held in 1924," said the other, "and the wall was thinner then."

| year | rainfall (mm) | harvest (t) |
| 2019 | 812 | 40.5 |
"""
BYTES_PER_TOKEN = 4  # roughly; a text that is too short for a vocabulary is repeated


def sample_tokens(vocabulary: Vocabulary, n: int) -> TokenArray:
    """The first `n` tokens of the text, said as often as needed: int32 [n]."""
    text = TEXT * (1 + BYTES_PER_TOKEN * n // len(TEXT))
    return np.resize(vocabulary.tokenize(text.encode()), n).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure."""

    widths: tuple[int, ...] = (*range(1, 18), 24, 32, 48, 64)  # kernels change at 2, 4, 5, 8, 9
    depths: tuple[int, ...] = (64, 1024)  # tokens in memory
    most_turns: int = 15
    seconds: float = 100.0  # for all together; one turn may go over
    n_compared: int = 64  # positions at each depth that are also evaluated one by one


FULL = Effort()
QUICK = Effort((*range(1, 10), 12, 16), (64, 320), most_turns=5, seconds=15.0, n_compared=32)


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of several runs."""

    low: float  # lower quartile
    median: float
    high: float  # upper quartile

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Fold values; at least one."""
        return cls(*np.quantile(list(values), [0.25, 0.5, 0.75]).tolist())

    @property
    def half(self) -> float:
        """Half of the distance between the quartiles."""
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class WidthTiming:
    """One width of the target's evaluation."""

    width: int
    timings: tuple[Spread, ...]  # seconds at each depth
    logit_difference: float  # largest against width 1, over the same positions; 0 = bit-identical


@dataclass(frozen=True, slots=True)
class AttentionTiming:
    """A single position of the target with flash attention and without it."""

    depth: int  # tokens in memory
    on: Spread  # seconds
    off: Spread

    @property
    def off_speed_up(self) -> float:
        """How many times as fast it is without flash attention."""
        return self.on.median / self.off.median

    @property
    def is_off_faster(self) -> bool:
        """Whether it is faster without, by more than the times vary."""
        return self.off.high < self.on.low


@dataclass(frozen=True, slots=True)
class Probe:
    """What the probe found.

    Raises
    ------
    ValueError
        The parts do not belong together, or cannot have been measured.
    """

    depths: tuple[int, ...]
    left_out_depths: tuple[int, ...]  # reading so many tokens would have taken too long
    widths: tuple[WidthTiming, ...]
    draft_step: Spread | None  # seconds of one draft token, drawing included; None without a draft
    attention: tuple[AttentionTiming, ...] = ()  # at the depths where both ways were measured

    def __post_init__(self) -> None:
        if not self.depths or any(len(width.timings) != len(self.depths) for width in self.widths):
            raise ValueError("a probe needs one time for each width at each depth")
        if not all(0 <= depth <= MOST_TOKENS for depth in (*self.depths, *self.left_out_depths)):
            raise ValueError(f"depths must be from 0 to {MOST_TOKENS}")
        if any(width.logit_difference < 0 for width in self.widths):
            raise ValueError("differences must be >= 0")
        seconds = [timing for width in self.widths for timing in width.timings]
        seconds += [self.draft_step] if self.draft_step else []
        seconds += [spread for timing in self.attention for spread in (timing.on, timing.off)]
        if not all(0 < each.low <= each.median <= each.high <= MOST_SECONDS for each in seconds):
            raise ValueError("seconds must be positive, and a median between its quartiles")
        _ = self.curve  # its widths ascend from 1

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


def measure(pair: Pair, effort: Effort, report: Progress = lambda fraction: None) -> Probe:
    """Measure a pair. The KV caches of both models are emptied."""
    begin, target = pair.clock(), pair.target
    room = min(model.context_size for model in (target, pair.draft) if model is not None)
    widths = tuple(w for w in effort.widths if w <= min(target.max_scored, room // 2))
    longest = max(*widths, DRAFT_STEPS)
    coming = sorted({max(1, min(depth, room - longest)) for depth in effort.depths})
    tokens = sample_tokens(target.vocabulary, min(room, coming[-1] + max(longest, effort.n_compared)))
    pair.forget()
    parts: list[_AtDepth] = []
    left_out: list[int] = []
    while coming:
        part = _AtDepth(pair, effort, tokens, coming.pop(0))
        pace = pair.run(part.read())
        left = effort.seconds - (pair.clock() - begin)
        slow = [deeper for deeper in coming if pace * (deeper - part.depth) > READING * left]
        coming, left_out = [depth for depth in coming if depth not in slow], left_out + slow
        n = len(parts) + 1 + len(coming)
        report(len(parts) / n)
        pair.run(part.compare(widths, COMPARING * left / (1 + len(coming))))
        left = effort.seconds - (pair.clock() - begin)
        turning = _between(report, (len(parts) + COMPARING) / n, (len(parts) + 1) / n)
        pair.run(part.measure(left / (1 + len(coming)), with_draft=not parts, report=turning))
        parts.append(part)
    return _folded(parts, tuple(left_out))


def _between(report: Progress, low: float, high: float) -> Progress:
    return lambda done: report(low + (high - low) * done)


@dataclass
class _AtDepth:
    """Measures behind a context of one length."""

    pair: Pair
    effort: Effort
    tokens: TokenArray
    depth: int
    differences: dict[int, float] = field(default_factory=dict)  # by width
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by width, or STEP

    def read(self) -> Measurement[float]:
        """Prefill the context; before that a token, which reads weights from disk. Seconds of a token."""
        yield ForwardRequest(TARGET, self.tokens[:1])
        begin = self.pair.clock()
        yield ForwardRequest(TARGET, self.tokens[: self.depth])
        return (self.pair.clock() - begin) / self.depth

    def compare(self, widths: Sequence[int], seconds: float) -> Measurement[None]:
        """Find the widths that are bit-identical, as far as there is time."""
        start, tokens = self.pair.clock(), self.tokens[: self.depth + self.effort.n_compared]
        self.differences = yield from compare_widths(
            tokens, self.depth, widths, lambda part: self.pair.clock() - start < part * seconds
        )

    def measure(self, seconds: float, *, with_draft: bool, report: Progress) -> Measurement[None]:
        """Warm up, and take times until some seconds have passed."""
        clock, start = self.pair.clock, self.pair.clock()
        jobs = [*self.differences]
        if with_draft and self.pair.sources & {Source.MODEL, Source.MTP}:
            jobs.append(STEP)
        shuffled = random.Random(0)
        for turn in range(self.effort.most_turns + 1):  # the first one warms up
            begin = clock()
            for job in shuffled.sample(jobs, len(jobs)):
                if job == STEP:
                    taken = yield from draft_step(self.pair, self.tokens[: self.depth], DRAFT_STEPS)
                else:
                    taken = yield from self._evaluation(job)
                if turn:
                    self.seconds.setdefault(job, []).append(taken)
            report((turn + 1) / (self.effort.most_turns + 1))
            if turn and clock() - start + (clock() - begin) > seconds:
                break

    def _evaluation(self, width: int) -> Measurement[float]:
        # Another token first, so that nothing of what is timed is cached.
        other = (self.tokens[self.depth] + 1) % self.pair.target.vocabulary_size
        yield ForwardRequest(TARGET, np.append(self.tokens[: self.depth], other).astype(np.int32))
        forward = yield ForwardRequest(TARGET, self.tokens[: self.depth + width], width)
        return forward.seconds


def draft_step(pair: Pair, context: TokenArray, n_steps: int) -> Measurement[float]:
    """Return the seconds of one draft token among some in a row, with all that a drafter does."""
    drafter = pair.model_drafter(Sampling(), DEFAULT_RULE, SeededStreams(0))
    yield from preparing(drafter, context)
    start = pair.clock()
    yield from drafting(drafter, context, FixedLength(n_steps))
    return (pair.clock() - start) / n_steps


def time_draft_step(pair: Pair) -> float:
    """Seconds of a draft step behind two tokens, because the first may start a text; five steps are made."""
    tokens = sample_tokens(pair.target.vocabulary, 2)
    pair.run(draft_step(pair, tokens, 1))  # reads the weights
    return min(pair.run(draft_step(pair, tokens, 2)) for _ in range(2))


def _folded(parts: Sequence[_AtDepth], left_out: tuple[int, ...]) -> Probe:
    """One answer from all depths; widths that the time did not allow at some depth are left out."""
    step = parts[0].seconds.get(STEP)
    return Probe(
        depths=tuple(part.depth for part in parts),
        left_out_depths=left_out,
        widths=tuple(
            WidthTiming(
                width,
                tuple(Spread.of(part.seconds[width]) for part in parts),
                max(part.differences[width] for part in parts),
            )
            for width in parts[0].differences
            if all(width in part.seconds for part in parts)
        ),
        draft_step=Spread.of(step) if step else None,
    )


def compare_widths(
    tokens: TokenArray,
    depth: int,
    widths: Sequence[int],
    in_time: Callable[[float], bool] = lambda part: True,
) -> Measurement[dict[int, float]]:
    """Compare widths with width 1 behind the first `depth` tokens, over all positions behind them.

    Parameters
    ----------
    tokens : [n] int32, n > depth
    depth : int
    widths : sequence of int
        Ascending from 1.
    in_time : callable
        Whether less than a part of the time, 0 to 1, has passed.

    Returns
    -------
    dict of width -> float
        Largest difference of any logit; 0 = bit-identical. Widths 1 and 2 at least: one batch of every
        width comes first, narrow before wide ones, so where time is short the widest are left out.
    """
    alone = yield from _one_at_a_time(tokens, depth, in_time)
    found = {1: 0.0}
    for width in widths[1:]:
        if len(found) > 1 and not in_time(1.0):
            break
        found[width] = yield from _difference(tokens, depth, width, alone[:width])
    # More positions only for widths that still seem identical.
    unsure = [width for width in found if found[width] == 0 and 2 * width <= len(alone) and width > 1]
    for width in unsure:
        if not in_time(1.0):
            break
        found[width] = yield from _difference(tokens, depth, width, alone[: len(alone) // width * width])
    return found


def _difference(tokens: TokenArray, depth: int, width: int, alone: Logits) -> Measurement[float]:
    """One width against known logits [n, V], batch behind batch, with no other width in the KV cache."""
    largest = 0.0
    yield ForwardRequest(TARGET, tokens[:depth], n_logits=0)
    for first in range(0, len(alone), width):
        known = alone[first : first + width]
        together = yield ForwardRequest(TARGET, tokens[: depth + first + width], n_logits=width)
        largest = max(largest, float(np.abs(together.logits[: len(known)] - known).max()))
    return largest


def _one_at_a_time(tokens: TokenArray, depth: int, in_time: Callable[[float], bool]) -> Measurement[Logits]:
    """Logits of the positions from `depth` on, in evaluations of one position each: [n, V] float32."""
    # The context in batches, as a prompt is read; a position evaluated together with it would not be alone.
    yield ForwardRequest(TARGET, tokens[:depth], n_logits=0)
    rows: list[Logits] = []
    for end in range(depth + 1, len(tokens) + 1):
        if rows and not in_time(0.3):
            break
        forward = yield ForwardRequest(TARGET, tokens[:end])
        rows.append(forward.logits[0].copy())
    return np.array(rows)
