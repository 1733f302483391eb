"""The probe: what each batch size costs on this machine, and which are bit-identical to single positions.

After the same context all widths take turns, so that a machine that warms up slows all alike. A wider batch
may use another kernel, which adds in another order. So the same positions are evaluated one at a time and in
batches, and their logits are compared bit by bit. If time is short, the widest batches, long contexts and
further turns are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np

from llamaspec.length.cost_curve import CostCurve, credible
from llamaspec.length.costs import DENSE
from llamaspec.measure.turns import Progress, Spread, take_turns
from llamaspec.pair import Pair
from llamaspec.protocols import Vocabulary
from llamaspec.values import TARGET, Forward, ForwardRequest, Logits, Source, TokenArray

Result = TypeVar("Result")
Measurement: TypeAlias = Generator[ForwardRequest, Forward, Result]
STEPPING = {Source.MODEL, Source.MTP, Source.EAGLE3, Source.BLOCK}  # sources whose tokens need draft steps
STEP = 0  # stands for a draft step among the widths
DRAFT_STEPS = 4  # draft tokens in a row, as in a round
COMPARING = 0.3  # fraction of the time for comparing logits
READING = 0.25  # fraction of the remaining time that processing a longer context may take
ALONE = 0.3  # fraction of a comparison's time for evaluating positions one at a time
TELLING = 0.1  # relative change of plain decoding from which two depths tell what cached tokens cost
LEAST_SHARE = 0.02
MOST_SECONDS, MOST_TOKENS = 1e6, 1 << 30  # a stored probe with more is damaged
# Ordinary text, because a mixture of experts uses more of its experts for random tokens.
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
BYTES_PER_TOKEN = 4  # estimate; too few tokens are repeated


def sample_tokens(vocabulary: Vocabulary, n: int) -> TokenArray:
    """Return the first `n` tokens of `TEXT`, repeated as often as needed: int32 [n]."""
    text = TEXT * (1 + BYTES_PER_TOKEN * n // len(TEXT))
    return np.resize(vocabulary.tokenize(text.encode()), n).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure."""

    widths: tuple[int, ...] = (*range(1, 18), 24, 32, 48, 64)  # kernels change at 2, 4, 5, 8, 9
    depths: tuple[int, ...] = (64, 1024)  # tokens in the KV cache
    most_turns: int = 15
    seconds: float = 100.0  # in total; the last turn may exceed it
    n_compared: int = 64  # positions at each depth whose logits are compared


FULL = Effort()
QUICK = Effort((*range(1, 10), 12, 16), (64, 320), most_turns=5, seconds=15.0, n_compared=32)
# One position and a draft step, which show whether the draft is cheap next to the target.
STEPS = Effort(widths=(1,), depths=(64,), most_turns=7, seconds=10.0, n_compared=1)


