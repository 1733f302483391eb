"""One thread steps all running rows; requests wait for their turn, first come, first served.

Only this thread evaluates. A row begins when there is a place for it, and room in the KV cache for its
prompt and some text. Where the cache runs full, the rows that came last pause and leave their room to the
others; later they read their own text again. So no row is cut short because of others, and its text is the
one that it would be alone. A fault of one row ends that row. tests/serve/test_load.py.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from llamaspec.length.auto_length import AutoLength
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.serve.answers import Answer, Done, Event, Failed, Reading, Run, Wrote
from llamaspec.serve.faults import RequestError
from llamaspec.serve.jobs import Job
from llamaspec.serve.metrics import Metrics
from llamaspec.serve.settings import PADDING
from llamaspec.values import Round

LONGEST_RETRY_SECONDS = 60
SOME_TEXT = 256  # tokens for which there must be room before a row begins or goes on


class Decoder:
    """Runs what requests ask for on a pair.

    Parameters
    ----------
    pair : Pair
    policy : LengthPolicy
        Shared by all rows.
    metrics : Metrics
    parallel : int
        Rows that run at once.
    max_queue : int
        Rows that may wait.
    n_cells : int
        Tokens that the KV cache holds.
    """

    def __init__(
        self,
        pair: Pair,
        policy: LengthPolicy,
        metrics: Metrics,
        *,
        parallel: int,
        max_queue: int,
        n_cells: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pair, self._policy, self._metrics, self._clock = pair, policy, metrics, clock
        self._parallel, self._max_queue, self._n_cells = parallel, max_queue, n_cells
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[Run] = deque()
        self._running: list[Run] = []
        self._has_news = self._is_stopping = self._is_ending = self._is_closed = False
        self._usual_seconds = 1.0  # of a row, a running average
        self._thread = threading.Thread(target=self._work, name="llamaspec-decode", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> Answer:
        """Ask for texts; from the event loop.

        Raises
        ------
        RequestError
            429: too many wait already. 503: the server is stopping.
        """
        with self._changed:
            if self._is_stopping:
                raise RequestError(503, "the server is stopping", code="server_stopping")
            n_free = max(0, self._parallel - len(self._running))
            if len(self._waiting) + len(jobs) > self._max_queue + n_free:
                self._metrics.refused()
                raise RequestError(
                    429, "too many requests wait already; try again later", code="queue_full",
                    retry_after=self._retry_seconds(),
                )  # fmt: skip
            answer = Answer(jobs, self.wake, self._clock())
            self._waiting.extend(answer.runs)
            self._has_news = True
            self._changed.notify()
        return answer

    def wake(self) -> None:
        """Something has changed that the thread should look at."""
        with self._changed:
            self._has_news = True
            self._changed.notify()

    def stop(self) -> None:
        """Take no more requests, and none that wait; those that run go on."""
        with self._changed:
            self._is_stopping = self._has_news = True
            self._changed.notify()

    def end(self) -> None:
        """End what still runs."""
        with self._changed:
            self._is_stopping = self._is_ending = self._has_news = True
            self._changed.notify()

    def close(self) -> None:
        """End everything and the thread; before the pair is closed."""
        self.end()
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

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

    def _work(self) -> None:
        is_busy = False
        while self._wait(is_busy):
            try:
                is_busy = self._turn()
            except Exception as error:  # noqa: BLE001, PERF203  # all requests are told; the thread goes on
                is_busy = False
                for run in list(self._running):
                    self._end(run, Failed(error))

    def _turn(self) -> bool:
        """One evaluation and what belongs to it; whether anything happened."""
        self._end_unwanted()
        self._admit()
        self._make_room()
        is_busy = bool(self._running) and self._pair.step()
        for run in list(self._running):
            is_busy |= self._hand_out(run)
        return is_busy

    def _wait(self, is_busy: bool) -> bool:
        """Until there is something to do; False when that will never be."""
        with self._changed:
            while not (is_busy or self._has_news or self._is_closed):
                self._changed.wait()
            self._has_news = False
            return not self._is_closed or bool(self._running or self._waiting)

    def _end_unwanted(self) -> None:
        with self._changed:
            waiting = list(self._waiting)
            unwanted = [run for run in waiting if self._is_stopping or run.answer.is_cancelled]
            self._waiting = deque(run for run in waiting if run not in unwanted)
            ended = [run for run in self._running if self._is_ending or run.answer.is_cancelled]
        stopping = RequestError(503, "the server is stopping", code="server_stopping")
        for run in [*unwanted, *ended]:
            self._end(run, Failed(stopping))

    def _admit(self) -> None:
        """Start rows for which there is a place and room, in the order in which they came."""
        while True:
            with self._changed:
                if not self._waiting or len(self._running) >= self._parallel:
                    return
                run = self._waiting[0]
                taken = sum(map(_n_cells, self._running))
                if self._running and taken + _n_cells(run) + self._some_text(run) > self._n_cells:
                    return
                self._waiting.popleft()
                self._running.append(run)
            run.started_at = self._clock()
            try:
                run.stream = run.job.start(self._pair, self._policy, lambda *n, to=run: _read(to, *n))
                run.stream.ready()
            except Exception as error:  # noqa: BLE001  # the request is told
                self._end(run, Failed(error))

    def _make_room(self) -> None:
        """Let rows pause for which the KV cache has no room, and go on where it has room again.

        Who came first goes first, but who does not read what is there comes after all others.
        """
        taken, is_full = 0, False
        for run in sorted(self._running, key=lambda run: run.is_clogged):
            if run.stream is None:
                continue
            more = self._some_text(run) if run.stream.is_paused else 0
            is_full |= taken > 0 and taken + _n_cells(run) + more > self._n_cells
            if is_full:
                run.stream.pause()
            else:
                run.stream.go_on()
            taken += _n_cells(run)

    def _some_text(self, run: Run) -> int:
        """Tokens that a row should be able to add, so that it does not pause at once."""
        longest = min(len(run.job.prompt) + run.job.max_tokens, self._pair.target.context_size)
        return max(0, min(SOME_TEXT, longest + PADDING - _n_cells(run)))

    def _hand_out(self, run: Run) -> bool:
        """Pass on what a row has made; whether that was anything."""
        stream = run.stream
        if stream is None or run.is_clogged:
            return False
        try:
            parts = tuple(stream.ready())
        except Exception as error:  # noqa: BLE001  # the request is told
            self._end(run, Failed(error))
            return True
        new = stream.rounds[run.n_rounds_counted :]
        run.n_rounds_counted += len(new)
        self._metrics.rounds(new)
        if parts:
            run.first_at = self._clock() if run.first_at is None else run.first_at
            run.made.append(Wrote(parts))
        if stream.is_over:
            completion = stream.completion
            faster = speedup(completion.rounds, self._policy)
            self._end(run, Done(completion, faster, stream.n_thought))
            return True
        made, run.made = run.made, []
        if made:
            run.answer.post([(run, event) for event in made])
        return bool(made or new)

    def _end(self, run: Run, last: Event) -> None:
        if run.stream is not None:
            with suppress(Exception):  # whatever it is, the row is gone
                run.stream.close()
        with self._changed:
            if run in self._running:
                self._running.remove(run)
            self._has_news = True  # a place is free
        now = self._clock()
        if run.started_at is not None:
            self._usual_seconds += 0.2 * (now - run.started_at - self._usual_seconds)
        self._metrics.ended(run, last, now)
        run.answer.post([(run, event) for event in (*run.made, last)])
        run.made = []

    def _retry_seconds(self) -> int:
        """When there may be a place."""
        seconds = (len(self._waiting) + 1) * self._usual_seconds / self._parallel
        return max(1, min(LONGEST_RETRY_SECONDS, math.ceil(seconds)))


def speedup(rounds: Sequence[Round], policy: LengthPolicy) -> float | None:
    """How many times as fast as plain decoding a text was, by what plain rounds are believed to take."""
    if not isinstance(policy, AutoLength) or not rounds:
        return None
    believed = [policy.plain_seconds(round_.n_rows) for round_ in rounds]
    seconds = sum(round_.seconds for round_ in rounds)
    plain = sum((round_.n_accepted + 1) * each for round_, each in zip(rounds, believed, strict=True) if each)
    return plain / seconds if seconds > 0 and None not in believed else None


def _n_cells(run: Run) -> int:
    """Tokens that the KV cache must hold for the next evaluation of a row, with its draft and padding."""
    return PADDING + (len(run.job.prompt) if run.stream is None else run.stream.n_cells)


def _read(run: Run, n_read: int, n_to_read: int) -> None:
    run.made.append(Reading(n_read, n_to_read))
