"""One thread steps all running rows and hands out what they make. Only this thread evaluates.

Which rows these are, the queue says (`row_queue.py`), and which of them pause, the KV cache's room
(`room.py`). So the text of a row is the one that it would be alone, and a fault of one row ends that row.
tests/serve/test_load.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.serve.answers import Done, Event, Failed, Reading, Run, Wrote
from llamaspec.serve.figures import speedup
from llamaspec.serve.metrics import Metrics
from llamaspec.serve.room import Room
from llamaspec.serve.row_queue import RowQueue, server_stopping


class Decoder:
    """Runs what a queue holds on a pair, until it is closed.

    Parameters
    ----------
    pair : Pair
    policy : LengthPolicy
        Shared by all rows.
    metrics : Metrics
    queue : RowQueue
    room : Room
        Of the pair's KV cache.
    clock : callable
        Seconds, as the queue's.
    """

    def __init__(
        self,
        pair: Pair,
        policy: LengthPolicy,
        metrics: Metrics,
        queue: RowQueue,
        room: Room,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pair, self._policy, self._metrics, self._clock = pair, policy, metrics, clock
        self._queue, self._room = queue, room
        self._thread = threading.Thread(target=self._work, name="llamaspec-decode", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End everything and the thread; before the pair is closed."""
        self._queue.close()
        self._thread.join()

    def _work(self) -> None:
        is_busy = False
        while self._queue.wait(is_busy):
            try:
                is_busy = self._turn()
            except Exception as error:  # noqa: BLE001, PERF203  # all requests are told; the thread goes on
                is_busy = False
                for run in self._queue.running:
                    self._end(run, Failed(error))

    def _turn(self) -> bool:
        """One evaluation and what belongs to it; whether anything happened."""
        for run in self._queue.unwanted():
            self._end(run, Failed(server_stopping()))
        while begun := self._queue.begin_next(self._room.is_there_for):
            self._start(begun)
        running = self._queue.running
        self._room.share_out(running)
        is_busy = bool(running) and self._pair.step()
        for run in running:
            is_busy |= self._hand_out(run)
        return is_busy

    def _start(self, run: Run) -> None:
        try:
            run.stream = run.job.start(self._pair, self._policy, lambda *n: run.made.append(Reading(*n)))
            run.stream.ready()
        except Exception as error:  # noqa: BLE001  # the request is told
            self._end(run, Failed(error))

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
        self._metrics.ended(run, last, self._queue.remove(run))
        run.answer.post([(run, event) for event in (*run.made, last)])
        run.made = []
