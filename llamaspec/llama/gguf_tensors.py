"""What a GGUF file that is not loaded holds: short entries of its metadata, and the names of its tensors.

Read in Python and never beyond the end of the file, so that a file that means harm does none; llama.cpp
explains what is wrong with it. Of arrays only those are kept that have a number for each layer.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_U32, _U64, _HEAD = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<4sIQQ")
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes, by gguf_type
_NUMBERS = {4: _U32, 10: _U64}
_NUMBERS_OF_LAYERS = {4: "I", 5: "i"}
_MOST_DIMENSIONS = 4
_MOST_LAYERS = 1024
_MOST_STRINGS = 1 << 22  # of an array
_ALIGNMENT = 32  # bytes between tensors, unless the file says otherwise
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(slots=True)
class GgufTensors:
    """What was found before the end of the file, or before something that cannot be read."""

    texts: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # whole ones that are not negative
    arrays: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of whole numbers, short ones
    names: set[str] = field(default_factory=set)  # of tensors
    n_bytes: dict[str, int] = field(default_factory=dict)  # of each, with what lies before the next
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


def file_parts(path: Path) -> list[Path]:
    """A file, and the other parts of the same model that lie beside it."""
    found = _PART.search(path.name)
    if found is None:
        return [path]
    stem, n = path.name[: found.start()], int(found[1])
    named = (path.with_name(f"{stem}-{i:05d}-of-{n:05d}.gguf") for i in range(1, n + 1))
    return [path, *(part for part in named if part != path and part.is_file())]


class _Reader:
    """Reads on from one place to the next."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0

    def read(self, found: GgufTensors) -> None:
        """Note everything."""
        _, _, n_tensors, n_entries = _HEAD.unpack_from(self._content)
        self._at = _HEAD.size
        begins: dict[str, int] = {}
        for _ in range(n_entries):
            self._entry(found)
        for _ in range(n_tensors):
            name, n_dimensions = self._text(), self._number(_U32)
            if n_dimensions > _MOST_DIMENSIONS:
                raise ValueError("no tensor has so many dimensions")
            found.n_parameters += math.prod(self._number(_U64) for _ in range(n_dimensions))
            self._at += 4  # type
            begins[name] = self._number(_U64)
            found.names.add(name)
        alignment = found.numbers.get("general.alignment") or _ALIGNMENT
        end = len(self._content) - -(-self._at // alignment) * alignment
        for name, begin in sorted(begins.items(), key=lambda tensor: -tensor[1]):
            found.n_bytes[name] = max(0, end - begin)
            end = begin

    def _entry(self, found: GgufTensors) -> None:
        key, kind = self._text(), self._number(_U32)
        if kind == _STRING:
            found.texts[key] = self._text()
        elif kind in _NUMBERS:
            found.numbers[key] = self._number(_NUMBERS[kind])
        elif kind == _ARRAY:
            self._array(key, found)
        else:
            self._pass(kind, 1)

    def _array(self, key: str, found: GgufTensors) -> None:
        kind, n = self._number(_U32), self._number(_U64)
        if kind in _NUMBERS_OF_LAYERS and n <= _MOST_LAYERS:
            found.arrays[key] = struct.unpack_from(f"<{n}{_NUMBERS_OF_LAYERS[kind]}", self._content, self._at)
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
