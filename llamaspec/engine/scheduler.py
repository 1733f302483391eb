"""The scheduler: merges what texts want evaluated, and is the only one that touches models and the clock.

A text is a coroutine (`engine/stream.py`); a *row* is a text that the scheduler runs. A step is one
evaluation: of a draft model for all rows that draft, in lock-step; of the target for all rows whose drafts
are done; or of a part of a prompt, between rounds. Whoever waits for a row makes the steps, and they
advance all rows; the others wait for the lock. No thread is needed for that. tests/engine/test_scheduler.py
and tests/test_rows.py.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from llamaspec.engine.batching import Batching, model_of
from llamaspec.engine.row import Event, Row, Text, Width, unpadded
from llamaspec.errors import ClosedError, EvaluationAbortedError
from llamaspec.protocols import Model
from llamaspec.values import Forward, ForwardRequest, Logits

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
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        *,
        concurrent: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._models = dict(models)
        self._clock = clock
        self._lock = threading.RLock()  # held during a step
        self._new: deque[Row[Any]] = deque()  # rows that have not been started; appended without the lock
        self._rows: list[Row[Any]] = []
        self._evaluating: tuple[Row[Any], ...] = ()
        self._numbers = itertools.count()
        self._serials = itertools.count(1)
        self._batching = Batching(self._models, concurrent=concurrent)
        self._is_closed = False
        self._is_stepping = False
        self._process = os.getpid()
        # Only where models compute on different devices: on one, evaluations would disturb each other.
        self._workers = ThreadPoolExecutor(len(self._models), "llamaspec") if concurrent else None

    def start(self, text: Text[Event], width: Width = unpadded) -> Row[Event]:
        """Begin a text. From any thread, at any time; it joins the others at the next step."""
        self._check_open()
        row: Row[Event] = Row(next(self._numbers), text, width)
        self._new.append(row)
        return row

    def next_event(self, row: Row[Event]) -> Event | None:
        """The next event of a row; None after its end. Makes steps until there is one.

        Raises
        ------
        Exception
            Whatever ended the row.
        """
        while not row.events and not row.is_done:
            self._check_process()
            with self._lock:
                if not row.events and not row.is_done:
                    if not row.is_cancelled:  # else the step ends it
                        self._check_open()
                    self._step()
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
                self._end(row)

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
        for row in [*self._rows, *self._new]:
            row.is_cancelled = True
        for model in self._models.values():
            model.abort()
        with self._lock:
            for row in [] if self._is_stepping else [*self._rows, *self._new]:
                self._end(row)
        if self._workers is not None:
            self._workers.shutdown(wait=False)

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closed:
            raise ClosedError("the pair is closed; open it again")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError("this pair was opened before a fork; open it in the child process")

    def _step(self) -> bool:
        """Make one evaluation; False where no row needs one."""
        if self._is_stepping:
            raise RuntimeError(
                "a drafter cannot wait for a text of its own pair; let it yield a ForwardRequest"
            )
        self._is_stepping = True
        try:
            self._admit()
            groups = self._batching.groups(self._waiting())
            if groups:
                for group in groups:  # who had to wait comes first next time
                    self._rows.sort(key=lambda row: row in group)
                self._evaluate(groups)
            return bool(groups)
        finally:
            self._is_stepping = False

    def _waiting(self) -> list[Row[Any]]:
        """The rows that wait for an evaluation, all prepared at once."""
        while True:
            waiting = [row for row in self._rows if row.request is not None and len(row.events) < AHEAD]
            requests = [row.request for row in waiting]
            self._prepare(waiting)
            if all(row.request is request for row, request in zip(waiting, requests, strict=True)):
                return waiting

    def _admit(self) -> None:
        while self._new:
            row = self._new.popleft()
            if not row.is_done:
                self._rows.append(row)
                self._resume(row)
        for row in [row for row in self._rows if row.is_cancelled]:
            self._end(row)

    def _prepare(self, rows: Sequence[Row[Any]]) -> None:
        """Find out what is cached of every request, and end the rows that have no room."""
        for row in rows:
            if row.request is not None and row.request.model not in self._models:
                self._resume(row, error=ValueError(f"there is no model {row.request.model!r} to ask"))
        for name, model in self._models.items():
            asking = [row for row in rows if row.request is not None and row.request.model == name]
            batch = [
                (row.number, row.request, self._batching.padding_of(row)) for row in asking if row.request
            ]
            if not batch:
                continue
            begin = self._clock()
            answers = _prepared(model, batch)
            elapsed = self._clock() - begin
            for row, n_cached in zip(asking, answers, strict=True):
                row.overhead_seconds += elapsed
                if isinstance(n_cached, Exception):
                    self._resume(row, error=n_cached)
                    continue
                row.n_cached = n_cached
                if row.n_cached_before is None:
                    row.n_cached_before = n_cached
                if not row.n_new:  # a prompt that is cached
                    self._answer(row, np.empty((0, model.vocabulary_size), dtype=np.float32), _Evaluation())

    def _evaluate(self, groups: Sequence[list[Row[Any]]]) -> None:
        self._evaluating = tuple(itertools.chain.from_iterable(groups))
        try:
            jobs = [self._job(group) for group in groups]
            evaluations = [self._compute(*jobs[0])] if len(jobs) == 1 else self._compute_at_once(jobs)
        finally:
            self._evaluating = ()
        for group, evaluation in zip(groups, evaluations, strict=True):
            self._hand_out(group, evaluation)

    def _job(self, group: list[Row[Any]]) -> _Job:
        batch = [(row.number, self._batching.part(row)) for row in group]
        n = sum(request.n_tokens - row.n_cached for (_, request), row in zip(batch, group, strict=True))
        width = self._batching.width(group) or n if batch[0][1].n_scored else n
        return self._models[model_of(group)], batch, width - n, width

    def _compute(self, model: Model, batch: _Batch, n_padding: int, width: int) -> _Evaluation:
        begin = self._clock()
        try:
            logits = model.evaluate(batch, n_padding)
        except Exception as error:  # noqa: BLE001  # whatever it is, the rows are told
            return _Evaluation(error=error)
        return _Evaluation(logits, self._clock() - begin, width, len(batch), next(self._serials))

    def _compute_at_once(self, jobs: Sequence[_Job]) -> list[_Evaluation]:
        """On one thread for each model. None of them is running when this returns."""
        assert self._workers is not None
        running = [self._workers.submit(self._compute, *job) for job in jobs]
        try:
            return [future.result() for future in running]
        except BaseException:  # Ctrl-C
            for model, *_ in jobs:
                model.abort()
            wait(running)
            raise

    def _hand_out(self, group: list[Row[Any]], evaluation: _Evaluation) -> None:
        """Send what was computed to those who wait for it."""
        if isinstance(evaluation.error, EvaluationAbortedError):
            return  # the rows that were cancelled end at the next step, the others are evaluated again
        if evaluation.error is not None:
            for row in group:
                self._resume(row, error=evaluation.error)
            return
        for row, logits in zip(group, evaluation.logits, strict=True):
            request = row.request
            if request is None or row.is_cancelled:
                continue
            row.cost(evaluation.seconds)
            if self._batching.part(row) is request:
                self._answer(row, logits, evaluation)

    def _answer(self, row: Row[Any], logits: Logits, evaluation: _Evaluation) -> None:
        forward = Forward(
            logits,
            row.seconds,
            evaluation.width,
            evaluation.n_rows,
            row.n_cached if row.n_cached_before is None else row.n_cached_before,
            evaluation.serial,
        )
        self._resume(row, forward)

    def _resume(
        self, row: Row[Any], answer: Forward | None = None, *, error: Exception | None = None
    ) -> None:
        """Let a text go on, or know that its request cannot be evaluated."""
        try:
            row.go_on(self._clock, answer, error)
        except StopIteration:
            self._end(row)
        except Exception as raised:  # noqa: BLE001  # whoever reads the text is told
            self._end(row, raised)
        except BaseException:  # Ctrl-C: the text ends here
            self._end(row)
            raise

    def _end(self, row: Row[Any], error: BaseException | None = None) -> None:
        if row.is_done:
            return
        if row in self._rows:
            self._rows.remove(row)
        for model in self._models.values():
            model.release(row.number)
        try:
            row.text.close()
        except Exception as raised:  # noqa: BLE001  # of a drafter that does not let itself be closed
            error = error or raised
        finally:
            row.request, row.error, row.is_done = None, error, True


_Batch: TypeAlias = Sequence[tuple[int, ForwardRequest]]
_Job: TypeAlias = tuple[Model, _Batch, int, int]  # what to evaluate; positions of padding, and in all


@dataclass(frozen=True, slots=True, eq=False)
class _Evaluation:
    """What came of one evaluation; by default, of none."""

    logits: Sequence[Logits] = ()
    seconds: float = 0.0
    width: int = 0
    n_rows: int = 1
    serial: int = 0
    error: Exception | None = None


def _prepared(model: Model, batch: Sequence[tuple[int, ForwardRequest, int]]) -> Sequence[int | Exception]:
    """For each request how many of its tokens are cached, or why it cannot be evaluated."""
    try:
        return model.prepare(batch)
    except Exception:  # noqa: BLE001  # find out whose request it is
        return [_prepared_alone(model, entry) for entry in batch]


def _prepared_alone(model: Model, entry: tuple[int, ForwardRequest, int]) -> int | Exception:
    try:
        return model.prepare([entry])[0]
    except Exception as error:  # noqa: BLE001  # the row is told
        return error


@dataclass(frozen=True, slots=True)
class _Result(Generic[Result]):
    result: Result


def _with_result(measurement: Generator[ForwardRequest, Forward, Result]) -> Text[_Result[Result]]:
    result = yield from measurement
    yield _Result(result)
