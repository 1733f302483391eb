"""Kernels for products of few columns: a library in C++ that llama.cpp calls in place of its own functions.

ggml-cpu calls exported functions of its own through the dynamic linker, which takes the first library that
has them. So `load` comes before the first import of `llama_cpp`, and `choose` after it. If something does not
fit (no library, another llama.cpp, an old processor), the kernels stay off and `facts` says why. They are on
or off for the whole process, because a switch would break what other threads evaluate. This module knows
nothing of models. tests/kernels/test_library.py.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import TYPE_CHECKING

from llamaspec.errors import LlamaspecError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PANEL = 16  # rows of a matrix that are computed together
VARIABLE = "LLAMASPEC_KERNELS"  # environment variable
AUTO, OFF = "auto", "off"
_OFF_WORDS = (OFF, "0", "no", "false")
_LEVELS = {"avx512": "AVX-512", "avx-vnni": "AVX-VNNI", "avx2": "AVX2", "neon-dotprod": "NEON"}  # for people
LLAMA_CPP = "llama.cpp's kernels"
_NOT_BUILT = (
    "llamaspec's were not built; install a C++ compiler, then llamaspec again (pip install -v shows faults)"
)
_NOT_CHOSEN = "no model has been opened"
_SWITCHED_OFF = "an option switched llamaspec's off"
_TOO_LATE = (
    "llama_cpp was imported before llamaspec; write `from llamaspec import ...` above `import llama_cpp`"
)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a process."""

    level: str | None = None  # "avx512" or another of `_LEVELS`; None = they are off
    version: int = 0  # changes with every change of results or costs
    reason: str | None = None  # why they are off; a remedy follows the last semicolon
    is_misfit: bool = False  # whether the reason is another version or build of llama.cpp

    @property
    def name(self) -> str:
        """Their name for people, or that of llama.cpp's if they are off."""
        if self.level is None:
            return LLAMA_CPP
        return f"llamaspec's {_LEVELS.get(self.level, self.level)} kernels"

    @property
    def key(self) -> list[object]:
        """Their part of a cache key; empty if they are off."""
        return [] if self.level is None else [self.level, self.version]

    def describe(self) -> str:
        """Return the name, and the reason if they are off.

        Examples
        --------
        >>> Kernels("avx512", 3).describe()
        "llamaspec's AVX-512 kernels"
        >>> Kernels(reason="LLAMASPEC_KERNELS is off").describe()
        "llama.cpp's kernels only: LLAMASPEC_KERNELS is off"
        """
        if self.level is not None:
            return self.name
        remedy = f"; pip install '{_known_release()}'" if self.is_misfit else ""
        return f"{self.name} only: {self.reason}{remedy}"


def parse_choice(text: str) -> str:
    """Return "auto" or "off" for the value of an option or of the environment variable.

    Raises
    ------
    ValueError
        The value means neither.

    Examples
    --------
    >>> parse_choice("No")
    'off'
    """
    word = text.strip().lower() or AUTO
    if word in _OFF_WORDS:
        return OFF
    if word != AUTO:
        raise ValueError(f"kernels must be auto or off, got {text!r}")
    return AUTO


