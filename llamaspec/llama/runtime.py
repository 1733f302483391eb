"""llama.cpp in this process: start, log, build, aborting evaluations, freeing objects.

llama.cpp explains failures only in its log, so the messages of exceptions quote its error lines. It logs in
the thread that called it, so each call can tell its own lines from those of other threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib
from llama_cpp._ggml import libggml

from llamaspec.errors import ClosedError, DeviceError, printable
from llamaspec.kernels import Kernels, library

_LONGEST_REASON = 500  # characters; names in a damaged file may have any length
_INSTRUCTIONS = {  # ggml's names and Linux's
    "avx": "avx", "f16c": "f16c", "fma": "fma", "avx2": "avx2", "bmi2": "bmi2", "avx_vnni": "avx_vnni",
    "avx512": "avx512f", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16", "dotprod": "asimddp",
    "matmul_int8": "i8mm", "sve": "sve",
}  # fmt: skip
_FLAGS = {"x86_64": "flags", "aarch64": "Features"}  # the line of /proc/cpuinfo
_GPU_KINDS = (1, 2)  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU
_LEVEL_ERROR, _LEVEL_CONTINUED = 4, 5
_MOST_ERRORS = 8  # lines that are kept of one call


class Said:
    """What llama.cpp's log says during one call."""

    def __init__(self) -> None:
        self.errors: list[str] = []  # the first ones
        self.flash_attention: bool | None = None  # of the context that was made; None if the log does not say

    @property
    def reason(self) -> str:
        """The reason of a failure, in one line: the first error is the cause of the others."""
        said = self.errors[0] if self.errors else "llama.cpp gave no reason; --verbose shows its log"
        return printable(said)[:_LONGEST_REASON]

    def add(self, level: int, line: str) -> None:
        """Add a line."""
        if level >= _LEVEL_ERROR and line.strip() and len(self.errors) < _MOST_ERRORS:
            self.errors.append(line.strip())
        if "Flash Attention" in line:
            self.flash_attention = "enabled" in line


class _OfThread(threading.local):
    level = 0  # of its latest line
    said: Said | None = None  # in its running call


class Log:
    """A receiver of llama.cpp's log."""

    def __init__(self) -> None:
        self.verbose = False  # whether to show the log on stderr
        self._here = _OfThread()
        # llama.cpp keeps only a pointer: the callback must live as long as the process.
        self.callback = lib.llama_log_callback(self._receive)

    @contextmanager
    def of_call(self) -> Iterator[Said]:
        """Collect what the log says while this thread is in the block."""
        outer, self._here.said = self._here.said, Said()
        try:
            yield self._here.said
        finally:
            self._here.said = outer

    def _receive(self, level: int, text: bytes, _user_data: object) -> None:
        here = self._here
        here.level = level if level != _LEVEL_CONTINUED else here.level
        line = text.decode("utf-8", errors="replace")
        if here.said is not None:
            here.said.add(here.level, line)
        if self.verbose and sys.stderr is not None:
            sys.stderr.write(line)


log = Log()


@functools.cache
def start() -> None:
    """Start llama.cpp; later calls do nothing.

    Raises
    ------
    DeviceError
        llama.cpp was built for a newer processor: one instruction could end the process.
    """
    missing = missing_instructions(loaded("ggml-cpu"), Path("/proc/cpuinfo"), platform.machine())
    if missing:
        name = "llama-cpp-python"
        options = f"--force-reinstall --no-deps --no-cache-dir --no-binary {name}"
        remedy = f"pip install {options} {name}=={version(name)}"
        what = f"this llama.cpp is built for processors with {', '.join(missing)}, which this one lacks"
        raise DeviceError(f"{what}; build it here: {remedy}")
    lib.llama_log_set(log.callback, ctypes.c_void_p(0))
    lib.llama_backend_init()


def kernels() -> Kernels:
    """Return our own kernels in this process, or why they are off; if nobody has chosen, choose "auto"."""
    choose_kernels(None)
    return library.facts


def choose_kernels(choice: str | None) -> None:
    """Choose for the whole process, before the first model is opened; see `KernelLibrary.choose`."""
    start()
    library.choose(choice, loaded)


