"""Several drafters, those that cost nothing first: the first that has a draft speaks.

The order decides nothing where the length is automatic: it lets a drafter copy only what is worth more than
the next one's draft. tests/length/test_ngram.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamaspec.drafters.coroutines import drafting, preparing
from llamaspec.protocols import Drafter, Drafting, Preparing, RowLength
from llamaspec.values import NO_DRAFT, TokenArray


class FallbackDrafter:
    """Asks drafters in turn until one has a draft."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def prepare(self, context: TokenArray) -> Preparing:
        """Let every drafter take in the prompt."""
        for drafter in self._drafters:
            yield from preparing(drafter, context)

    def propose(self, context: TokenArray, length: RowLength) -> Drafting:
        """The first draft that is not empty."""
        for drafter in self._drafters:
            draft = yield from drafting(drafter, context, length)
            if len(draft):
                return draft
        return NO_DRAFT
