"""Seconds of one sequence since its last round, by what they were spent on.

Only the scheduler's slots hold one. It reads the clock; nothing else in the engine adds up seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from llamaspec.values import TARGET, ForwardRequest, Round

Clock: TypeAlias = Callable[[], float]  # seconds


class Stopwatch:
    """Adds up the seconds of a round.

    Parameters
    ----------
    clock : callable
        Returns seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = 0.0
        self.request_seconds = 0.0  # evaluations of the current request: a long prompt takes several
        self._draft_seconds = self._verify_seconds = self._overhead_seconds = 0.0
        self._n_draft_steps = self._n_draft_scored = 0

    def start(self) -> None:
        """The coroutine runs from now on; its request is answered."""
        self.request_seconds = 0.0
        self._since = self._clock()

    def lap(self, *, is_drafting: bool) -> None:
        """Count the seconds since the start, or since the last lap, as the coroutine's own."""
        now = self._clock()
        if is_drafting:
            self._draft_seconds += now - self._since
        else:
            self._overhead_seconds += now - self._since
        self._since = now

    def restart(self) -> None:
        """Forget everything up to now: the prompt is not part of the first round."""
        self._draft_seconds = self._verify_seconds = self._overhead_seconds = 0.0
        self._n_draft_steps = self._n_draft_scored = 0
        self._since = self._clock()

    def count_preparation(self, seconds: float) -> None:
        """Count this sequence's share of preparing a batch."""
        self._overhead_seconds += seconds

    def count_evaluation(self, request: ForwardRequest, seconds: float) -> None:
        """Count an evaluation of the request or of a part of it."""
        self.request_seconds += seconds
        if request.model == TARGET:
            self._verify_seconds += seconds
        else:
            self._draft_seconds += seconds
            self._n_draft_steps += bool(request.n_scored)
            self._n_draft_scored += request.n_scored

    def stamped(self, round_: Round) -> Round:
        """The round with its seconds; the next round starts here."""
        stamped = replace(
            round_,
            n_draft_steps=self._n_draft_steps,
            n_draft_scored=self._n_draft_scored,
            draft_seconds=self._draft_seconds,
            verify_seconds=self._verify_seconds,
            overhead_seconds=self._overhead_seconds,
        )
        self._draft_seconds = self._verify_seconds = self._overhead_seconds = 0.0
        self._n_draft_steps = self._n_draft_scored = 0
        return stamped
