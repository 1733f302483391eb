"""The simplest drafters: none at all, and the first of several that has a draft.

Drafters may be plain functions or coroutines; `drafting` and `preparing` make coroutines of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamaspec.protocols import Closing, Drafter, Drafting, Preparing, RowLength
from llamaspec.values import NO_DRAFT, Draft, TokenArray


def drafting(drafter: Drafter, context: TokenArray, length: RowLength) -> Drafting:
    """What a drafter proposes."""
    proposed = drafter.propose(context, length)
    return proposed if isinstance(proposed, Draft) else (yield from proposed)


def preparing(drafter: Drafter, context: TokenArray) -> Preparing:
    """A drafter's preparation for a prompt."""
    prepared = drafter.prepare(context)
    if prepared is not None:
        yield from prepared


class NoDrafter:
    """Drafts nothing: with it the loop is plain decoding."""

    def prepare(self, context: TokenArray) -> None:
        """Needs no preparation."""

    def propose(self, context: TokenArray, length: RowLength) -> Draft:
        """No tokens."""
        return NO_DRAFT


class FallbackDrafter:
    """Asks drafters in turn until one has a draft; those that cost nothing come first.

    With an automatic length the order does not matter: it lets a drafter copy only what is worth more than
    the next one's draft.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def prepare(self, context: TokenArray) -> Preparing:
        """Let every drafter read the prompt."""
        for drafter in self._drafters:
            yield from preparing(drafter, context)

    def propose(self, context: TokenArray, length: RowLength) -> Drafting:
        """The first draft that is not empty."""
        for drafter in self._drafters:
            draft = yield from drafting(drafter, context, length)
            if len(draft):
                return draft
        return NO_DRAFT

    def close(self) -> None:
        """The sequence has ended."""
        for drafter in self._drafters:
            if isinstance(drafter, Closing):
                drafter.close()
