"""The scheduler: merges what texts want evaluated, and is the only one that touches models and the clock.

A text is a coroutine (`engine/write.py`); a *row* is a text that the scheduler runs. A step is one
evaluation: of a draft model for all rows that draft, in lock-step; of the target for all rows whose drafts
are done; or of a part of a prompt, between rounds. Whoever waits for a row makes the steps, and they
advance all rows; the others wait for the lock. No thread is needed for that. tests/engine/test_scheduler.py
and tests/test_rows.py.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from llamaspec.engine.ahead import draft_ahead
from llamaspec.engine.batching import Batching, Group
from llamaspec.engine.evaluation import Evaluation, Evaluator, Job, Prepared, prepared
from llamaspec.engine.row import Event, Row, Text, Width, unpadded
from llamaspec.engine.running import RunningRows
from llamaspec.errors import ClosedError
from llamaspec.protocols import Model
from llamaspec.values import TARGET, Forward, ForwardRequest

Result = TypeVar("Result")

AHEAD = 16  # events that a row may have made before anybody takes them


class Scheduler:
    """Runs texts over models.

    Parameters
    ----------
    models : mapping of name -> Model
        TARGET among them. Other models draft; they are asked in reverse order, so a draft's draft comes last.
    concurrent : bool
        The models compute on different devices, so that drafting and verifying may run at once.
    clock : callable
        Seconds.
    leave : callable
        Called by a thread that evaluates no more for now: its row has ended, or another's may be next.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        *,
        concurrent: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._models = dict(models)
        self._clock = clock
        self._leave = leave
        self._lock = threading.RLock()  # held during a step
        self._rows = RunningRows(self._models.values(), clock)
        self._evaluating: list[Row[Any]] = []
        self._numbers = itertools.count()
        self._batching = Batching(self._models, concurrent=concurrent)
        self._is_closed = False
        self._is_stepping = False
        self._process = os.getpid()
        # Several at once only where models compute on different devices: on one, they disturb each other.
        self._evaluator = Evaluator(len(self._models) if concurrent else 1, clock)

    def start(self, text: Text[Event], width: Width = unpadded) -> Row[Event]:
        """Begin a text. From any thread, at any time; it joins the others at the next step."""
        self._check_open()
        row: Row[Event] = Row(next(self._numbers), text, width)
        self._rows.add(row)
        return row

    def next_event(self, row: Row[Event]) -> Event | None:
        """The next event of a row; None after its end. Makes steps until there is one.

        Raises
        ------
        Exception
            Whatever ended the row.
        """
        row.caller = threading.get_ident()
        while not row.events and not row.is_done:
            self._check_process()
            with self._lock:
                self._step_for(row)
        if row.events:
            return row.events.popleft()
        if row.error is not None:
            error, row.error = row.error, None
            raise error
        return None

    def step(self) -> bool:
        """Make one evaluation for all rows, for who reads their events later; False where none is needed."""
        with self._lock:
            self._check_open()
            return self._step()

    def cancel(self, row: Row[Any]) -> None:
        """End a row, within one evaluation; from any thread, and harmless to other rows."""
        row.is_cancelled = True
        if os.getpid() != self._process:
            return  # the lock may be held for ever: by a thread that only the parent has
        if row in self._evaluating:
            for model in self._models.values():
                model.abort()
        with self._lock:
            if not self._is_stepping:  # else called from within a step, which ends the row
                self._rows.end(row)

    def pause(self, row: Row[Any]) -> None:
        """Evaluate nothing for a row until `go_on`, which reads its text again: others may have its room.

        For who steps; `next_event` of a paused row would wait for ever.
        """
        with self._lock:
            if not row.is_paused and not row.is_done:
                row.is_paused = True
                for model in self._models.values():
                    model.release(row.number)

    def go_on(self, row: Row[Any]) -> None:
        """Let a paused row take part in the next step."""
        row.is_paused = False

    def run(self, measurement: Generator[ForwardRequest, Forward, Result]) -> Result:
        """Run a coroutine that is no text, such as a measurement, to its end; returns its result."""
        row = self.start(_with_result(measurement))
        try:
            event = self.next_event(row)
        except BaseException:
            self.cancel(row)
            raise
        if event is None:
            raise ClosedError("the pair was closed")
        return event.result

    def forget(self) -> None:
        """Empty the KV caches; rows that are running read their text again."""
        self._check_open()
        with self._lock:
            for model in self._models.values():
                model.forget()

    def close(self) -> None:
        """End all rows; more than once is allowed."""
        self._is_closed = True
        if os.getpid() != self._process:
            return  # nothing here is this process's
        for row in self._rows.all():
            row.is_cancelled = True
        for model in self._models.values():
            model.abort()
        with self._lock:
            for row in [] if self._is_stepping else self._rows.all():
                self._rows.end(row)
        self._evaluator.close()

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closed:
            raise ClosedError("the pair is closed; open it again")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError("this pair was opened before a fork; open it in the child process")

    def _step_for(self, row: Row[Any]) -> None:
        """Make one evaluation, unless the row has got what it waits for."""
        if row.events or row.is_done:
            return
        if self._is_closed and not row.is_cancelled:  # else the step ends it
            self._check_open()
        self._step()
        running = self._rows.started
        if row not in running or any(other.caller not in {None, row.caller} for other in running):
            self._leave()

    def _step(self) -> bool:
        """Make one evaluation; False where no row needs one."""
        if self._is_stepping:
            raise RuntimeError(
                "a drafter cannot wait for a text of its own pair; let it yield a ForwardRequest"
            )
        self._is_stepping = True
        try:
            self._rows.admit()
            groups = self._batching.groups(self._waiting())
            if groups:
                for group in groups:
                    self._rows.put_last(group.rows)  # who had to wait comes first next time
                self._evaluate(groups)
            return bool(groups)
        finally:
            self._is_stepping = False

    def _waiting(self) -> list[Row[Any]]:
        """The rows that wait for an evaluation, all prepared at once."""
        while True:
            waiting: list[Row[Any]] = []
            asking: dict[str, list[tuple[Row[Any], ForwardRequest]]] = {}
            for row in self._rows.started:
                if row.request is not None and not row.is_paused and len(row.events) < AHEAD:
                    waiting.append(row)
                    asking.setdefault(row.request.model, []).append((row, row.request))
            n_prepared = 0
            for name, requests in asking.items():
                n_prepared += self._prepare(name, requests)
            if n_prepared == len(waiting):
                return waiting

    def _prepare(self, name: str, asking: Sequence[tuple[Row[Any], ForwardRequest]]) -> int:
        """Find out what is cached of requests for one model; how many of them are to be evaluated.

        The others are answered: they are cached as they are, or cannot be evaluated.
        """
        model = self._models.get(name)
        if model is None:
            for row, _ in asking:
                self._rows.resume(row, error=ValueError(f"there is no model {name!r} to ask"))
            return 0
        begin = self._clock()
        batch: list[Prepared] = []
        for row, request in asking:
            row.n_padding = self._batching.padding(row, request, len(asking))
            batch.append((row.number, request, row.n_padding))
        answers = prepared(model, batch)
        share, n_prepared = (self._clock() - begin) / len(asking), 0
        for (row, request), n_cached in zip(asking, answers, strict=True):
            row.overhead_seconds += share
            if isinstance(n_cached, Exception):
                self._rows.resume(row, error=n_cached)
                continue
            row.n_cached, row.n_new = n_cached, request.n_tokens - n_cached
            row.part = self._batching.part(request, n_cached)
            if row.n_cached_before is None:
                row.n_cached_before = n_cached
            if row.n_new:
                n_prepared += 1
            else:  # a prompt that is cached
                self._rows.answer(row, np.empty((0, model.vocabulary_size), dtype=np.float32), Evaluation())
        return n_prepared

    def _evaluate(self, groups: Sequence[Group]) -> None:
        jobs: list[Job] = []
        for group in groups:
            self._evaluating += group.rows
            jobs.append(self._job(group))
        begin, meanwhile = self._clock(), self._meanwhile(groups)
        try:
            evaluations = self._evaluator.evaluate(jobs, meanwhile)
        finally:
            self._evaluating = []
        if meanwhile is not None:  # its last step may have outlasted the target
            waited = self._clock() - begin - evaluations[0].seconds
            for row in groups[0].rows:
                row.overhead_seconds += waited
        for group, evaluation in zip(groups, evaluations, strict=True):
            self._rows.hand_out(group.rows, evaluation)

    def _meanwhile(self, groups: Sequence[Group]) -> Callable[[Callable[[], bool]], None] | None:
        """What rows want drafted while the target verifies, where that can be and no other row drafts."""
        if not self._evaluator.is_concurrent or [group.model for group in groups] != [TARGET]:
            return None
        rows = [
            (row.number, row.request.meanwhile)
            for row in groups[0].rows
            if row.request is not None and row.part is row.request and row.request.meanwhile is not None
        ]
        return functools.partial(draft_ahead, self._models, rows) if rows else None

    def _job(self, group: Group) -> Job:
        batch: list[tuple[int, ForwardRequest]] = []
        n_padding = group.width
        for row in group.rows:
            assert row.part is not None
            batch.append((row.number, row.part))
            n_padding -= row.part.n_tokens - row.n_cached
        return Job(self._models[group.model], batch, n_padding, group.width, group.n_beside)


@dataclass(frozen=True, slots=True)
class _Result(Generic[Result]):
    result: Result


def _with_result(measurement: Generator[ForwardRequest, Forward, Result]) -> Text[_Result[Result]]:
    result = yield from measurement
    yield _Result(result)
