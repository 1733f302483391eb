"""A prompt in, pieces of text out, and at the end the whole with its statistics.

`write` is the text as a coroutine: it reads the prompt, speculates, and ends where the text ends.
`TextStream` is what a program iterates over, with `for` or `async for`; it may stop at any time, and what
was produced until then stays available. Knows models only by the requests for them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from llamaspec.drafters.coroutines import preparing
from llamaspec.engine.row import Row, Text
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.speculate import Speculation, speculate
from llamaspec.engine.statistics import Summary, summarize
from llamaspec.engine.text import Span, TextAssembler
from llamaspec.errors import ContextFullError, PromptError
from llamaspec.protocols import Vocabulary
from llamaspec.values import TARGET, Forward, ForwardRequest, Logprobs, Round, TokenArray

PREFILL_PART = 512  # tokens of a prompt between two reports of progress

Progress = Callable[[int, int], None]  # (tokens read, tokens to read)


class StopReason(str, Enum):
    """Why a text ended."""

    END = "end"  # the model said so
    LIMIT = "limit"  # as many tokens as were asked for
    STOP = "stop"  # a stop string
    CONTEXT = "context"  # the context is full
    CONSTRAINT = "constraint"  # the constraint is not fulfilled, and nothing that it allows can follow
    INTERRUPT = "interrupt"  # the consumer stopped, or the pair was closed


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain with one token: text, or none where a character or a stop string may go on."""

    text: str
    token: int
    spans: tuple[Span, ...]  # the same text, split by where it came from
    logprobs: Logprobs | None = None  # of the token, where they are wanted

    @property
    def drafted(self) -> bool:
        """Whether there is text, all of it from accepted draft tokens."""
        return bool(self.spans) and all(span.drafted for span in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """Some of the prompt has been read."""

    n_read: int
    n_to_read: int
    n_cached: int  # of them, tokens that the target's KV cache held before
    seconds: float  # of the target and the draft, up to now


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A round, and what the text keeps of it."""

    round: Round
    pieces: tuple[Piece, ...]  # one for each token, the end-of-text token counted


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """The text is complete."""

    reason: StopReason
    pieces: tuple[Piece, ...]  # what was held back


TextEvent: TypeAlias = "Prefilled | Written | Ended"


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A finished text."""

    text: str
    tokens: tuple[int, ...]  # of the text, without the end-of-text token
    n_prompt_tokens: int
    stop_reason: StopReason
    rounds: tuple[Round, ...]
    summary: Summary
    prefill_seconds: float  # reading the prompt, by target and draft
    n_cached: int = 0  # tokens of the prompt that the target's KV cache held before


@dataclass(frozen=True, slots=True, eq=False)
class TextPlan:
    """What a text is made from.

    Raises
    ------
    PromptError
        The prompt is empty or does not fit the target's context.
    ValueError
        A number is outside its range, or a stop string is empty.
    """

    prompt: TokenArray  # [n] int32
    vocabulary: Vocabulary
    speculation: Speculation
    max_tokens: int = 256
    stops: Sequence[str] = ()  # strings that end the text; they are not part of it

    def __post_init__(self) -> None:
        n, context_size = len(self.prompt), self.speculation.context_size
        if n == 0:
            raise PromptError("the prompt is empty; give some text to continue")
        if n >= context_size:
            raise PromptError(
                f"the prompt has {n} tokens, which leaves no room in a context of {context_size}; "
                f"shorten it or use a larger context"
            )
        if self.max_tokens < 1:
            raise ValueError(f"max tokens must be >= 1, got {self.max_tokens}")
        if "" in self.stops:
            raise ValueError("a stop string must not be empty")

    @property
    def limit(self) -> int:
        """Tokens that the sequence has at most."""
        return min(len(self.prompt) + self.max_tokens, self.speculation.context_size)

    @property
    def reason_at_limit(self) -> StopReason:
        """Why the text ends there."""
        return StopReason.LIMIT if self.limit == len(self.prompt) + self.max_tokens else StopReason.CONTEXT


def write(plan: TextPlan) -> Text[TextEvent]:
    """The text as a coroutine: yields requests, rounds and events."""
    try:
        writer = _Writer(plan)
        try:
            yield from _prefill(plan)
        except ContextFullError:  # other texts hold the room
            yield Ended(StopReason.CONTEXT, ())
            return
        reason = yield from _generate(plan, writer)
        yield Ended(reason, writer.rest())
    finally:
        plan.speculation.length.close()


def _prefill(plan: TextPlan) -> Text[TextEvent]:
    """Read the prompt, all but its last token: decoding begins with that."""
    prompt, n_to_read = plan.prompt, len(plan.prompt) - 1
    n_cached, seconds = 0, 0.0
    for begin in range(0, n_to_read, PREFILL_PART):
        end = min(begin + PREFILL_PART, n_to_read)
        forward: Forward = yield ForwardRequest(TARGET, prompt[:end], n_logits=0)
        n_cached += max(0, forward.n_cached - begin)
        seconds += forward.seconds
        yield Prefilled(end, n_to_read, n_cached, seconds)
    seconds += yield from _prepare_drafter(plan)
    yield Prefilled(n_to_read, n_to_read, n_cached, seconds)


def _prepare_drafter(plan: TextPlan) -> Generator[ForwardRequest, Forward, float]:
    """Let the drafter take in the prompt; returns seconds."""
    seconds, preparation = 0.0, preparing(plan.speculation.drafter, plan.prompt)
    request = _advance(preparation)
    while request is not None:
        try:
            forward = yield request
        except ContextFullError as error:  # noqa: PERF203
            request = _advance(preparation, error=error)
        else:
            seconds += forward.seconds
            request = _advance(preparation, forward)
    return seconds


def _generate(plan: TextPlan, writer: _Writer) -> Generator[Any, Any, StopReason]:
    """Speculate to where the text ends; returns why it ends."""
    with closing(speculate(plan.prompt, plan.limit, plan.speculation)) as loop:
        wanted = _advance(loop)
        while wanted is not None:
            try:
                answer = yield wanted
            except ContextFullError as error:
                try:
                    wanted = _advance(loop, error=error)  # a drafter can do without
                except ContextFullError:
                    return StopReason.CONTEXT
                continue
            if isinstance(wanted, Round):
                yield writer.keep(answer)  # before the next draft, which may fail
                if writer.reason is not None:
                    plan.speculation.length.observe(answer)  # as the loop would, before its next draft
                    return writer.reason
            wanted = _advance(loop, answer)
    return plan.reason_at_limit


def _advance(
    coroutine: Generator[Any, Any, Any], answer: Any = None, *, error: Exception | None = None
) -> Any:
    """What a coroutine yields next; None at its end."""
    try:
        return coroutine.send(answer) if error is None else coroutine.throw(error)
    except StopIteration:
        return None


class _Writer:
    """Turns rounds into text, up to where the text ends."""

    def __init__(self, plan: TextPlan) -> None:
        self._vocabulary = plan.vocabulary
        self._text = TextAssembler(plan.stops)
        self._last_token = int(plan.prompt[-1])
        self._constraint = plan.speculation.constraint
        self._generated: list[int] = []
        self.reason: StopReason | None = None  # the text has ended

    def keep(self, round_: Round) -> Written:
        """What the text keeps of a round."""
        pieces: list[Piece] = []
        logprobs = round_.logprobs or itertools.repeat(None)
        for i, (token, of_token) in enumerate(zip(round_.tokens.tolist(), logprobs, strict=False)):
            self._last_token = token
            if self._vocabulary.is_end(token):
                self.reason = StopReason.END if self._is_complete() else StopReason.CONSTRAINT
                pieces.append(Piece("", token, (), of_token))
                break
            self._generated.append(token)
            spans = self._text.add(self._vocabulary.piece(token), drafted=i < round_.n_accepted)
            pieces.append(_piece(spans, token, of_token))
            if self._text.stopped:
                self.reason = StopReason.STOP
                break
        return Written(round_, tuple(pieces))

    def _is_complete(self) -> bool:
        """Whether the text is what its constraint wants, if it has one."""
        return self._constraint is None or self._constraint.is_complete(np.array(self._generated, np.int32))

    def rest(self) -> tuple[Piece, ...]:
        """What was held back."""
        spans = self._text.finish()
        return (_piece(spans, self._last_token),) if spans else ()


def _piece(spans: Sequence[Span], token: int, logprobs: Logprobs | None = None) -> Piece:
    return Piece("".join(span.text for span in spans), token, tuple(spans), logprobs)


class TextStream:
    """Iterate to generate, with `for` or `async for`; `completion` tells what came of it, at any time.

    Parameters
    ----------
    plan : TextPlan
    scheduler : Scheduler
    on_prefill : callable, optional
        Told how many tokens of the prompt have been read, of how many.
    """

    def __init__(self, plan: TextPlan, scheduler: Scheduler, on_prefill: Progress | None = None) -> None:
        self._plan = plan
        self._scheduler = scheduler
        self._on_prefill = on_prefill
        self._row: Row[TextEvent] | None = None
        self._pieces: deque[Piece] = deque()  # made, and not handed out
        self._shown: list[str] = []
        self._tokens: list[int] = []
        self._rounds: list[Round] = []
        self._n_ended = 0  # 1 when the model's end-of-text token came
        self._prefilled = Prefilled(0, 0, 0, 0.0)
        self._stop_reason = StopReason.INTERRUPT
        self._is_over = False
        self._is_closed = False

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        while not self._pieces and not self._is_over:
            self._take_in(self._next_event())
        if self._is_closed or not self._pieces:
            raise StopIteration
        piece = self._pieces.popleft()
        self._shown.append(piece.text)
        if self._plan.vocabulary.is_end(piece.token):
            self._n_ended = 1
        elif self._stop_reason is StopReason.INTERRUPT:  # else it is what was held back
            self._tokens.append(piece.token)
        return piece

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        try:
            piece = await asyncio.to_thread(next, self, None)
        except BaseException:  # also when the task is cancelled
            self.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def run(self) -> Completion:
        """Generate to the end."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        """Stop generating; from any thread, within one evaluation."""
        self._is_over = self._is_closed = True
        if self._row is not None:
            self._scheduler.cancel(self._row)
        if self._row is None or not self._row.is_started:  # else the text has done so
            self._plan.speculation.length.close()

    def __del__(self) -> None:
        if self._row is not None:
            self._row.is_cancelled = True  # ends at the next step: nobody can take a lock here
        elif not self._is_closed:
            self._plan.speculation.length.close()

    @property
    def completion(self) -> Completion:
        """What has been generated up to now."""
        return Completion(
            text="".join(self._shown),
            tokens=tuple(self._tokens),
            n_prompt_tokens=len(self._plan.prompt),
            stop_reason=self._stop_reason,
            rounds=tuple(self._rounds),
            summary=summarize(self._rounds, len(self._tokens) + self._n_ended),
            prefill_seconds=self._prefilled.seconds,
            n_cached=self._prefilled.n_cached,
        )

    def _next_event(self) -> TextEvent | None:
        if self._row is None:
            self._row = self._scheduler.start(write(self._plan), self._plan.speculation.length.width)
        try:
            return self._scheduler.next_event(self._row)
        except BaseException:
            self._is_over = True
            self._scheduler.cancel(self._row)
            raise

    def _take_in(self, event: TextEvent | None) -> None:
        if isinstance(event, Prefilled):
            self._prefilled = event
            if self._on_prefill is not None and event.n_to_read:
                self._on_prefill(event.n_read, event.n_to_read)
            return
        self._is_over = not isinstance(event, Written)
        if isinstance(event, Written):
            self._rounds.append(event.round)
            self._pieces.extend(event.pieces)
        elif isinstance(event, Ended):
            self._stop_reason = event.reason
            self._pieces.extend(event.pieces)
