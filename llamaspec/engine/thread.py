"""The compute thread: it alone calls llama.cpp, for every user of every pair of the process.

Callers hand in texts and read events from a queue each; a program that iterates, tasks of asyncio and the
server are the same thing seen from three sides. Ctrl-C in the main thread, and whoever cancels, set the abort
flag, which ends the running evaluation. Several pairs take turns, step by step: in a thread each, they would
want more OpenMP threads than there are cores, and those wait without spinning, for good.
tests/engine/test_threads.py.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.sequence import MAX_UNREAD, Event, RunningSequence, Text, Width, unpadded
from llamaspec.errors import ClosedError
from llamaspec.values import Forward, ForwardRequest

Result = TypeVar("Result")
Task: TypeAlias = Callable[[], object]  # what to do between two steps


class ComputeThread:
    """Runs a scheduler in the compute thread, from its first text to the end of this object.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers = itertools.count()
        # The thread knows nothing of this object, so that a forgotten one is finalized.
        self._seat = _Seat(scheduler)
        self._finalizer = weakref.finalize(self, self._seat.leave)

    def start(
        self,
        text: Text[Event],
        width: Width = unpadded,
        *,
        n_prompt: int = 0,
        limit: int | None = None,
        is_interactive: bool = False,
        notify: Callable[[], object] | None = None,
    ) -> RunningSequence[Event]:
        """Begin a text; from any thread. It joins the others at the next step.

        Parameters
        ----------
        text : coroutine
        width : callable
            As `SequenceLength.width`.
        n_prompt, limit : int
            Tokens that the text has at first, and at most.
        is_interactive : bool
            It goes before texts that are not.
        notify : callable, optional
            Called by the compute thread after each event.
        """
        sequence: RunningSequence[Event] = RunningSequence(
            next(self._numbers),
            text,
            width,
            n_prompt=n_prompt,
            limit=limit,
            is_interactive=is_interactive,
            notify=notify,
        )
        self._post(lambda: self._scheduler.add(sequence))
        return sequence

    def next_event(self, sequence: RunningSequence[Event]) -> Event | None:
        """The next event of a text, as soon as there is one; None after its end.

        Raises
        ------
        Exception
            Whatever ended the text.
        """
        self._check_caller()
        event = sequence.events.get()
        if event is None:
            sequence.events.put(None)  # for whoever asks again
            if sequence.error is not None:
                error, sequence.error = sequence.error, None
                raise error
        elif sequence.events.qsize() == MAX_UNREAD - 1:  # it waited for its reader
            self._seat.wake()
        return event

    def cancel(self, sequence: RunningSequence[Any]) -> None:
        """End a text within one evaluation; from any thread, at once, and harmless to other texts."""
        sequence.is_cancelled = True
        if os.getpid() == self._seat.process:
            self._scheduler.abort(sequence)
            self._seat.wake()

    def run(self, measurement: Generator[ForwardRequest, Forward, Result]) -> Result:
        """Run a coroutine that is no text, such as a measurement, to its end; returns its result."""
        sequence = self.start(_with_result(measurement))
        try:
            event = self.next_event(sequence)
        except BaseException:
            self.cancel(sequence)
            raise
        if event is None:
            raise ClosedError("the pair was closed")
        return event.result

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function in this thread, between two evaluations; returns its result."""
        self._check_caller()
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  # it is raised where it was asked for
                future.set_exception(error)

        self._post(run)
        return future.result()

    def close(self) -> None:
        """End all texts; more than once is allowed."""
        if os.getpid() == self._seat.process:  # otherwise the thread is only the parent's
            self._check_caller()
            self._seat.leave()

    def _post(self, task: Task) -> None:
        self._seat.post(task)

    def _check_caller(self) -> None:
        """Refuse what would wait for ever."""
        self._seat.check_process()
        if threading.current_thread() is self._seat.thread:
            raise RuntimeError("a drafter cannot wait for a text of a pair; let it yield a ForwardRequest")


class _Seat:
    """A scheduler's place in the compute thread: taken with its first task, until it leaves."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.process = os.getpid()
        self.thread: _Thread | None = None
        self.has_left = False
        self.ended = threading.Event()  # the thread has ended all texts

    def check_process(self) -> None:
        """Raise ClosedError in a child of the process."""
        if os.getpid() != self.process:
            raise ClosedError("this pair was opened before a fork; open it in the child process")

    def post(self, task: Task) -> None:
        """Have a task done between two steps."""
        self.check_process()
        with _seating:
            if self.has_left:
                raise ClosedError("the pair is closed; open it again")
            if self.thread is None:
                self.thread = _Thread.running()
                self.thread.n_seats += 1
            self.thread.inbox.put((self, task))

    def wake(self) -> None:
        """Have the thread look whether a text can go on."""
        if self.thread is not None:
            self.thread.inbox.put((self, _nothing))

    def leave(self) -> None:
        """End all texts and wait for that; in the thread itself (a finalizer may run anywhere), soon."""
        if os.getpid() != self.process:
            return
        with _seating:
            is_first, self.has_left = not self.has_left, True
        if self.thread is None:
            return
        if is_first:
            self.thread.inbox.put((self, None))
        if self.thread is threading.current_thread():
            return
        self.ended.wait(0.01)  # an idle thread is quick; aborting it would abort a model's next evaluation
        while not self.ended.wait(0.05) and self.thread.is_alive():
            self.scheduler.abort()


