"""What an answer is made of, whatever the API: the one stream that all APIs put into their own form.

Rows hand out parts that are already taken apart (`chat/answers.py`). Here content gets what belongs to it:
how probable its tokens were, and which of it was drafted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple, TypeAlias

from llamaspec.chat.answer_stream import AnswerPart
from llamaspec.chat.answers import ArgumentsDelta, CallDelta, ContentDelta, ReasoningDelta, message_of
from llamaspec.chat.message import Message
from llamaspec.engine.events import Completion, StopReason
from llamaspec.engine.text import Span
from llamaspec.serve.answers import Answer, Done, Failed, Reading, Wrote
from llamaspec.serve.faults import RequestError
from llamaspec.values import Logprobs


class TokenLogprobs(NamedTuple):
    """How probable a token of a text was."""

    token: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Content(ContentDelta):
    """Text for the person."""

    spans: tuple[Span, ...] = ()  # the same text, split by whether it was drafted
    logprobs: tuple[TokenLogprobs, ...] = ()  # of its tokens, where they are wanted


@dataclass(frozen=True, slots=True)
class Silence:
    """Nothing happened for a while; or, with numbers, tokens of the prompt were read."""

    n_read: int | None = None
    n_to_read: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The last delta of a row."""

    completion: Completion
    speedup: float | None  # estimated, against plain decoding
    n_thought: int = 0  # tokens of reasoning

    @property
    def is_cut(self) -> bool:
        """Whether the text is not complete: no room for more, or no way on within its constraint."""
        return self.completion.stop_reason in (StopReason.LIMIT, StopReason.CONTEXT, StopReason.CONSTRAINT)


Said: TypeAlias = "Content | ReasoningDelta | CallDelta | ArgumentsDelta"
Delta: TypeAlias = "Said | Silence | End"
Deltas: TypeAlias = AsyncIterator[tuple[int, Delta]]  # with the number of the row


async def deltas(
    answer: Answer,
    deadline: float | None,
    patience: float,
    clock: Callable[[], float] = monotonic,
) -> Deltas:
    """The deltas of all rows of an answer.

    Parameters
    ----------
    answer : Answer
    deadline : float, optional
        By the clock, when the request has taken too long.
    patience : float
        Seconds of silence after which that is said.

    Raises
    ------
    RequestError
        The request has taken too long.
    Exception
        Whatever ended a row.
    """
    tellers = [Teller() for _ in answer.runs]
    while not answer.is_over:
        left = patience if deadline is None else min(patience, deadline - clock())
        if left <= 0:
            raise RequestError(504, "the answer took too long; see --request-timeout", code="timeout")
        happened = await answer.next_event(left)
        if happened is None:
            yield 0, Silence()
            continue
        index, event = happened
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Reading):
            yield index, Silence(event.n_read, event.n_to_read)
        elif isinstance(event, Wrote):
            for said in tellers[index].tell(event.parts):
                yield index, said
        elif isinstance(event, Done):
            yield index, End(event.completion, event.speedup, event.n_thought)


class Teller:
    """Turns the parts of one row's answer into what is said."""

    def __init__(self) -> None:
        self._tokens: list[TokenLogprobs] = []  # whose text is not out yet
        self._spans: list[Span] = []  # text that is not out yet

    def tell(self, parts: Iterable[AnswerPart]) -> list[Said]:
        """What some parts say; content that follows content is joined."""
        told: list[Said] = []
        for part in parts:
            if part.piece is not None:
                self._spans += part.piece.spans
                if part.piece.logprobs is not None:
                    self._tokens.append(TokenLogprobs(part.piece.token, part.piece.logprobs))
            for delta in part.deltas:
                if isinstance(delta, ContentDelta):
                    content = self._content(delta.text)
                    if told and isinstance(told[-1], Content):
                        content = _joined(told.pop(), content)  # type: ignore[arg-type]
                    told.append(content)
                else:
                    self._tokens, self._spans = [], []  # they were of this
                    told.append(delta)
        return told

    def _content(self, text: str) -> Content:
        tokens, self._tokens = tuple(self._tokens), []
        raw = "".join(span.text for span in self._spans)
        begin = raw.rfind(text)
        if begin < 0:  # not as the model wrote it
            return Content(text, (Span(text, False),), tokens)
        end, at = begin + len(text), 0
        spans, rest = list[Span](), list[Span]()
        for span in self._spans:
            inside = span.text[max(0, begin - at) : max(0, end - at)]
            behind = span.text[max(0, end - at) :]
            spans += [Span(inside, span.drafted)] if inside else []
            rest += [Span(behind, span.drafted)] if behind else []
            at += len(span.text)
        self._spans = rest
        return Content(text, _merged(spans), tokens)


def _joined(first: Content, second: Content) -> Content:
    return Content(
        first.text + second.text, _merged((*first.spans, *second.spans)), first.logprobs + second.logprobs
    )


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same with neighbours of one kind joined."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].drafted == span.drafted:
            merged[-1] = Span(merged[-1].text + span.text, span.drafted)
        else:
            merged.append(span)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Whole:
    """All that one row said."""

    message: Message
    logprobs: tuple[TokenLogprobs, ...]  # of its text
    end: End


async def wholes(of: Deltas, n_rows: int) -> Sequence[Whole]:
    """Everything that the rows say, at once."""
    rows: list[list[Said]] = [[] for _ in range(n_rows)]
    ends: dict[int, End] = {}
    async for index, delta in of:
        if isinstance(delta, End):
            ends[index] = delta
        elif not isinstance(delta, Silence):
            rows[index].append(delta)
    return [Whole(message_of(said), _logprobs(said), ends[index]) for index, said in enumerate(rows)]


def _logprobs(said: Iterable[Said]) -> tuple[TokenLogprobs, ...]:
    return tuple(token for one in said if isinstance(one, Content) for token in one.logprobs)
