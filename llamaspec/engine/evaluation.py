"""Evaluations, one or several at once, and what came of each; what a model raises is an answer, too.

Knows no rows' texts: who is told what, the scheduler decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple, TypeAlias

from llamaspec.protocols import Model
from llamaspec.values import ForwardRequest, Logits

Prepared: TypeAlias = tuple[int, ForwardRequest, int]  # row, request, positions of padding


class Job(NamedTuple):
    """What to evaluate."""

    model: Model
    batch: Sequence[tuple[int, ForwardRequest]]  # rows and their requests
    n_padding: int  # positions
    width: int  # positions, with the padding
    n_beside: int = 0  # of these, the last row's: of a prompt, beside the rounds of the others


class Evaluation(NamedTuple):
    """What came of one evaluation; by default, of none."""

    logits: Sequence[Logits] = ()
    seconds: float = 0.0
    width: int = 0
    n_rows: int = 1  # without one that reads beside the others
    serial: int = 0
    n_beside: int = 0  # positions of that one
    error: Exception | None = None


class Evaluator:
    """Lets models evaluate.

    Parameters
    ----------
    n_at_once : int
        Evaluations of different models that may run at the same time; 1 needs no thread.
    clock : callable
        Seconds.
    """

    def __init__(self, n_at_once: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._serials = itertools.count(1)
        self._workers = ThreadPoolExecutor(n_at_once, "llamaspec") if n_at_once > 1 else None

    @property
    def is_concurrent(self) -> bool:
        """Whether something can be done while a model evaluates."""
        return self._workers is not None

    def evaluate(
        self, jobs: Sequence[Job], meanwhile: Callable[[Callable[[], bool]], None] | None = None
    ) -> list[Evaluation]:
        """What came of each job. None of them is running when this returns.

        `meanwhile` is called with a function that says whether one still is.
        """
        if len(jobs) == 1 and meanwhile is None:
            return [self._compute(*jobs[0])]
        assert self._workers is not None
        running = [self._workers.submit(self._compute, *job) for job in jobs]
        try:
            if meanwhile is not None:
                meanwhile(lambda: not all(future.done() for future in running))
            return [future.result() for future in running]
        except BaseException:  # Ctrl-C
            for job in jobs:
                job.model.abort()
            wait(running)
            raise

    def close(self) -> None:
        """Let the threads end."""
        if self._workers is not None:
            self._workers.shutdown(wait=False)

    def _compute(
        self,
        model: Model,
        batch: Sequence[tuple[int, ForwardRequest]],
        n_padding: int,
        width: int,
        n_beside: int,
    ) -> Evaluation:
        begin = self._clock()
        try:
            logits = model.evaluate(batch, n_padding)
        except Exception as error:  # noqa: BLE001  # whatever it is, the rows are told
            return Evaluation(error=error)
        seconds, n_rows = self._clock() - begin, len(batch) - bool(n_beside)
        return Evaluation(logits, seconds, width, n_rows, next(self._serials), n_beside)


def prepared(model: Model, batch: Sequence[Prepared]) -> Sequence[int | Exception]:
    """For each request how many of its tokens are cached, or why it cannot be evaluated."""
    try:
        return model.prepare(batch)
    except Exception:  # noqa: BLE001  # find out whose request it is
        return [_prepared_alone(model, entry) for entry in batch]


def _prepared_alone(model: Model, entry: Prepared) -> int | Exception:
    try:
        return model.prepare([entry])[0]
    except Exception as error:  # noqa: BLE001  # the row is told
        return error
