"""llama.cpp in this process: its start, its log, aborting, and the memory and cores that it may use.

llama.cpp explains failures only in its log, so error lines are kept for the messages of exceptions.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from llama_cpp import llama_cpp as lib
from llama_cpp._ggml import libggml

from llamaspec.errors import ClosedError, printable

_LONGEST_REASON = 500  # characters; files may name things at any length
_GPU_KINDS = (1, 2)  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU
_LEVEL_ERROR, _LEVEL_CONTINUED = 4, 5


class _Log:
    """Receives llama.cpp's log lines."""

    def __init__(self) -> None:
        self.verbose = False
        self.errors: deque[str] = deque(maxlen=8)
        self.flash_attention: bool | None = None
        self._level = 0
        # llama.cpp keeps only a pointer: the callback must live as long as the process.
        self.callback = lib.llama_log_callback(self._receive)

    def _receive(self, level: int, text: bytes, _user_data: object) -> None:
        self._level = level if level != _LEVEL_CONTINUED else self._level
        line = text.decode("utf-8", errors="replace")
        if self._level >= _LEVEL_ERROR and line.strip():
            self.errors.append(line.strip())
        if "Flash Attention" in line:
            self.flash_attention = "enabled" in line
        if self.verbose and sys.stderr is not None:
            sys.stderr.write(line)


_log = _Log()


@functools.cache
def start() -> None:
    """Start llama.cpp; later calls do nothing."""
    lib.llama_log_set(_log.callback, ctypes.c_void_p(0))
    lib.llama_backend_init()


def set_verbose(verbose: bool) -> None:
    """Show llama.cpp's own log on stderr, or keep it silent."""
    _log.verbose = verbose


def clear_errors() -> None:
    """Forget earlier errors, before an attempt whose failure is to be explained."""
    _log.errors.clear()


def failure_reason() -> str:
    """Why the latest attempt failed, in one line: the first error since `clear_errors` is the cause."""
    said = _log.errors[0] if _log.errors else "llama.cpp gave no reason; --verbose shows its log"
    return printable(said)[:_LONGEST_REASON]


def expect_flash_attention() -> None:
    """Forget what an earlier context said; the next one may say whether it has flash attention."""
    _log.flash_attention = None


def flash_attention() -> bool | None:
    """Whether the latest context has flash attention, if llama.cpp chose; None if it did not say."""
    return _log.flash_attention


@contextmanager
def raising_callbacks() -> Iterator[None]:
    """Raise exceptions of Python callbacks after the call of llama.cpp; ctypes would print them and go on.

    Callbacks run in the thread that calls llama.cpp, so each thread gets the exceptions of its own. Blocks of
    several threads may end in any order: a hook that stays behind passes everything on to the one before it.
    """
    raised: list[BaseException] = []
    usual, thread, is_open = sys.unraisablehook, threading.get_ident(), True

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        is_ours = is_open and threading.get_ident() == thread
        error = unraisable.exc_value
        if is_ours and error is not None and "ctypes" in (unraisable.err_msg or ""):
            raised.append(error)
        else:
            usual(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        is_open = False
        if sys.unraisablehook is hook:
            sys.unraisablehook = usual
    if raised:
        raise raised[0]


class AbortFlag:
    """Ends a running evaluation, from any thread.

    llama.cpp asks at every node of its graph whether to abort, by calling a function with an address. Python
    would take the interpreter's lock each time, so the function is C's strlen: an empty string means no.
    """

    ASK = lib.ggml_abort_callback(ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value or 0)

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)
        self.address = ctypes.addressof(self._text)

    def set(self) -> None:
        """Abort the evaluation that runs, or the next one."""
        self._text[0] = b"1"

    def clear(self) -> None:
        """Let evaluations run."""
        self._text[0] = b"\0"


@functools.cache
def repacking_is_safe() -> bool:
    """Whether llama.cpp may rearrange weights.

    A build with AMX made by GCC crashes at the first evaluation of rearranged weights
    (ggml-org/llama.cpp#20824).
    """
    return b"AMX_INT8 = 1" not in lib.llama_print_system_info()


@functools.cache
def backend_description() -> str:
    """The build of llama.cpp and what it computes on, in one line."""
    start()
    features = lib.llama_print_system_info().decode("utf-8", errors="replace")
    offload = "with GPU offload" if can_offload() else "no GPU offload"
    return f"llama-cpp-python {version('llama-cpp-python')}, {offload}, {features}"


def ggml_function(name: str, result: type | None, *arguments: type) -> Any:
    """A function of ggml with these types; llama.h has none for devices and tensors."""
    found = libggml[name]  # by index: an object of our own, whose types nobody else changes
    found.restype, found.argtypes = result, arguments
    return found


def can_offload() -> bool:
    """Whether this build of llama.cpp computes on a GPU of this machine.

    `llama_supports_gpu_offload` says yes in every build that has RPC.
    """
    start()
    by_kind = ggml_function("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)
    return any(by_kind(kind) for kind in _GPU_KINDS)


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


class Handle:
    """Owns a pointer, which `free` frees; keeps `needs` alive until then."""

    def __init__(self, pointer: Any, free: Callable[[Any], object], *needs: object) -> None:
        self.pointer = pointer
        self._process = os.getpid()
        weakref.finalize(self, _free, pointer, free, self._process, needs)

    def check(self) -> None:
        """Raise ClosedError in a forked process."""
        if os.getpid() != self._process:
            raise ClosedError("this model was opened before a fork; open it in the child process")


def _free(pointer: Any, free: Callable[[Any], object], process: int, needs: tuple[object, ...]) -> None:
    if os.getpid() == process:
        free(pointer)
    del needs  # it had to live until here
