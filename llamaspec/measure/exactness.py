"""Which evaluations give the very bits that single positions give: what `--exact` keeps to.

A width is exact if its logits are those of width 1. Reading is exact if a prompt that is read at once leaves
the bits in the KV cache that narrow evaluations leave: then it does not matter how much of it was cached.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from llamaspec.measure.probe import Measurement, compare_widths, sample_tokens
from llamaspec.pair import Pair
from llamaspec.values import TARGET, ForwardRequest, Logits, TokenArray

# On a CPU llama.cpp computes single positions by another kernel once the KV cache holds more than 256 tokens.
DEPTHS = (32, 320)  # tokens in the cache
COMPARED = 20  # positions at each depth
SECONDS = 60.0  # no further comparison begins after this; what was not compared is not exact
WIDEST = 17  # positions
# Lengths of prompts whose reading is compared. The short one finds most differences, soon; the long one has
# more positions than llama.cpp evaluates at once.
READ = (40, 600)


@dataclass(frozen=True, slots=True)
class Exactness:
    """What was found of a pair on this machine."""

    widths: tuple[int, ...]  # bit-identical with width 1, ascending
    reads: bool  # prompts may be read in any parts
    is_whole: bool = True  # there was time to compare all widths

    def __post_init__(self) -> None:
        if 1 not in self.widths or not all(1 <= width <= WIDEST for width in self.widths):
            raise ValueError(f"exact widths are from 1 to {WIDEST}, 1 among them; got {self.widths}")


def find_exactness(pair: Pair) -> Exactness:
    """Compare on the spot, without timing anything. The KV caches are emptied."""
    target, begin = pair.target, time.perf_counter()
    widths = range(1, min(WIDEST + 1, target.max_scored + 1, target.context_size // 2))
    pair.forget()
    exact, is_whole = {1, *widths}, True
    for depth in sorted({max(1, min(d, target.context_size - COMPARED)) for d in DEPTHS}):
        tokens = sample_tokens(target.vocabulary, min(depth + COMPARED, target.context_size))
        found = pair.run(
            compare_widths(tokens, depth, widths, lambda part: time.perf_counter() - begin < part * SECONDS)
        )
        exact &= {width for width, difference in found.items() if difference == 0}
        is_whole &= len(found) == len(widths)
    return Exactness(tuple(sorted(exact)), reads_exactly(pair, max(exact)), is_whole)


def reads_exactly(pair: Pair, width: int) -> bool:
    """Whether prompts that are read at once have the bits of those read in parts of an exact width.

    Not if single positions are the only exact width: then a wide evaluation is not exact either.
    """
    target = pair.target

    def read(tokens: TokenArray, step: int) -> Logits:
        pair.forget()
        return pair.run(_last_logits(tokens, step))

    for n in sorted({min(n, target.context_size) for n in READ}) if width > 1 else ():
        tokens = sample_tokens(target.vocabulary, n)
        if not np.array_equal(read(tokens, n), read(tokens, width)):
            return False
    return width > 1


def _last_logits(tokens: TokenArray, step: int) -> Measurement[Logits]:
    """Logits behind some tokens that are read in parts, but for the last one: [1, V] float32."""
    n = len(tokens) - 1
    for end in (*range(step, n, step), n):
        yield ForwardRequest(TARGET, tokens[:end], n_logits=0)
    forward = yield ForwardRequest(TARGET, tokens)
    return forward.logits.copy()
