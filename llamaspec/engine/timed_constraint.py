"""A constraint of one text that knows how long its answers took. tests/engine/test_timed_constraint.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from llamaspec.engine.sequence import Clock
from llamaspec.protocols import RowConstraint
from llamaspec.values import TokenArray

Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class TimedConstraint:
    """Asks another constraint, and sums up the seconds: of all drafts and of the target."""

    constraint: RowConstraint
    clock: Clock = time.perf_counter
    seconds: float = 0.0

    def allowed(self, generated: TokenArray) -> TokenArray:
        """The tokens that may come next."""
        return self._timed(self.constraint.allowed, generated)

    def forced(self, generated: TokenArray) -> TokenArray:
        """The only tokens that can come next."""
        return self._timed(self.constraint.forced, generated)

    def is_complete(self, generated: TokenArray) -> bool:
        """Whether the text may end here."""
        return self._timed(self.constraint.is_complete, generated)

    def _timed(self, ask: Callable[[TokenArray], Answer], generated: TokenArray) -> Answer:
        begin = self.clock()
        try:
            return ask(generated)
        finally:
            self.seconds += self.clock() - begin
