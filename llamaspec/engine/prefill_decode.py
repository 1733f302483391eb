"""A completion as a coroutine: process the prompt, then speculate until the completion ends.

It yields requests, rounds and events. tests/engine/test_stream.py.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from llamaspec.drafters.calling import first_row, metered, preparing, report
from llamaspec.engine.completion import StopReason
from llamaspec.engine.detokenizer import Detokenizer, Piece
from llamaspec.engine.sequence import Generating
from llamaspec.engine.speculate import Speculation, speculate
from llamaspec.errors import EVALUATION_FAULTS, ContextFullError
from llamaspec.protocols import Drafter
from llamaspec.values import TARGET, Forward, ForwardRequest, Round, TokenArray

PREFILL_PART = 512  # tokens of a prompt between two reports of progress
REPEATED = 512  # maximum cached tokens of a prompt that are evaluated again because a draft needs their rows


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """Progress of prompt processing."""

    n_processed: int  # prompt tokens processed so far
    n_total: int  # prompt tokens to process: all but the last
    n_cached: int  # of the processed tokens, those that the target's KV cache already held
    seconds: float  # of target and draft so far


class Written(NamedTuple):
    """A round, and the pieces of its tokens up to the end of the completion."""

    round: Round
    pieces: tuple[Piece, ...]  # one for each token, end-of-text token included


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """The end of a completion."""

    reason: StopReason
    pieces: tuple[Piece, ...]  # text that was held back until the end


TextEvent: TypeAlias = "Prefilled | Written | Ended"


def generate(config: Speculation, text: Detokenizer) -> Generating[TextEvent]:
    """Generate a completion: a coroutine that yields requests, rounds and events."""
    written: list[int] = []
    try:
        try:
            yield from _prefill(config)
            reason = yield from _decode(config, text, written)
        except ContextFullError:  # other sequences need the room
            reason = StopReason.CONTEXT
        yield Ended(reason, text.rest())
    finally:
        config.close()
        if config.on_end is not None:
            config.on_end(config.prompt, np.array(written, np.int32))


def _prefill(config: Speculation) -> Generating[TextEvent]:
    """Process the prompt except its last token, with which decoding begins."""
    prompt, n_total = config.prompt, len(config.prompt) - 1
    n_cached, reading = 0, config.length.reading
    first, seconds = yield from _first_row(config)
    for begin in range(0, n_total, PREFILL_PART):
        end = min(begin + PREFILL_PART, n_total)
        rows_from = None if first >= n_total else max(begin, first)
        forward: Forward = yield ForwardRequest(
            TARGET, prompt[:end], 0, rows_from=rows_from, scope=config.scope, whole=prompt
        )
        n_cached += max(0, forward.n_cached - begin)
        seconds += forward.seconds
        n_new = end - max(forward.n_cached, begin)
        if reading is not None and forward.evaluation.width == n_new:  # in one evaluation, beside no other
            reading.observe_prompt(forward.evaluation, forward.seconds)
        report(config.drafter, prompt[:end], forward.hidden)
        if end < n_total:  # now, because hidden rows are not kept for long
            seconds += yield from _prepare(config.drafter, prompt[: end + 1])
        yield Prefilled(end, n_total, n_cached, seconds)
    seconds += yield from _prepare(config.drafter, prompt)
    yield Prefilled(n_total, n_total, n_cached, seconds)


def _first_row(config: Speculation) -> Generator[ForwardRequest, Forward, tuple[int, float]]:
    """Return the first position of the prompt whose hidden row is reported to the drafter, and the seconds.

    Rows that the drafter needs are computed again if the target has cached their tokens, but only the last
    ones: the draft does not see the tokens before them. A draft that may never process the prompt costs
    nothing: it sees what is evaluated anyway.
    """
    needed, spent = yield from metered(first_row(config.drafter, config.prompt))
    n_repeated = REPEATED if config.length.reading is None else 0
    first = max(needed, config.n_cached(config.prompt[:-1]) - n_repeated)
    return first, sum(seconds for _, seconds in spent)


def _prepare(drafter: Drafter, processed: TokenArray) -> Generator[ForwardRequest, Forward, float]:
    """Let the drafter process what the target has processed of the prompt; return the seconds."""
    _, spent = yield from metered(preparing(drafter, processed))
    return sum(seconds for _, seconds in spent)


def _decode(config: Speculation, text: Detokenizer, written: list[int]) -> Generator[Any, Any, StopReason]:
    """Speculate until the completion ends; return the reason. Adds its tokens to `written`."""
    with closing(speculate(config)) as loop:
        wanted = next(loop, None)
        while wanted is not None:
            try:
                answer = yield wanted
            except EVALUATION_FAULTS as error:
                wanted = loop.throw(error)  # a drafter can continue without its model
                continue
            if isinstance(wanted, Round):
                pieces = text.add(answer, config.constraint)
                written += [piece.token for piece in pieces]
                yield Written(config.length.observe(answer), pieces)  # before a draft that may fail
                if text.end is not None:
                    return text.end
            try:
                wanted = loop.send(answer)
            except StopIteration:
                break
    has_all = config.limit == len(config.prompt) + config.max_tokens
    return StopReason.LIMIT if has_all else StopReason.CONTEXT
