"""The library of kernels, called directly through the functions that it has for tests.

With `make test-arm`, the one for arm64 computes too, as further instruction sets of this processor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

import llamaspec.kernels
from kernels import emulated

HERE = ("avx512", "avx-vnni", "avx2", "neon-dotprod")
LEVELS = (*HERE, *(f"emulated {name}" for name in emulated.PROCESSORS if emulated.COMMAND))
GROUP = 64  # columns that are computed together
UNIT = 32  # activations that share a scale
QUANTIZED = (
    Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K,
    Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4,
)  # fmt: skip
FLOATS = (Type.F32, Type.F16, Type.BF16)
# Where a block has its half floats, in bytes.
HALVES = {
    Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.Q8_0: (0,),
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,),
    Type.IQ4_NL: (0,), Type.IQ4_XS: (0,), Type.MXFP4: (),
}  # fmt: skip

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_ACTIVATIONS = np.dtype([("q", "i1", UNIT), ("scale", "f4"), ("aux", "i4", 2)])


class Library:
    """Calls functions of a library in this process, or in the process of an emulated instruction set."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.llamaspec_kernels_level.restype = ctypes.c_char_p
        self._emulated: str | None = None

    @property
    def level(self) -> str:
        """The instruction set; any text returns to it."""
        name: bytes = self._library.llamaspec_kernels_level()
        return f"emulated {self._emulated}" if self._emulated else name.decode()

    def set_level(self, name: str) -> bool:
        """Use an instruction set; False if this processor lacks it."""
        word, _, rest = name.rpartition(" ")
        self._emulated = rest if word else None
        return bool(word or self._library.llamaspec_kernels_set_level(rest.encode()))

    def call(self, name: str, *arguments: emulated.Argument) -> bool:
        """Call a function, with arrays in place of pointers."""
        if self._emulated:
            return bool(emulated.emulator(self._emulated).call(name, *arguments))
        return bool(self._library[f"llamaspec_kernels_{name}"](*map(_as_c, arguments)))


def _as_c(argument: emulated.Argument) -> Any:
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument


def open_library() -> Library:
    """Return the library, or the one that the environment variable KERNELS names (`make test-kernels`)."""
    path = Path(os.environ.get("KERNELS", llamaspec.kernels.library.path))
    if not path.is_file():
        pytest.skip("the kernels were not built")
    return Library(path)


@contextmanager
def at_level(library: Library, name: str) -> Iterator[bool]:
    """Use an instruction set; yields whether this processor has it."""
    before = library.level
    try:
        yield library.set_level(name)
    finally:
        library.set_level(before)


def levels_here(library: Library) -> list[str]:
    found = []
    for name in LEVELS:
        with at_level(library, name) as is_here:
            if is_here:
                found.append(name)
    return found


def random_weights(kind: Type, n_rows: int, n_inputs: int, rng: np.random.Generator) -> Bytes:
    """Return rows of random blocks with finite scales: [n_rows, bytes of a row]."""
    length, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind is Type.F32:
        return rng.normal(size=(n_rows, n_inputs)).astype(np.float32).view(np.uint8)
    if kind is Type.F16:
        return rng.normal(size=(n_rows, n_inputs)).astype(np.float16).view(np.uint8)
    if kind is Type.BF16:
        return brain(rng.normal(size=(n_rows, n_inputs))).view(np.uint8)
    blocks = rng.integers(0, 256, (n_rows, n_inputs // length, n_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        set_halves(blocks, at, rng.normal(size=blocks.shape[:2]))
    if kind is Type.MXFP4:
        blocks[:, :, 0] = rng.integers(100, 140, blocks.shape[:2])
    return blocks.reshape(n_rows, -1)


def set_halves(blocks: Bytes, at: int, values: npt.ArrayLike) -> None:
    halves = np.broadcast_to(np.asarray(values, np.float16), blocks.shape[:2])
    blocks[:, :, at : at + 2] = np.ascontiguousarray(halves)[..., None].view(np.uint8)


def brain(x: Float64) -> npt.NDArray[np.uint16]:
    """Return x as bf16, cut off."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def true_weights(kind: Type, rows: Bytes) -> Float64:
    """Return the numbers that rows stand for."""
    with np.errstate(all="ignore"):
        return np.asarray(dequantize(rows, kind), np.float64)


def multiply(
    library: Library, kind: Type, rows: Bytes, x: Float32, *, n_threads: int = 1, chunk: int = 1 << 20
) -> tuple[Float32, Float64]:
    """Return the products [columns, rows], and the columns as they were quantized."""
    (n, n_inputs), n_rows = x.shape, len(rows)
    out = np.full((n, n_rows), np.nan, np.float32)
    quantized = np.zeros(n_inputs // UNIT * n, _ACTIVATIONS)
    is_covered = library.call(
        "multiply", int(kind), rows, rows.strides[0], n_rows, n_inputs, x, n, out, n_threads, chunk, quantized
    )
    assert is_covered
    return out, x.astype(np.float64) if kind in FLOATS else _columns(quantized, n, n_inputs)


def _columns(quantized: npt.NDArray[Any], n: int, n_inputs: int) -> Float64:
    columns, at = np.empty((n, n_inputs)), 0
    for first in range(0, n, GROUP):
        width = min(GROUP, n - first)
        part = quantized[at : at + width * (n_inputs // UNIT)].reshape(n_inputs // UNIT, width)
        with np.errstate(invalid="ignore"):  # a scale may be infinite or NaN
            numbers = part["q"].astype(np.float64) * part["scale"].astype(np.float64)[..., None]
        columns[first : first + width] = numbers.transpose(1, 0, 2).reshape(width, n_inputs)
        at += part.size
    return columns
