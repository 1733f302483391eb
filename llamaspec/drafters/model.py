"""Guesses from a small model, one token after the other, each from the model's own distribution.

The model remembers what it has read, so every guess costs one step, and tokens that the target kept are
not read twice. Knows nothing of the target. tests/drafters/test_model.py counts the evaluations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamaspec.protocols import Dice, LengthPolicy, Model, Rule
from llamaspec.rules.sampling import confidence, distribution
from llamaspec.values import NO_DRAFT, Ask, Draft, Sampling, TokenArray


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """Draws guesses from a model.

    Parameters
    ----------
    model : Model
        The draft; its vocabulary must number the same tokens as the target's.
    sampling : Sampling
        The draft's own chain; the target's is the natural choice.
    rule : Rule
        Says with which chance a guess is drawn.
    dice : Dice
        The same as the target's.
    n_tokens : int, optional
        Guess only token ids below this: the target's vocabulary size, where the draft's is larger.
    lane : int
        The row of the model's memory to use.
    """

    model: Model
    sampling: Sampling
    rule: Rule
    dice: Dice
    n_tokens: int | None = None
    lane: int = 0

    def prepare(self, context: TokenArray) -> None:
        """Read all but the last token, so that the first guess costs no more than the next."""
        read = self._readable(self._known(context))[:-1]
        if len(read):
            self.model.logits([Ask(self.lane, read, 0)])

    def propose(self, context: TokenArray, policy: LengthPolicy) -> Draft:
        """Guess until the policy has enough or the model's context is full."""
        context, draft = self._known(context), NO_DRAFT
        while policy.wants_more(draft):
            path = np.concatenate([context, draft.tokens])
            readable = self._readable(path)
            scores = self.model.logits([Ask(self.lane, readable, 1)])[0][0, : self.n_tokens]
            q = distribution(scores, self.sampling, path)
            guess = self.rule.guess(q, self.dice, len(context), len(draft))
            draft = draft.plus(guess, q, confidence(scores, guess, q))
        return draft

    def _known(self, context: TokenArray) -> TokenArray:
        """The context, with token 0 in place of tokens that only the target knows."""
        if self.n_tokens is None or self.n_tokens <= self.model.vocabulary_size:
            return context
        return np.where(context < self.model.vocabulary_size, context, np.int32(0))

    def _readable(self, path: TokenArray) -> TokenArray:
        """The end of the path that fits the model's context.

        What is left out grows by half a context at a time: in between, the start stays where it is and
        the model's memory stays useful.
        """
        excess = len(path) - self.model.context_size
        if excess <= 0:
            return path
        half = max(1, self.model.context_size // 2)
        return path[-(-excess // half) * half :]
