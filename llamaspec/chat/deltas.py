"""What an answer consists of while it is generated: deltas of text, of reasoning and of tool calls.

The parser (`chat/parse.py`) makes them, `chat/answer_stream.py` adds to content the log-probabilities and the
origin of its tokens, and every API writes them as its own JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from llamaspec.chat.template import Message, ToolCall
from llamaspec.engine.generation import Span
from llamaspec.values import Logprobs


class TokenLogprobs(NamedTuple):
    """How probable a token and its alternatives were."""

    token: int
    logprobs: Logprobs
    begin: int = 0  # characters of the answer before its text


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str
    spans: tuple[Span, ...] = field(default=(), repr=False)  # the same text, split by whether it was drafted
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)  # of its tokens, if requested
    end: int = field(default=0, kw_only=True, compare=False, repr=False)  # characters fed, up to its last


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str
    end: int = field(default=0, kw_only=True, compare=False, repr=False)  # as of content


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A tool call begins."""

    index: int  # of the call within the answer
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments, which together are JSON if the model made no mistake."""

    index: int
    text: str


Delta: TypeAlias = "ContentDelta | ReasoningDelta | CallDelta | ArgumentsDelta"


def message_of(deltas: Iterable[Delta]) -> Message:
    """The whole answer as a message of a conversation."""
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
