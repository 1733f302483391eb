"""A fixed number of draft tokens, and an upper limit for any policy."""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.protocols import LengthPolicy, SequenceLength
from llamaspec.values import Draft, Round


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same number of draft tokens; 0 is plain decoding. Without state, so it is its own row.

    Raises
    ------
    ValueError
        The number is negative.
    """

    n_draft: int

    def __post_init__(self) -> None:
        if self.n_draft < 0:
            raise ValueError(f"draft length must be >= 0, got {self.n_draft}")

    def start_sequence(self, *, drops: bool = False) -> FixedLength:
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
    row: SequenceLength

    def wants_more(self, draft: Draft) -> bool:
        """As the policy decides, below the limit."""
        return len(draft) < self.limit and self.row.wants_more(draft)

    def n_verified(self, draft: Draft) -> int:
        """As the policy decides."""
        return self.row.n_verified(draft)

    def width(self, n_positions: int) -> int | None:
        """As the policy decides."""
        return self.row.width(n_positions)

    def observe(self, round_: Round) -> None:
        """The policy learns."""
        self.row.observe(round_)

    def close(self) -> None:
        """The text has ended."""
        self.row.close()


@dataclass(slots=True, eq=False)
class AtMost:
    """A policy that never wants more than so many draft tokens."""

    limit: int
    policy: LengthPolicy

    def start_sequence(self, *, drops: bool = False) -> SequenceAtMost:
        """A text begins."""
        return SequenceAtMost(self.limit, self.policy.start_sequence(drops=drops))
