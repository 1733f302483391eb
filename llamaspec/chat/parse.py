"""A streamed answer taken apart: text, reasoning, calls of tools.

Pieces of text go in, deltas come out. What reads is a generator that yields where it needs more text to
decide, so how the text was split makes no difference. What does not follow the format of the model's family
(`chat/families.py`) becomes content; nothing that a model writes raises an exception or is held back without
bound. tests/chat/test_parse.py has recorded answers of each family, split everywhere.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from llamaspec.chat.escaping import Json
from llamaspec.chat.template import Message, ToolCall

MAX_HELD = 1 << 16  # characters that may turn out to be no call after all
_MAX_SPACE = 64  # characters at the end of a text that may be dropped before what follows

Result = TypeVar("Result")
Reading = Generator[None, None, Result]  # yields where it needs more text
Sink = Callable[[str], None]


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


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks between which a model thinks."""

    opening: str
    closing: str
    empty_line: str = ""  # what stands between the closing mark and the answer

    @property
    def cut(self) -> str:
        """What ends thinking that goes on too long."""
        return f"\n{self.closing}{self.empty_line}"


@dataclass(frozen=True, slots=True, eq=False)
class CallFormat:
    """How a family of models writes calls of tools.

    A call is `before_call`, its arguments, `after_call`, where NAME stands for the tool's name, and
    QUOTED_NAME for that as JSON.
    """

    name: str
    read: Callable[[AnswerParser], Reading[None]]  # passes on content, calls and their arguments
    template_marks: tuple[str, ...]  # regular expressions; a chat template of the family has all of them
    marks: tuple[str, ...]  # that are control tokens where the vocabulary has them
    before_call: tuple[str, ...]
    after_call: str = ""
    opening: tuple[str, ...] = ()  # before calls
    closing: tuple[str, ...] = ()  # behind them
    between: str | None = None  # two calls in one pair of marks, as Lark; None: there is only one
    again: str | None = None  # two pairs of marks, as Lark; None: there is only one
    has_channels: bool = False  # `read` reads reasoning, too, and answers without tools


NAME = "{name}"
QUOTED_NAME = '"{name}"'


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What an answer consists of besides text; `None` is what the family does not have."""

    calls: CallFormat | None = None
    reasoning: Reasoning | None = None

    def spelled(self, controls: Mapping[str, int]) -> dict[int, bytes]:
        """Those of a vocabulary's control tokens whose text an answer needs: `Pair.stream(spelled=…)`."""
        marks = self.calls.marks if self.calls is not None else ()
        if self.reasoning is not None:
            marks = (*marks, self.reasoning.opening.strip(), self.reasoning.closing)
        # <|channel>thought is a token and a word.
        known = [text for text in controls if len(text) > 1 and any(text in mark for mark in marks)]
        return {controls[text]: text.encode() for text in known}

    def begins_thinking(self, prompt: bytes) -> bool:
        """Whether a rendered conversation ends with the mark that opens reasoning."""
        opening = self.reasoning.opening.strip().encode() if self.reasoning is not None else None
        return opening is not None and prompt.rstrip().endswith(opening)


class MalformedError(Exception):
    """What was begun does not go on as its format says; `excess` is taken and not used."""

    def __init__(self, excess: str = "") -> None:
        super().__init__()
        self.excess = excess


class Held:
    """Text that is taken but not understood yet, up to a number of characters."""

    def __init__(self, text: str = "", limit: int = MAX_HELD) -> None:
        self.text = text
        self._limit = limit

    def __call__(self, text: str) -> None:
        """Take more."""
        room = max(0, self._limit - len(self.text))
        self.text += text[:room]
        if len(text) > room:
            raise MalformedError(text[room:])


def nowhere(_text: str) -> None:
    """Receives what is of no interest."""