@dataclass(frozen=True, slots=True)
class WidthTiming:
    """One width of the target's evaluation."""

    width: int
    timings: tuple[Spread, ...]  # seconds at each depth
    logit_difference: float  # largest difference from width 1, over the same positions; 0 = bit-identical


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of a probe; ValueError if its parts do not belong together or are impossible."""

    depths: tuple[int, ...]
    left_out_depths: tuple[int, ...]  # contexts that would have taken too long to process
    widths: tuple[WidthTiming, ...]
    draft_step: Spread | None  # seconds of one draft token, drawing included; None without a draft

    def __post_init__(self) -> None:
        if not self.depths or any(len(width.timings) != len(self.depths) for width in self.widths):
            raise ValueError("a probe needs one time for each width at each depth")
        if not all(0 <= depth <= MOST_TOKENS for depth in (*self.depths, *self.left_out_depths)):
            raise ValueError(f"depths must be from 0 to {MOST_TOKENS}")
        if any(width.logit_difference < 0 for width in self.widths):
            raise ValueError("differences must be >= 0")
        seconds = [timing for width in self.widths for timing in width.timings]
        seconds += [self.draft_step] if self.draft_step else []
        if not all(0 < each.low <= each.median <= each.high <= MOST_SECONDS for each in seconds):
            raise ValueError("seconds must be positive, and a median between its quartiles")
        _ = self.curve  # its widths ascend from 1

    @property
    def curve(self) -> CostCurve:
        """Costs at the first depth, and what more cached tokens cost, for the length policy."""
        attention, share = self._attention_costs()
        return CostCurve(
            tuple(timing.width for timing in self.widths),
            credible(timing.timings[0].median for timing in self.widths),
            self.draft_step.median if self.draft_step else 0.0,
            attention=attention,
            attention_share=share,
        )

    def _attention_costs(self) -> tuple[float, float]:
        """Return the cost of a cached token relative to width 1, and the share for another position.

        Both are 0, unknown, if times vary too much to tell the depths apart.
        """
        narrow = [timing for timing in self.widths if timing.width <= DENSE]
        if len(narrow) < 2:
            return 0.0, 0.0
        plain, widest = narrow[0].timings, narrow[-1]
        n_tokens, seconds = self.depths[-1] - self.depths[0], plain[-1].median - plain[0].median
        if seconds < TELLING * plain[0].median:
            return 0.0, 0.0
        more = (widest.timings[-1].median - widest.timings[0].median) / seconds
        share = min(max((more - 1) / (widest.width - 1), LEAST_SHARE), 1.0)
        return seconds / plain[0].median / n_tokens, share

    @property
    def identical_widths(self) -> frozenset[int]:
        """Widths whose logits have the bits of width 1 at every depth.

        Only width 1 if the long context was left out, because kernels change with the length of the context.
        """
        if self.left_out_depths:
            return frozenset({1})
        return frozenset(timing.width for timing in self.widths if timing.logit_difference == 0)


def measure(pair: Pair, effort: Effort, report: Progress = lambda fraction: None) -> Probe:
    """Measure a pair. The KV caches of both models are emptied."""
    used, target = used_time(pair.clock, effort.seconds), pair.target
    room = min(model.context_size for model in (target, pair.draft) if model is not None)
    widths = tuple(w for w in effort.widths if w <= min(target.max_scored, room // 2))
    longest = max(*widths, DRAFT_STEPS)
    coming = sorted({max(1, min(depth, room - longest)) for depth in effort.depths})
    tokens = sample_tokens(target.vocabulary, min(room, coming[-1] + max(longest, effort.n_compared)))
    pair.forget()
    depths, left_out = list[int](), list[int]()
    differences, timings = list[dict[int, float]](), list[dict[int, list[float]]]()  # by width, at each depth

    def seconds_left() -> float:
        """Return the seconds for the current depth."""
        return effort.seconds * (1 - used()) / (1 + len(coming))

    def at_this_depth(done: float) -> None:
        report((len(depths) - 1 + done) / (len(depths) + len(coming)))

    while coming:
        depths.append(depth := coming.pop(0))
        pace = pair.run(_prefill(pair, tokens[:depth])) / depth
        most = READING * effort.seconds * (1 - used())
        left_out += [deeper for deeper in coming if pace * (deeper - depth) > most]
        coming = [deeper for deeper in coming if deeper not in left_out]
        at_this_depth(0.0)
        comparing = used_time(pair.clock, COMPARING * seconds_left())
        compared = compare_widths(tokens[: depth + effort.n_compared], depth, widths, comparing)
        differences.append(pair.run(compared))
        ways = {width: partial(_evaluation_seconds, pair, tokens, depth, width) for width in differences[-1]}
        if len(depths) == 1 and pair.sources & STEPPING:
            ways[STEP] = partial(_draft_seconds, pair, tokens[:depth])
        timings.append(
            take_turns(ways, effort.most_turns, at_this_depth, used_time(pair.clock, seconds_left()))
        )
    timed = [
        WidthTiming(
            width,
            tuple(Spread.of(seconds[width]) for seconds in timings),
            max(found[width] for found in differences),
        )
        for width in differences[0]
        if all(width in found for found in differences)
    ]
    step = timings[0].get(STEP)
    return Probe(tuple(depths), tuple(left_out), tuple(timed), Spread.of(step) if step else None)


def used_time(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    """Return a function that returns which fraction of `seconds` has passed since this call."""
    begin, seconds = clock(), max(seconds, 1e-9)
    return lambda: (clock() - begin) / seconds


def _prefill(pair: Pair, tokens: TokenArray) -> Measurement[float]:
    """Return the seconds of processing a context; one token before it loads the weights from the disk."""
    yield ForwardRequest(TARGET, tokens[:1])
    begin = pair.clock()
    yield ForwardRequest(TARGET, tokens)
    return pair.clock() - begin


def _evaluation_seconds(pair: Pair, tokens: TokenArray, depth: int, width: int, turn: int) -> float:
    """Return the seconds of one evaluation of `width` positions after the first `depth` tokens."""

    def evaluation() -> Measurement[float]:
        # The token before them first: then none of the timed positions is cached, and if layers keep states,
        # these need not be restored in between.
        yield ForwardRequest(TARGET, tokens[:depth])
        forward = yield ForwardRequest(TARGET, tokens[: depth + width], width)
        return forward.seconds

    return pair.run(evaluation())


def _draft_seconds(pair: Pair, context: TokenArray, turn: int) -> float:
    return pair.run(pair.draft_step(context, DRAFT_STEPS))


def compare_widths(
    tokens: TokenArray,
    depth: int,
    widths: Sequence[int],
    used: Callable[[], float] = lambda: 0.0,
) -> Measurement[dict[int, float]]:
    """Return the largest difference of a logit from width 1, by width; 0 = bit-identical.

    `widths` ascend from 1. The positions are those after the first `depth` tokens. `used` returns the
    fraction of the time that has passed: if time is short, the widest are left out, but never 1 and 2.
    """
    alone = yield from _one_at_a_time(tokens, depth, used)
    found = {1: 0.0}
    for width in widths[1:]:
        if len(found) > 1 and used() >= 1:
            break
        found[width] = yield from _difference(tokens, depth, width, alone[:width])
    # Compare further positions of widths that still seem identical.
    unsure = [width for width in found if found[width] == 0 and 2 * width <= len(alone) and width > 1]
    for width in unsure:
        if used() >= 1:
            break
        found[width] = yield from _difference(tokens, depth, width, alone[: len(alone) // width * width])
    return found


def _difference(tokens: TokenArray, depth: int, width: int, alone: Logits) -> Measurement[float]:
    """Return the largest difference of one width, which alone fills the KV cache, from logits [n, V]."""
    largest = 0.0
    yield ForwardRequest(TARGET, tokens[:depth], n_logits=0)
    for first in range(0, len(alone), width):
        known = alone[first : first + width]
        together = yield ForwardRequest(TARGET, tokens[: depth + first + width], n_logits=width)
        largest = max(largest, float(np.abs(together.logits[: len(known)] - known).max()))
    return largest


def _one_at_a_time(tokens: TokenArray, depth: int, used: Callable[[], float]) -> Measurement[Logits]:
    """Return the logits of the positions from `depth` on, evaluated one at a time: [n, V] float32."""
    # Process the context first, or the first position would be evaluated together with it.
    yield ForwardRequest(TARGET, tokens[:depth], n_logits=0)
    rows: list[Logits] = []
    for end in range(depth + 1, len(tokens) + 1):
        if rows and used() >= ALONE:
            break
        forward = yield ForwardRequest(TARGET, tokens[:end])
        rows.append(forward.logits[0].copy())
    return np.array(rows)
