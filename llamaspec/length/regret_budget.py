"""What drafting has won or lost against plain decoding, and how much may still be lost.

This is the guarantee behind "never slower": whatever the estimates say, a round that could lose more than
what is left is not made. The unit is the time of one plain token. One budget for all rows.
tests/length/test_regret_budget.py; test_speed.py checks the bound on every simulated machine, text and load.
"""

from __future__ import annotations

from dataclasses import dataclass

ALLOWED = 2.2  # plain tokens of each row that a text may lose at first
RATE = 0.003  # and more for every token
SAVED = 1.1  # of what earlier texts have won, that a text may lose besides
RECENT = 16  # rounds that are booked anew where plain decoding turns out to take another time


@dataclass(slots=True)
class RegretBudget:
    """Running account in plain tokens."""

    gain: float = 0.0  # won against plain decoding, in all texts
    left: float = ALLOWED  # that each row may lose now
    _recent: float = 0.0  # that each row's recent rounds with drafts took, old ones fading

    def start_text(self, *, is_alone: bool) -> None:
        """A text begins; alone, it owes nothing."""
        self.left = min(max(self.left, ALLOWED) if is_alone else self.left, ALLOWED + SAVED)
        self._recent *= not is_alone

    def book(self, n_made: int, spent: float, n_rows: int, *, is_plain: bool) -> None:
        """Enter that a row's round of `n_made` tokens took as long as `spent` plain ones."""
        self._win(n_made - spent, n_rows)
        self.left += RATE * n_made / n_rows
        self._recent -= self._recent / (RECENT * n_rows)
        if not is_plain:  # else this holds whatever they take
            self._recent += spent / n_rows

    def correct(self, factor: float, n_rows: int) -> None:
        """Plain decoding takes so many times as long as was believed."""
        self._win(n_rows * self._recent * (1.0 - 1.0 / factor), n_rows)
        self._recent /= factor

    def _win(self, gain: float, n_rows: int) -> None:
        self.gain += gain
        self.left += gain / n_rows
