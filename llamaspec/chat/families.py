"""How each family of models writes calls of tools: recognised from its chat template, read from an answer.

A template renders earlier calls just as the model was trained to write them, so its text tells the format. A
reader passes content on until a call begins, then the call's name and its arguments as they come, as JSON:
where a family writes them otherwise, they are translated on the way. `chat/tool_grammar.py` writes grammars
of the same formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llamaspec.chat.escaping import Json
from llamaspec.chat.parse import (
    NAME,
    QUOTED_NAME,
    AnswerFormat,
    AnswerParser,
    CallFormat,
    Held,
    Incoming,
    MalformedError,
    Reading,
    Reasoning,
    Sink,
    nowhere,
)

_MAX_NAME = 256
_MAX_VALUE = 1 << 20  # characters of a parameter that may be JSON or a text
_TYPES: dict[str, type | tuple[type, ...]] = {  # besides texts
    "null": type(None), "boolean": bool, "integer": int, "number": (int, float), "object": dict,
    "array": list,
}  # fmt: skip


def recognize(template: str) -> AnswerFormat:
    """The format of a chat template's family.

    Examples
    --------
    >>> recognize('… <tool_call>{"name": …, "arguments": …}</tool_call> … <think></think>').calls.name
    'hermes'
    """
    calls = next((f for f in FORMATS if all(re.search(mark, template) for mark in f.template_marks)), None)
    if calls is HARMONY:
        return AnswerFormat(HARMONY, CHANNELS)
    return AnswerFormat(calls, next((found for found in _REASONING if found.closing in template), None))


# Parts of readers.


def _or_content(parser: AnswerParser, held: Held, call: Reading[None]) -> Reading[bool]:
    """A call; whether it was one. What turns out to be none before it began is content, held back or not."""
    n_before = parser.n_calls
    try:
        yield from call
    except MalformedError:
        if parser.n_calls == n_before:
            parser.content(held.text)
        return False
    return True


def _expect(is_there: bool) -> None:
    """Else it is no call."""
    if not is_there:
        raise MalformedError


def _loaded(text: str) -> Json:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedError from None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str, kinds: set[str]) -> bool:
    """Whether a text is a value of one of these kinds; of any, where a text will not do."""
    try:
        value = _loaded(text)
    except MalformedError:
        return False
    return "string" not in kinds or any(
        isinstance(value, _TYPES[kind]) for kind in kinds.intersection(_TYPES)
    )


def _name(incoming: Incoming, marks: tuple[str, ...], held: Held) -> Reading[tuple[str, str]]:
    """A short text up to one of these marks, and the mark."""
    name = Held(limit=_MAX_NAME)
    try:
        mark = yield from incoming.until(marks, name)
    finally:
        held(name.text)
    held(mark or "")
    _expect(mark is not None and bool(name.text.strip()))
    return name.text.strip(), mark or ""


def _object(parser: AnswerParser, held: Held, *, known_only: bool = False) -> Reading[None]:
    """{"name": …, "arguments": {…}}, whatever the order and whatever else it says."""
    incoming, name, early, n_before = parser.incoming, "", "", parser.n_calls
    sink: Sink = held
    yield from incoming.space(held)
    _expect((yield from incoming.takes("{", held)))
    while True:
        yield from incoming.space(sink)
        key = yield from _string(incoming, sink)
        yield from incoming.space(sink)
        _expect((yield from incoming.takes(":", sink)))
        yield from incoming.space(sink)
        is_begun = parser.n_calls > n_before
        if key == "name" and not is_begun:
            name = yield from _string(incoming, sink)
            _expect(bool(name) and (name in parser.schemas or not known_only))
        elif key in ("arguments", "parameters") and not is_begun:
            if name and (yield from incoming.next_character()) == "{":
                parser.begin_call(name)
                _expect((yield from incoming.json_value(parser.arguments)))
            else:
                early = yield from _early_arguments(incoming, held)
        else:
            _expect((yield from incoming.json_value(sink)))
        if name and early and parser.n_calls == n_before:
            parser.begin_call(name)
            parser.arguments(early)
        sink = nowhere if parser.n_calls > n_before else held
        yield from incoming.space(sink)
        if not (yield from incoming.takes(",", sink)):
            break
    _expect((yield from incoming.takes("}", sink)) and parser.n_calls > n_before)


def _string(incoming: Incoming, sink: Sink) -> Reading[str]:
    """A string of JSON, decoded."""
    _expect((yield from incoming.next_character()) == '"')
    value = _loaded((yield from _json_text(incoming, sink)))
    _expect(isinstance(value, str))
    return str(value)


def _json_text(incoming: Incoming, sink: Sink) -> Reading[str]:
    """A value of JSON, as it is written."""
    text = Held()
    try:
        is_whole = yield from incoming.json_value(text)
    finally:
        sink(text.text)
    _expect(is_whole)
    return text.text


def _early_arguments(incoming: Incoming, held: Held) -> Reading[str]:
    """Arguments before the name, or JSON in a string, or none."""
    found = yield from _json_text(incoming, held)
    value = _loaded(found)
    if isinstance(value, str):
        value, found = _loaded(value), value
    _expect(value is None or isinstance(value, dict))
    return "{}" if value is None else found


# Readers.


def _read_hermes(parser: AnswerParser) -> Reading[None]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, perhaps several."""
    while (yield from parser.incoming.until(("<tool_call>",), parser.content)):
        held = Held("<tool_call>")
        if (yield from _or_content(parser, held, _object(parser, held))):
            yield from parser.incoming.space()
            yield from parser.incoming.takes("</tool_call>")


