"""How long a copy of earlier text may be.

Copies cost no draft step, only width, and are often accepted as a whole. So they may be much longer than the
drafts of a model: twice as long after each that was accepted as a whole, as far as their rejection is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamaspec.length.costs import Array
from llamaspec.values import LONGEST_COPY

FIRST = 16  # tokens
TRUST = 0.5  # plain tokens that a rejected copy may cost, for each token of its match
BANK = 32.0  # most plain tokens that earlier copies of the completion can add to that, or take away


class CopyLength:
    """The copies of one completion."""

    def __init__(self) -> None:
        self._gain = 0.0  # plain tokens that copies have won in this text
        self._longest = FIRST

    def longest(self, ahead: Sequence[float], prices: Array, plain: float) -> int:
        """The longest copy whose whole price may be lost, by its match and by what copies have won.

        Parameters
        ----------
        ahead : [m] float
            Confidences of what could be copied.
        prices : [n] float
            What 0, 1, ... copied tokens cost, in seconds.
        plain : float
            Seconds of a plain token.
        """
        if not ahead:
            return 0
        most = TRUST * ahead[0] / (1.0 - ahead[0]) + self._gain
        affordable = (prices <= most * plain).nonzero()[0].max(initial=0)
        return min(int(affordable), self._longest)

    def learn(self, n: int, n_accepted: int, gain: float) -> None:
        """A copy of `n` tokens was verified; its round won `gain` plain tokens, or lost them."""
        self._gain = max(-BANK, min(self._gain + gain, BANK))
        self._longest = min(max(FIRST, 2 * (self._longest if n_accepted == n else n_accepted)), LONGEST_COPY)
