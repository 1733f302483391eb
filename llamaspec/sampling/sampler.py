"""The distributions from which the tokens of a sequence are drawn, given its tokens and constraint.

Target and draft use the same `Sampler`. tests/sampling/test_sampler.py, tests/engine/test_constrained_law.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llamaspec.protocols import RandomStreams, SequenceConstraint, Stream
from llamaspec.sampling.filters import Sampling, Scores, distribution
from llamaspec.values import Distribution, Draft, Logits, Logprobs, TokenArray, Verification


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the next token of a sequence is drawn."""

    sampling: Sampling
    n_prompt: int = 0  # tokens before the first that was generated
    constraint: SequenceConstraint | None = None
    n_tokens: int | None = None  # only token ids below this are drawn

    @property
    def looks_back(self) -> bool:
        """Whether the distribution depends on earlier tokens, even for the same scores."""
        return self.constraint is not None or self.sampling.penalises

    def allowed(self, tokens: TokenArray) -> TokenArray | None:
        """Return the tokens that may follow `tokens`: int32 [A], ascending; None = any."""
        if self.constraint is None:
            return None
        allowed = self.constraint.allowed(tokens[self.n_prompt :])
        return allowed if self.n_tokens is None else allowed[: np.searchsorted(allowed, self.n_tokens)]

    def distribution(
        self, scores: Scores, tokens: TokenArray, allowed: TokenArray | None = None
    ) -> Distribution:
        """Return the distribution of the token after `tokens`; only `allowed` ones are possible."""
        seen = tokens if self.sampling.penalty_window is not None else tokens[self.n_prompt :]
        return distribution(scores, self.sampling, seen, allowed)


class LogitsTarget:
    """The target's distributions along a draft, each computed when a rule first asks for it.

    They come from the logits after the context and after each of K draft tokens: [1 + K, V] float32.
    """

    def __init__(self, logits: Logits, context: TokenArray, draft: Draft, sampler: Sampler) -> None:
        self._logits, self._context, self._draft, self._sampler = logits, context, draft, sampler
        self._known: dict[int, Distribution] = {}

    def after(self, i: int) -> Distribution:
        """Return p after the context and the path to draft token `i`; -1 = after the context."""
        if i not in self._known:
            tokens = self._context
            if i >= 0 and self._sampler.looks_back:
                tokens = np.concatenate([tokens, self._draft.tokens[self._draft.path(i)]])
            allowed = self._sampler.allowed(tokens)
            if allowed is not None and not len(allowed):
                allowed = None  # after an end-of-text token, where no token is kept
            self._known[i] = self._sampler.distribution(self._logits[i + 1], tokens, allowed)
        return self._known[i]


def candidates(
    scores: Scores, sampler: Sampler, path: TokenArray, streams: RandomStreams, n: int
) -> tuple[list[int], list[float]]:
    """Return up to `n` tokens that the target may draw after `path`, best first, and their confidences.

    They have the greatest log q + g, with the noise g that the target will use; a confidence is a softmax of
    log q + g. A greedy sampler has no noise; then q is the distribution at temperature 1.

    References
    ----------
    Daliri, Musco and Suresh, arXiv 2408.07978; lists of candidates: arXiv 2506.05632.
    """
    sampling, position = sampler.sampling, len(path)
    if sampling.temperature == 0 or sampling.top_k == 1:
        warm = replace(sampling, temperature=1.0, top_k=max(4 * n, 16), top_p=None, min_p=None)
        q = replace(sampler, sampling=warm).distribution(scores, path)
        perturbed = np.log(q.probabilities)
    else:
        q = sampler.distribution(scores, path)
        perturbed = streams.perturbed(q, Stream.TOKEN, position)
    order = (-perturbed).argsort(kind="stable")[:n]
    weights = np.exp(perturbed - perturbed[order[0]])
    chances = weights[order] / weights.sum()
    return q.tokens[order].tolist(), chances.tolist()


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
    nodes = (-1, *verification.path)
    tokens = [*draft.tokens[list(verification.path)].tolist(), verification.next_token]
    return tuple(logprobs(logits[node + 1], token, n_top) for node, token in zip(nodes, tokens, strict=True))