def _read_llama3(parser: AnswerParser) -> Reading[None]:
    """{"name": …, "parameters": {…}} as the whole answer, or behind <|python_tag|>."""
    mark: str | None = ""
    while mark is not None:
        is_next = True
        while is_next:
            held = Held(mark)
            is_call = yield from _or_content(parser, held, _object(parser, held, known_only=True))
            if is_call:
                yield from parser.incoming.space()
            is_next = is_call and (yield from parser.incoming.takes(mark := ";"))
        mark = yield from parser.incoming.until(("<|python_tag|>",), parser.content)


def _read_mistral(parser: AnswerParser) -> Reading[None]:
    """[TOOL_CALLS] and a list of objects, one object, or name[ARGS]{…}."""
    while (yield from parser.incoming.until(("[TOOL_CALLS]",), parser.content)):
        held = Held("[TOOL_CALLS]")
        yield from _or_content(parser, held, _mistral_calls(parser, held))


def _mistral_calls(parser: AnswerParser, held: Held) -> Reading[None]:
    incoming = parser.incoming
    yield from incoming.space(held)
    first = yield from incoming.next_character()
    if first == "{":
        yield from _object(parser, held)
    elif first == "[":
        goes_on = yield from incoming.takes("[", held)
        while goes_on:
            yield from _object(parser, held)
            yield from incoming.space()
            goes_on = yield from incoming.takes(",")
        yield from incoming.takes("]")
    else:  # perhaps with [CALL_ID]… between name and arguments
        name, mark = yield from _name(incoming, ("[ARGS]", "[CALL_ID]"), held)
        if mark == "[CALL_ID]":
            yield from _name(incoming, ("[ARGS]",), held)
        yield from incoming.space(held)
        _expect((yield from incoming.next_character()) == "{")
        parser.begin_call(name)
        _expect((yield from incoming.json_value(parser.arguments)))


