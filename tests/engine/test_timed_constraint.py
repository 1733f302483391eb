"""A timed constraint reports its seconds, and passes on the results."""

from __future__ import annotations

import pytest

from fake_constraint import Steps
from fakes import Clock, tokens
from llamaspec.engine.stream import TimedConstraint
from llamaspec.values import TokenArray


class Slow(Steps):
    """Takes a different time in each method."""

    clock = Clock()

    def allowed(self, generated: TokenArray) -> TokenArray:
        self.clock.passes(0.25)
        if len(generated) > 3:
            raise ValueError("too long")
        return super().allowed(generated)

    def forced(self, generated: TokenArray) -> TokenArray:
        self.clock.passes(2.0)
        return tokens(2)

    def is_complete(self, generated: TokenArray) -> bool:
        self.clock.passes(16.0)
        return False


def test_every_call_counts_even_if_it_fails() -> None:
    slow = Slow()
    timed = TimedConstraint(slow, slow.clock)
    assert timed.allowed(tokens(1)).tolist() == [0, 2]
    assert timed.seconds == 0.25
    assert timed.forced(tokens(0)).tolist() == [2]
    assert timed.seconds == 2.25
    assert timed.is_complete(tokens(1)) is False
    assert timed.seconds == 18.25
    slow.clock.passes(100.0)
    with pytest.raises(ValueError, match="too long"):
        timed.allowed(tokens(1, 2, 1, 2))
    assert timed.seconds == 18.5
