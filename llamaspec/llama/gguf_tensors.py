"""What a GGUF file that is not loaded holds: short entries of its metadata, and the names of its tensors.

Read in Python and never beyond the end of the file, so that a file that means harm does none; llama.cpp
explains what is wrong with it. Arrays are passed over.
"""

from __future__ import annotations

import math
import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_U32, _U64, _HEAD = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<4sIQQ")
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes, by gguf_type
_NUMBERS = {4: _U32, 10: _U64}
_MOST_DIMENSIONS = 4
_MOST_STRINGS = 1 << 22  # of an array


@dataclass(slots=True)
class GgufTensors:
    """What was found before the end of the file, or before something that cannot be read."""

    texts: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # whole ones that are not negative
    names: set[str] = field(default_factory=set)  # of tensors
    n_parameters: int = 0  # numbers in all tensors


def read_tensors(path: Path) -> GgufTensors:
    """Look at a file.

    Raises
    ------
    OSError
        It cannot be read.
    """
    found = GgufTensors()
    with (
        path.open("rb") as file,
        suppress(struct.error, ValueError, OverflowError),  # cut short, empty, damaged
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        _Reader(content).read(found)
    return found


class _Reader:
    """Reads on from one place to the next."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0

    def read(self, found: GgufTensors) -> None:
        """Note everything."""
        _, _, n_tensors, n_entries = _HEAD.unpack_from(self._content)
        self._at = _HEAD.size
        for _ in range(n_entries):
            self._entry(found)
        for _ in range(n_tensors):
            name, n_dimensions = self._text(), self._number(_U32)
            if n_dimensions > _MOST_DIMENSIONS:
                raise ValueError("no tensor has so many dimensions")
            found.n_parameters += math.prod(self._number(_U64) for _ in range(n_dimensions))
            self._at += 4 + 8  # type, offset
            found.names.add(name)

    def _entry(self, found: GgufTensors) -> None:
        key, kind = self._text(), self._number(_U32)
        if kind == _STRING:
            found.texts[key] = self._text()
        elif kind in _NUMBERS:
            found.numbers[key] = self._number(_NUMBERS[kind])
        elif kind == _ARRAY:
            self._pass_array()
        else:
            self._pass(kind, 1)

    def _pass_array(self) -> None:
        kind, n = self._number(_U32), self._number(_U64)
        if kind != _STRING:
            self._pass(kind, n)
            return
        if n > _MOST_STRINGS:
            raise ValueError(f"no vocabulary has {n} tokens")
        content, at, unpack = self._content, self._at, _U64.unpack_from
        for _ in range(n):  # vocabularies: as fast as it goes
            at += 8 + unpack(content, at)[0]
        self._at = at

    def _pass(self, kind: int, n: int) -> None:
        if kind not in _SIZES:
            raise ValueError(f"there is no type {kind}")
        self._at += n * _SIZES[kind]

    def _number(self, kind: struct.Struct) -> int:
        (number,) = kind.unpack_from(self._content, self._at)
        self._at += kind.size
        return int(number)

    def _text(self) -> str:
        n = self._number(_U64)
        start, self._at = self._at, self._at + n
        if self._at > len(self._content):
            raise ValueError("a text goes beyond the end of the file")
        return self._content[start : self._at].decode("utf-8", errors="replace")
