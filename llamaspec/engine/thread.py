"""The compute thread: the only thread that calls llama.cpp, for all pairs of the process.

Callers start sequences and take the events of each from its queue, in any thread or event loop. Pairs take
turns of one evaluation each. Cancelling, and Ctrl-C in the main thread, set llama.cpp's abort flag, which
ends the running evaluation. There is one thread because each would have its own team of OpenMP threads: if
these outnumber the cores, they sleep instead of spinning, and evaluations take several times as long.
tests/engine/test_threads.py and tests/engine/test_several_pairs.py.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Generator
from queue import SimpleQueue
from typing import Any, TypeVar

from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.sequence import MAX_UNREAD, Event, Generating, RunningSequence
from llamaspec.errors import ClosedError
from llamaspec.values import Forward, ForwardRequest

Result = TypeVar("Result")

ABORT_SECONDS = 0.05  # between attempts to abort an evaluation, as one just before its start has no effect


class ComputeThread:
    """Runs a scheduler in the compute thread, from its first sequence until it is closed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers = itertools.count()
        # The thread refers only to the seat, so that an object of this class can be finalized.
        self._seat = _Seat(scheduler)
        weakref.finalize(self, self._seat.leave)
        _stop_at_exit()

    def start(self, sequence: RunningSequence[Any]) -> None:
        """Start a sequence, from any thread. It joins the others at the next step."""
        sequence.number = next(self._numbers)
        try:
            self._check_process()
            self._seat.post(sequence)
        except BaseException:  # Ctrl-C, or no thread can be started: the caller will not read its events
            sequence.is_cancelled = True
            raise

    def next_event(self, sequence: RunningSequence[Event]) -> Event | None:
        """Wait for the next event of a sequence; None after its end. Raises the error that ended it."""
        self._check_caller()
        event = sequence.next_event()
        if event is not None and sequence.events.qsize() == MAX_UNREAD - 1:  # the sequence may continue
            self._seat.wake()
        return event

    def cancel(self, sequence: RunningSequence[Any]) -> None:
        """Abort the evaluation of a sequence and end it, from any thread; other sequences continue."""
        sequence.is_cancelled = True
        if self._seat.is_here:
            self._scheduler.abort(sequence)
            self._seat.wake()

    def run(self, measurement: Generator[ForwardRequest, Forward, Result]) -> Result:
        """Run a coroutine that generates nothing, such as a measurement, and return its result."""
        self._check_caller()
        sequence = RunningSequence(_with_result(measurement))
        self.start(sequence)
        try:
            event = self.next_event(sequence)
        except BaseException:
            self.cancel(sequence)
            raise
        if event is None:
            raise ClosedError("the pair was closed")
        return event[0]

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function in the compute thread between two evaluations, and return its result."""

        def calling() -> Generator[ForwardRequest, Forward, Result]:
            yield from ()
            return function()

        return self.run(calling())

    def close(self) -> None:
        """End all sequences, and wait until they have ended. May be called more than once."""
        if self._seat.is_here:  # after a fork there is nothing to wait for
            self._check_caller()
        self._seat.close()

    def _check_process(self) -> None:
        if not self._seat.is_here:
            raise ClosedError("this pair was opened before a fork; open it in the child process")

    def _check_caller(self) -> None:
        """Refuse a call that would wait forever."""
        self._check_process()
        if threading.get_ident() == self._seat.thread.ident:
            raise RuntimeError(
                "a drafter cannot wait for a completion of a pair; let it yield a ForwardRequest"
            )


class _Seat:
    """A scheduler's place in the compute thread, from its first sequence until it is closed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.thread = _shared
        self.is_closed = False
        self._is_used = False
        self._new: SimpleQueue[RunningSequence[Any]] = SimpleQueue()  # not started yet
        self._ended = threading.Event()

    @property
    def is_here(self) -> bool:
        """Whether the thread belongs to this process, not to its parent before a fork."""
        return self.thread is _shared

    def post(self, sequence: RunningSequence[Any]) -> None:
        """Let the thread start a sequence."""
        if self.is_closed or self.thread.is_stopped:
            raise ClosedError("the pair is closed; open it again")
        self._is_used = True  # first, so that `close` waits for the thread from now on
        self._new.put(sequence)
        self.thread.admit(self)

    def wake(self) -> None:
        """Let the thread check again whether a sequence can continue; never waits."""
        if self._is_used and self.is_here and not self._ended.is_set():
            self.thread.wake()

    def leave(self) -> None:
        """Let the thread end all sequences. Never waits, because a finalizer may run in any thread."""
        self.is_closed = True
        self.wake()

    def close(self) -> None:
        """End all sequences, and wait until they have ended."""
        self.is_closed = True
        if not self._is_used or not self.is_here or self._ended.is_set():
            return
        self.thread.admit(self)
        while not self._ended.is_set():
            self.scheduler.abort()
            self._ended.wait(ABORT_SECONDS)

    def take_turn(self) -> bool:
        """Start new sequences and make a step; False if no sequence can continue.

        An error of the scheduler ends its sequences, but not the thread.
        """
        try:
            for _ in range(self._new.qsize()):
                self.scheduler.add(self._new.get())
            return self.scheduler.step()
        except BaseException as error:  # noqa: BLE001  # raised to all readers
            self.scheduler.end_all(error)
            return True

    def end(self) -> None:
        """End all sequences, even those that have not started."""
        self.is_closed = True
        self.scheduler.end_all()
        while not self._new.empty():
            self._new.get().end(None)
        self._ended.set()


