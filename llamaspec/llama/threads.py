"""How many threads evaluate: as many as there are cores that other programs leave.

llama.cpp's threads wait for each other by spinning, so one thread that has lost its core to another program
keeps all of them waiting (docs/hardware.md). Threads that spin use all the time of their cores: what they did
not get was taken. Cores that were idle during evaluations may be taken back.

Without flash attention scores have the same bits at every number of threads, so it follows the machine at
once. With it over f16 values, llama.cpp splits a long cache among threads and adds up in another order, so
near ties may fall another way: there only a load that lasts counts.
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

WINDOW = 0.1  # seconds of evaluating that are looked at together
LASTING_WINDOW = 1.0  # the same, where bits depend on the number of threads
LONGEST_WINDOW = 4.0  # where loads come and go too fast to be followed, so that their mean counts
STEADY = 4  # windows; a choice that is taken back within fewer was too hasty
PAUSE = 0.05  # seconds between two evaluations after which the machine may have become another


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds that have passed on this machine."""

    wall: float
    own: float  # of processor time, in all threads of this process
    idle: float  # of processor time that nobody used, on the cores that this process may use


def usage() -> Usage:
    """As the system tells it now."""
    times = psutil.cpu_times(percpu=True)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(times))
    idle = sum(times[core].idle for core in cores if core < len(times))
    return Usage(time.perf_counter(), time.process_time(), idle)


class ThreadGovernor:
    """Tells before every evaluation how many threads it should use.

    On a quiet machine `most`, and never more; `n_cores` are the hardware threads that this process may use,
    `shortest` the seconds of evaluating that a choice needs.
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
        self._spare = max(0, n_cores - most)  # that are idle on a quiet machine, too
        self._look, self._clock = look, clock
        self.n_threads = most  # for the next evaluation
        self._since: Usage | None = None  # what the open window began with
        self._evaluated = 0.0  # seconds of it
        self._wanted = 0.0  # seconds of processor time that its threads would have used on a quiet machine
        self._shortest = self._window = shortest
        self._n_windows = STEADY  # since the latest change
        self._rose = False  # by that change
        self._end = 0.0  # of the latest evaluation

    def begin(self) -> None:
        """An evaluation begins."""
        now = self._clock()
        if self._most > 1 and (self._since is None or now - self._end > PAUSE):
            self._begin_window(self._look())
        self._end = now

    def finish(self, n_threads: int) -> None:
        """It is over, and has used so many threads."""
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
        """Followed as fast as it comes and goes, a load would make every choice wrong: look longer then."""
        if n == self.n_threads:
            self._n_windows += 1
            if self._n_windows % STEADY == 0:
                self._window = max(self._window / 2, self._shortest)
            return
        if self._n_windows < STEADY and (n > self.n_threads) != self._rose:
            self._window = min(2 * max(self._window, self._evaluated), LONGEST_WINDOW)
        self._n_windows, self._rose, self.n_threads = 0, n > self.n_threads, n

    def _surplus(self, since: Usage, latest: Usage) -> float:
        """Cores that were idle, less those that these threads wanted and did not get."""
        wall = latest.wall - since.wall
        idle = (latest.idle - since.idle) / wall - self._spare
        missed = (self._wanted - (latest.own - since.own)) / wall
        return idle - max(missed, 0.0)


@functools.cache
def governors() -> tuple[ThreadGovernor, ThreadGovernor]:
    """Those of this process, for all models meet one machine: it follows each load, or those that last."""
    most, n_cores = runtime.default_threads(), runtime.n_hardware_threads()
    return ThreadGovernor(most, n_cores), ThreadGovernor(most, n_cores, LASTING_WINDOW)
