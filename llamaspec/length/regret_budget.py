"""What drafting has won or lost against plain decoding, and how much may still be lost.

This is the guarantee behind "never slower": whatever the estimates say, a round that could lose more than
what is left is not made. The unit is the time of one plain token. One budget for all rows.
tests/length/test_regret_budget.py; test_speed.py checks the bound on every simulated machine, text and load.
"""

from __future__ import annotations

from dataclasses import dataclass

ALLOWED = 1.6  # plain tokens of each row that may be lost at first: 1.7 % of 96 tokens
ALLOWED_RATE = 0.02  # and more for every token after the first 96
FREE_TOKENS = 96
FORGIVEN = 0.04  # of what a text has lost, for each of its tokens: the rest is owed by the next
SHARE, MOST = 0.1, 2.0  # of what earlier texts have won, that a text may lose besides
FOLD = 32  # evaluations booked at today's price of a plain token; older ones keep the price of their day


@dataclass(slots=True)
class RegretBudget:
    """Running account; gains and losses in plain tokens."""

    gain: float = 0.0  # won against plain decoding, in all texts
    _base: float = 0.0  # gain when the text began, less what it has of earlier texts
    _n_start: int = 0  # tokens when the text began
    _settled: float = 0.0
    _n_made: int = 0
    _seconds: float = 0.0
    _n_open: int = 0

    def book(self, n_made: int, seconds: float, plain_seconds: float) -> None:
        """Enter an evaluation that made `n_made` tokens."""
        self._n_made += n_made
        self._seconds += seconds
        self._n_open += 1
        self.gain = self._settled + self._n_made - self._seconds / plain_seconds
        if self._n_open >= FOLD:
            self._fold()

    def start_text(self, n_tokens: int) -> None:
        """A text begins alone, after `n_tokens` of earlier ones.

        It owes their debts, and may lose a little of their gain.
        """
        debt = min(self.gain - self._base + FORGIVEN * (n_tokens - self._n_start), 0.0)
        won = min(max(SHARE * self.gain, 0.0), MOST)
        self._fold()
        self._base, self._n_start = self.gain - debt - won, n_tokens

    def left(self, n_tokens: int, n_rows: int) -> float:
        """What may be lost now, after `n_tokens` of all rows."""
        later = max(n_tokens - self._n_start - n_rows * FREE_TOKENS, 0)
        return self.gain - self._base + n_rows * ALLOWED + ALLOWED_RATE * later

    def _fold(self) -> None:
        self._settled, self._n_made, self._seconds, self._n_open = self.gain, 0, 0.0, 0
