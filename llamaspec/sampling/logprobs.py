"""Log-probabilities of the tokens of a text, as llama-server gives them.

They are of softmax(logits): before bias, penalties, a constraint, truncation and temperature.
"""

from __future__ import annotations

import numpy as np

from llamaspec.sampling.filters import Scores
from llamaspec.values import Draft, Logits, Logprobs, Verification


def logprobs(scores: Scores, token: int, n_top: int) -> Logprobs:
    """Of one token, and of the `n_top` most probable ones, ties to the lowest ids; scores are [V] float32."""
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
    """Of each token of a round, from the target's logits [1 + K, V] float32."""
    nodes = (-1, *verification.path)
    tokens = [*draft.tokens[list(verification.path)].tolist(), verification.next_token]
    return tuple(logprobs(logits[node + 1], token, n_top) for node, token in zip(nodes, tokens, strict=True))
