"""The memory and cores that this process may use, and the number of threads that evaluate.

llama.cpp's threads wait for each other by spinning, so if another program takes the core of one thread, all
of them wait (docs/hardware.md). So there are as many threads as cores that other programs leave idle.
Spinning threads use all the time of their cores; if they got less, other programs took it. Cores that were
idle during evaluations can be taken back.

Without flash attention, logits are bit-identical for every number of threads, so the number follows the load
at once. With flash attention over f16 values, llama.cpp splits a long cache among threads and sums in another
order, so near ties may be decided differently. There the number follows only a lasting load.
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

WINDOW = 0.1  # seconds of evaluation between two choices
LASTING_WINDOW = 1.0  # the same, if bits depend on the number of threads
LONGEST_WINDOW = 4.0  # if the load changes too fast to follow, so that its mean counts
STEADY = 4  # windows; a choice reversed within fewer was made too soon
PAUSE = 0.05  # seconds between two evaluations after which the load may have changed


def available_bytes() -> int:
    """Memory that the machine, and the container around this process, can still give."""
    free = psutil.virtual_memory().available
    room = container_room(Path("/"))
    return free if room is None else min(free, room)


def total_bytes(root: Path = Path("/")) -> int:
    """Memory of the machine, or of the container around this process if that has less."""
    return min([psutil.virtual_memory().total, *(limit for _, limit in _memory_limits(root))])


def container_room(root: Path) -> int | None:
    """Bytes that Linux control groups leave, by their files below `root`; None if there is no limit.

    The page cache counts as free: the kernel drops it if it needs room.
    """
    rooms = []
    for group, limit in _memory_limits(root):
        used = _words(group / "memory.current", group / "memory.usage_in_bytes")
        if used:
            words = _words(group / "memory.stat")
            facts = dict(zip(words[::2], map(int, words[1::2]), strict=False))
            n_cached = facts.get("total_cache", facts.get("file", 0))
            n_pinned = facts.get("total_shmem", facts.get("shmem", 0))
            rooms.append(limit - int(used[0]) + n_cached - n_pinned)
    return max(0, min(rooms)) if rooms else None


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    """The control groups that limit the memory of this process, and their limits in bytes."""
    for group in _control_groups(root, "memory"):
        limit = _words(group / "memory.max", group / "memory.limit_in_bytes")
        if limit and limit[0].isdigit():
            yield group, int(limit[0])


def cpu_quota(root: Path) -> float | None:
    """Cores whose time Linux control groups allow, by their files below `root`; None = all."""
    quotas = []
    for group in _control_groups(root, "cpu"):
        match _words(group / "cpu.max", group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us"):
            case [quota, period] if quota.isdigit() and period.isdigit():
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and those around it, in either version of control groups."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            own = top / path.strip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def _words(*files: Path) -> list[str]:
    """The words in the first of some files that has any."""
    return next((words for file in files if (words := " ".join(_lines(file)).split())), [])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def n_hardware_threads() -> int:
    """Hardware threads that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def default_threads() -> int:
    """Number of cores of equal speed: physical cores, on Apple Silicon the performance cores.

    Not more than a container may use at once.
    """
    return max(1, min(_full_speed_cores(), int(cpu_quota(Path("/")) or 1 << 16)))


def _full_speed_cores() -> int:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]  # unknown to Macs whose cores are all alike
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.stdout.strip().isdigit():
            return int(answer.stdout)
    if hasattr(os, "sched_getaffinity"):
        topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings"
        cores = os.sched_getaffinity(0)
        return len({"".join(_lines(Path(topology.format(core)))) or core for core in cores})
    return psutil.cpu_count(logical=False) or max(1, n_hardware_threads() // 2)


# The number of threads


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
    most, n_cores = default_threads(), n_hardware_threads()
    return ThreadGovernor(most, n_cores), ThreadGovernor(most, n_cores, LASTING_WINDOW)
