"""Which batch widths give the very numbers that single positions give, on this machine, with this model.

A wider batch may run another kernel, which adds in another order. The same positions are evaluated one at
a time and in batches of every width, and their logits compared bit by bit. What agrees on the compared
positions is believed to agree; how many these were is part of the answer. Measurements are coroutines, run by
`Pair.run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from llamaspec.measure.sample_text import sample_tokens
from llamaspec.pair import Pair
from llamaspec.values import TARGET, Forward, ForwardRequest, Logits, TokenArray

Result = TypeVar("Result")
Measurement: TypeAlias = Generator[ForwardRequest, Forward, Result]

# On a CPU llama.cpp computes single positions by another kernel once the memory holds more than 256.
EXACT_DEPTHS = (32, 320)  # tokens in memory
EXACT_COMPARED = 34  # positions at each depth
EXACT_SECONDS = 20.0  # no further comparison begins after this; what was not compared is not exact


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


def logit_differences(pair: Pair, tokens: TokenArray, widths: tuple[int, ...]) -> dict[int, float]:
    """For each width the largest difference over the last positions, as many as the widest has."""
    depth = len(tokens) - max(widths)
    found = pair.run(compare_widths(tokens, depth, (1, *widths), lambda part: True, lambda done: None))
    return {width: found[width].largest for width in widths}


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
