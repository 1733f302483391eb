"""The rows of a scheduler: they join, go on, and end.

Every text's coroutine is driven here, and whatever goes wrong in one ends that one alone. Knows nothing of
what is evaluated together. tests/engine/test_faults.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from llamaspec.engine.evaluation import Evaluation
from llamaspec.engine.row import Clock, Row
from llamaspec.errors import EvaluationAbortedError
from llamaspec.protocols import Model
from llamaspec.values import Forward, Logits


class RunningRows:
    """All rows that have not ended.

    Parameters
    ----------
    models : collection of Model
        Told of rows that have ended.
    clock : callable
        Seconds.
    """

    def __init__(self, models: Collection[Model], clock: Clock) -> None:
        self._models = models
        self._clock = clock
        self._new: deque[Row[Any]] = deque()  # appended by any thread
        self.started: list[Row[Any]] = []

    def add(self, row: Row[Any]) -> None:
        """A row joins at the next step; from any thread."""
        self._new.append(row)

    def all(self) -> list[Row[Any]]:
        """Started or not."""
        return [*self.started, *self._new]

    def put_last(self, rows: Sequence[Row[Any]]) -> None:
        """Let other rows come before some; else the order stays."""
        if len(rows) < len(self.started):
            self.started.sort(key=rows.__contains__)

    def admit(self) -> None:
        """Start the rows that have joined, end those that were cancelled."""
        while self._new:
            row = self._new.popleft()
            if not row.is_done:
                self.started.append(row)
                self.resume(row)
        for row in tuple(self.started):
            if row.is_cancelled:
                self.end(row)

    def hand_out(self, rows: Sequence[Row[Any]], evaluation: Evaluation) -> None:
        """Send what was computed to those who wait for it."""
        if isinstance(evaluation.error, EvaluationAbortedError):
            return  # the rows that were cancelled end at the next step, the others are evaluated again
        if evaluation.error is not None:
            for row in rows:
                self.resume(row, error=evaluation.error)
            return
        reader = rows[-1] if evaluation.n_beside else None
        reading = evaluation.seconds * evaluation.n_beside / evaluation.width
        for row, logits in zip(rows, evaluation.logits, strict=True):
            if row.request is None or row.is_cancelled:
                continue
            row.cost(reading if row is reader else evaluation.seconds - reading)
            if row.part is row.request:
                self.answer(row, logits, evaluation)

    def answer(self, row: Row[Any], logits: Logits, evaluation: Evaluation) -> None:
        """Send a text what it waits for."""
        forward = Forward(
            logits,
            row.seconds,
            evaluation.width,
            evaluation.n_rows,
            row.n_cached if row.n_cached_before is None else row.n_cached_before,
            evaluation.serial,
            evaluation.n_beside,
        )
        self.resume(row, forward)

    def resume(self, row: Row[Any], answer: Forward | None = None, *, error: Exception | None = None) -> None:
        """Let a text go on, or know that its request cannot be evaluated."""
        try:
            row.go_on(self._clock, answer, error)
        except StopIteration:
            self.end(row)
        except Exception as raised:  # noqa: BLE001  # whoever reads the text is told
            self.end(row, raised)
        except BaseException:  # Ctrl-C: the text ends here
            self.end(row)
            raise

    def end(self, row: Row[Any], error: BaseException | None = None) -> None:
        """A row is over; more than once is allowed."""
        if row.is_done:
            return
        if row in self.started:
            self.started.remove(row)
        for model in self._models:
            model.release(row.number)
        try:
            row.text.close()
        except Exception as raised:  # noqa: BLE001  # of a drafter that does not let itself be closed
            error = error or raised
        finally:
            row.request, row.error, row.is_done = None, error, True
