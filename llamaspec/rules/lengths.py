"""How many tokens to guess, for those who know: a fixed number, or never more than a number.

What pays is found out by rules/auto_length.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.protocols import LengthPolicy
from llamaspec.values import Draft, Round


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same number of guesses; 0 is plain decoding.

    Examples
    --------
    >>> FixedLength(3).wants_more(Draft())
    True
    >>> FixedLength(3).width(3)
    4

    Raises
    ------
    ValueError
        The number is negative.
    """

    n_guesses: int

    def __post_init__(self) -> None:
        if self.n_guesses < 0:
            raise ValueError(f"draft length must be >= 0, got {self.n_guesses}")

    def wants_more(self, draft: Draft) -> bool:
        """Until the number is reached."""
        return len(draft) < self.n_guesses

    def n_to_verify(self, draft: Draft) -> int:
        """All of them."""
        return len(draft)

    def width(self, n_guesses: int) -> int:
        """No padding: one position for each guess and one for the token after them."""
        return n_guesses + 1

    def observe(self, round_: Round) -> None:
        """Learns nothing."""


@dataclass(frozen=True, slots=True)
class AtMost:
    """Another policy, but never more guesses than a limit: what is left of a token budget."""

    policy: LengthPolicy
    limit: int  # guesses; 0 or less allows none

    def wants_more(self, draft: Draft) -> bool:
        """What the other policy says, below the limit."""
        return len(draft) < self.limit and self.policy.wants_more(draft)

    def n_to_verify(self, draft: Draft) -> int:
        """What the other policy says."""
        return self.policy.n_to_verify(draft)

    def width(self, n_guesses: int) -> int:
        """What the other policy says."""
        return self.policy.width(n_guesses)

    def observe(self, round_: Round) -> None:
        """The other policy learns."""
        self.policy.observe(round_)
