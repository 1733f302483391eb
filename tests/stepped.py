"""A compute thread without a thread: the caller that waits makes the steps, so a test decides their order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.sequence import Event, RunningSequence
from llamaspec.engine.thread import ComputeThread
from llamaspec.errors import ClosedError
from llamaspec.protocols import Model


class Stepped(ComputeThread):
    """Computes in the calling thread."""

    def __init__(
        self, models: Mapping[str, Model], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.scheduler = Scheduler(models, clock=clock)
        self.numbers = itertools.count()
        self._is_stepping = self._is_closed = False
        super().__init__(self.scheduler)

    def step(self) -> bool:
        self._is_stepping = True
        try:
            return self.scheduler.step()
        finally:
            self._is_stepping = False

    def next_event(self, sequence: RunningSequence[Event]) -> Event | None:
        while sequence.events.empty() and not sequence.is_done:
            assert self.step() or sequence.is_done, "this would wait forever"
        return super().next_event(sequence)

    def cancel(self, sequence: RunningSequence[Any]) -> None:
        super().cancel(sequence)
        if not self._is_stepping:
            self.scheduler.end_cancelled()

    def close(self) -> None:
        self._is_closed = True
        self.scheduler.end_all()

    def start(self, sequence: RunningSequence[Any]) -> None:
        if self._is_closed:
            raise ClosedError("closed")
        sequence.number = next(self.numbers)
        self.scheduler.add(sequence)
