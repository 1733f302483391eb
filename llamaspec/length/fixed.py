"""A fixed number of draft tokens, and an upper limit for any policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamaspec.protocols import LengthPolicy, PromptReading, SequenceLength
from llamaspec.values import Draft, Round


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same number of draft tokens; 0 is plain decoding.

    It has no state, so one object serves as the policy and as the length of every sequence.

    Raises
    ------
    ValueError
        The number is negative.
    """

    n_draft: int

    def __post_init__(self) -> None:
        if self.n_draft < 0:
            raise ValueError(f"draft length must be >= 0, got {self.n_draft}")

    @property
    def reading(self) -> None:
        """None: the draft model processes the prompt at once."""

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> FixedLength:
        """Return the policy itself."""
        return self

    def wants_more(self, draft: Draft) -> bool:
        """Whether the draft is shorter than the fixed length."""
        return len(draft) < self.n_draft

    def longest_copy(self) -> int:
        """The fixed length."""
        return self.n_draft

    def n_verified(self, draft: Draft) -> int:
        """All draft tokens."""
        return len(draft)

    def begin_round(self, depth: float, others: Sequence[SequenceLength]) -> None:
        """Do nothing: the length is fixed."""

    def timed_width(self) -> None:
        """None: nothing is timed."""

    def observe(self, round_: Round) -> Round:
        """Return the round: there is nothing to learn."""
        return round_

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True, eq=False)
class SequenceAtMost:
    """The length of one sequence, limited to a number of draft tokens."""

    limit: int
    sequence: SequenceLength

    @property
    def reading(self) -> PromptReading | None:
        """As the policy decides."""
        return self.sequence.reading

    def wants_more(self, draft: Draft) -> bool:
        """As the policy decides, below the limit."""
        return len(draft) < self.limit and self.sequence.wants_more(draft)

    def longest_copy(self) -> int:
        """As the policy decides, up to the limit."""
        return min(self.limit, self.sequence.longest_copy())

    def n_verified(self, draft: Draft) -> int:
        """As the policy decides."""
        return self.sequence.n_verified(draft)

    def begin_round(self, depth: float, others: Sequence[SequenceLength]) -> None:
        """Tell the policy."""
        self.sequence.begin_round(depth, others)

    def timed_width(self) -> int | None:
        """As the policy decides."""
        return self.sequence.timed_width()

    def observe(self, round_: Round) -> Round:
        """Let the policy learn."""
        return self.sequence.observe(round_)

    def close(self) -> None:
        """End the sequence."""
        self.sequence.close()


@dataclass(slots=True, eq=False)
class AtMost:
    """A policy that is limited to a number of draft tokens."""

    limit: int
    policy: LengthPolicy

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> SequenceAtMost:
        """Start a sequence with this limit."""
        return SequenceAtMost(self.limit, self.policy.start_sequence(drops=drops, max_tokens=max_tokens))
