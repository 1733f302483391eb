"""The drafter that drafts nothing. With it the loop is plain decoding."""

from __future__ import annotations

from llamaspec.protocols import RowLength
from llamaspec.values import NO_DRAFT, Draft, TokenArray


class NoDrafter:
    """Drafts nothing."""

    def prepare(self, context: TokenArray) -> None:
        """Needs no preparation."""

    def propose(self, context: TokenArray, length: RowLength) -> Draft:
        """No tokens."""
        return NO_DRAFT
