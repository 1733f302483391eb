"""What a chat template gets to see, with the words of users, tools and clients covered.

In the form that Hugging Face's templates expect: dictionaries as OpenAI's API has them, arguments of calls as
objects. Words that a template looks for, such as the keywords of a JSON schema, stay as they are; all else
goes through `Cover` (`chat/special_tokens.py`), names and keys included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamaspec.chat.message import Message, ToolCall
from llamaspec.chat.special_tokens import Cover

Json = Any  # what json.loads makes

# Where a schema has names of its author's choice as keys.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_KEYWORDS = _NAMED | {
    "type", "function", "name", "description", "parameters", "strict", "return", "response", "required",
    "items",
    "enum", "const", "default", "title", "format", "nullable", "examples", "additionalProperties", "anyOf",
    "oneOf",
    "allOf", "not", "if", "then", "else", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength",
    "pattern", "minProperties", "maxProperties", "propertyNames", "dependentRequired", "$ref", "$schema",
    "$id",
}  # fmt: skip
_TYPES = frozenset({"function", "object", "array", "string", "number", "integer", "boolean", "null"})


def conversation(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Messages as templates know them, nothing covered."""
    return [_message(message) for message in messages]


def covered_conversation(messages: Sequence[Message], cover: Cover) -> list[dict[str, Json]]:
    """Messages as templates know them."""
    return [_covered_message(message, cover) for message in messages]


def covered_tools(tools: Sequence[Mapping[str, Json]], cover: Cover) -> list[Json]:
    """Tools as templates know them: the keywords stay, what their author chose is covered."""
    return [_covered_schema(tool, cover) for tool in tools]


def covered_json(value: Json, cover: Cover, *, keep_keys: bool = False) -> Json:
    """Any JSON with all its texts covered."""
    if isinstance(value, str):
        return cover.put_on(value)
    if isinstance(value, Mapping):
        return {
            key if keep_keys else cover.put_on(str(key)): covered_json(inner, cover)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [covered_json(inner, cover) for inner in value]
    return value


def texts_in(value: Json) -> Iterator[str]:
    """All texts and keys in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


def _message(message: Message) -> dict[str, Json]:
    found: dict[str, Json] = {"role": message.role, "content": message.text}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
        if not (message.text and message.tool_calls):  # gpt-oss wants only one of both beside a call
            found["thinking"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    return found


def _call(call: ToolCall) -> dict[str, Json]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": _arguments(call.arguments)},
    }


def _arguments(text: str) -> Json:
    """An object, as templates expect it; what a model wrote wrongly stays a text."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _covered_message(message: Message, cover: Cover) -> dict[str, Json]:
    plain = _message(message)
    covered: dict[str, Json] = {
        key: cover.put_on(value) for key, value in plain.items() if isinstance(value, str)
    }
    covered["role"] = message.role
    if message.tool_calls:
        covered["tool_calls"] = [
            {
                "id": cover.put_on(call["id"]),
                "type": "function",
                "function": covered_json(call["function"], cover, keep_keys=True),
            }
            for call in plain["tool_calls"]
        ]
    return covered


def _covered_schema(schema: Json, cover: Cover) -> Json:
    if not isinstance(schema, Mapping):
        return covered_json(schema, cover)
    covered: dict[str, Json] = {}
    for key, value in schema.items():
        name = key if key in _KEYWORDS else cover.put_on(str(key))
        if key in _NAMED and isinstance(value, Mapping):
            covered[name] = {
                cover.put_on(str(inner)): _covered_schema(part, cover) for inner, part in value.items()
            }
        elif key == "type":
            covered[name] = _covered_type(value, cover)
        elif isinstance(value, list | tuple):
            covered[name] = [_covered_schema(part, cover) for part in value]
        else:
            covered[name] = _covered_schema(value, cover)
    return covered


def _covered_type(value: Json, cover: Cover) -> Json:
    if isinstance(value, list | tuple):
        return [_covered_type(part, cover) for part in value]
    return value if value in _TYPES else covered_json(value, cover)