class Incoming:
    """The part of an answer that has come and is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # what stands before is read
        self._is_complete = False

    def add(self, text: str) -> None:
        """More of the answer."""
        self._text, self._at = self._text[self._at :] + text, 0

    def complete(self) -> None:
        """Nothing follows."""
        self._is_complete = True

    def until(self, marks: Sequence[str], sink: Sink) -> Reading[str | None]:
        """Pass the text before the first mark on and take the mark; None where the answer ends without one.

        Among marks one may end with another, but not otherwise contain it.
        """
        pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self._take(found.start(), sink)
                self._take(found.end(), nowhere)
                return found[0]
            n_held = 0 if self._is_complete else self._possible_beginning(marks)
            self._take(len(self._text) - n_held, sink)
            if self._is_complete:
                return None
            yield

    def space(self, sink: Sink = nowhere) -> Reading[None]:
        """Take whitespace."""
        yield from self._up_to(r"\S", sink)

    def takes(self, word: str, sink: Sink = nowhere) -> Reading[bool]:
        """Take a word if it comes next."""
        while not self._is_complete and len(self._text) - self._at < len(word):
            if not word.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(word, self._at):
            return False
        self._take(self._at + len(word), sink)
        return True

    def next_character(self) -> Reading[str]:
        """The character that comes next, which stays; "" at the end."""
        while self._at == len(self._text) and not self._is_complete:
            yield
        return self._text[self._at : self._at + 1]

    def json_value(self, sink: Sink) -> Reading[bool]:
        """Pass a value of JSON on, up to its end; whether it has one. Looks only at brackets and quotes."""
        first = yield from self.next_character()
        if not first or first in ",:}]":
            return False
        if first not in '{["':
            return (yield from self._up_to(r"[\s,}\]]", sink))  # a number or a word
        depth, in_string, is_escaped = 0, False, False
        while True:
            at, is_escaped = self._at + is_escaped, False
            while found := re.compile(r'["\\]' if in_string else r'["{}\[\]]').search(self._text, at):
                at = found.end()
                if found[0] == "\\":
                    is_escaped = at == len(self._text)  # what comes next
                    at += 1
                elif found[0] == '"':
                    in_string = not in_string
                else:
                    depth += 1 if found[0] in "{[" else -1
                if depth <= 0 and not in_string:
                    self._take(at, sink)
                    return True
            self._take(len(self._text), sink)
            if self._is_complete:
                return False
            yield

    def _up_to(self, pattern: str, sink: Sink) -> Reading[bool]:
        """Take all before a pattern; whether it came."""
        while True:
            found = re.compile(pattern).search(self._text, self._at)
            self._take(found.start() if found is not None else len(self._text), sink)
            if found is not None or self._is_complete:
                return found is not None
            yield

    def _take(self, end: int, sink: Sink) -> None:
        """Pass the text up to a place on."""
        taken, self._at = self._text[self._at : end], end
        try:
            if taken:
                sink(taken)
        except MalformedError as error:
            self._at -= len(error.excess)
            raise

    def _possible_beginning(self, marks: Sequence[str]) -> int:
        """Length of the longest end of the text that begins a mark."""
        longest = max(map(len, marks), default=1) - 1
        lengths = range(min(longest, len(self._text) - self._at), 0, -1)
        return next((n for n in lengths if any(mark.startswith(self._text[-n:]) for mark in marks)), 0)


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
    >>> parser = AnswerParser(AnswerFormat(None, Reasoning("<think>", "</think>")))
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
        functions = [tool.get("function", tool) for tool in tools]
        self.schemas: dict[str, Mapping[str, Json]] = {
            str(function["name"]): function.get("parameters") or {} for function in functions
        }
        self.is_thinking = thinking  # what comes now is reasoning
        self.n_calls = 0  # that have begun
        self._format = answer_format
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self._space = ""  # at the end of the text so far
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

    def begin_call(self, name: str) -> None:
        """A call, whose arguments follow; empty lines around it are not part of the text."""
        self._begin_text()
        self._deltas.append(CallDelta(self.n_calls, self._new_id(), name))
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
        may_be_dropped = kind is ReasoningDelta or (self._format.calls is not None and self.schemas)
        end = max(len(text.rstrip()), len(text) - _MAX_SPACE) if may_be_dropped else len(text)
        text, self._space = text[:end], text[end:]
        if text:
            self._deltas.append(kind(text))

    def _advance(self) -> list[Delta]:
        next(self._reading, None)
        deltas, self._deltas = joined(self._deltas), []
        return deltas

    def _read(self) -> Reading[None]:
        calls = self._format.calls
        has_channels = calls is not None and calls.has_channels
        if self._format.reasoning is not None and not has_channels:
            yield from self._think(self._format.reasoning)
        if calls is not None and (self.schemas or has_channels):
            yield from calls.read(self)
        yield from self.incoming.until((), self.content)

    def _think(self, marks: Reasoning) -> Reading[None]:
        """Reasoning, where the answer begins with it."""
        if not self.is_thinking:
            before = Held(limit=_MAX_SPACE)
            try:
                yield from self.incoming.space(before)
                is_there = yield from self.incoming.takes(marks.opening)
            except MalformedError:
                is_there = False
            if not is_there:
                self.content(before.text)
                return
        self.think(True)
        yield from self.incoming.until((marks.closing,), self.reasoning)
        self.think(False)


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same with neighbours of one kind joined."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if last is None or isinstance(last, CallDelta) or type(last) is not type(delta):
            found.append(delta)
        else:
            assert not isinstance(delta, CallDelta)
            found[-1] = replace(last, text=last.text + delta.text)
    return found


def message_of(deltas: Iterable[Delta]) -> Message:
    """The whole answer, as it goes on in a conversation.

    Examples
    --------
    >>> message_of([CallDelta(0, "a1", "now"), ArgumentsDelta(0, "{"), ArgumentsDelta(0, "}")]).tool_calls
    (ToolCall(id='a1', name='now', arguments='{}'),)
    """
    content, reasoning, calls = "", "", list[ToolCall]()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content += delta.text
        elif isinstance(delta, ReasoningDelta):
            reasoning += delta.text
        elif isinstance(delta, CallDelta):
            calls.append(ToolCall(delta.id, delta.name, ""))
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + delta.text)
    return Message("assistant", content, tool_calls=tuple(calls), reasoning=reasoning or None)