class _Thread(threading.Thread):
    """Makes steps while some text can go on; else waits for something to do. Ends with its last seat."""

    current: _Thread | None = None

    def __init__(self) -> None:
        super().__init__(name="llamaspec-compute", daemon=True)
        self.inbox: SimpleQueue[tuple[_Seat, Task | None]] = SimpleQueue()  # None: the seat is left
        self.n_seats = 0
        self._busy: list[_Seat] = []

    @classmethod
    def running(cls) -> _Thread:
        """The thread of this process; to be called by one caller at a time."""
        if cls.current is None:
            cls.current = cls()
            cls.current.start()
        return cls.current

    def run(self) -> None:
        """Make steps of all schedulers in turns."""
        while True:
            try:
                seat, task = self.inbox.get(block=not self._busy)
            except Empty:
                seat = self._busy.pop(0)
                if _attempt(seat.scheduler, seat.scheduler.step):
                    self._busy.append(seat)
            else:
                if task is not None:
                    _attempt(seat.scheduler, task)
                    if seat not in self._busy:
                        self._busy.append(seat)
                elif self._dismiss(seat):
                    return
            del seat
            task = None  # a task refers to the object whose end empties its seat

    def _dismiss(self, seat: _Seat) -> bool:
        """End the texts of a seat; whether it was the last seat."""
        if seat in self._busy:
            self._busy.remove(seat)
        seat.scheduler.end_all()
        with _seating:
            self.n_seats -= 1
            if not self.n_seats:
                _Thread.current = None
        seat.ended.set()
        return not self.n_seats


_seating = threading.RLock()  # who takes or leaves a seat; a finalizer may do so anywhere


def _forget_the_parents_thread() -> None:
    global _seating  # the parent's may be locked for ever
    _seating, _Thread.current = threading.RLock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents_thread)


def _nothing() -> None:
    """Wakes the thread."""


def _attempt(scheduler: Scheduler, task: Task) -> bool:
    """Whether something was done. A fault of the scheduler itself ends all texts, but not the thread."""
    try:
        return bool(task())
    except Exception as error:  # noqa: BLE001  # all readers are told
        scheduler.end_all(error)
        return False


@dataclass(frozen=True, slots=True)
class _Result(Generic[Result]):
    result: Result


def _with_result(measurement: Generator[ForwardRequest, Forward, Result]) -> Text[_Result[Result]]:
    result = yield from measurement
    yield _Result(result)
