"""A library of kernels for another processor, which qemu emulates.

`make test-arm` builds the library and the program `emulated.cpp`, which calls its functions.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import struct
import subprocess
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

PROCESSORS = {"neon-dotprod": "cortex-a76"}  # by instruction set: one that has it, and no later one
COMMAND = os.environ.get("EMULATED", "")  # qemu with {cpu} for the processor, the program, and the library

Argument = int | float | bytes | npt.NDArray[Any] | None


class Emulator:
    """A process on a processor that qemu knows by this name."""

    def __init__(self, processor: str) -> None:
        command = COMMAND.format(cpu=processor).split()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(self._process.communicate)

    def has(self, level: str) -> bool:
        """Use an instruction set; False if the processor lacks it."""
        return bool(self.call("set_level", level.encode() + b"\0"))

    def call(self, name: str, *arguments: Argument) -> int:
        """Call a function that has integers, floats and arrays as arguments; arrays may change."""
        assert self._process.stdin
        arrays = [each for each in arguments if isinstance(each, (np.ndarray, bytes))]
        self._process.stdin.write(name[:1].encode() + b"".join(map(_packed, arguments)) + b"\0")
        self._process.stdin.flush()
        (result,) = struct.unpack("=i", self._read(4))
        for array in arrays:
            content = self._read(len(_content(array)))
            if isinstance(array, np.ndarray) and array.flags.c_contiguous:
                ctypes.memmove(array.ctypes.data, content, len(content))
        return int(result)

    def _read(self, n: int) -> bytes:
        assert self._process.stdout
        content = self._process.stdout.read(n)
        assert len(content) == n, f"the emulated program ended with {self._process.wait()}"
        return content


@cache
def emulator(level: str) -> Emulator:
    """Return the process of an instruction set, which ends with this one."""
    made = Emulator(PROCESSORS[level])
    assert made.has(level)
    return made


def _packed(argument: Argument) -> bytes:
    if isinstance(argument, float):
        return struct.pack("=cf", b"f", argument)
    if argument is None:
        return struct.pack("=cq", b"a", -1)
    if isinstance(argument, int):
        return struct.pack("=cq", b"i", argument)
    content = _content(argument)
    return struct.pack("=cq", b"a", len(content)) + content


def _content(array: bytes | npt.NDArray[Any]) -> bytes:
    """Return the bytes from an array's first element to its last."""
    if isinstance(array, bytes):
        return array
    last = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    return ctypes.string_at(array.ctypes.data, last + array.itemsize)
