"""Several drafters in order of preference: the first that has a guess speaks."""

from __future__ import annotations

from collections.abc import Sequence

from llamaspec.protocols import Drafter, LengthPolicy
from llamaspec.values import NO_DRAFT, Draft, TokenArray


class FirstThatGuesses:
    """Asks drafters in turn until one makes a guess."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def prepare(self, context: TokenArray) -> None:
        """Let every drafter read the prompt."""
        for drafter in self._drafters:
            drafter.prepare(context)

    def propose(self, context: TokenArray, policy: LengthPolicy) -> Draft:
        """The first draft that is not empty."""
        for drafter in self._drafters:
            draft = drafter.propose(context, policy)
            if len(draft):
                return draft
        return NO_DRAFT
