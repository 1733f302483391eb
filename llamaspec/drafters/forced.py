"""Draft tokens from a constraint: what it forces needs no model, and what it forbids is not drafted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamaspec.drafters.fallback import drafting, preparing
from llamaspec.protocols import Closing, Drafter, Drafting, Preparing, RowConstraint, RowLength
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


@dataclass(frozen=True, slots=True)
class AllowedDrafter:
    """Cuts another drafter's chains at the first token that is not allowed."""

    drafter: Drafter
    constraint: RowConstraint
    n_prompt: int

    def prepare(self, context: TokenArray) -> Preparing:
        """Let the other drafter read the prompt."""
        return preparing(self.drafter, context)

    def propose(self, context: TokenArray, length: RowLength) -> Drafting:
        """The part of the other's draft that can be accepted."""
        draft = yield from drafting(self.drafter, context, length)
        if not draft.is_chain:
            return draft
        path = np.concatenate([context[self.n_prompt :], draft.tokens])
        n_generated = len(path) - len(draft)
        for i, token in enumerate(draft.tokens):
            if token not in self.constraint.allowed(path[: n_generated + i]):  # the target asks the same
                return draft.first(i)
        return draft

    def close(self) -> None:
        """The sequence has ended."""
        if isinstance(self.drafter, Closing):
            self.drafter.close()
