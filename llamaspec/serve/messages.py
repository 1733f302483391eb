"""The conversation in a request: messages in OpenAI's form or Anthropic's become those of the chat template.

tests/serve/test_tools.py, tests/serve/test_agents.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from llamaspec.chat.template import Message, ToolCall
from llamaspec.serve.bodies import Fields
from llamaspec.serve.errors import bad_field, not_supported

_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")  # types of parts
_PARTS = (*_TEXTS, "thinking", "redacted_thinking", "tool_use", "tool_result")  # types that are read
MAX_MESSAGES = 4096
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
# Claude Code begins the system prompt with this header. Its values differ in each request, and nothing behind
# the first token that differs is found in the KV cache. github.com/ggml-org/llama.cpp/pull/21793
_BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:(\s*[\w-]+=[^;\s]*;)*\s*")


class ContentPart(Fields):
    """A part of a message: text, or one of Anthropic's blocks; for other parts only the type is read."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)] | None = None
    id: str | None = None  # of tool_use, like the next two
    name: str | None = None
    input: dict[str, Any] | str | list[Any] | None = None  # an object, unless a limit cut it off
    tool_use_id: str | None = None  # of tool_result, like the next
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_type(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        return {"type": kind} if isinstance(kind, str) and kind not in _PARTS else given


Content = str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)]


class FunctionFields(Fields):
    """The name and the arguments of a call: JSON in a string or, from some clients, an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallFields(Fields):
    """A tool call of the assistant."""

    id: str | None = None
    function: FunctionFields


class MessageFields(Fields):
    """A message of a conversation, in OpenAI's form or Anthropic's."""

    role: Role
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallFields], Field(max_length=MAX_MESSAGES)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def conversation(messages: Sequence[tuple[str, MessageFields]]) -> list[Message]:
    """Return the messages for the chat template, from messages with their places, such as "messages.3".

    RequestError if a kind of message is not supported.
    """
    found: list[Message] = []
    names: dict[str, str] = {}  # of the tool of each call: some templates want it with the result
    for place, fields in messages:
        for message in _messages(fields, place):
            names.update({call.id: call.name for call in message.tool_calls})
            name = message.name or (names.get(message.tool_call_id or "") if message.role == "tool" else None)
            found.append(replace(message, name=name, place=place))
    return found


def placed(messages: Sequence[MessageFields]) -> list[tuple[str, MessageFields]]:
    """Return each message of the field `messages` with its place."""
    if not messages:
        raise bad_field("messages", "must not be empty")
    return [(f"messages.{i}", message) for i, message in enumerate(messages)]


def text_of(content: Content | None, place: str) -> str:
    """Return the text of a message, its parts joined; RequestError if a part is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part, f"{place}.{i}") for i, part in enumerate(content))


def _result_text(content: Content | None, place: str) -> str:
    """Return the text of a tool result. Other parts are only named: agents resend them in every turn."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        _part_text(part, f"{place}.{i}") if part.type in _TEXTS else f"[{part.type} left out: not text]"
        for i, part in enumerate(content)
    )


def _part_text(part: ContentPart, place: str) -> str:
    if part.type not in _TEXTS:
        raise not_supported(f"{place}.type", "only text is supported here, no images, audio or files")
    return required(part.refusal if part.type == "refusal" else part.text, f"{place}.text")


def _messages(fields: MessageFields, place: str) -> list[Message]:
    """Return a message; tool results in its blocks come before it, as messages of their own."""
    role = {"developer": "system", "function": "tool"}.get(fields.role, fields.role)
    content, is_assistant = fields.content, role == "assistant"
    if role == "tool":
        text = _result_text(content, f"{place}.content")
        return [Message("tool", text, name=fields.name, tool_call_id=fields.tool_call_id)]
    if fields.tool_calls and not is_assistant:
        raise bad_field(f"{place}.tool_calls", "only the assistant calls tools")
    called = [(call.id or "", call.function) for call in fields.tool_calls or ()]
    calls = [ToolCall(call_id, each.name, _written(each.arguments)) for call_id, each in called]
    text, reasoning, results = "", fields.reasoning_content or "", list[Message]()
    parts = [ContentPart(type="text", text=content)] if isinstance(content, str) else content or []
    for i, part in enumerate(parts):
        at = f"{place}.content.{i}"
        if part.type == "thinking" and is_assistant:
            # A block from another server may have only a signature.
            reasoning += text_of(part.thinking, f"{at}.thinking")
        elif is_assistant and (part.type == "redacted_thinking" or part.type not in _PARTS):
            continue  # encrypted by another server, or from a tool that it ran
        elif part.type == "tool_use" and is_assistant:
            name, call_id = required(part.name, f"{at}.name"), required(part.id, f"{at}.id")
            calls.append(ToolCall(call_id, name, _written(part.input)))
        elif part.type == "tool_result" and role == "user":
            call_id = required(part.tool_use_id, f"{at}.tool_use_id")
            text_of_result = _result_text(part.content, f"{at}.content")
            results.append(Message("tool", text_of_result, tool_call_id=call_id))
        else:
            text += _part_text(part, at)
    if results and not text:
        return results
    if role == "system":
        return [system_message(text)]
    message = Message(role, text, name=fields.name, tool_calls=tuple(calls), reasoning=reasoning or None)
    return [*results, message]


def _written(arguments: Any) -> str:
    """Return the arguments of a call as text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def system_message(text: str, place: str = "") -> Message:
    """Return a system message, without Claude Code's billing header."""
    return Message("system", _BILLING_HEADER.sub("", text), place=place)


def required(value: str | None, place: str) -> str:
    """Return the value; RequestError if it is missing."""
    if value is None:
        raise bad_field(place, "is missing")
    return value
