"""Readers of calls whose arguments stand between tags, one by one: Qwen3-Coder, GLM."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llamaspec.chat.answer_text import Held, Reading
from llamaspec.chat.reading_calls import Json, Receiver, both, escaped, expect, is_json, or_content, short

_MAX_VALUE = 1 << 20  # characters of a parameter that may be JSON or a text


def read_qwen_xml(to: Receiver) -> Reading[None]:
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>.

    Some models leave <tool_call> out; then the name must be that of a tool.
    """
    while mark := (yield from to.incoming.until(("<tool_call>", "<function="), to.content)):
        held = Held(mark)
        if (yield from or_content(to, held, _xml_call(to, held, is_open=mark == "<function="))):
            yield from to.incoming.space()
            yield from to.incoming.takes("</tool_call>")


def read_glm(to: Receiver) -> Reading[None]:
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, perhaps in lines."""
    while (yield from to.incoming.until(("<tool_call>",), to.content)):
        held = Held("<tool_call>")
        yield from or_content(to, held, _glm_call(to, held))


def _xml_call(to: Receiver, held: Held, *, is_open: bool) -> Reading[None]:
    """<function=name> and its parameters; `is_open` where <function= is taken already."""
    incoming = to.incoming
    if not is_open:
        yield from incoming.space(held)
        expect((yield from incoming.takes("<function=", held)))
    name = Held()
    expect(bool((yield from incoming.until((">",), short(both(held, name))))))
    held(">")
    expect(bool(name.text) and (name.text in to.schemas or not is_open))
    to.begin_call(name.text)
    properties = to.schemas.get(name.text, {}).get("properties", {})
    opening = "{"
    yield from incoming.space()
    while (yield from incoming.takes("<parameter=")):
        key = Held()
        expect(bool((yield from incoming.until((">",), short(key)))))
        to.arguments(f"{opening}{json.dumps(key.text, ensure_ascii=False)}: ")
        yield from incoming.takes("\n")
        yield from _value(to, _kinds(properties, key.text), ("\n</parameter>", "</parameter>"))
        opening = ", "
        yield from incoming.space()
    to.arguments("{}" if opening == "{" else "}")
    expect((yield from incoming.takes("</function>")))


def _glm_call(to: Receiver, held: Held) -> Reading[None]:
    """A tool's name and its arguments."""
    incoming, name = to.incoming, Held()
    mark = yield from incoming.until(("\n", "<arg_key>", "</tool_call>"), short(both(held, name)))
    held(mark or "")
    expect(mark is not None and name.text.strip() in to.schemas)
    to.begin_call(name.text.strip())
    properties = to.schemas[name.text.strip()].get("properties", {})
    opening = "{"
    while mark != "</tool_call>":
        if mark != "<arg_key>":
            yield from incoming.space()
            if not (yield from incoming.takes("<arg_key>")):
                break
        key, mark = Held(), None
        expect(bool((yield from incoming.until(("</arg_key>",), short(key)))))
        yield from incoming.space()
        expect((yield from incoming.takes("<arg_value>")))
        to.arguments(f"{opening}{json.dumps(key.text, ensure_ascii=False)}: ")
        yield from _value(to, _kinds(properties, key.text), ("</arg_value>",))
        opening = ", "
    to.arguments("{}" if opening == "{" else "}")
    expect(mark == "</tool_call>" or (yield from incoming.takes("</tool_call>")))


def _value(to: Receiver, kinds: set[str], ends: tuple[str, ...]) -> Reading[None]:
    """A parameter's value; a text is passed on as it comes, all else is JSON or, if it is not, a text."""
    if kinds == {"string"}:
        to.arguments('"')
        expect(bool((yield from to.incoming.until(ends, escaped(to.arguments)))))
        to.arguments('"')
        return
    text = Held(limit=_MAX_VALUE)
    expect(bool((yield from to.incoming.until(ends, text))))
    to.arguments(
        text.text.strip() if is_json(text.text, kinds) else json.dumps(text.text, ensure_ascii=False)
    )


def _kinds(properties: Json, key: str) -> set[str]:
    """The types that a schema allows a parameter; none where it does not say."""
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(schema, Mapping):
        return set()
    if "type" not in schema and isinstance(schema.get("enum"), list):
        return {"string"} if all(isinstance(value, str) for value in schema["enum"]) else set()
    kinds = schema.get("type")
    return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
