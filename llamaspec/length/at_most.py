"""A length policy with an upper limit: of a request, or where a text or its context ends.

It hides that the policy lets trees grow: a tree is no number of draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.protocols import LengthPolicy, RowLength
from llamaspec.values import Draft, Round


@dataclass(slots=True, eq=False)
class RowAtMost:
    """One text's length, of at most so many draft tokens."""

    limit: int
    row: RowLength

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

    def start_row(self, *, drops: bool = False) -> RowAtMost:
        """A text begins."""
        return RowAtMost(self.limit, self.policy.start_row(drops=drops))
