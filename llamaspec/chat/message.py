"""One contribution to a conversation, and the tools that it calls."""

from __future__ import annotations

from dataclasses import dataclass

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the assistant wants called."""

    id: str
    name: str
    arguments: str  # JSON, as the model wrote it: it may be wrong


@dataclass(frozen=True, slots=True)
class Message:
    """One contribution to a conversation.

    Raises
    ------
    ValueError
        The role is unknown.
    """

    role: str  # system, user, assistant or tool
    text: str
    name: str | None = None  # of the speaker, or of the tool whose result this is
    tool_calls: tuple[ToolCall, ...] = ()  # of the assistant
    tool_call_id: str | None = None  # the call whose result this is
    reasoning: str | None = None  # what the assistant thought before its answer

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"a message is from {', '.join(ROLES)}, got {self.role!r}")
