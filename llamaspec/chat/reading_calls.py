"""What readers of calls are made of: whom they tell, and small sinks. tests/chat/test_answers.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from llamaspec.chat.answer_text import Held, Incoming, MalformedError, Reading, Sink

Json = Any  # what json.loads makes

MAX_NAME = 256
_TYPES: dict[str, type | tuple[type, ...]] = {  # besides texts
    "null": type(None), "boolean": bool, "integer": int, "number": (int, float), "object": dict,
    "array": list,
}  # fmt: skip


class Receiver(Protocol):
    """Takes what a reader finds; an `AnswerParser`."""

    incoming: Incoming
    schemas: Mapping[str, Mapping[str, Json]]  # of the tools' parameters, by name
    n_calls: int

    def content(self, text: str) -> None:
        """Text of the answer."""

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """A call, whose arguments follow; with the id that the model gave it, if it gave one."""

    def arguments(self, text: str) -> None:
        """Of the call that was begun last."""


def or_content(to: Receiver, held: Held, call: Reading[None]) -> Reading[bool]:
    """A call; whether it was one. What turns out to be none before it began is content, held back or not."""
    n_before = to.n_calls
    try:
        yield from call
    except MalformedError:
        if to.n_calls == n_before:
            to.content(held.text)
        return False
    return True


def expect(is_there: bool) -> None:
    """Else it is no call."""
    if not is_there:
        raise MalformedError


def loaded(text: str) -> Json:
    """What JSON says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedError from None


def is_json(text: str, kinds: set[str]) -> bool:
    """Whether a text is a value of one of these kinds; of any, where a text will not do."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if "string" not in kinds:
        return True
    return any(isinstance(value, _TYPES[kind]) for kind in kinds.intersection(_TYPES))


def both(first: Sink, second: Sink) -> Sink:
    """What tells two."""

    def sink(text: str) -> None:
        first(text)
        second(text)

    return sink


def short(sink: Sink) -> Sink:
    """What holds no more than a name."""
    room = MAX_NAME

    def count(text: str) -> None:
        nonlocal room
        sink(text[:room])
        if len(text) > room:
            raise MalformedError(text[room:])
        room -= len(text)

    return count


def escaped(sink: Sink) -> Sink:
    """As the inside of a string of JSON."""
    return lambda text: sink(json.dumps(text, ensure_ascii=False)[1:-1])
