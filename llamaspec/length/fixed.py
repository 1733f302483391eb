"""A fixed number of draft tokens, and an upper limit for any policy."""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.protocols import LengthPolicy, PromptReading, SequenceLength
from llamaspec.values import Draft, Round


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same number of draft tokens; 0 is plain decoding. Without state, so it is its own sequence.

    Raises
    ------
    ValueError
        The number is negative.
    """

    n_draft: int

    def __post_init__(self) -> None:
        if self.n_draft < 0:
            raise ValueError(f"draft length must be >= 0, got {self.n_draft}")

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> FixedLength:
        """Itself."""
        return self

    def wants_more(self, draft: Draft) -> bool:
        """Until the number is reached."""
        return len(draft) < self.n_draft

    def n_verified(self, draft: Draft) -> int:
        """All."""
        return len(draft)

    def width(self, n_positions: int) -> int:
        """No padding."""
        return n_positions

    def observe(self, round_: Round) -> None:
        """Learns nothing."""

    def close(self) -> None:
        """Nothing to do."""


@dataclass(slots=True, eq=False)
class SequenceAtMost:
    """One text's length, of at most so many draft tokens. Lets no trees grow: they have no number."""

    limit: int
    sequence: SequenceLength

    def wants_more(self, draft: Draft) -> bool:
        """As the policy decides, below the limit."""
        return len(draft) < self.limit and self.sequence.wants_more(draft)

    def n_verified(self, draft: Draft) -> int:
        """As the policy decides."""
        return self.sequence.n_verified(draft)

    def width(self, n_positions: int) -> int | None:
        """As the policy decides."""
        return self.sequence.width(n_positions)

    def observe(self, round_: Round) -> None:
        """The policy learns."""
        self.sequence.observe(round_)

    def close(self) -> None:
        """The text has ended."""
        self.sequence.close()


@dataclass(slots=True, eq=False)
class AtMost:
    """A policy that never wants more than so many draft tokens."""

    limit: int
    policy: LengthPolicy

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> SequenceAtMost:
        """A text begins."""
        return SequenceAtMost(self.limit, self.policy.start_sequence(drops=drops, max_tokens=max_tokens))


def prompt_reading(length: SequenceLength) -> PromptReading | None:
    """What decides when a draft model reads the prompt; None: it does so at once."""
    inner = length.sequence if isinstance(length, SequenceAtMost) else length
    return inner if isinstance(inner, PromptReading) else None
