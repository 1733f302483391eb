"""Random numbers that are a pure function of (seed, stream, position, attempt, token).

They do not depend on who asks for them, or in which order, so the completion for a seed is independent of the
draft. tests/sampling/test_random_streams.py checks their distribution and independence.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from llamaspec.protocols import Stream
from llamaspec.values import Distribution

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class SeededStreams:
    """Reproducible randomness from one seed, taken modulo 2^64.

    Tokens are drawn by the Gumbel-max trick: the argmax of log p(v) + g(v), with standard Gumbel noise g(v),
    has the distribution p. If draft and target share the noise, they usually draw the same token.

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

    def choose(self, distribution: Distribution, stream: Stream, position: int, attempt: int = 0) -> int:
        """Draw one token of `distribution`."""
        if len(distribution.tokens) == 1:
            return int(distribution.tokens[0])
        uniform = self._uniform(distribution.tokens.astype(np.uint64), stream, position, attempt)
        perturbed = np.log(distribution.probabilities) - np.log(-np.log(uniform))
        return int(distribution.tokens[perturbed.argmax()])

    def chance(self, probability: float, stream: Stream, position: int, attempt: int = 0) -> bool:
        """Return True with the given probability."""
        return float(self._uniform(np.zeros(1, dtype=np.uint64), stream, position, attempt)[0]) < probability

    def _uniform(
        self, tokens: npt.NDArray[np.uint64], stream: Stream, position: int, attempt: int
    ) -> npt.NDArray[np.float64]:
        """Return a number in (0, 1) for each token: float64 [S]."""
        key = self._seed
        for part in (stream, position, attempt):
            key = _mixed(key ^ _of_part(part))
        hashed = (tokens + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
        hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(_MIX_1)
        hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(_MIX_2)
        hashed ^= hashed >> np.uint64(31)
        return ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


@functools.lru_cache(maxsize=64)
def _of_part(part: int) -> int:
    """Return the part of a key for a stream, a position or an attempt; draft and target share it."""
    return _mixed((part + 1) * _GOLDEN & _MASK)


def _mixed(value: int) -> int:
    """Return SplitMix64's finalizer of a 64-bit number."""
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)
