"""Messages as the chat APIs send them, as the conversation that a template renders.

The place where tools, tool results and images of other roles will come in: today only text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from llamaspec.chat.message import Message
from llamaspec.serve.faults import RequestError, not_supported
from llamaspec.serve.fields import Fields

MAX_MESSAGES = 4096
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = ("text", "input_text", "output_text")


class ContentPart(Fields):
    """A part of a message."""

    type: str
    text: str | None = None


Content = str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)]


class MessageFields(Fields):
    """A message of a conversation."""

    role: str
    content: Content | None = None
    tool_calls: list[dict[str, Any]] | None = None


def conversation(messages: Sequence[MessageFields], field: str = "messages") -> list[Message]:
    """The messages of a request.

    Raises
    ------
    RequestError
        There are none, or one is of a kind that cannot be read.
    """
    if not messages:
        raise RequestError(400, f"{field}: must not be empty", field=field)
    return [_message(message, f"{field}.{i}") for i, message in enumerate(messages)]


def text_of(content: Content | None, field: str) -> str:
    """The text of a message, whose parts are joined.

    Raises
    ------
    RequestError
        A part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            raise not_supported(f"{field}.{i}.type", "only parts of text are supported")
        if part.text is None:
            raise RequestError(400, f"{field}.{i}.text: is missing", field=f"{field}.{i}.text")
    return "".join(part.text or "" for part in content)


def _message(message: MessageFields, field: str) -> Message:
    if message.role in ("tool", "function"):
        raise not_supported(f"{field}.role", "results of tools are not supported yet")
    if message.role not in _ROLES:
        raise RequestError(
            400, f"{field}.role: must be one of {', '.join(_ROLES)}, tool", field=f"{field}.role"
        )
    if message.tool_calls:
        raise not_supported(f"{field}.tool_calls")
    return Message(_ROLES[message.role], text_of(message.content, f"{field}.content"))
