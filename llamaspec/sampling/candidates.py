"""The tokens that the target may draw at a position, as a draft sees it: the greatest log q + g.

The target's token is the greatest log p + g, with the same noise g: so the first candidate is what a chain
would draft, and where p and q differ a little the target's token is often the second or the third. Knows
neither models nor lengths. tests/sampling/test_candidates.py.

References: Daliri, Musco and Suresh, arXiv 2408.07978; lists of candidates: arXiv 2506.05632.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from llamaspec.protocols import RandomStreams, Stream
from llamaspec.sampling.distributions import Scores
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import Distribution, TokenArray


class Candidates(NamedTuple):
    """Tokens for one position, best first."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]  # softmax of log q + g, over all tokens that q leaves


def candidates(
    scores: Scores, sampler: Sampler, path: TokenArray, streams: RandomStreams, n: int
) -> Candidates:
    """At most `n` tokens for the position behind `path`.

    Parameters
    ----------
    scores : [V] float32
        The draft's, behind `path`.
    sampler : Sampler
        What the draft draws from. Where that is greedy there is no noise, and q is that of temperature 1.
    """
    sampling, position = sampler.sampling, len(path)
    if sampling.temperature == 0 or sampling.top_k == 1:
        warm = replace(sampling, temperature=1.0, top_k=max(4 * n, 16), top_p=None, min_p=None)
        q = replace(sampler, sampling=warm).distribution(scores, path)
        perturbed = np.log(q.probabilities)
    else:
        q = sampler.distribution(scores, path)
        perturbed = streams.perturbed(q, Stream.TOKEN, position)
    return _best(q, perturbed, n)


def _best(q: Distribution, perturbed: np.ndarray, n: int) -> Candidates:
    order = (-perturbed).argsort(kind="stable")[:n]
    weights = np.exp(perturbed - perturbed[order[0]])
    chances = weights[order] / weights.sum()
    return Candidates(tuple(q.tokens[order].tolist()), tuple(chances.tolist()))