class KernelLibrary:
    """The library in this process, first not loaded, then loaded, then attached to llama.cpp or left off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library: ctypes.CDLL | None = None
        self._fault: str | None = None  # of the environment variable
        self._reason: str | None = "llamaspec's are not loaded"  # why they are off; None = on
        self._is_misfit = False
        self._choosing = threading.Lock()

    @property
    def facts(self) -> Kernels:
        """The kernels that compute now, or why there are none."""
        active = self._active
        if active is None:
            return Kernels(reason=self._reason, is_misfit=self._is_misfit)
        level: bytes = active.llamaspec_kernels_level()
        return Kernels(level.decode(), active.llamaspec_kernels_version())

    @property
    def n_products(self) -> int:
        """Number of products and attentions that the kernels have computed."""
        return 0 if self._library is None else int(self._library.llamaspec_kernels_calls())

    @property
    def n_missed(self) -> int:
        """Number of products and attentions that the kernels have left to llama.cpp.

        If an evaluation leaves none, its results depend on nothing that is evaluated beside them.
        """
        return 0 if self._library is None else int(self._library.llamaspec_kernels_missed())

    def load(self) -> None:
        """Load the library, so that llama.cpp will find it.

        Warns
        -----
        RuntimeWarning
            `llama_cpp` was imported before, so the kernels stay off.
        """
        self._reason = self._obstacle()
        if self._reason is not None:
            return
        if "llama_cpp" in sys.modules:
            self._reason = _TOO_LATE
            warnings.warn(f"llamaspec's kernels stay off: {_TOO_LATE}", RuntimeWarning, stacklevel=2)
            return
        try:
            self._library = _open(self.path)
        except (OSError, AttributeError) as error:  # AttributeError: it lacks a function
            self._reason = f"llamaspec's cannot be loaded ({error}); install llamaspec again"
        else:
            self._reason = _NOT_CHOSEN

    def choose(self, choice: str | None, find: Callable[[str], ctypes.CDLL | None]) -> None:
        """Choose "auto" or "off" for the process, before the first model is opened.

        None = what was chosen before, or else "auto". `find` returns a library of llama.cpp, or None if its
        build has no such library.

        Raises
        ------
        LlamaspecError
            The choice was made before and was another, or the environment variable has an impossible value.
        """
        if self._fault is not None:
            raise LlamaspecError(self._fault)
        with self._choosing:
            if self._reason == _NOT_CHOSEN:
                self._reason = _SWITCHED_OFF if choice == OFF else self._attach(find)
                return
        if choice is not None and self._reason == (None if choice == OFF else _SWITCHED_OFF):
            other = AUTO if choice == OFF else OFF
            raise LlamaspecError(
                f"kernels={choice!r} comes too late, because this process has started with {other!r}; "
                f"give all its models the same choice, or set {VARIABLE}=off"
            )

    def _attach(self, find: Callable[[str], ctypes.CDLL | None]) -> str | None:
        """Let the kernels compute if they suit llama.cpp; return why they do not, if anything."""
        assert self._library is not None
        ggml_cpu, ggml_base = find("ggml-cpu"), find("ggml-base")
        if ggml_cpu is None or ggml_base is None:
            self._is_misfit = True
            return "this build of llama.cpp has no libggml-cpu"
        refusal: bytes | None = self._library.llamaspec_kernels_attach(ggml_cpu._handle, ggml_base._handle)
        if refusal is None:
            return None
        self._is_misfit = bool(self._library.llamaspec_kernels_level())  # none if the processor is too old
        return refusal.decode(errors="replace")

    def use_level(self, name: str) -> bool:
        """Use another instruction set, to measure it; False if the processor lacks it, or kernels are off.

        Nothing may be evaluated meanwhile.
        """
        active = self._active
        return active is not None and bool(active.llamaspec_kernels_set_level(name.encode()))

    @contextmanager
    def only_panels(self, panels: npt.NDArray[np.int32], n_rows: int) -> Iterator[None]:
        """Compute only some panels of matrices with `n_rows` rows, in evaluations of this thread.

        `panels` has at least one index, ascending. The results of other rows are -inf. Nothing changes where
        the kernels do not compute.
        """
        active = self._active
        if active is None:
            yield
            return
        active.llamaspec_kernels_want(panels.ctypes.data, len(panels), n_rows)
        try:
            yield
        finally:
            active.llamaspec_kernels_want(0, 0, 0)

    def bytes_per_cell(self, heads: int, n_threads: int) -> int:
        """Return the memory that attention takes for each cell if `heads` heads share a key; 0 if off."""
        active = self._active
        return 0 if active is None else int(active.llamaspec_kernels_bytes_per_cell(heads, n_threads))

    def covers(self, ggml_type: int) -> bool:
        """Whether the kernels are on and take weights of a type of ggml."""
        active = self._active
        return active is not None and bool(active.llamaspec_kernels_covers(ggml_type))

    @property
    def _active(self) -> ctypes.CDLL | None:
        """The library, if the kernels are on."""
        return self._library if self._reason is None else None

    def _obstacle(self) -> str | None:
        """Return why the library is not to be loaded, if anything."""
        try:
            choice = parse_choice(os.environ.get(VARIABLE, ""))
        except ValueError as error:
            self._fault = f"the environment variable {VARIABLE} cannot be used: {error}"
            return self._fault
        if choice == OFF:
            return f"{VARIABLE} is off"
        if self.path.is_file():
            return None
        is_served = sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64")
        return _NOT_BUILT if is_served else "llamaspec's are for Linux on x86-64 and arm64 processors"


def _known_release() -> str:
    """Return the requirement of the llama-cpp-python that the kernels were tried with."""
    return next(each for each in requires("llamaspec") or () if each.startswith("llama-cpp-python"))


def _open(path: Path) -> ctypes.CDLL:
    """Open the library and declare its functions; OSError or AttributeError if that fails."""
    # Local symbols would be invisible to llama.cpp.
    opened = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    for name, result, arguments in (
        ("version", number, []),
        ("attach", text, [pointer, pointer]),
        ("level", text, []),
        ("set_level", number, [text]),
        ("covers", number, [number]),
        ("calls", ctypes.c_longlong, []),
        ("missed", ctypes.c_longlong, []),
        ("want", None, [ctypes.c_size_t] * 3),
        ("bytes_per_cell", ctypes.c_size_t, [number, number]),
    ):
        function = opened[f"llamaspec_kernels_{name}"]
        function.restype, function.argtypes = result, arguments
        setattr(opened, f"llamaspec_kernels_{name}", function)
    return opened


library = KernelLibrary(Path(__file__).with_name("libllamaspec_kernels.so"))  # built by hatch_build.py
