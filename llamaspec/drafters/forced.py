"""Draft tokens that a constraint forces: they need no model."""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.protocols import RowConstraint, RowLength
from llamaspec.values import NO_GRAMMAR_DRAFT, Distribution, Draft, TokenArray


@dataclass(frozen=True, slots=True)
class ForcedDrafter:
    """Drafts the tokens that must come next, such as the keys of a JSON object."""

    constraint: RowConstraint
    n_prompt: int  # tokens before the first that was generated

    def prepare(self, context: TokenArray) -> None:
        """Needs no preparation."""

    def propose(self, context: TokenArray, length: RowLength) -> Draft:
        """The forced tokens, while the policy wants more."""
        draft = NO_GRAMMAR_DRAFT
        if length.wants_more(draft):
            for token in self.constraint.forced(context[self.n_prompt :]).tolist():
                draft = draft.plus(token, Distribution.certain(token), 1.0)
                if not length.wants_more(draft):
                    break
        return draft
