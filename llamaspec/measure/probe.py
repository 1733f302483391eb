"""The saturation probe: what a wider batch costs on this machine, and which widths are bit-identical.

Behind the same context every width is evaluated again and again, in shuffled order, so that a machine that
warms up slows all alike. A wider batch may run another kernel, which adds in another order: so the same
positions are evaluated one at a time and in batches, and their logits compared bit by bit. Where time is
short, the widest batches, long contexts and further turns are left out. Measurements are coroutines.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from llamaspec.drafters.fallback import drafting, preparing
from llamaspec.length.costs import CostCurve
from llamaspec.length.fixed import FixedLength
from llamaspec.pair import Pair
from llamaspec.protocols import Stream, Vocabulary
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.sampling.filters import Sampling, distribution
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import DRAFT, MTP, TARGET, Forward, ForwardRequest, Logits, Source, TokenArray

Result = TypeVar("Result")
Measurement: TypeAlias = Generator[ForwardRequest, Forward, Result]
Clock = Callable[[], float]  # seconds
Report = Callable[[float], None]  # the finished fraction, 0 to 1
FULL_WIDTHS = (*range(1, 18), 24, 32, 48, 64)  # kernels change at 2, 4, 5, 8, 9
QUICK_WIDTHS = (*range(1, 10), 12, 16)
FULL_DEPTHS = (64, 1024)  # tokens in memory
QUICK_DEPTHS = (64, 320)  # more than 256, where kernels change
CATCH_UPS = (2, 4, 8, 16)  # tokens that the draft has missed, and the one before its draft token
DRAFT_STEPS = 4  # draft tokens in a row, as in a round
COMPARING = 0.3  # part of the time for finding out which widths are bit-identical
MOST_SECONDS, MOST_TOKENS = 1e6, 1 << 30  # what a probe can find; a stored one with more is damaged
READING = 0.5  # part of the time left that reading on to a longer context may take
# On a CPU llama.cpp computes single positions by another kernel once the KV cache holds more than 256 tokens.
EXACT_DEPTHS = (32, 320)  # tokens in the cache
EXACT_COMPARED = 34  # positions at each depth
EXACT_SECONDS = 20.0  # no further comparison begins after this; what was not compared is not exact
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

    widths: tuple[int, ...] = FULL_WIDTHS
    depths: tuple[int, ...] = FULL_DEPTHS
    most_turns: int = 15
    seconds: float = 100.0  # for all together; one turn may go over
    n_compared: int = 64  # positions at each depth that are also evaluated one by one


FULL = Effort()
QUICK = Effort(QUICK_WIDTHS, QUICK_DEPTHS, most_turns=5, seconds=15.0, n_compared=32)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one thing measured several times.

    Raises
    ------
    ValueError
        They are not positive, or not in order.
    """

    median: float
    low: float  # lower quartile
    high: float  # upper quartile

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.median <= self.high <= MOST_SECONDS:
            raise ValueError("seconds must be positive, and a median between its quartiles")

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
    """What the probe found.

    Raises
    ------
    ValueError
        The parts do not belong together.
    """

    depths: tuple[int, ...]
    left_out_depths: tuple[int, ...]  # reading so many tokens would have taken too long
    widths: tuple[WidthTiming, ...]
    draft_step: Timing | None  # one draft token, drawing included; None without a draft
    catch_ups: tuple[CatchUp, ...]
    sampling_seconds: float  # the distribution and the draw of one scored position, default sampling

    def __post_init__(self) -> None:
        if not self.depths or any(len(width.timings) != len(self.depths) for width in self.widths):
            raise ValueError("a probe needs one time for each width at each depth")
        numbers = (*self.depths, *self.left_out_depths, *(c.n_tokens for c in self.catch_ups))
        compared = (number for width in self.widths for number in (width.width, width.n_compared))
        if not all(0 <= number <= MOST_TOKENS for number in (*numbers, *compared)):
            raise ValueError(f"numbers of tokens must be from 0 to {MOST_TOKENS}")
        if any(width.logit_difference < 0 for width in self.widths):
            raise ValueError("differences must be >= 0")
        seconds = (self.sampling_seconds, *(c.seconds for c in self.catch_ups))
        if not all(0 <= value <= MOST_SECONDS for value in seconds):
            raise ValueError(f"seconds must be from 0 to {MOST_SECONDS:g}")
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


