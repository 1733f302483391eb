"""What an answer is made of, whatever the API: the one stream that all APIs put into their own form.

Rows hand out text. A parser turns it into deltas: content, reasoning, tool calls. Without one everything is
content.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol, TypeAlias

from llamaspec.engine.events import Completion, StopReason
from llamaspec.serve.answers import Answer, Done, Failed, Reading, Wrote
from llamaspec.serve.faults import RequestError


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the person."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """The model begins to call a tool; its arguments follow."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A part of the JSON of the arguments of the tool that was begun last."""

    text: str


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

    @property
    def is_cut(self) -> bool:
        """Whether there was no room for more."""
        return self.completion.stop_reason in (StopReason.LIMIT, StopReason.CONTEXT)


Said: TypeAlias = "Content | Reasoning | ToolStart | ToolArguments"
Delta: TypeAlias = "Said | Silence | End"
Deltas: TypeAlias = AsyncIterator[tuple[int, Delta]]  # with the number of the row


class AnswerParser(Protocol):
    """Finds reasoning and tool calls in the text of one row."""

    def feed(self, text: str) -> Iterable[Said]:
        """What more text says for certain."""

    def finish(self) -> Iterable[Said]:
        """What was held back, at the end of the text."""


class PlainParser:
    """All text is content."""

    def feed(self, text: str) -> Iterable[Said]:
        """The text."""
        return (Content(text),) if text else ()

    def finish(self) -> Iterable[Said]:
        """Nothing is held back."""
        return ()


async def deltas(
    answer: Answer,
    deadline: float | None,
    patience: float,
    make_parser: Callable[[], AnswerParser] = PlainParser,
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
    make_parser : callable
        A parser for each row.

    Raises
    ------
    RequestError
        The request has taken too long.
    Exception
        Whatever ended a row.
    """
    parsers = [make_parser() for _ in answer.runs]
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
            for said in parsers[index].feed("".join(piece.text for piece in event.pieces)):
                yield index, said
        elif isinstance(event, Done):
            for said in parsers[index].finish():
                yield index, said
            yield index, End(event.completion, event.speedup)


@dataclass(slots=True)
class ToolCall:
    """A call of a tool, put together."""

    id: str
    name: str
    arguments: str = ""  # JSON


@dataclass(slots=True)
class Whole:
    """All that one row said."""

    content: str = ""
    reasoning: str = ""
    tools: list[ToolCall] = field(default_factory=list)
    end: End | None = None

    def add(self, delta: Delta) -> None:
        """Take in what comes next."""
        if isinstance(delta, Content):
            self.content += delta.text
        elif isinstance(delta, Reasoning):
            self.reasoning += delta.text
        elif isinstance(delta, ToolStart):
            self.tools.append(ToolCall(delta.id, delta.name))
        elif isinstance(delta, ToolArguments):
            self.tools[-1].arguments += delta.text
        elif isinstance(delta, End):
            self.end = delta

    @property
    def ended(self) -> End:
        """The end, which every row has that did not fail."""
        assert self.end is not None
        return self.end


async def wholes(of: Deltas, n_rows: int) -> Sequence[Whole]:
    """Everything that the rows say, at once."""
    rows = [Whole() for _ in range(n_rows)]
    async for index, delta in of:
        rows[index].add(delta)
    return rows
