"""How each family's calls of tools are read from an answer; formats in `chat/formats.py`.

A reader passes content on until a call begins, then the call's name and arguments as they come. Arguments
arrive as JSON: where a family writes them otherwise, they are translated on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from llamaspec.chat.answer_text import Held, Incoming, MalformedError, Reading, Sink, nowhere
from llamaspec.chat.formats import CallFormat

Json = Any  # what json.loads makes

_ARGUMENTS = ("arguments", "parameters")
_MAX_NAME = 256
_MAX_VALUE = 1 << 20  # characters of a parameter that may be JSON or a text
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

    def begin_call(self, name: str) -> None:
        """A call, whose arguments follow."""

    def arguments(self, text: str) -> None:
        """Of the call that was begun last."""


def read_hermes(to: Receiver) -> Reading[None]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, perhaps several."""
    while (yield from to.incoming.until(("<tool_call>",), to.content)):
        held = Held("<tool_call>")
        if (yield from _or_content(to, held, _object(to, held))):
            yield from to.incoming.space()
            yield from to.incoming.takes("</tool_call>")


def read_llama3(to: Receiver) -> Reading[None]:
    """{"name": …, "parameters": {…}} as the whole answer, or behind <|python_tag|>."""
    mark: str | None = ""
    while mark is not None:
        is_next = True
        while is_next:
            held = Held(mark)
            is_call = yield from _or_content(to, held, _object(to, held, known_only=True))
            if is_call:
                yield from to.incoming.space()
            is_next = is_call and (yield from to.incoming.takes(mark := ";"))
        mark = yield from to.incoming.until(("<|python_tag|>",), to.content)


def read_mistral(to: Receiver) -> Reading[None]:
    """[TOOL_CALLS] and a list of objects, one object, or name[ARGS]{…}."""
    while (yield from to.incoming.until(("[TOOL_CALLS]",), to.content)):
        held = Held("[TOOL_CALLS]")
        yield from _or_content(to, held, _mistral_calls(to, held))


def read_gemma4(to: Receiver) -> Reading[None]:
    """<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>."""
    while (yield from to.incoming.until(("<|tool_call>",), to.content)):
        held = Held("<|tool_call>")
        if (yield from _or_content(to, held, _gemma_call(to, held))):
            yield from to.incoming.takes("<tool_call|>")


