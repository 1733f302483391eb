"""What guessing has won or lost against plain decoding, and how much may still be lost.

This is the guarantee behind "never slower": whatever the estimates say, a bet that could lose more than
the room left is not placed. The unit is the time of one plain token. Knows neither widths nor chances.
tests/rules/test_speed.py checks the bound on every simulated machine and text.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOM = 1.25  # plain tokens that may be lost at first: 2 % of 64 tokens
ROOM_RATE = 0.02  # and more for every token after the first 64
FREE_TOKENS = 64
EXPLORE = 1.3  # plain tokens that tries may lose at first
EXPLORE_RATE = 0.015  # and more for every token
EXPLORE_SHARE = 0.25  # and this part of what guessing has won
DOUBT = 0.5  # standard deviations of a plain token's time that the gain must do without
FOLD = 32  # rounds booked at today's price of a plain token; older ones keep the price of their day


@dataclass(slots=True)
class Ledger:
    """Running account; gains and losses in plain tokens."""

    gain: float = 0.0  # won against plain decoding, in all rounds with guesses
    explored: float = 0.0  # lost by tries
    _settled: float = 0.0
    _n_made: int = 0
    _seconds: float = 0.0
    _n_open: int = 0

    def book(self, n_made: int, seconds: float, plain_seconds: float) -> float:
        """Enter a round with guesses; returns what it won."""
        self._n_made += n_made
        self._seconds += seconds
        self._n_open += 1
        self.gain = self._settled + self._n_made - self._seconds / plain_seconds
        if self._n_open >= FOLD:
            self._settled, self._n_made, self._seconds, self._n_open = self.gain, 0, 0.0, 0
        return n_made - seconds / plain_seconds

    def room(self, n_tokens: int, plain_spread: float) -> float:
        """What the next round may lose, after a text of `n_tokens`.

        `plain_spread`: standard deviation of the logarithm of a plain token's time. Where that is little
        known, so is the gain.
        """
        doubt = DOUBT * plain_spread * (self._n_made + max(-self.gain, 0.0))
        return self.gain - doubt + ROOM + ROOM_RATE * max(n_tokens - FREE_TOKENS, 0)

    def room_to_explore(self, n_tokens: int) -> float:
        """What the next try may lose."""
        return EXPLORE + EXPLORE_RATE * n_tokens + EXPLORE_SHARE * max(self.gain, 0.0) - self.explored
