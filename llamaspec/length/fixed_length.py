"""A fixed number of draft tokens, for those who know; length/auto_length.py finds out what pays."""

from __future__ import annotations

from dataclasses import dataclass

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

    def start_row(self, *, drops: bool = False) -> FixedLength:
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