def _read_qwen_xml(parser: AnswerParser) -> Reading[None]:
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>.

    Some models leave <tool_call> out; then the name must be that of a tool.
    """
    while mark := (yield from parser.incoming.until(("<tool_call>", "<function="), parser.content)):
        held = Held(mark)
        if (yield from _or_content(parser, held, _xml_call(parser, held, is_open=mark == "<function="))):
            yield from parser.incoming.space()
            yield from parser.incoming.takes("</tool_call>")


def _xml_call(parser: AnswerParser, held: Held, *, is_open: bool) -> Reading[None]:
    """<function=name> and its parameters; `is_open` where <function= is taken already."""
    incoming = parser.incoming
    if not is_open:
        yield from incoming.space(held)
        _expect((yield from incoming.takes("<function=", held)))
    name, _ = yield from _name(incoming, (">",), held)
    _expect(name in parser.schemas or not is_open)
    parser.begin_call(name)
    properties = parser.schemas.get(name, {}).get("properties", {})
    opening = "{"
    yield from incoming.space()
    while (yield from incoming.takes("<parameter=")):
        key, _ = yield from _name(incoming, (">",), Held())
        parser.arguments(f"{opening}{_quoted(key)}: ")
        yield from incoming.takes("\n")
        yield from _xml_value(parser, _kinds(properties, key))
        opening = ", "
        yield from incoming.space()
    parser.arguments("{}" if opening == "{" else "}")
    _expect((yield from incoming.takes("</function>")))


def _xml_value(parser: AnswerParser, kinds: set[str]) -> Reading[None]:
    """A parameter; a text is passed on as it comes, all else is JSON or, if it is not, a text."""
    ends = ("\n</parameter>", "</parameter>")
    if kinds == {"string"}:
        yield from _json_string(parser, ends)
        return
    text = Held(limit=_MAX_VALUE)
    _expect(bool((yield from parser.incoming.until(ends, text))))
    parser.arguments(text.text.strip() if _is_json(text.text, kinds) else _quoted(text.text))


def _json_string(parser: AnswerParser, ends: tuple[str, ...]) -> Reading[None]:
    """A text up to its end, as a string of JSON."""
    parser.arguments('"')
    end = yield from parser.incoming.until(ends, lambda text: parser.arguments(_quoted(text)[1:-1]))
    _expect(end is not None)
    parser.arguments('"')


def _kinds(properties: Json, key: str) -> set[str]:
    """The types that a schema allows a parameter; none where it does not say."""
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(schema, Mapping):
        return set()
    if "type" not in schema and isinstance(schema.get("enum"), list):
        return {"string"} if all(isinstance(value, str) for value in schema["enum"]) else set()
    kinds = schema.get("type")
    return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}


def _read_gemma4(parser: AnswerParser) -> Reading[None]:
    """<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>."""
    while (yield from parser.incoming.until(("<|tool_call>",), parser.content)):
        held = Held("<|tool_call>")
        if (yield from _or_content(parser, held, _gemma_call(parser, held))):
            yield from parser.incoming.takes("<tool_call|>")


def _gemma_call(parser: AnswerParser, held: Held) -> Reading[None]:
    """call:name{…}, whose keys are bare and whose strings stand between <|"|>."""
    incoming = parser.incoming
    _expect((yield from incoming.takes("call:", held)))
    name, _ = yield from _name(incoming, ("{",), held)
    parser.begin_call(name)
    parser.arguments("{")
    depth = 1
    while depth:
        word = Held()
        mark = yield from incoming.until(('<|"|>', "{", "}", "[", "]", ",", ":"), word)
        _expect(mark is not None)
        text = word.text.strip()
        if mark == ":":
            parser.arguments(f"{_quoted(text)}: ")
        elif mark == '<|"|>':
            yield from _json_string(parser, ('<|"|>',))
            if (yield from incoming.takes(":")):  # a key in quotes
                parser.arguments(": ")
        else:
            is_value = not text or _is_json(text, set())
            parser.arguments((text if is_value else _quoted(text)) + (", " if mark == "," else str(mark)))
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark or "", 0)


_HEADER = re.compile(r"\s*(assistant)?(\s*to=|\s*<\|channel\|>)")
_LONGEST_BEGINNING = 40
_MAX_HEADER = 512


def _read_harmony(parser: AnswerParser) -> Reading[None]:
    """Messages, each with a channel and a recipient. The prompt ends with <|start|>assistant.

        <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
        <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>

    The recipient may also stand before the channel. Source: github.com/openai/harmony, docs/format.md.
    """
    end: str | None = "<|start|>"
    while end is not None:
        held = Held()
        try:
            header = yield from _harmony_header(parser, held)
        except MalformedError:
            parser.content(held.text)
            header = ""
        end = yield from _harmony_body(parser, header)
        if end is not None and end != "<|start|>":
            end = yield from parser.incoming.until(("<|start|>",), parser.content)


