"""The compute thread: it alone calls llama.cpp, for every user of a pair.

Callers hand in texts and read events from a queue each; a program that iterates, tasks of asyncio and the
server are the same thing seen from three sides. Ctrl-C in the main thread, and whoever cancels, set the abort
flag, which ends the running evaluation. tests/engine/test_threads.py.
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
Inbox: TypeAlias = "SimpleQueue[Callable[[], None] | None]"  # what to do between two steps; None = end


class ComputeThread:
    """Runs a scheduler in a thread of its own, which starts with the first text and ends with this object.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._inbox: Inbox = SimpleQueue()
        self._numbers = itertools.count()
        self._process = os.getpid()
        # The thread knows nothing of this object, so that a forgotten one is finalized.
        self._thread = threading.Thread(
            target=_work, args=(scheduler, self._inbox), name="llamaspec-compute", daemon=True
        )
        self._starting = threading.Lock()
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _stop, scheduler, self._inbox, self._thread, self._process)

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
            self._inbox.put(_nothing)
        return event

    def cancel(self, sequence: RunningSequence[Any]) -> None:
        """End a text within one evaluation; from any thread, at once, and harmless to other texts."""
        sequence.is_cancelled = True
        if os.getpid() == self._process:
            self._scheduler.abort(sequence)
            self._inbox.put(_nothing)

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
        """End all texts and the thread; more than once is allowed."""
        self._is_closed = True
        if os.getpid() != self._process:
            return  # the thread is only the parent's
        self._check_caller()
        with self._starting:
            pass
        _stop(self._scheduler, self._inbox, self._thread, self._process)

    def _post(self, task: Callable[[], None]) -> None:
        if os.getpid() != self._process:
            raise ClosedError("this pair was opened before a fork; open it in the child process")
        with self._starting:
            if self._is_closed:
                raise ClosedError("the pair is closed; open it again")
            self._inbox.put(task)
            if not self._thread.ident:
                self._thread.start()

    def _check_caller(self) -> None:
        """Refuse what would wait for ever."""
        if os.getpid() != self._process:
            raise ClosedError("this pair was opened before a fork; open it in the child process")
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a drafter cannot wait for a text of its own pair; let it yield a ForwardRequest"
            )


def _nothing() -> None:
    """Wakes the thread."""


def _work(scheduler: Scheduler, inbox: Inbox) -> None:
    """Make steps while some text can go on; else wait for something to do."""
    is_busy = False
    while True:
        try:
            task = inbox.get(block=not is_busy)
        except Empty:
            is_busy = _attempt(scheduler, scheduler.step)
            continue
        if task is None:
            break
        _attempt(scheduler, task)
        task, is_busy = None, True  # a task refers to the object whose end ends this thread
    scheduler.end_all()
    while not inbox.empty():  # what nobody will do
        task = inbox.get()
        if task is not None:
            _attempt(scheduler, task)
    scheduler.end_all()


def _attempt(scheduler: Scheduler, task: Callable[[], object]) -> bool:
    """Whether something was done. A fault of the scheduler itself ends all texts, but not the thread."""
    try:
        return bool(task())
    except Exception as error:  # noqa: BLE001  # all readers are told
        scheduler.end_all(error)
        return False


def _stop(scheduler: Scheduler, inbox: Inbox, thread: threading.Thread, process: int) -> None:
    """End the thread, from any other; from itself (a finalizer may run anywhere) soon."""
    if os.getpid() != process or not thread.ident:
        return
    inbox.put(None)
    if thread is threading.current_thread():
        return
    thread.join(0.01)  # an idle thread ends at once; aborting it would abort a model's next evaluation
    while thread.is_alive():
        scheduler.abort()
        thread.join(0.05)


@dataclass(frozen=True, slots=True)
class _Result(Generic[Result]):
    result: Result


def _with_result(measurement: Generator[ForwardRequest, Forward, Result]) -> Text[_Result[Result]]:
    result = yield from measurement
    yield _Result(result)