class _SharedThread:
    """The compute thread of a process; it runs while there are seats.

    A caller puts a message into `_news` and then checks whether a thread runs. A thread that ends gives up
    `_role` and then checks `_news`. So no message is lost, and no caller holds a lock while a thread starts:
    a finalizer that runs in the new thread might need the same lock.
    """

    def __init__(self) -> None:
        self.ident: int | None = None  # of the running thread
        self.is_stopped = False
        self._news: SimpleQueue[tuple[_Seat, ...]] = SimpleQueue()  # seats to admit; none = wake up
        self._role = threading.Lock()  # held by the running thread
        self._computing: Scheduler | None = None

    def admit(self, seat: _Seat) -> None:
        """Let a seat take turns, in a new thread if none runs."""
        self._news.put((seat,))
        if not self._role.locked():
            threading.Thread(target=self._run, name="llamaspec-compute", daemon=True).start()

    def wake(self) -> None:
        """Let every seat take a turn."""
        self._news.put(())

    def stop(self) -> None:
        """End all sequences of all seats, and do not run again."""
        self.is_stopped = True
        self.wake()
        while not self._role.acquire(timeout=ABORT_SECONDS):
            computing = self._computing
            if computing is not None:
                computing.abort()

    def _run(self) -> None:
        while not self._news.empty() and self._role.acquire(blocking=False):  # else another thread runs
            try:
                self.ident = threading.get_ident()
                self._work()
            finally:
                self.ident = None
                self._role.release()

    def _work(self) -> None:
        """Give turns to all seats until none is left."""
        seats: set[_Seat] = set()
        is_busy = True
        while seats or not self._news.empty():
            for _ in range(max(self._news.qsize(), not is_busy)):  # waits if no sequence can continue
                seats.update(self._news.get())
            is_busy = self._give_turns(seats)

    def _give_turns(self, seats: set[_Seat]) -> bool:
        """Make one step for each seat; False if no sequence can continue."""
        is_busy = False
        for seat in tuple(seats):
            if seat.is_closed or self.is_stopped:
                seats.remove(seat)
                seat.end()
            else:
                self._computing = seat.scheduler
                is_busy |= seat.take_turn()
        self._computing = None  # a reference would keep an unused pair alive
        return is_busy


_shared = _SharedThread()


def _replace_thread() -> None:
    """Start over in a child process, which lacks the threads of its parent."""
    global _shared
    _shared = _SharedThread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_thread)


@functools.cache
def _stop_at_exit() -> None:
    """Stop the thread at exit, before models are freed: exit handlers run in reverse order."""
    atexit.register(lambda: _shared.stop())


def _with_result(measurement: Generator[ForwardRequest, Forward, Result]) -> Generating[tuple[Result]]:
    result = yield from measurement
    yield (result,)
