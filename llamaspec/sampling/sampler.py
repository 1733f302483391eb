"""The distributions from which the tokens of a sequence are drawn, given its tokens and constraint.

Target and draft use the same `Sampler`. tests/engine/test_constrained_law.py, tests/test_logprobs.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamaspec.protocols import SequenceConstraint
from llamaspec.sampling.filters import Sampling, Scores, distribution
from llamaspec.values import Distribution, Draft, Logits, Logprobs, TokenArray, Verification, without_pictures


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the next token of a sequence is drawn."""

    sampling: Sampling
    n_prompt: int = 0  # tokens before the first that was generated
    constraint: SequenceConstraint | None = None

    @property
    def looks_back(self) -> bool:
        """Whether the distribution depends on earlier tokens, even for the same scores."""
        return self.constraint is not None or self.sampling.penalises

    def allowed(self, tokens: TokenArray) -> TokenArray | None:
        """Return the tokens that may follow `tokens`: int32 [A], ascending; None = any."""
        if self.constraint is None:
            return None
        return self.constraint.allowed(tokens[self.n_prompt :])

    def distribution(
        self, scores: Scores, tokens: TokenArray, allowed: TokenArray | None = None
    ) -> Distribution:
        """Return the distribution of the token after `tokens`; only `allowed` ones are possible."""
        seen = tokens if self.sampling.penalty_window is not None else tokens[self.n_prompt :]
        if self.sampling.penalises:
            seen = without_pictures(seen)
        return distribution(scores, self.sampling, seen, allowed)


class LogitsTarget:
    """The target's distributions along a draft, each computed when a rule first asks for it.

    They come from the logits after the context and after each of K draft tokens: [1 + K, V] float32.
    """

    def __init__(self, logits: Logits, context: TokenArray, draft: Draft, sampler: Sampler) -> None:
        self._logits, self._context, self._draft, self._sampler = logits, context, draft, sampler
        self._known: dict[int, Distribution] = {}

    def after(self, i: int) -> Distribution:
        """Return p after the context and draft tokens 0 to `i`; -1 = after the context."""
        if i not in self._known:
            tokens = self._context
            if i >= 0 and self._sampler.looks_back:
                tokens = np.concatenate([tokens, self._draft.tokens[: i + 1]])
            allowed = self._sampler.allowed(tokens)
            if allowed is not None and not len(allowed):
                allowed = None  # after an end-of-text token, where no token is kept
            self._known[i] = self._sampler.distribution(self._logits[i + 1], tokens, allowed)
        return self._known[i]


def logprobs(scores: Scores, token: int, n_top: int) -> Logprobs:
    """Return the log-probabilities of a token and of the `n_top` most probable ones, ties to the lowest ids.

    They are those of softmax(scores), before bias, penalties, constraint, truncation and temperature.
    """
    highest = float(scores.max())
    total = highest + float(np.log(np.exp(scores.astype(np.float64) - highest).sum()))
    top: list[tuple[int, float]] = []
    if n := min(n_top, len(scores)):
        candidates = np.flatnonzero(scores >= np.partition(scores, -n)[-n])
        best = candidates[np.argsort(-scores[candidates], kind="stable")[:n]]
        top = [(i, float(scores[i]) - total) for i in best.tolist()]
    return Logprobs(float(scores[token]) - total, tuple(top))


def round_logprobs(
    logits: Logits, draft: Draft, verification: Verification, n_top: int
) -> tuple[Logprobs, ...]:
    """Return the log-probabilities of each token of a round, from the target's logits [1 + K, V] float32."""
    tokens = [*draft.tokens[: verification.n_accepted].tolist(), verification.next_token]
    return tuple(logprobs(scores, token, n_top) for scores, token in zip(logits, tokens, strict=False))
