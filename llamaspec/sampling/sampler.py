"""What the tokens of one text are drawn from: a model's scores, what was written before, and a constraint.

Target and draft ask the same sampler, so that the draft proposes only what the text may say. Knows neither
models nor chance. tests/engine/test_constrained_law.py walks every branch under all rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamaspec.protocols import RowConstraint
from llamaspec.sampling.distributions import Scores, distribution
from llamaspec.sampling.parameters import Sampling
from llamaspec.values import Distribution, Draft, Logits, TokenArray


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the next token of a text is drawn."""

    sampling: Sampling
    n_prompt: int = 0  # tokens before the first that was generated
    constraint: RowConstraint | None = None
    n_tokens: int | None = None  # only token ids below this are drawn

    @property
    def looks_back(self) -> bool:
        """Whether the distribution depends on the tokens before, given the scores."""
        return self.constraint is not None or self.sampling.penalises

    def allowed(self, tokens: TokenArray) -> TokenArray | None:
        """The only tokens that may follow all of `tokens`: int32 [A], ascending; None = any."""
        if self.constraint is None:
            return None
        allowed = self.constraint.allowed(tokens[self.n_prompt :])
        return allowed if self.n_tokens is None else allowed[: np.searchsorted(allowed, self.n_tokens)]

    def only_allowed(self, tokens: TokenArray) -> int | None:
        """The token that must follow, where the constraint leaves no choice."""
        allowed = self.allowed(tokens)
        return int(allowed[0]) if allowed is not None and len(allowed) == 1 else None

    def distribution(
        self, scores: Scores, tokens: TokenArray, allowed: TokenArray | None = None
    ) -> Distribution:
        """Of the next token after all of `tokens`, one of `allowed`."""
        seen = tokens if self.sampling.penalty_window is not None else tokens[self.n_prompt :]
        return distribution(scores, self.sampling, seen, allowed)


class LogitsTarget:
    """The target's distributions behind a draft, each computed once and only where a rule looks.

    Parameters
    ----------
    logits : [1 + K, V] float32
        After the context, then after each draft token.
    context : [n] int32
    draft : Draft
        Of K tokens.
    sampler : Sampler
    """

    def __init__(self, logits: Logits, context: TokenArray, draft: Draft, sampler: Sampler) -> None:
        self._logits = logits
        self._context = context
        self._draft = draft
        self._sampler = sampler
        self._known: dict[int, Distribution] = {}

    def after(self, i: int) -> Distribution:
        """p after the context and the path to draft token `i`; -1 = after the context."""
        if i not in self._known:
            tokens = self._tokens(i)
            allowed = self._sampler.allowed(tokens)
            if allowed is not None and not len(allowed):
                allowed = None  # behind the end of the text, where nothing is kept
            self._known[i] = self._sampler.distribution(self._logits[i + 1], tokens, allowed)
        return self._known[i]

    def _tokens(self, i: int) -> TokenArray:
        if i < 0 or not self._sampler.looks_back:
            return self._context
        return np.concatenate([self._context, self._draft.tokens[self._draft.path(i)]])