def read_qwen_xml(to: Receiver) -> Reading[None]:
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>.

    Some models leave <tool_call> out; then the name must be that of a tool.
    """
    while mark := (yield from to.incoming.until(("<tool_call>", "<function="), to.content)):
        held = Held(mark)
        if (yield from _or_content(to, held, _xml_call(to, held, is_open=mark == "<function="))):
            yield from to.incoming.space()
            yield from to.incoming.takes("</tool_call>")


READERS: Mapping[CallFormat, Callable[[Receiver], Reading[None]]] = {
    CallFormat.HERMES: read_hermes,
    CallFormat.QWEN_XML: read_qwen_xml,
    CallFormat.LLAMA3: read_llama3,
    CallFormat.MISTRAL: read_mistral,
    CallFormat.MISTRAL_ARGS: read_mistral,
    CallFormat.GEMMA4: read_gemma4,
}


def _or_content(to: Receiver, held: Held, call: Reading[None]) -> Reading[bool]:
    """A call; whether it was one. What turns out to be none before it began is content, held back or not."""
    n_before = to.n_calls
    try:
        yield from call
    except MalformedError:
        if to.n_calls == n_before:
            to.content(held.text)
        return False
    return True


def _expect(is_there: bool) -> None:
    if not is_there:
        raise MalformedError


def _mistral_calls(to: Receiver, held: Held) -> Reading[None]:
    """What stands behind [TOOL_CALLS]."""
    yield from to.incoming.space(held)
    first = yield from to.incoming.next_character()
    if first == "{":
        yield from _object(to, held)
        return
    if first != "[":
        yield from _name_and_arguments(to, held)
        return
    goes_on = yield from to.incoming.takes("[", held)
    while goes_on:
        yield from _object(to, held)
        yield from to.incoming.space()
        goes_on = yield from to.incoming.takes(",")
    yield from to.incoming.takes("]")


def _object(to: Receiver, held: Held, *, known_only: bool = False) -> Reading[None]:
    """{"name": …, "arguments": {…}}, whatever the order and whatever else it says."""
    incoming, name, early, n_before = to.incoming, "", "", to.n_calls
    yield from incoming.space(held)
    _expect((yield from incoming.takes("{", held)))
    while True:
        is_begun = to.n_calls > n_before
        sink: Sink = nowhere if is_begun else held
        yield from incoming.space(sink)
        key = yield from _string(incoming, sink)
        yield from incoming.space(sink)
        _expect((yield from incoming.takes(":", sink)))
        yield from incoming.space(sink)
        if key == "name" and not is_begun:
            name = yield from _string(incoming, sink)
            _expect(bool(name) and (name in to.schemas or not known_only))
            if early:
                to.begin_call(name)
                to.arguments(early)
        elif key in _ARGUMENTS and not is_begun and not early:
            if name and (yield from incoming.next_character()) == "{":
                to.begin_call(name)
                _expect((yield from incoming.json_value(to.arguments)))
            else:
                early = yield from _other_arguments(incoming, held)
                if name:
                    to.begin_call(name)
                    to.arguments(early)
        else:
            _expect((yield from incoming.json_value(sink)))
        sink = nowhere if to.n_calls > n_before else held
        yield from incoming.space(sink)
        if not (yield from incoming.takes(",", sink)):
            break
    _expect((yield from incoming.takes("}", sink)))
    _expect(to.n_calls > n_before)


def _string(incoming: Incoming, sink: Sink) -> Reading[str]:
    """A string of JSON, decoded."""
    _expect((yield from incoming.next_character()) == '"')
    text = Held()
    is_whole = yield from incoming.json_value(_both(sink, text))
    value = _loaded(text.text) if is_whole else None
    _expect(isinstance(value, str))
    return str(value)


def _other_arguments(incoming: Incoming, held: Held) -> Reading[str]:
    """Arguments before the name, or JSON in a string, or none."""
    text = Held()
    _expect((yield from incoming.json_value(_both(held, text))))
    value = _loaded(text.text)
    if isinstance(value, str):
        value, text = _loaded(value), Held(value)
    _expect(value is None or isinstance(value, dict))
    return "{}" if value is None else text.text


def _name_and_arguments(to: Receiver, held: Held) -> Reading[None]:
    """name[ARGS]{…}, perhaps with [CALL_ID]… between."""
    name = Held()
    mark = yield from to.incoming.until(("[ARGS]", "[CALL_ID]"), _short(_both(held, name)))
    _expect(bool(mark and name.text.strip()))
    held(mark or "")
    if mark == "[CALL_ID]":
        _expect(bool((yield from to.incoming.until(("[ARGS]",), _short(held)))))
        held("[ARGS]")
    yield from to.incoming.space(held)
    _expect((yield from to.incoming.next_character()) == "{")
    to.begin_call(name.text.strip())
    _expect((yield from to.incoming.json_value(to.arguments)))


def _gemma_call(to: Receiver, held: Held) -> Reading[None]:
    """call:name{…}, whose keys are bare and whose strings stand between <|"|>."""
    incoming = to.incoming
    _expect((yield from incoming.takes("call:", held)))
    name = Held()
    _expect(bool((yield from incoming.until(("{",), _short(_both(held, name))))))
    held("{")
    _expect(bool(name.text.strip()))
    to.begin_call(name.text.strip())
    to.arguments("{")
    depth = 1
    while depth:
        word = Held()
        mark = yield from incoming.until(('<|"|>', "{", "}", "[", "]", ",", ":"), word)
        _expect(mark is not None)
        text = word.text.strip()
        if mark == ":":
            to.arguments(f"{json.dumps(text, ensure_ascii=False)}: ")
        elif mark == '<|"|>':
            to.arguments('"')
            _expect(bool((yield from incoming.until(('<|"|>',), _escaped(to.arguments)))))
            to.arguments('"')
            key_or_value = yield from incoming.next_character()
            if key_or_value == ":":  # a key in quotes
                yield from incoming.takes(":")
                to.arguments(": ")
        else:
            to.arguments(_word(text) + (", " if mark == "," else str(mark)))
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark or "", 0)


