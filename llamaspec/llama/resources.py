"""The memory and cores that this process may use, and the number of threads that evaluate.

llama.cpp's threads wait for each other by spinning. If another program takes the core of one thread, all of
them wait (docs/hardware.md), so there are only as many threads as cores that other programs leave idle.
Spinning threads use all the time of their cores; if they got less, other programs took the rest. Cores that
were idle during evaluations can be used again. Before the first evaluation and after a long pause, the load
while the model was opened, or of the pause, decides, if the programs still run.

With our kernels, and without flash attention, logits have the same bits at every number of threads, so the
number follows the load at once. In llama.cpp's flash attention over f16 values, threads share a long cache
and add up in another order, so near ties may be decided differently: the number follows only a lasting load.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

WINDOW = 0.1  # seconds of evaluation between two choices
LASTING_WINDOW = 1.0  # the same, if bits depend on the number of threads
LONGEST_WINDOW = 4.0  # the same, if the load changes too fast to follow: then its mean decides
STEADY = 4  # windows; a choice that is reversed within fewer was made too soon
LOOKS, BETWEEN_LOOKS = 3, 0.005  # seconds; further looks at the programs that run
STORE_SHARE, MAX_STORE_BYTES = 4, 8 << 30  # a store takes at most 1 / STORE_SHARE of the free memory
PAUSE = 0.05  # seconds without evaluations after which the load may have changed

# Linux's measures of a core, and the ratio to the next faster core below which another kind begins. Each core
# may have its own highest frequency, but those of one kind differ by a few per cent from one to the next.
_SPEEDS = {"cpu_capacity": 0.7, "cpufreq/cpuinfo_max_freq": 0.9}


def available_bytes() -> int:
    """Return the free memory of the machine, or of the container around this process if it has less."""
    free = psutil.virtual_memory().available
    room = container_room(Path("/"))
    return free if room is None else min(free, room)


def default_store_bytes(weights_bytes: int) -> int:
    """Return the default limit of a store: a quarter of the memory besides the weights, at most 8 GiB."""
    return min(max(0, available_bytes() - weights_bytes) // STORE_SHARE, MAX_STORE_BYTES)


def total_bytes(root: Path = Path("/")) -> int:
    """Return the memory of the machine, or of the container around this process if it has less."""
    return min([psutil.virtual_memory().total, *(limit for _, limit in _memory_limits(root))])


def give_back_memory() -> None:
    """Return freed memory to the system, if the C library has a function for that (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def container_room(root: Path) -> int | None:
    """Return the free bytes within the limits of Linux control groups; None if there is no limit.

    `root` is the folder that contains /proc and /sys. The page cache counts as free: the kernel drops it if
    it needs room.
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
    """Yield the control groups that limit the memory of this process, with their limits in bytes."""
    for group in _control_groups(root, "memory"):
        limit = _words(group / "memory.max", group / "memory.limit_in_bytes")
        if limit and limit[0].isdigit():
            yield group, int(limit[0])


def cpu_quota(root: Path) -> float | None:
    """Return the number of cores that Linux control groups allow this process; None = all."""
    quotas = []
    for group in _control_groups(root, "cpu"):
        match _words(group / "cpu.max", group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us"):
            case [quota, period] if quota.isdigit() and period.isdigit():
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's group and those of the groups around it, in version 1 or 2."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            own = top / path.strip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def _words(*files: Path) -> list[str]:
    """Return the words in the first file that has any."""
    return next((words for file in files if (words := " ".join(_lines(file)).split())), [])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def n_hardware_threads() -> int:
    """Return the number of hardware threads of full-speed cores that this process may use."""
    return len(watched_threads())


@functools.cache
def watched_threads() -> frozenset[int]:
    """Return the hardware threads whose load decides about the number of threads."""
    return frozenset(full_speed_threads())


@functools.cache
def default_threads() -> int:
    """Return the number of full-speed cores, but at most as many as a container may use at once."""
    return max(1, min(n_full_speed_cores(), int(cpu_quota(Path("/")) or 1 << 16)))


def n_full_speed_cores(root: Path = Path("/")) -> int:
    """Return the number of physical cores of the fastest kind that this process may use."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]  # fails on Macs whose cores are all alike
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.stdout.strip().isdigit():
            return int(answer.stdout)
    if hasattr(os, "sched_getaffinity"):
        return _n_physical(full_speed_threads(root), root)
    return psutil.cpu_count(logical=False) or max(1, (os.cpu_count() or 1) // 2)


def full_speed_threads(root: Path = Path("/")) -> set[int]:
    """Return the hardware threads of the fastest kind of cores that this process may use; macOS: all.

    Threads share the work of an operation evenly, so fast cores would wait for slow ones.
    """
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    threads = set(os.sched_getaffinity(0))
    if fast := threads & _numbers(root / "sys/devices/cpu_core/cpus"):  # Intel's hybrids have this file
        return fast
    for name, gap in _SPEEDS.items():
        files = {thread: root / f"sys/devices/system/cpu/cpu{thread}/{name}" for thread in threads}
        speeds = {thread: int(words[0]) for thread, file in files.items() if (words := _words(file))}
        if len(speeds) == len(threads) and len({*speeds.values()}) > 1:
            return _fastest_kind(speeds, gap, root)
    return threads


def _fastest_kind(speeds: Mapping[int, int], gap: float, root: Path) -> set[int]:
    """Return the threads before the first gap in the speeds. A single favoured core is no kind of its own."""
    order = sorted(speeds, key=lambda thread: -speeds[thread])
    for n in range(1, len(order)):
        if speeds[order[n]] < gap * speeds[order[n - 1]] and _n_physical(order[:n], root) > 1:
            return set(order[:n])
    return set(order)


def _n_physical(threads: Iterable[int], root: Path) -> int:
    """Return the number of cores that have these hardware threads."""
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings"
    return len({"".join(_lines(root / siblings.format(thread))) or thread for thread in threads})


def _numbers(path: Path) -> set[int]:
    """Return the numbers in a file such as "0-7,16"."""
    ranges = [part.partition("-") for part in "".join(_words(path)).split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


# The number of threads


@dataclass(frozen=True, slots=True)
class Usage:
    """Times of this machine up to a moment, in seconds."""

    wall: float
    own: float  # processor time of all threads of this process
    idle: float  # of the full-speed cores that this process may use; 0 if the system does not count it


def usage() -> Usage:
    """Return the times up to now."""
    times = psutil.cpu_times(percpu=True)
    watched = [times[thread] for thread in watched_threads() if thread < len(times)]
    # Linux counts waits for disks apart.
    idle = sum(each.idle + getattr(each, "iowait", 0.0) for each in watched)
    return Usage(time.perf_counter(), time.process_time(), idle)


def n_running_elsewhere() -> int | None:
    """Return how many threads of other processes want a core now; None if that is not known.

    It is the least of a few looks, because many programs run for a moment only. On an idle machine there is
    one look, without waiting.
    """
    n = _n_running_elsewhere()
    for _ in range(LOOKS):
        if not n:
            break
        time.sleep(BETWEEN_LOOKS)
        n = min(n, _n_running_elsewhere() or 0)
    return n


def _n_running_elsewhere() -> int | None:
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        n_all = next(int(line.split()[1]) for line in lines if line.startswith("procs_running"))
        stats = [path.read_text() for path in Path("/proc/self/task").glob("*/stat")]
    except (OSError, StopIteration, ValueError, IndexError):  # another system, or a thread that ended
        return None
    return max(n_all - sum(stat.rpartition(")")[2].lstrip().startswith("R") for stat in stats), 0)


@dataclass(slots=True)
class Window:
    """The evaluations between two choices of the number of threads."""

    since: Usage
    evaluated: float = 0.0  # seconds of evaluation
    wanted: float = 0.0  # seconds of processor time that their threads would use on an idle machine

    def add(self, seconds: float, n_threads: int) -> None:
        """Add an evaluation."""
        self.evaluated += seconds
        self.wanted += n_threads * seconds

    def surplus(self, latest: Usage) -> float:
        """Return the number of idle cores, minus the cores that threads needed and did not get."""
        wall = latest.wall - self.since.wall
        missed = (self.wanted - (latest.own - self.since.own)) / wall
        return (latest.idle - self.since.idle) / wall - max(missed, 0.0)


class ThreadGovernor:
    """Chooses the number of threads of the next evaluation: at most `most`, fewer on a busy machine.

    This process may use `n_cores` hardware threads. A choice needs `shortest` seconds of evaluation.
    """

    def __init__(
        self,
        most: int,
        n_cores: int,
        shortest: float = WINDOW,
        look: Callable[[], Usage] = usage,
        clock: Callable[[], float] = time.perf_counter,
        count: Callable[[], int | None] = n_running_elsewhere,
    ) -> None:
        self._most = most
        self._spare = max(0, n_cores - most)  # cores that stay idle
        self._look, self._clock, self._count = look, clock, count
        self.n_threads = most  # for the next evaluation
        self._window: Window | None = None
        self._is_new = True  # nothing was evaluated yet
        self._shortest = self._seconds = shortest  # of evaluation in a window
        self._n_windows = STEADY  # since the latest change
        self._rose = False  # in that change
        self._end = 0.0  # of the latest evaluation, or the start of the current one or of the first look

    def look(self) -> None:
        """Look at the load while a model is opened, unless evaluations have already shown it."""
        if self._most > 1 and self._is_new:
            self._window, self._end = Window(self._look()), self._clock()

    def begin(self) -> None:
        """Record the start of an evaluation; after a long pause, first choose its number of threads."""
        now = self._clock()
        if self._most > 1 and (self._window is None or now - self._end > PAUSE):
            latest = self._look()
            if self._window is not None and latest.idle > 0:
                self._choose_after(now - self._end, self._window, latest)
            self._window = Window(latest)
        self._end, self._is_new = now, False

    def finish(self, n_threads: int) -> None:
        """Record the end of an evaluation that used `n_threads`."""
        now, window = self._clock(), self._window
        seconds, self._end = now - self._end, now
        if window is None:
            return
        window.add(seconds, n_threads)
        if window.evaluated >= self._seconds:
            latest, n = self._look(), self.n_threads
            surplus = window.surplus(latest) - self._spare
            more = round(surplus) if self._seconds == WINDOW else math.floor(surplus + 1 / (n + 1))
            self._change(self._possible(n + more), window.evaluated)
            self._window = Window(latest)

    def _choose_after(self, pause: float, window: Window, latest: Usage) -> None:
        """Choose by the load of a window that ends with a pause, if that was long enough.

        Only programs that run now count: an agent's tests may have filled the pause, and ended.
        """
        n_running = self._count()
        if n_running is not None and pause >= (self._shortest if self._is_new else LASTING_WINDOW):
            window.add(pause, self.n_threads)  # as if threads had waited for cores
            chosen = self.n_threads + round(window.surplus(latest) - self._spare)
            self.n_threads = self._possible(max(chosen, self._most - n_running))
            self._n_windows = STEADY

    def _possible(self, n: int) -> int:
        return min(max(n, 1), self._most)

    def _change(self, n: int, evaluated: float) -> None:
        """Change the number; lengthen the window if the load changes faster than the choice can follow."""
        if n == self.n_threads:
            self._n_windows += 1
            if self._n_windows % STEADY == 0:
                self._seconds = max(self._seconds / 2, self._shortest)
            return
        if self._n_windows < STEADY and (n > self.n_threads) != self._rose:
            self._seconds = min(2 * max(self._seconds, evaluated), LONGEST_WINDOW)
        self._n_windows, self._rose, self.n_threads = 0, n > self.n_threads, n


@functools.cache
def governors() -> tuple[ThreadGovernor, ThreadGovernor]:
    """Return the two governors that all models share: one follows every load, one only lasting loads."""
    most, n_cores = default_threads(), n_hardware_threads()
    return ThreadGovernor(most, n_cores), ThreadGovernor(most, n_cores, LASTING_WINDOW)
