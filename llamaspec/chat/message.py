"""One contribution to a conversation."""

from __future__ import annotations

from dataclasses import dataclass

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Message:
    """One contribution to a conversation.

    Raises
    ------
    ValueError
        The role is unknown.
    """

    role: str  # system, user or assistant
    text: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"a message is from {', '.join(ROLES)}, got {self.role!r}")
