"""What drafting has won or lost against plain decoding, and how much may still be lost.

This is the guarantee behind "never slower": whatever the estimates say, a round that could lose more than
what is left is not made. The unit is the time of one plain token. One budget for all rows.
tests/length/test_regret_budget.py; test_speed.py checks the bound on every simulated machine, text and load.
"""

from __future__ import annotations

from dataclasses import dataclass

ALLOWED = 2.2  # plain tokens of each row that a text may lose at first
RATE = 0.007  # and more for every token
SAVED = 0.8  # of what earlier texts have won, that a text may lose besides


@dataclass(slots=True)
class RegretBudget:
    """Running account in plain tokens."""

    gain: float = 0.0  # won against plain decoding, in all texts
    left: float = ALLOWED  # that each row may lose now

    def book(self, gain: float, n_made: int, n_rows: int) -> None:
        """Enter what a row's round of `n_made` tokens has won."""
        self.gain += gain
        self.left += (gain + RATE * n_made) / n_rows

    def start_text(self, *, is_alone: bool) -> None:
        """A text begins; alone, it owes nothing."""
        self.left = min(max(self.left, ALLOWED) if is_alone else self.left, ALLOWED + SAVED)