def measure(pair: Pair, effort: Effort, on_progress: Report | None = None) -> Probe:
    """Measure a pair. The KV caches of both models are emptied."""
    clock = pair.clock
    report, begin = on_progress or (lambda fraction: None), clock()
    target = pair.target
    room = min(model.context_size for model in (target, pair.draft) if model is not None)
    widths = tuple(w for w in effort.widths if w <= min(target.max_scored, room // 2))
    longest = max(*widths, *CATCH_UPS, DRAFT_STEPS)
    depths = sorted({max(1, min(depth, room - longest)) for depth in effort.depths})
    tokens = sample_tokens(target.vocabulary, min(room, depths[-1] + max(longest, effort.n_compared)))
    pair.forget()
    parts: list[_Part] = []
    left_out: list[int] = []
    for i, depth in enumerate(depths):
        left = effort.seconds - (clock() - begin)
        if parts and parts[-1].reading_seconds(depth) > READING * left:
            left_out.append(depth)
            continue
        part = _Part(pair, effort, tokens, depth)
        pair.run(part.read())
        left = effort.seconds - (clock() - begin)
        n_more = sum(part.pace * (deeper - depth) <= READING * left / 2 for deeper in depths[i + 1 :])

        def tell(done: float, i: int = i, n: int = i + 1 + n_more) -> None:
            report((i + done) / n)

        pair.run(part.measure(widths, left / (1 + n_more), with_draft=i == 0, report=tell))
        parts.append(part)
    return _folded(parts, tuple(left_out), pair.run(_time_sampling(tokens[: depths[0]], clock)))


class _Part:
    """Measures behind a context of one length."""

    def __init__(self, pair: Pair, effort: Effort, tokens: TokenArray, depth: int) -> None:
        self._pair, self._effort, self._clock, self._tokens = pair, effort, pair.clock, tokens
        self.depth = depth
        self.pace = 0.0  # seconds that a token took to read
        self.differences: Mapping[int, Difference] = {}
        self.seconds: dict[tuple[str, int], list[float]] = {}  # by what is timed, and its width

    def read(self) -> Measurement[None]:
        """Take in the context; before that a token, which reads the weights where they are still on disk."""
        yield ForwardRequest(TARGET, self._tokens[:1])
        begin = self._clock()
        yield ForwardRequest(TARGET, self._tokens[: self.depth])
        self.pace = (self._clock() - begin) / self.depth

    def measure(
        self, widths: Sequence[int], seconds: float, *, with_draft: bool, report: Report
    ) -> Measurement[None]:
        """Compare, warm up, and take times until some seconds have passed."""
        clock, start, effort = self._clock, self._clock(), self._effort
        self.differences = yield from compare_widths(
            self._tokens[: self.depth + effort.n_compared],
            self.depth,
            widths,
            lambda part: clock() - start < part * COMPARING * seconds,
            lambda done: report(COMPARING * done),
        )
        jobs = [("target", width) for width in self.differences]
        if with_draft and self._pair.sources & {Source.MODEL, Source.MTP}:
            jobs += [("step", 1), *(("catch-up", n) for n in CATCH_UPS)]
        shuffled = random.Random(0)
        for turn in range(effort.most_turns + 1):  # the first one warms up
            begin = clock()
            for what, width in shuffled.sample(jobs, len(jobs)):
                taken = yield from self._time(what, width)
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
        return (depth - self.depth) * min(each, self.pace)

    def _time(self, what: str, width: int) -> Measurement[float]:
        if what == "step":
            return (yield from self._time_steps())
        name, model = TARGET, self._pair.draft or self._pair.target
        if what == "target":
            model = self._pair.target
        elif self._pair.heads is None:
            name = DRAFT
        else:  # which need the hidden rows of what they read
            name = MTP
            yield ForwardRequest(TARGET, self._tokens[: self.depth + width], n_logits=0)
        # A draft may lack some of the target's tokens.
        tokens = np.where(self._tokens < model.vocabulary_size, self._tokens, np.int32(0))
        # Another token first, so that nothing of what is timed is cached.
        other = (tokens[self.depth] + 1) % model.vocabulary_size
        yield ForwardRequest(name, np.append(tokens[: self.depth], other).astype(np.int32))
        n_logits = width if what == "target" else 1
        forward = yield ForwardRequest(name, tokens[: self.depth + width], n_logits)
        return forward.seconds

    def _time_steps(self) -> Measurement[float]:
        """Seconds of one draft token among some in a row, with all that a drafter does."""
        context = self._tokens[: self.depth]
        drafter = self._pair.model_drafter(Sampling(), DEFAULT_RULE, SeededStreams(0))
        yield from preparing(drafter, context)
        start = self._clock()
        yield from drafting(drafter, context, FixedLength(DRAFT_STEPS))
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


def _time_sampling(tokens: TokenArray, clock: Clock) -> Measurement[float]:
    forward = yield ForwardRequest(TARGET, tokens)
    streams, times = SeededStreams(0), []
    for position in range(25):
        start = clock()
        streams.choose(distribution(forward.logits[0], Sampling()), Stream.TOKEN, position)
        times.append(clock() - start)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the scores of one width are from those of width 1."""

    largest: float  # of any logit; 0 = bit-identical
    n_compared: int  # positions


def exact_widths(pair: Pair) -> frozenset[int]:
    """Widths that are bit-identical with width 1 here, found on the spot, without timing anything."""
    target, begin = pair.target, time.perf_counter()
    widths = range(1, min(18, target.max_scored + 1, target.context_size // 2))
    pair.forget()
    exact = frozenset(widths)
    for depth in sorted({max(1, min(d, target.context_size - EXACT_COMPARED)) for d in EXACT_DEPTHS}):
        tokens = sample_tokens(target.vocabulary, min(depth + EXACT_COMPARED, target.context_size))
        found = pair.run(
            compare_widths(
                tokens,
                depth,
                widths,
                lambda part: time.perf_counter() - begin < part * EXACT_SECONDS,
                lambda done: None,
            )
        )
        exact &= {width for width, difference in found.items() if difference.largest == 0}
    return exact | {1}


def compare_widths(
    tokens: TokenArray,
    depth: int,
    widths: Sequence[int],
    in_time: Callable[[float], bool],
    report: Callable[[float], None],
) -> Measurement[dict[int, Difference]]:
    """Compare widths behind the first `depth` tokens, over all positions behind them.

    Parameters
    ----------
    tokens : [n] int32, n > depth
        The positions from `depth` on are compared.
    widths : sequence of int
        Ascending from 1.
    in_time : callable
        Whether less than a part of the time, 0 to 1, has passed.
    report : callable
        Told the finished fraction.

    Returns
    -------
    dict of width -> Difference
        Widths 1 and 2 at least. One batch of every width comes first, narrow widths before wide ones: where
        time is short, the widest are left out.
    """
    alone = yield from _one_at_a_time(tokens, depth, in_time)
    report(0.3)
    found = {1: Difference(0.0, len(alone))}
    for width in widths[1:]:
        if len(found) > 1 and not in_time(1.0):
            break
        found[width] = yield from _compare(tokens, depth, width, alone[:width])
    report(0.6)
    # More positions only for widths that still seem identical.
    unsure = [width for width in found if found[width].largest == 0 and 2 * width <= len(alone) and width > 1]
    for done, width in enumerate(unsure):
        if not in_time(1.0):
            break
        found[width] = yield from _compare(tokens, depth, width, alone[: len(alone) // width * width])
        report(0.6 + 0.4 * (done + 1) / len(unsure))
    return found


def _compare(tokens: TokenArray, depth: int, width: int, alone: Logits) -> Measurement[Difference]:
    """One width against known logits [n, V], batch behind batch, with no other width in the KV cache."""
    largest = 0.0
    yield ForwardRequest(TARGET, tokens[:depth], n_logits=0)
    for first in range(0, len(alone), width):
        known = alone[first : first + width]
        together = yield ForwardRequest(TARGET, tokens[: depth + first + width], n_logits=width)
        largest = max(largest, float(np.abs(together.logits[: len(known)] - known).max()))
    return Difference(largest, len(alone))


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
