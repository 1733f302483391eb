"""What llama.cpp needs once for a process: its start, its log, the threads worth using.

llama.cpp explains failures only in its log; the last errors are kept here, so that an exception can say
what went wrong while the log itself stays silent.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib
from llama_cpp._ggml import libggml

from llamaspec.errors import printable

_LONGEST_REASON = 500  # characters; files may name things at any length
_GPU_KINDS = (1, 2)  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU
_LEVEL_WARNING, _LEVEL_ERROR, _LEVEL_CONTINUED = 3, 4, 5


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
        if self._level >= _LEVEL_ERROR:
            self.errors.append(line.strip())
        if "Flash Attention" in line:
            self.flash_attention = "enabled" in line
        if self.verbose:
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
    """Forget what was said before, ahead of an attempt whose outcome is to be explained."""
    _log.errors.clear()
    _log.flash_attention = None


def last_error() -> str:
    """What llama.cpp said about the latest failure, in one line."""
    said = next((line for line in _log.errors if line), "llama.cpp gave no reason; --verbose shows its log")
    return printable(said)[:_LONGEST_REASON]


def flash_attention() -> bool | None:
    """Whether the latest context got flash attention, where that was left to llama.cpp; None: not said."""
    return _log.flash_attention


@contextmanager
def raising_callbacks() -> Iterator[None]:
    """Raise what Python callbacks raise during a call of llama.cpp, once the call is over.

    ctypes would print it and go on; Ctrl-C is met in a callback more often than not.
    """
    raised: list[BaseException] = []
    usual = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_value is not None and "ctypes" in (unraisable.err_msg or ""):
            raised.append(unraisable.exc_value)
        else:
            usual(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
    if raised:
        raise raised[0]


@contextmanager
def raising_signals() -> Iterator[None]:
    """Raise what the handler of a signal raises while llama.cpp calls the log: Ctrl-C would be lost there.

    Handlers run in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with raising_callbacks():
        yield


def available_bytes() -> int | None:
    """Memory that the machine can still give; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def repacking_is_safe() -> bool:
    """Whether llama.cpp may rearrange weights.

    Builds with AMX by GCC end the process at the first evaluation of rearranged weights
    (ggml-org/llama.cpp#20824); without AMX they are sound.
    """
    return b"AMX_INT8 = 1" not in lib.llama_print_system_info()


@functools.cache
def backend_description() -> str:
    """The build of llama.cpp and what it computes on, in one line."""
    start()
    features = lib.llama_print_system_info().decode("utf-8", errors="replace")
    return f"llama-cpp-python {version('llama-cpp-python')}, GPU offload {can_offload()}, {features}"


def ggml_function(name: str, result: type | None, *arguments: type) -> Any:
    """A function of ggml's with these types; llama.h does not list devices, ggml does."""
    found = libggml[name]  # by index: an object of our own, whose types nobody else changes
    found.restype, found.argtypes = result, arguments
    return found


def can_offload() -> bool:
    """Whether this build of llama.cpp computes on a GPU of this machine.

    llama.cpp's own answer is yes in every build that has RPC.
    """
    start()
    by_kind = ggml_function("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)
    return any(by_kind(kind) for kind in _GPU_KINDS)


@functools.cache
def default_threads() -> int:
    """Cores that do equal work at full speed: physical cores, on Apple Silicon the performance cores.

    Not more than a container may use at once.
    """
    return max(1, min(_full_speed_cores(), int(cpu_quota(Path("/")) or 1 << 16)))


def n_hardware_threads() -> int:
    """Hardware threads that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path) -> float | None:
    """Cores whose time a Linux control group may use, as its files below `root` say; None: all.

    The least of the group and those around it, in either version of control groups.
    """
    quotas = []
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            top = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            top = root / "sys/fs/cgroup/cpu"
        else:
            continue
        own = top / path.strip("/")
        for group in [group for group in (own, *own.parents) if group.is_relative_to(top)]:
            files = (
                _lines(group / "cpu.max"),
                _lines(group / "cpu.cfs_quota_us"),
                _lines(group / "cpu.cfs_period_us"),
            )
            match " ".join(itertools.chain.from_iterable(files)).split():
                case [quota, period] if quota.isdigit() and period.isdigit() and int(period):
                    quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _full_speed_cores() -> int:
    if sys.platform == "darwin":
        for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
            answer = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
            if answer.stdout.strip().isdigit():
                return int(answer.stdout)
    if hasattr(os, "sched_getaffinity"):
        return len({_siblings(core) for core in os.sched_getaffinity(0)})
    return max(1, (os.cpu_count() or 2) // 2)


def _siblings(core: int) -> str:
    """A name shared by the hardware threads of one physical core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings").read_text()
    except OSError:
        return str(core)