def loaded(name: str) -> ctypes.CDLL | None:
    """Return a library that llama.cpp has loaded; None if its build has no such library.

    The folder may hold several copies, of which one is loaded.
    """
    for path in sorted(Path(libggml._name).parent.glob(f"lib{name}.so*")):
        with suppress(OSError):  # it is another copy
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
    return None


def missing_instructions(cpu: ctypes.CDLL | None, described: Path, machine: str) -> list[str]:
    """Return the instruction sets that ggml-cpu was built with and the processor lacks, as Linux names them.

    An emulator may show the file of the machine below it, which is of no use and has another word.
    """
    try:
        lines = described.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return []
    word = _FLAGS.get(machine, "\0")
    known = next((set(line.split()) for line in lines if line.startswith(word)), None)
    if cpu is None or known is None:
        return []
    names = ((name, getattr(cpu, f"ggml_cpu_has_{ours}", None)) for ours, name in _INSTRUCTIONS.items())
    return [name for name, has in names if has is not None and has() and name not in known]


@contextmanager
def raising_callbacks() -> Iterator[None]:
    """Raise exceptions of Python callbacks after the call of llama.cpp; ctypes would print and ignore them.

    Callbacks run in the thread that calls llama.cpp, so each thread raises only its own exceptions. Blocks of
    several threads may end in any order: a hook that is still installed after its block calls the one before.
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
    """A flag that aborts an evaluation from any thread.

    At every node of its graph, llama.cpp calls a function with an address to ask whether to abort. A Python
    function would need the interpreter's lock each time, so the function is C's strlen on a string that is
    empty until `set`.
    """

    ASK = lib.ggml_abort_callback(ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value or 0)

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)
        self.address = ctypes.addressof(self._text)

    def set(self) -> None:
        """Abort the running evaluation, or otherwise the next one."""
        self._text[0] = b"1"

    def clear(self) -> None:
        """Let evaluations run again."""
        self._text[0] = b"\0"


@functools.cache
def repacking_is_safe() -> bool:
    """Whether llama.cpp may repack weights.

    A build with AMX by GCC crashes at the first evaluation of repacked weights (ggml-org/llama.cpp#20824).
    """
    return b"AMX_INT8 = 1" not in lib.llama_print_system_info()


@functools.cache
def backend_description() -> str:
    """Describe the build of llama.cpp and the hardware that it uses, in one line."""
    start()
    features = lib.llama_print_system_info().decode("utf-8", errors="replace")
    offload = "with GPU offload" if can_offload() else "no GPU offload"
    return f"llama-cpp-python {version('llama-cpp-python')}, {offload}, {features}"


def ggml_function(name: str, result: type | None, *arguments: type) -> Any:
    """Return a function of ggml with these types: llama.h has none for devices and tensors."""
    found = libggml[name]  # an index makes a new object, so other users of the library keep their types
    found.restype, found.argtypes = result, arguments
    return found


def can_offload() -> bool:
    """Whether this build of llama.cpp can use a GPU of this machine.

    `llama_supports_gpu_offload` does not answer this: it returns True in every build with RPC.
    """
    start()
    by_kind = ggml_function("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)
    return any(by_kind(kind) for kind in _GPU_KINDS)


class Handle:
    """An owner of a pointer that `free` frees; keeps `needs` alive until then."""

    def __init__(self, pointer: Any, free: Callable[[Any], object], *needs: object) -> None:
        self.pointer = pointer
        self._process = os.getpid()
        weakref.finalize(self, _free, pointer, free, self._process, needs)

    def check(self) -> None:
        """Raise ClosedError in a forked process."""
        if os.getpid() != self._process:
            raise ClosedError("this model was opened before a fork; open it in the child process")


def opened(handle: Handle | None) -> Handle:
    """Return a model's handle; ClosedError if the model is closed, or was opened before a fork."""
    if handle is None:
        raise ClosedError("the model is closed")
    handle.check()
    return handle


def _free(pointer: Any, free: Callable[[Any], object], process: int, needs: tuple[object, ...]) -> None:
    if os.getpid() == process:
        free(pointer)
    del needs  # it had to live until here
