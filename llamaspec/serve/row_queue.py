"""The rows that run and those that wait for their turn, first come, first served.

The event loop asks, the decode thread takes: whatever both see is guarded here. Knows neither models nor
texts. tests/serve/test_load.py.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from llamaspec.serve.answers import Answer, Run
from llamaspec.serve.faults import RequestError
from llamaspec.serve.jobs import Job
from llamaspec.serve.metrics import Metrics

LONGEST_RETRY_SECONDS = 60


class RowQueue:
    """Takes rows until it is stopped.

    Parameters
    ----------
    parallel : int
        Rows that run at once.
    max_queue : int
        Rows that may wait.
    metrics : Metrics
    clock : callable
        Seconds.
    """

    def __init__(
        self, parallel: int, max_queue: int, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._parallel, self._max_queue, self._metrics, self._clock = parallel, max_queue, metrics, clock
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[Run] = deque()
        self._running: list[Run] = []
        self._has_news = self._is_stopping = self._is_ending = self._is_closed = False
        self._usual_seconds = 1.0  # of a row, a running average

    def submit(self, jobs: Sequence[Job]) -> Answer:
        """Ask for texts; from the event loop.

        Raises
        ------
        RequestError
            429: too many wait already. 503: the server is stopping.
        """
        with self._changed:
            if self._is_stopping:
                raise server_stopping()
            n_free = max(0, self._parallel - len(self._running))
            if len(self._waiting) + len(jobs) > self._max_queue + n_free:
                self._metrics.refused()
                raise RequestError(
                    429, "too many requests wait already; try again later", code="queue_full",
                    retry_after=self._retry_seconds(),
                )  # fmt: skip
            answer = Answer(jobs, self.wake, self._clock())
            self._waiting.extend(answer.runs)
            self._tell()
        return answer

    def wake(self) -> None:
        """Something has changed that the decode thread should look at."""
        with self._changed:
            self._tell()

    def stop(self) -> None:
        """Take no more requests, and none that wait; those that run go on."""
        with self._changed:
            self._is_stopping = True
            self._tell()

    def end(self) -> None:
        """End what still runs."""
        with self._changed:
            self._is_stopping = self._is_ending = True
            self._tell()

    def close(self) -> None:
        """End everything: nothing more will be."""
        with self._changed:
            self._is_stopping = self._is_ending = self._is_closed = True
            self._tell()

    @property
    def is_stopping(self) -> bool:
        """Whether no more requests are taken."""
        return self._is_stopping

    @property
    def is_ending(self) -> bool:
        """Whether what runs is ended, too."""
        return self._is_ending

    def rows(self) -> tuple[list[Run], int]:
        """The rows that run, and how many wait."""
        with self._changed:
            return list(self._running), len(self._waiting)

    # For the decode thread.

    @property
    def running(self) -> list[Run]:
        """The rows that run: a copy, in the order in which they came. Only the decode thread changes them."""
        return list(self._running)

    def wait(self, is_busy: bool) -> bool:
        """Until there is something to do; False when that will never be."""
        with self._changed:
            while not (is_busy or self._has_news or self._is_closed):
                self._changed.wait()
            self._has_news = False
            return not self._is_closed or bool(self._running or self._waiting)

    def unwanted(self) -> list[Run]:
        """Rows that should end at once; those among them that wait are taken out."""
        with self._changed:
            waiting = list(self._waiting)
            unwanted = [run for run in waiting if self._is_stopping or run.answer.is_cancelled]
            self._waiting = deque(run for run in waiting if run not in unwanted)
            return [*unwanted, *(run for run in self._running if self._is_ending or run.answer.is_cancelled)]

    def begin_next(self, has_room: Callable[[Run, Sequence[Run]], bool]) -> Run | None:
        """Let the next row run, if there is a place, and room beside those that run; None if not."""
        with self._changed:
            if not self._waiting or len(self._running) >= self._parallel:
                return None
            run = self._waiting[0]
            if not has_room(run, self._running):
                return None
            self._waiting.popleft()
            self._running.append(run)
        run.started_at = self._clock()
        return run

    def remove(self, run: Run) -> float:
        """The row has ended; returns the time."""
        with self._changed:
            if run in self._running:
                self._running.remove(run)
            self._has_news = True  # a place is free
        now = self._clock()
        if run.started_at is not None:
            self._usual_seconds += 0.2 * (now - run.started_at - self._usual_seconds)
        return now

    def _tell(self) -> None:
        self._has_news = True
        self._changed.notify()

    def _retry_seconds(self) -> int:
        """When there may be a place."""
        seconds = (len(self._waiting) + 1) * self._usual_seconds / self._parallel
        return max(1, min(LONGEST_RETRY_SECONDS, math.ceil(seconds)))


def server_stopping() -> RequestError:
    """What those are told who come too late."""
    return RequestError(503, "the server is stopping", code="server_stopping")
