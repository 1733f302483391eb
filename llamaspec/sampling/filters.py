"""From a model's scores to the distribution of the next token: pure functions of arrays.

Top-k, top-p and min-p each keep a *prefix* of the tokens sorted by score, so together they keep the shortest
of three prefixes. Only the few tokens that can be part of it are sorted. tests/sampling/test_filters.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llamaspec.errors import ScoresError
from llamaspec.values import NO_TOKENS, Distribution, TokenArray

Floats = npt.NDArray[np.float64]
Scores = npt.NDArray[np.float32]  # [V] logits of one position

COLDEST = 1e-200  # minimum temperature in a division, which could overflow; only ties share at this value


class Biases(NamedTuple):
    """What is added to the scores of some tokens."""

    tokens: npt.NDArray[np.int64]  # [B]
    values: npt.NDArray[np.float32]  # [B]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from a model's scores, in llama.cpp's order of steps.

    Logit bias, penalties, top-k, top-p, min-p, then temperature. Temperature 0 takes the most probable token,
    the lowest id of several. A field outside its range raises ValueError.
    """

    temperature: float = 0.8  # >= 0; 0 = greedy
    top_k: int | None = 40  # keep the k best tokens
    top_p: float | None = 0.95  # keep the smallest set of best tokens with this much probability
    min_p: float | None = 0.05  # keep tokens at least this probable, relative to the best
    repeat_penalty: float | None = None  # divides positive scores of seen tokens, multiplies negative ones
    presence_penalty: float | None = None  # subtracted once from the score of a seen token
    frequency_penalty: float | None = None  # subtracted for each time that a token was seen
    penalty_window: int | None = 64  # number of last tokens that count as seen; None = all but the prompt
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # token -> added to its score
    biases: Biases | None = field(default=None, init=False, repr=False, compare=False)  # the same, as arrays

    def __post_init__(self) -> None:
        for name, is_right, wanted in (
            ("temperature", 0 <= self.temperature < math.inf, ">= 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, ">= 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", self.min_p is None or 0 < self.min_p <= 1, "in (0, 1]"),
            ("repeat_penalty", self.repeat_penalty is None or 0 < self.repeat_penalty < math.inf, "> 0"),
            ("presence_penalty", math.isfinite(self.presence_penalty or 0), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty or 0), "a finite number"),
            ("penalty_window", self.penalty_window is None or self.penalty_window >= 1, ">= 1"),
        ):
            if not is_right:
                raise ValueError(f"{name.replace('_', '-')} must be {wanted}, got {getattr(self, name)}")
        for token, bias in (self.logit_bias or {}).items():
            if not (0 <= token < 1 << 31 and math.isfinite(bias)):
                raise ValueError(f"a logit bias must be a finite number for a token id, got {token}: {bias}")
        if self.logit_bias:  # once, because each position needs them
            tokens, values = [*self.logit_bias], [*self.logit_bias.values()]
            biases = Biases(np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float32))
            object.__setattr__(self, "biases", biases)

    @property
    def penalises(self) -> bool:
        """Whether the scores depend on the tokens seen before."""
        return (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (None, None, None)


def distribution(
    scores: Scores, sampling: Sampling, seen: TokenArray = NO_TOKENS, allowed: TokenArray | None = None
) -> Distribution:
    """Return the distribution of the next token. Raises ScoresError if no score is a finite number.

    `scores` [V] float32 are the logits of one position. Penalties apply to the last tokens of `seen`. Only
    tokens of `allowed`, ascending and not empty, can be drawn.

    Examples
    --------
    >>> row = np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32))
    >>> distribution(row, Sampling(temperature=1.0, top_k=2, top_p=None, min_p=None)).tokens
    array([1, 2], dtype=int32)
    """
    if sampling.biases is not None:
        scores = biased(scores, sampling.biases)
    if sampling.penalises:
        window = sampling.penalty_window
        scores = penalised(scores, sampling, seen if window is None else seen[-window:])
    if allowed is None:
        return _truncated(scores, sampling)
    drawn = _truncated(scores[allowed], sampling)
    return Distribution(allowed[drawn.tokens], drawn.probabilities)


def confidence(
    scores: Scores, token: int, drawn_from: Distribution, allowed: TokenArray | None = None
) -> float:
    """Return the drafter's probability of its token: in the distribution, or in softmax(scores) if greedy."""
    if len(drawn_from.tokens) > 1:
        return drawn_from.probability(token)
    highest = float(scores[token])
    scores = scores if allowed is None else scores[allowed]
    return min(1.0, 1.0 / _sum_exp(scores, highest))


def biased(scores: Scores, biases: Biases) -> Scores:
    """Return a copy of the scores with a bias on some tokens, of which a draft may lack some: float32 [V]."""
    scores = scores.copy()
    known = biases.tokens < len(scores)
    scores[biases.tokens[known]] += biases.values[known]
    return scores


def penalised(scores: Scores, sampling: Sampling, seen: TokenArray) -> Scores:
    """Return a copy of the scores with llama.cpp's three penalties for the tokens of `seen`: float32 [V]."""
    scores = scores.copy()
    tokens, counts = np.unique(seen, return_counts=True)
    if sampling.repeat_penalty is not None:
        values = scores[tokens]
        factor = np.float32(sampling.repeat_penalty)
        scores[tokens] = np.where(values > 0, values / factor, values * factor)
    if sampling.presence_penalty is not None:
        scores[tokens] -= np.float32(sampling.presence_penalty)
    if sampling.frequency_penalty is not None:
        scores[tokens] -= (counts * sampling.frequency_penalty).astype(np.float32)
    return scores


def _truncated(scores: Scores, sampling: Sampling) -> Distribution:
    """Apply top-k, top-p, min-p and temperature."""
    best = int(scores.argmax())
    highest = float(scores[best])
    if not math.isfinite(highest):
        raise ScoresError("the model's scores are not finite numbers; download or convert it again")
    if sampling.temperature == 0 or sampling.top_k == 1:
        return Distribution.certain(best)

    mass = None
    if sampling.top_p is not None and sampling.top_k is None:
        mass = _sum_exp(scores, highest)
    tokens = _candidates(scores, sampling, highest, mass)
    relative = scores[tokens].astype(np.float64) - highest  # [C] <= 0
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return _tempered(tokens, relative, sampling.temperature)
    order = (-relative).argsort(kind="stable")  # ties stay in order of id
    if sampling.top_k is not None:
        order = order[: sampling.top_k]
    sorted_scores = relative[order]
    n_kept = len(order)
    if sampling.min_p is not None:
        n_kept = min(n_kept, int(np.count_nonzero(sorted_scores >= np.log(sampling.min_p))))
    if sampling.top_p is not None:
        cumulative = np.exp(sorted_scores).cumsum()
        total = float(cumulative[-1]) if mass is None else mass
        n_kept = min(n_kept, int(cumulative.searchsorted(sampling.top_p * total)) + 1)
    kept = order[:n_kept]
    kept.sort()  # by id again, because the candidates are ordered by id
    return _tempered(tokens[kept], relative[kept], sampling.temperature)


def _tempered(tokens: TokenArray, relative: Floats, temperature: float) -> Distribution:
    weights = np.exp(relative / max(temperature, COLDEST))
    possible = weights > 0
    if not possible.all():
        tokens, weights = tokens[possible], weights[possible]
    return Distribution(tokens, weights / weights.sum())


def _sum_exp(scores: Scores, highest: float) -> float:
    return float(np.exp(scores - np.float32(highest)).sum(dtype=np.float64))


def _candidates(scores: Scores, sampling: Sampling, highest: float, mass: float | None) -> TokenArray:
    """Return all tokens that may survive truncation, and few others: int32 [C], ascending.

    `mass` is the sum of exp(score - highest) over all tokens, if top-p applies to all of them.
    """
    threshold = -np.inf
    if sampling.top_k is not None:
        threshold = _floor_of_best(scores, sampling.top_k)
    # The thresholds below have a little slack, because the exact cuts follow in double precision.
    # With top-k and top-p, min-p must not apply yet: top-p is a share of all tokens that top-k leaves.
    if sampling.min_p is not None and (sampling.top_k is None or sampling.top_p is None):
        threshold = max(threshold, highest + math.log(sampling.min_p) - 1e-3)
    if mass is not None and sampling.top_p is not None and sampling.top_p < 1:
        # All tokens below this threshold together are less probable than what top-p removes.
        threshold = max(threshold, highest + float(np.log((1 - sampling.top_p) * mass / len(scores))) - 1e-3)
    return (scores >= np.float32(threshold)).nonzero()[0].astype(np.int32)


def _floor_of_best(scores: Scores, k: int) -> float:
    """Return a score that at least `k` tokens reach, and not many more, in one pass over the scores.

    It is the k-th best of the maxima of disjoint groups, which is at most the k-th best of all.
    """
    n_groups = len(scores) // min(64, max(1, len(scores) // (4 * k)))
    if n_groups < k:
        return -np.inf
    group_size = len(scores) // n_groups
    maxima = np.maximum.reduce(scores[: n_groups * group_size].reshape(group_size, n_groups))
    maxima.partition(n_groups - k)
    return float(maxima[n_groups - k])
