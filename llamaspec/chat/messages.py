"""Messages of a conversation, and the deltas of an answer while it is generated.

`chat/parse.py` makes deltas, `chat/answer_stream.py` adds the log-probabilities and the origin of their
tokens, and each HTTP API writes them as its own JSON. Templates get messages as in OpenAI's API.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pydantic_core import from_json

from llamaspec.engine.detokenizer import Span
from llamaspec.values import Logprobs

if TYPE_CHECKING:
    from llamaspec.chat.attached import Attached

Json = Any  # a result of json.loads
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the assistant wants called."""

    id: str
    name: str
    arguments: str  # JSON as the model wrote it; may be invalid

    def as_dict(self, *, arguments_in_text: bool = False) -> dict[str, Json]:
        """Return the call as in OpenAI's API, but with its arguments as an object, because templates iterate.

        Arguments that were cut off are closed, so that the KV cache can serve their beginning. Text after the
        object is left out. Anything else becomes a string in an object.
        """
        arguments: Json = self.arguments
        if not arguments_in_text:
            try:
                arguments = from_json(arguments.strip() or "{}", allow_partial="trailing-strings")
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict):
                arguments = {"arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation; ValueError if the role is unknown."""

    role: str  # system, user, assistant or tool
    text: str
    name: str | None = None  # of the speaker, or of the tool whose result this is
    tool_calls: tuple[ToolCall, ...] = ()  # only of the assistant
    tool_call_id: str | None = None  # the call whose result this is
    reasoning: str | None = None  # before the assistant's answer
    pictures: tuple[Attached, ...] = ()  # whose marks are in the text
    place: str = field(default="", compare=False)  # in the request, for error messages: messages.3

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"a message is from {', '.join(ROLES)}, got {self.role!r}")

    def without(self, picture: Attached) -> Message:
        """Return the message with a remark in place of a picture."""
        text = self.text.replace(picture.mark, picture.left_out)
        return replace(self, text=text, pictures=tuple(each for each in self.pictures if each != picture))

    def as_dict(self, *, arguments_in_text: bool = False) -> dict[str, Json]:
        """Return the message as templates expect it; arguments of calls as in `ToolCall.as_dict`."""
        found: dict[str, Json] = {"role": self.role, "content": self.text}
        if self.name is not None:
            found["name"] = self.name
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
            if not (self.text and self.tool_calls):  # with a call, gpt-oss accepts only one of the two
                found["thinking"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                call.as_dict(arguments_in_text=arguments_in_text) for call in self.tool_calls
            ]
        return found


class TokenLogprobs(NamedTuple):
    """A token, with the log-probabilities of it and of its alternatives."""

    token: int
    logprobs: Logprobs
    begin: int = 0  # characters of the answer before the token


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str
    spans: tuple[Span, ...] = field(default=(), repr=False)  # the same text, split by whether it was drafted
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)  # of its tokens, if requested
    end: int = field(default=0, kw_only=True, compare=False, repr=False)  # characters of the answer so far
    n_tokens: int = field(default=0, kw_only=True, compare=False, repr=False)  # new since the last delta


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str
    n_tokens: int = field(default=0, kw_only=True, compare=False, repr=False)  # new since the last delta


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The beginning of a tool call."""

    index: int  # of the call within the answer
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments. Together they are JSON, unless the model made a mistake."""

    index: int
    text: str


Delta: TypeAlias = "ContentDelta | ReasoningDelta | CallDelta | ArgumentsDelta"


def finite(value: Json) -> Json:
    """Return a JSON value with null for numbers that JSON cannot write, as JavaScript writes them.

    1e999 is JSON, but is read as infinity; some writers also write NaN.
    """
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def message_of(deltas: Iterable[Delta]) -> Message:
    """Return the whole answer as a message of a conversation."""
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
