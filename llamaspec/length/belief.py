"""What is believed about unknown numbers, each with its uncertainty: an iterated extended Kalman filter.

A measurement depends on several unknowns at once. The filter moves each by its share of the uncertainty, and
remembers which ones a later measurement can tell apart (R. E. Kalman, "A new approach to linear filtering and
prediction problems", 1960). Knows nothing of costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import sqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Expected: TypeAlias = tuple[float, Mapping[int, float]]  # a measurement, and the effect of each unknown on it

SMALL, ITERATIONS = 0.1, 2  # after a larger surprise, the effects are computed again so many times


class Belief:
    """Means and covariances of unknowns, which are added one by one and keep their index."""

    def __init__(self) -> None:
        self.means = np.zeros(0)  # [n]
        self._covariance = np.zeros((0, 0))  # [n, n]

    def add(self, mean: float, deviation: float) -> int:
        """Add an unknown with its standard deviation; return its index."""
        n = len(self.means)
        covariance = np.zeros((n + 1, n + 1))
        covariance[:n, :n], covariance[n, n] = self._covariance, deviation**2
        self.means, self._covariance = np.append(self.means, mean), covariance
        return n

    def deviation(self, i: int) -> float:
        """Return the standard deviation of an unknown."""
        return sqrt(self._covariance[i, i])

    def doubt(self, i: int | slice, deviation: float) -> None:
        """Let one or more unknowns have changed by about this much."""
        np.einsum("ii->i", self._covariance)[i] += deviation**2

    def learn(
        self,
        expect: Callable[[Array], Expected],
        surprise: float,
        noise: float,
        only: Collection[int] | None = None,
    ) -> None:
        """Learn from a measurement.

        Parameters
        ----------
        expect : callable
            Returns what the means [n] let expect, and how much that changes with each unknown.
        surprise : float
            The measurement, minus what was expected.
        noise : float
            Standard deviation of the measurement itself.
        only : collection of int, optional
            The unknowns to learn about; the others count as uncertain, and stay as they are.
        """
        before = self.means
        expected, effects = expect(before)
        measured = expected + surprise
        gain, shared, variance = self._gain(effects, noise, only)
        self.means = before + gain * surprise
        for _ in range(ITERATIONS if abs(surprise) > SMALL else 0):  # the effects differ at the new means
            expected, effects = expect(self.means)
            gain, shared, variance = self._gain(effects, noise, only)
            moved = sum(factor * (self.means[i] - before[i]) for i, factor in effects.items())
            self.means = before + gain * (measured - expected + moved)
        change = np.outer(gain, shared)
        if only is None:
            self._covariance -= change
        else:  # the form of Joseph, for gains that are not optimal
            self._covariance += variance * np.outer(gain, gain) - change - change.T

    def spread(self, effects: Mapping[int, float]) -> float:
        """Return the standard deviation of a sum of unknowns with these factors."""
        at, factors = list(effects), np.array(list(effects.values()))
        return sqrt(factors @ self._covariance[at][:, at] @ factors)

    def _gain(
        self, effects: Mapping[int, float], noise: float, only: Collection[int] | None
    ) -> tuple[Array, Array, float]:
        """Return the gains, the covariances of each unknown with the measurement, and its variance."""
        at, factors = list(effects), np.array(list(effects.values()))
        shared = self._covariance[:, at] @ factors
        variance = float(factors @ shared[at]) + noise * noise
        gain = shared / variance
        if only is not None:
            others = np.ones(len(gain), dtype=bool)
            others[list(only)] = False
            gain[others] = 0.0
        return gain, shared, variance
