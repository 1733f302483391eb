"""The number of threads that evaluate: as many as there are cores that other programs leave idle.

llama.cpp's threads wait for each other by spinning, so if another program takes the core of one thread, all
of them wait (docs/hardware.md). Spinning threads use all the time of their cores; if they got less, other
programs took it. Cores that were idle during evaluations can be taken back.

Without flash attention, logits are bit-identical for every number of threads, so the number follows the load
at once. With flash attention over f16 values, llama.cpp splits a long cache among threads and sums in another
order, so near ties may be decided differently. There the number follows only a lasting load.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from llamaspec.llama import runtime

WINDOW = 0.1  # seconds of evaluation between two choices
LASTING_WINDOW = 1.0  # the same, if bits depend on the number of threads
LONGEST_WINDOW = 4.0  # if the load changes too fast to follow, so that its mean counts
STEADY = 4  # windows; a choice reversed within fewer was made too soon
PAUSE = 0.05  # seconds between two evaluations after which the load may have changed


@dataclass(frozen=True, slots=True)
class Usage:
    """Clock and processor time of this machine, in seconds."""

    wall: float
    own: float  # of processor time, in all threads of this process
    idle: float  # on the cores that this process may use


def usage() -> Usage:
    """Read the current times from the system."""
    times = psutil.cpu_times(percpu=True)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(times))
    idle = sum(times[core].idle for core in cores if core < len(times))
    return Usage(time.perf_counter(), time.process_time(), idle)


class ThreadGovernor:
    """Chooses the number of threads of the next evaluation.

    It is `most` on an idle machine, and never more. This process may use `n_cores` hardware threads. A choice
    needs at least `shortest` seconds of evaluation.
    """

    def __init__(
        self,
        most: int,
        n_cores: int,
        shortest: float = WINDOW,
        look: Callable[[], Usage] = usage,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._most = most
        self._spare = max(0, n_cores - most)  # cores that stay idle
        self._look, self._clock = look, clock
        self.n_threads = most  # for the next evaluation
        self._since: Usage | None = None  # at the start of the current window
        self._evaluated = 0.0  # seconds in the current window
        self._wanted = 0.0  # seconds of processor time that its threads would use on an idle machine
        self._shortest = self._window = shortest
        self._n_windows = STEADY  # since the latest change
        self._rose = False  # in that change
        self._end = 0.0  # of the latest evaluation, in seconds

    def begin(self) -> None:
        """Record the start of an evaluation."""
        now = self._clock()
        if self._most > 1 and (self._since is None or now - self._end > PAUSE):
            self._begin_window(self._look())
        self._end = now

    def finish(self, n_threads: int) -> None:
        """Record the end of an evaluation that used `n_threads`."""
        now = self._clock()
        self._evaluated += now - self._end
        self._wanted += n_threads * (now - self._end)
        self._end = now
        if self._since is not None and self._evaluated >= self._window:
            latest = self._look()
            n, surplus = self.n_threads, self._surplus(self._since, latest)
            more = round(surplus) if self._window == WINDOW else math.floor(surplus + 1 / (n + 1))
            self._change(min(max(n + more, 1), self._most))
            self._begin_window(latest)

    def _begin_window(self, since: Usage) -> None:
        self._since, self._evaluated, self._wanted = since, 0.0, 0.0

    def _change(self, n: int) -> None:
        """Change the number; lengthen the window if the load changes faster than the choice can follow."""
        if n == self.n_threads:
            self._n_windows += 1
            if self._n_windows % STEADY == 0:
                self._window = max(self._window / 2, self._shortest)
            return
        if self._n_windows < STEADY and (n > self.n_threads) != self._rose:
            self._window = min(2 * max(self._window, self._evaluated), LONGEST_WINDOW)
        self._n_windows, self._rose, self.n_threads = 0, n > self.n_threads, n

    def _surplus(self, since: Usage, latest: Usage) -> float:
        """Return the number of idle cores, minus the cores that these threads needed and did not get."""
        wall = latest.wall - since.wall
        idle = (latest.idle - since.idle) / wall - self._spare
        missed = (self._wanted - (latest.own - since.own)) / wall
        return idle - max(missed, 0.0)


@functools.cache
def governors() -> tuple[ThreadGovernor, ThreadGovernor]:
    """Return two governors shared by all models: one follows every load, one only lasting loads."""
    most, n_cores = runtime.default_threads(), runtime.n_hardware_threads()
    return ThreadGovernor(most, n_cores), ThreadGovernor(most, n_cores, LASTING_WINDOW)