def _word(text: str) -> str:
    """A bare word as JSON."""
    return text if not text or _is_json(text, set()) else json.dumps(text, ensure_ascii=False)


def _xml_call(to: Receiver, held: Held, *, is_open: bool) -> Reading[None]:
    """<function=name> and its parameters; `is_open` where <function= is taken already."""
    incoming = to.incoming
    if not is_open:
        yield from incoming.space(held)
        _expect((yield from incoming.takes("<function=", held)))
    name = Held()
    _expect(bool((yield from incoming.until((">",), _short(_both(held, name))))))
    held(">")
    _expect(bool(name.text) and (name.text in to.schemas or not is_open))
    to.begin_call(name.text)
    properties = to.schemas.get(name.text, {}).get("properties", {})
    opening = "{"
    yield from incoming.space()
    while (yield from incoming.takes("<parameter=")):
        key = Held()
        _expect(bool((yield from incoming.until((">",), _short(key)))))
        to.arguments(f"{opening}{json.dumps(key.text, ensure_ascii=False)}: ")
        yield from _xml_value(to, _kinds(properties, key.text))
        opening = ", "
        yield from incoming.space()
    to.arguments("{}" if opening == "{" else "}")
    _expect((yield from incoming.takes("</function>")))


def _xml_value(to: Receiver, kinds: set[str]) -> Reading[None]:
    """A parameter's value; a text is passed on as it comes, all else is JSON or, if it is not, a text."""
    ends = ("\n</parameter>", "</parameter>")
    yield from to.incoming.takes("\n")
    if kinds == {"string"}:
        to.arguments('"')
        _expect(bool((yield from to.incoming.until(ends, _escaped(to.arguments)))))
        to.arguments('"')
        return
    text = Held(limit=_MAX_VALUE)
    _expect(bool((yield from to.incoming.until(ends, text))))
    is_json = _is_json(text.text, kinds)
    to.arguments(text.text.strip() if is_json else json.dumps(text.text, ensure_ascii=False))


def _is_json(text: str, kinds: set[str]) -> bool:
    """Whether a text is a value of one of these kinds; of any, where a text will not do."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if "string" not in kinds:
        return True
    return any(isinstance(value, _TYPES[kind]) for kind in kinds.intersection(_TYPES))


def _kinds(properties: Json, key: str) -> set[str]:
    """The types that a schema allows a parameter; none where it does not say."""
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(schema, Mapping):
        return set()
    if "type" not in schema and isinstance(schema.get("enum"), list):
        return {"string"} if all(isinstance(value, str) for value in schema["enum"]) else set()
    kinds = schema.get("type")
    return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}


def _loaded(text: str) -> Json:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedError from None


def _both(first: Sink, second: Sink) -> Sink:
    def sink(text: str) -> None:
        first(text)
        second(text)

    return sink


def _short(sink: Sink) -> Sink:
    """What holds no more than a name."""
    room = _MAX_NAME

    def count(text: str) -> None:
        nonlocal room
        sink(text[:room])
        if len(text) > room:
            raise MalformedError(text[room:])
        room -= len(text)

    return count


def _escaped(sink: Sink) -> Sink:
    """As the inside of a string of JSON."""
    return lambda text: sink(json.dumps(text, ensure_ascii=False)[1:-1])