def _harmony_header(parser: AnswerParser, held: Held) -> Reading[str]:
    """What stands before <|message|>."""

    def sink(text: str) -> None:
        # As soon as it cannot be a header any more: an answer without one should not wait.
        for i, character in enumerate(text):
            held(character)
            n_held = len(held.text)
            if n_held > _MAX_HEADER or (n_held >= _LONGEST_BEGINNING and not _HEADER.match(held.text)):
                raise MalformedError(text[i + 1 :])

    mark = yield from parser.incoming.until(("<|message|>",), sink)
    _expect(mark is not None and _HEADER.match(held.text) is not None)
    return held.text


def _harmony_body(parser: AnswerParser, header: str) -> Reading[str | None]:
    """What stands behind <|message|>; how it ends."""
    recipient = (re.findall(r"to=([^\s<]+)", header) or [""])[-1]
    channel = (re.findall(r"<\|channel\|>\s*(\w+)", header) or [""])[-1]
    sink: Sink = parser.content
    if parser.schemas and recipient.startswith("functions.") and recipient != "functions.":
        parser.begin_call(recipient.removeprefix("functions."))
        sink = parser.arguments
    elif channel == "analysis" and recipient in ("", "assistant"):
        parser.think(True)
        sink = parser.reasoning
    end = yield from parser.incoming.until(("<|end|>", "<|return|>", "<|call|>", "<|start|>"), sink)
    if sink == parser.reasoning:
        parser.think(False)
    return end


CHANNELS = Reasoning(
    "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>"
)
_REASONING = (
    Reasoning("<think>", "</think>", "\n\n"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<|channel>thought\n", "<channel|>"),
)
HARMONY = CallFormat(
    "harmony",  # gpt-oss
    _read_harmony,
    (r"<\|channel\|>", r"<\|message\|>", r"<\|start\|>"),
    ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"),
    ("<|channel|>", "commentary to=functions.", NAME, " ", "<|constrain|>", "json", "<|message|>"),
    has_channels=True,
)
GEMMA4 = CallFormat(
    "gemma4",
    _read_gemma4,
    (r"<\|tool_call>call:", r"<tool_call\|>"),
    ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ("call:", NAME),
    opening=("<|tool_call>",),
    closing=("<tool_call|>",),
    again="",
)
QWEN_XML = CallFormat(
    "qwen-xml",  # Qwen3-Coder, Qwen 3.5, Nemotron 3
    _read_qwen_xml,
    (r"<tool_call>", r"<function=", r"<parameter="),
    ("<tool_call>", "</tool_call>"),
    ("<function=", NAME, ">\n"),
    "</function>\n",
    opening=("<tool_call>", "\n"),
    closing=("</tool_call>",),
    again='"\\n"',
)
HERMES = CallFormat(
    "hermes",  # Hermes 2 and 3, Qwen 2.5 and 3
    _read_hermes,
    (r"<tool_call>", r"</tool_call>", r'"arguments\\?"', r"^(?!(?s:.*)(<tool_calls>|</arg_key>))"),
    ("<tool_call>", "</tool_call>"),
    ('{"name": ', QUOTED_NAME, ', "arguments": '),
    "}",
    opening=("<tool_call>", "\n"),
    closing=("\n", "</tool_call>"),
    again='"\\n"',
)
MISTRAL_ARGS = CallFormat(
    "mistral-args",  # Mistral Small 3.2, Devstral, Ministral 3
    _read_mistral,
    (r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    (NAME, "[ARGS]"),
    opening=("[TOOL_CALLS]",),
    again="",
)
MISTRAL = CallFormat(
    "mistral",  # up to Nemo
    _read_mistral,
    (r"\[TOOL_CALLS\]",),
    ("[TOOL_CALLS]",),
    ('{"name": ', QUOTED_NAME, ', "arguments": '),
    "}",
    opening=("[TOOL_CALLS]", "["),
    closing=("]",),
    between='", "',
)
LLAMA3 = CallFormat(
    "llama3",  # Llama 3.1 to 3.3
    _read_llama3,
    (r"<\|start_header_id\|>", r'"parameters": '),
    ("<|python_tag|>",),
    ('{"name": ', QUOTED_NAME, ', "parameters": '),
    "}",
)
FORMATS = (
    HARMONY,
    GEMMA4,
    QWEN_XML,
    HERMES,
    MISTRAL_ARGS,
    MISTRAL,
    LLAMA3,
)  # the first whose marks are found
