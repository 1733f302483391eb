"""Messages as the chat APIs send them, as the conversation that a template renders.

OpenAI's calls and results of tools are fields and messages, Anthropic's are blocks in messages; both become
the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from llamaspec.chat.message import Message, ToolCall
from llamaspec.serve.faults import RequestError, not_supported
from llamaspec.serve.fields import Fields

MAX_MESSAGES = 4096
_OTHER_NAMES = {"developer": "system", "function": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")


class ContentPart(Fields):
    """A part of a message: text, or one of Anthropic's blocks."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None  # of tool_use, with the next two
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of tool_result, with the next
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)] | None = None


Content = str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)]


class FunctionFields(Fields):
    """A function and its arguments, which are JSON."""

    name: str
    arguments: str | None = None


class CallFields(Fields):
    """A call of a tool by the assistant."""

    id: str | None = None
    function: FunctionFields


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class MessageFields(Fields):
    """A message of a conversation."""

    role: Role
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallFields], Field(max_length=MAX_MESSAGES)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def conversation(
    messages: Sequence[MessageFields],
    field: str = "messages",
    *,
    takes_tools: bool,
    fields: Sequence[str] | None = None,
) -> list[Message]:
    """The messages of a request.

    Parameters
    ----------
    messages : sequence of MessageFields
    field : str
        Of the request.
    takes_tools : bool
        The chat template knows of tools.
    fields : sequence of str, optional
        The place of each message in the request, where they are not one to one.

    Raises
    ------
    RequestError
        There are none, or one is of a kind that cannot be read.
    """
    if not messages:
        raise RequestError(400, f"{field}: must not be empty", field=field)
    places = fields or [f"{field}.{i}" for i in range(len(messages))]
    found: list[Message] = []
    for message, place in zip(messages, places, strict=True):
        made = _messages(message, place)
        if not takes_tools and any(one.role == "tool" or one.tool_calls for one in made):
            raise not_supported(place, "this model's chat template takes no tools")
        found += made
    return _with_names(found)


def text_of(content: Content | None, field: str) -> str:
    """The text of a message, whose parts are joined.

    Raises
    ------
    RequestError
        A part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part, f"{field}.{i}") for i, part in enumerate(content))


def _part_text(part: ContentPart, field: str) -> str:
    if part.type not in _TEXT_PARTS:
        raise not_supported(f"{field}.type", "only parts of text are supported here")
    return _given(part.text, f"{field}.text")


def _messages(message: MessageFields, field: str) -> list[Message]:
    """A message, after the results of tools that are blocks in it."""
    role, parts = _OTHER_NAMES.get(message.role, message.role), message.content
    if role == "tool":
        text = text_of(parts, f"{field}.content")
        return [Message("tool", text, name=message.name, tool_call_id=message.tool_call_id)]
    if message.tool_calls and role != "assistant":
        raise RequestError(
            400, f"{field}.tool_calls: only the assistant calls tools", field=f"{field}.tool_calls"
        )
    calls = [
        ToolCall(one.id or "", one.function.name, one.function.arguments or "{}")
        for one in message.tool_calls or ()
    ]
    text, thoughts, results = "", message.reasoning_content or "", list[Message]()
    blocks = [ContentPart(type="text", text=parts)] if isinstance(parts, str) else parts or []
    for i, part in enumerate(blocks):
        place = f"{field}.content.{i}"
        if part.type == "thinking" and role == "assistant":
            thoughts += _given(part.thinking, f"{place}.thinking")
        elif part.type == "redacted_thinking" and role == "assistant":
            continue  # nobody here can read it
        elif part.type == "tool_use" and role == "assistant":
            name = _given(part.name, f"{place}.name")
            arguments = json.dumps(part.input or {}, ensure_ascii=False)
            calls.append(ToolCall(_given(part.id, f"{place}.id"), name, arguments))
        elif part.type == "tool_result" and role == "user":
            of = _given(part.tool_use_id, f"{place}.tool_use_id")
            results.append(Message("tool", text_of(part.content, f"{place}.content"), tool_call_id=of))
        else:
            text += _part_text(part, place)
    is_there = text or not results
    own = Message(role, text, name=message.name, tool_calls=tuple(calls), reasoning=thoughts or None)
    return [*results, *([own] if is_there else [])]


def _with_names(messages: Iterable[Message]) -> list[Message]:
    """The same, with the names of the tools whose results they are: some templates want them."""
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        names.update({call.id: call.name for call in message.tool_calls})
        if message.role == "tool" and message.name is None and message.tool_call_id in names:
            message = replace(message, name=names[message.tool_call_id])
        named.append(message)
    return named


def _given(text: str | None, field: str) -> str:
    if text is None:
        raise RequestError(400, f"{field}: is missing", field=field)
    return text


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool as templates and grammars know it: in OpenAI's form."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = dict(parameters or {"type": "object", "properties": {}})
    return {"type": "function", "function": function}
