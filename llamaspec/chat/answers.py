"""An answer taken apart while it streams: text, reasoning, calls of tools.

Pieces of text go in, deltas come out; how the text was split makes no difference. What does not follow the
format of the model's family becomes content, and nothing that a model writes raises an exception or is held
back without bound. tests/chat/test_answers.py has recorded answers of each family, split everywhere.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from llamaspec.chat.answer_text import Held, Incoming, MalformedError, Reading
from llamaspec.chat.call_readers import READERS
from llamaspec.chat.formats import AnswerFormat, CallFormat
from llamaspec.chat.harmony import read_harmony
from llamaspec.chat.message import Message, ToolCall

_MAX_SPACE = 64  # characters at the end of a text that may be dropped before what follows

Json = Any  # what json.loads makes


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A call of a tool begins."""

    index: int  # of the call within the answer
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments, which together are JSON if the model made no mistake."""

    index: int
    text: str


Delta: TypeAlias = "ContentDelta | ReasoningDelta | CallDelta | ArgumentsDelta"


def random_id() -> str:
    """Nine letters and digits, for Mistral's templates refuse all else."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class AnswerParser:
    """Takes an answer apart.

    Parameters
    ----------
    answer_format : AnswerFormat
    tools : sequence of dict
        What may be called, in OpenAI's form. Without any, calls are text like other text.
    thinking : bool
        The prompt ends with the mark that opens reasoning (`AnswerFormat.begins_thinking`).
    new_id : callable
        Makes the id of a call.

    Examples
    --------
    >>> parser = AnswerParser(AnswerFormat.of("<think></think>"))
    >>> [*parser.feed("<thi"), *parser.feed("nk>Hm.</think>Yes"), *parser.finish()]
    [ReasoningDelta(text='Hm.'), ContentDelta(text='Yes')]
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        tools: Sequence[Mapping[str, Json]] = (),
        *,
        thinking: bool = False,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        self.incoming = Incoming()
        self.schemas: Mapping[str, Mapping[str, Json]] = {
            name: schema for name, schema in map(_named, tools) if name
        }
        self.is_thinking = thinking  # what comes now is reasoning
        self.n_calls = 0  # that have begun
        self._format = answer_format
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self._space = ""  # at the end of the text so far
        self._is_held = False  # space, because a call may follow
        self._is_at_start = False  # of a text whose empty lines are not part of it
        self._reading = self._read()

    def feed(self, text: str) -> list[Delta]:
        """What a piece of text makes certain."""
        if not text:
            return []
        self.incoming.add(text)
        return self._advance()

    def finish(self) -> list[Delta]:
        """What was held back, when no text follows."""
        self.incoming.complete()
        deltas = self._advance()
        if not self.n_calls and self._space:
            deltas.append(ContentDelta(self._space))
        self._space = ""
        return joined(deltas)

    # For the readers of formats.

    def content(self, text: str) -> None:
        """Text of the answer."""
        self._text(text, ContentDelta)

    def reasoning(self, text: str) -> None:
        """What the model thinks."""
        self._text(text, ReasoningDelta)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """A call, whose arguments follow; empty lines around it are not part of the text."""
        self._begin_text()
        self._deltas.append(CallDelta(self.n_calls, call_id or self._new_id(), name))
        self.n_calls += 1

    def arguments(self, text: str) -> None:
        """Of the call that was begun last."""
        if text:
            self._deltas.append(ArgumentsDelta(self.n_calls - 1, text))

    def think(self, is_thinking: bool) -> None:
        """From here on it is reasoning, or not any more."""
        self.is_thinking = is_thinking
        self._begin_text()

    def _begin_text(self) -> None:
        self._space, self._is_at_start = "", True

    def _text(self, text: str, kind: type[ContentDelta] | type[ReasoningDelta]) -> None:
        if self._is_at_start:
            text = text.lstrip("\n")
        if not text:
            return
        self._is_at_start = False
        text = self._space + text
        n_held = _MAX_SPACE if self._is_held or kind is ReasoningDelta else 0
        end = max(len(text.rstrip()), len(text) - n_held)
        text, self._space = text[:end], text[end:]
        if text:
            self._deltas.append(kind(text))

    def _advance(self) -> list[Delta]:
        next(self._reading, None)
        deltas, self._deltas = joined(self._deltas), []
        return deltas

    def _read(self) -> Reading[None]:
        calls = self._format.calls if self.schemas else None
        self._is_held = calls is not None
        if self._format.calls is CallFormat.HARMONY:
            yield from read_harmony(self)
            return
        if self._format.reasoning is not None:
            yield from self._think(self._format.reasoning.opening, self._format.reasoning.closing)
        if calls is not None:
            yield from READERS[calls](self)
        yield from self.incoming.until((), self.content)

    def _think(self, opening: str, closing: str) -> Reading[None]:
        """Reasoning, where the answer begins with it."""
        if not self.is_thinking:
            before = Held(limit=_MAX_SPACE)
            try:
                yield from self.incoming.space(before)
                is_there = yield from self.incoming.takes(opening)
            except MalformedError:
                is_there = False
            if not is_there:
                self.content(before.text)
                return
        self.think(True)
        yield from self.incoming.until((closing,), self.reasoning)
        self.think(False)


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same with neighbours of one kind joined."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if last is None or type(last) is not type(delta) or isinstance(delta, CallDelta):
            found.append(delta)
        else:
            assert not isinstance(last, CallDelta)
            found[-1] = replace(last, text=last.text + delta.text)
    return found


def message_of(deltas: Iterable[Delta]) -> Message:
    """The whole answer, as it goes on in a conversation.

    Examples
    --------
    >>> message_of([CallDelta(0, "a1", "now"), ArgumentsDelta(0, "{"), ArgumentsDelta(0, "}")]).tool_calls
    (ToolCall(id='a1', name='now', arguments='{}'),)
    """
    content, reasoning, calls = list[str](), list[str](), list[tuple[CallDelta, list[str]]]()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        elif isinstance(delta, CallDelta):
            calls.append((delta, []))
        else:
            calls[-1][1].append(delta.text)
    tool_calls = tuple(ToolCall(call.id, call.name, "".join(arguments)) for call, arguments in calls)
    return Message("assistant", "".join(content), tool_calls=tool_calls, reasoning="".join(reasoning) or None)


def _named(tool: Mapping[str, Json]) -> tuple[str, Mapping[str, Json]]:
    """Name and schema of a tool."""
    function = tool.get("function", tool)
    schema = function.get("parameters")
    return str(function.get("name", "")), schema if isinstance(schema, Mapping) else {}
