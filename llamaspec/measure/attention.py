"""Where flash attention is the slower one: times a single position with it and without it, in turns.

A second, small context over the target's weights has the attention that the target's own has not. It has to
read the text once more; where that would take too long, the depth is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from llamaspec.errors import MemoryFullError
from llamaspec.llama.model import LlamaModel
from llamaspec.measure.probe import AttentionTiming, Measurement, Progress, Spread, sample_tokens
from llamaspec.pair import Pair
from llamaspec.protocols import Model
from llamaspec.values import TARGET, ForwardRequest, TokenArray

TURNS = 9  # besides one that warms up
MOST_SECONDS = 15.0  # for reading; above that nothing deeper is measured


def compare_attention(pair: Pair, depths: Sequence[int], report: Progress) -> tuple[AttentionTiming, ...]:
    """Time both ways at ascending depths, as far as there is time; empty if only one way is possible."""
    with other_attention(pair.target, depths[-1] + TURNS + 1) as other:
        return () if other is None else tuple(measure_in_turns(pair, other, depths, report))


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
    pair: Pair, other: Model, depths: Sequence[int], report: Progress
) -> Iterator[AttentionTiming]:
    """Time a single position of the target and of `other`, which has the other attention, at each depth."""
    tokens = sample_tokens(pair.target.vocabulary, min(depths[-1] + TURNS + 1, pair.target.context_size))
    n_read, spent = 0, 0.0
    for depth in depths:
        while n_read < depth:  # in parts, so that Ctrl-C need not wait for all
            end = min(n_read + other.prompt_chunk, depth)
            seconds = pair.call(partial(_seconds_of, other, tokens[:end], pair.clock))
            spent += seconds
            if spent + seconds / (end - n_read) * (depth - end) > MOST_SECONDS:
                return
            n_read = end
            report(end / (depths[-1] + 1))
        yield pair.run(_turns(pair, other, tokens, depth))


def _turns(pair: Pair, other: Model, tokens: TokenArray, depth: int) -> Measurement[AttentionTiming]:
    """Let both go on with the text, a token at a time."""
    mine: list[float] = []
    others: list[float] = []
    for end in range(depth + 1, min(depth + 1 + TURNS, len(tokens)) + 1):
        forward = yield ForwardRequest(TARGET, tokens[:end])
        mine.append(forward.seconds)
        others.append(_seconds_of(other, tokens[:end], pair.clock))
    first, second = Spread.of(mine[1:]), Spread.of(others[1:])
    is_off = pair.target.options.flash_attention == "off"
    return AttentionTiming(depth, second, first) if is_off else AttentionTiming(depth, first, second)


def _seconds_of(model: Model, tokens: TokenArray, clock: Callable[[], float]) -> float:
    """Seconds of evaluating what the model has not cached of some tokens; call it in the compute thread."""
    request = ForwardRequest(TARGET, tokens)
    model.prepare([(0, request, 0)])
    begin = clock()
    model.evaluate([(0, request)])
    return clock() - begin
