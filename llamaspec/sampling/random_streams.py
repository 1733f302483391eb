"""Random numbers that are a pure function of (seed, use, position, attempt, token).

They are the same whoever asks for them, in whatever order: so the text for a seed is independent of the
draft. tests/sampling/test_random_streams.py checks the law and the independence.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from llamaspec.protocols import RandomStreams, Stream
from llamaspec.values import Distribution

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class SeededStreams:
    """Reproducible chance from one seed.

    Tokens are drawn by the Gumbel-max trick: the argmax of log p(v) + g(v), with g(v) standard Gumbel
    noise, has law p. Two distributions that share the noise choose the same token if they agree on it.
    The seed is taken modulo 2^64.

    References
    ----------
    The finalizer is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014). Coupled draws: Daliri, Musco and Suresh, arXiv 2408.07978.

    Examples
    --------
    >>> streams = SeededStreams(7)
    >>> streams.choose(Distribution.certain(3), Stream.TOKEN, position=0)
    3
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed & _MASK

    def choose(self, distribution: Distribution, use: Stream, position: int, attempt: int = 0) -> int:
        """Draw one token of `distribution`."""
        if len(distribution.tokens) == 1:
            return int(distribution.tokens[0])
        return int(distribution.tokens[self.perturbed(distribution, use, position, attempt).argmax()])

    def chance(self, probability: float, use: Stream, position: int, attempt: int = 0) -> bool:
        """True with the given probability."""
        return float(self._uniform(np.zeros(1, dtype=np.uint64), use, position, attempt)[0]) < probability

    def perturbed(
        self, distribution: Distribution, use: Stream, position: int, attempt: int = 0
    ) -> npt.NDArray[np.float64]:
        """Scores whose greatest `choose` takes: log p + noise of each token, float64 [S]."""
        uniform = self._uniform(distribution.tokens.astype(np.uint64), use, position, attempt)
        perturbed: npt.NDArray[np.float64] = np.log(distribution.probabilities) - np.log(-np.log(uniform))
        return perturbed

    def _uniform(
        self, tokens: npt.NDArray[np.uint64], use: Stream, position: int, attempt: int
    ) -> npt.NDArray[np.float64]:
        """Numbers in (0, 1), one for each token: float64 [S]."""
        key = self._seed
        for part in (use, position, attempt):
            key = _mixed(key ^ _of_part(part))
        hashed = (tokens + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
        hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(_MIX_1)
        hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(_MIX_2)
        hashed ^= hashed >> np.uint64(31)
        return ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


class CascadeStreams:
    """Chance for a draft that has a draft of its own.

    What position alone decides is shared, so that under the coupled rule all draw the same tokens. All else
    is independent of what the text itself draws, and of other drafts.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self.start = 0  # index at which the draft begins

    def choose(self, distribution: Distribution, use: Stream, position: int, attempt: int = 0) -> int:
        """Draw one token of `distribution`."""
        return self._streams.choose(distribution, use, position, self._own(attempt))

    def perturbed(self, distribution: Distribution, use: Stream, position: int) -> npt.NDArray[np.float64]:
        """Scores whose greatest `choose` takes: log p + noise of each token, float64 [S]."""
        return self._streams.perturbed(distribution, use, position)

    def chance(self, probability: float, use: Stream, position: int, attempt: int = 0) -> bool:
        """True with the given probability."""
        return self._streams.chance(probability, use, position, self._own(attempt))

    def _own(self, attempt: int) -> int:
        return attempt and attempt << 32 | self.start


@functools.lru_cache(maxsize=64)
def _of_part(part: int) -> int:
    """The part of a key that comes from a use, a position or an attempt; draft and target share them."""
    key = _mixed((part + 1) * _GOLDEN & _MASK)
    return key if part <= _MASK else _mixed(key ^ _of_part(part >> 64))


def _mixed(value: int) -> int:
    """SplitMix64's finalizer of one 64-bit number."""
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)
