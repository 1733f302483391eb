"""How probable the tokens of a text were to the model itself, as programs ask a server for it.

Of softmax(logits): before bias, penalties, a constraint, truncation and temperature, as llama-server gives
it. So the numbers say what the model believes, whatever it was made to say.
"""

from __future__ import annotations

import numpy as np

from llamaspec.sampling.filters import Scores
from llamaspec.values import Draft, Logits, Logprobs, Verification


def logprobs(scores: Scores, token: int, n_top: int) -> Logprobs:
    """Of one token, and of the `n_top` most probable ones; ties go to the lowest ids.

    Parameters
    ----------
    scores : [V] float32
    """
    highest = float(scores.max())
    total = highest + float(np.log(np.exp(scores.astype(np.float64) - highest).sum()))
    best = _best(scores, min(n_top, len(scores)))
    return Logprobs(
        float(scores[token]) - total, tuple((int(i), float(scores[i]) - total) for i in best.tolist())
    )


def round_logprobs(
    logits: Logits, draft: Draft, verification: Verification, n_top: int
) -> tuple[Logprobs, ...]:
    """Of each token of a round, from the target's logits [1 + K, V] float32."""
    nodes = (-1, *verification.path)
    tokens = [*draft.tokens[list(verification.path)].tolist(), verification.next_token]
    return tuple(logprobs(logits[node + 1], token, n_top) for node, token in zip(nodes, tokens, strict=True))


def _best(scores: Scores, n: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Indices of the `n` highest scores, best first."""
    if not n:
        return np.empty(0, dtype=np.intp)
    floor = np.partition(scores, len(scores) - n)[len(scores) - n]
    candidates = np.flatnonzero(scores >= floor)
    return candidates[np.argsort(-scores[candidates], kind="stable")[:n]]
