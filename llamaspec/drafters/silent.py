"""The drafter that never guesses. With it the loop is plain decoding."""

from __future__ import annotations

from llamaspec.protocols import LengthPolicy
from llamaspec.values import NO_DRAFT, Draft, TokenArray


class SilentDrafter:
    """Never guesses."""

    def prepare(self, context: TokenArray) -> None:
        """Needs no preparation."""

    def propose(self, context: TokenArray, policy: LengthPolicy) -> Draft:
        """No guesses."""
        return NO_DRAFT
