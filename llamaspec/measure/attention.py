"""Where flash attention is slower: times a single position with it and without it, in turns.

A second, small context over the target's weights has the attention that the target's own has not. It has to
process the text once more; depths for which that would take too long are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from llamaspec.errors import MemoryFullError
from llamaspec.llama.model import LlamaModel
from llamaspec.measure.compare import take_turns
from llamaspec.measure.probe import AttentionTiming, Measurement, Progress, Spread, sample_tokens
from llamaspec.pair import Pair
from llamaspec.values import TARGET, ForwardRequest, TokenArray

TURNS = 9  # besides one that warms up
MOST_SECONDS = 15.0  # for processing a text; above that nothing deeper is measured


def compare_attention(pair: Pair, depths: Sequence[int], report: Progress) -> tuple[AttentionTiming, ...]:
    """Time both ways at ascending depths, as far as there is time; empty if only one way is possible."""
    with other_attention(pair.target, depths[-1] + TURNS + 1) as model:
        if model is None:
            return ()
        with Pair(model, None, 0.0, clock=pair.clock) as other:
            return tuple(measure_in_turns(pair, other, depths, report))


@contextmanager
def other_attention(target: LlamaModel, n_ctx: int) -> Iterator[LlamaModel | None]:
    """Open the target's weights once more, without flash attention, or with it if the target has none.

    None where there is no attention, where the KV cache needs flash attention, or no memory is left.
    """
    options, other = target.options, None
    if not target.weights.is_recurrent and not options.needs_flash_attention:
        options = replace(
            options,
            flash_attention="on" if options.flash_attention == "off" else "off",
            n_ctx=min(n_ctx, target.context_size),
            n_cells=None,
            max_scored=1,
            heads=False,
        )
        with suppress(MemoryFullError):
            other = LlamaModel(target.path, options, weights=target.weights)
    try:
        yield other
    finally:
        if other is not None:
            other.close()


def measure_in_turns(
    pair: Pair, other: Pair, depths: Sequence[int], report: Progress
) -> Iterator[AttentionTiming]:
    """Time a single position of the target and of `other`, which has the other attention, at each depth."""
    n_most = min(depths[-1] + TURNS + 1, pair.target.context_size)
    tokens = sample_tokens(pair.target.vocabulary, n_most)
    n_read, pace = 0, 0.0  # tokens, seconds per token
    for depth in depths:
        if pace * (depth - n_read) > MOST_SECONDS:
            return
        pace = other.run(_read(tokens[:depth], other)) / (depth - n_read)
        pair.run(_read(tokens[:depth], pair))
        n_read = depth
        report(depth / (depths[-1] + 1))
        n_turns = min(TURNS, len(tokens) - depth - 1)
        step = partial(_seconds_behind, tokens, depth)
        found = take_turns({"mine": partial(step, pair), "other": partial(step, other)}, n_turns)
        mine, others = Spread.of(found["mine"]), Spread.of(found["other"])
        is_off = pair.target.options.flash_attention == "off"
        yield AttentionTiming(depth, others, mine) if is_off else AttentionTiming(depth, mine, others)


def _read(tokens: TokenArray, pair: Pair) -> Measurement[float]:
    """Process a text; return the seconds."""
    begin = pair.clock()
    yield ForwardRequest(TARGET, tokens, n_logits=0)
    return pair.clock() - begin


def _seconds_behind(tokens: TokenArray, depth: int, pair: Pair, turn: int) -> float:
    """Return the seconds of the next position in a turn, which begin with -1."""

    def step() -> Measurement[float]:
        forward = yield ForwardRequest(TARGET, tokens[: depth + turn + 2])
        return forward.seconds

    return pair.run(step())
