"""Checks what a GGUF file says of its model, before llama.cpp believes it.

Only what no sound file says: a token twice, no layers, numbers that are none. It makes a clear error of
common damage; what else there is, a trial finds (`llama/trial.py`). Reads the metadata only, never more than
the file holds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from llamaspec.errors import ModelFileError

_STRING, _ARRAY = 8, 9
_SCALARS = {
    kind: struct.Struct(f"<{code}") for kind, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_HEAD = struct.Struct("<4sIQQ")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TOKENS = "tokenizer.ggml.tokens"
_RANGES = {  # of whole numbers, by the end of their keys
    "block_count": (1, 4096),
    "context_length": (1, 1 << 30),
    "embedding_length": (1, 1 << 24),
    "expert_count": (0, 1 << 16),
    "vocab_size": (2, 1 << 28),
}


class _BrokenError(Exception):
    """The metadata cannot be read; llama.cpp says better why."""


def check_metadata(path: Path) -> None:
    """Refuse a file whose metadata no sound model has.

    What cannot be read at all is left to llama.cpp, which refuses it and says why.

    Raises
    ------
    ModelFileError
        With the entry and its value.
    """
    try:
        with path.open("rb") as file:
            fault = _fault(_read(file, path.stat().st_size))
    except (_BrokenError, OSError):
        return
    if fault is not None:
        raise ModelFileError(f"{path} is damaged: {fault}; download or convert it again")


def _fault(entries: Mapping[str, Any]) -> str | None:
    """What is wrong with the entries, if anything is."""
    architecture = str(entries.get("general.architecture"))
    alignment = entries.get("general.alignment", 32)
    if not _is_whole(alignment) or alignment < 8 or alignment & (alignment - 1):
        return f"general.alignment is {alignment}"
    for key, value in entries.items():
        within = _RANGES.get(key.removeprefix(f"{architecture}."))
        if isinstance(value, float) and not math.isfinite(value):
            return f"{key} is {value}"
        if within is not None and _is_whole(value) and not within[0] <= value <= within[1]:
            return f"{key} is {value}, not from {within[0]} to {within[1]}"
    used, count = (entries.get(f"{architecture}.{key}", 0) for key in ("expert_used_count", "expert_count"))
    if _is_whole(used) and _is_whole(count) and used > count:
        return f"it uses {used} of {count} experts"
    tokens = entries.get(_TOKENS)
    if isinstance(tokens, list) and len(tokens) != len(set(tokens)):
        return f"{len(tokens) - len(set(tokens))} of its {len(tokens)} tokens are there twice"
    if isinstance(tokens, list) and len(tokens) < 2:
        return f"its vocabulary has {len(tokens)} tokens"
    return None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read(file: BinaryIO, size: int) -> dict[str, Any]:
    """Metadata by key; of arrays the tokens only."""
    *_, n_entries = _unpack(file, _HEAD)
    entries: dict[str, Any] = {}
    for _ in range(n_entries):
        key = _string(file, size).decode(errors="replace")
        (kind,) = _unpack(file, _U32)
        if kind == _ARRAY:
            values = _array(file, size, is_kept=key == _TOKENS)
            if values is not None:
                entries[key] = values
        elif kind == _STRING:
            entries[key] = _string(file, size).decode(errors="replace")
        elif kind in _SCALARS:
            (entries[key],) = _unpack(file, _SCALARS[kind])
        else:
            raise _BrokenError
    return entries


def _array(file: BinaryIO, size: int, *, is_kept: bool) -> list[bytes] | None:
    (kind,), (n,) = _unpack(file, _U32), _unpack(file, _U64)
    if kind in _SCALARS:
        if n > size:
            raise _BrokenError
        file.seek(n * _SCALARS[kind].size, 1)
        return None
    if kind != _STRING:
        raise _BrokenError
    strings: list[bytes] | None = [] if is_kept else None
    for _ in range(n):
        string = _string(file, size)
        if strings is not None:
            strings.append(string)
    return strings


def _string(file: BinaryIO, size: int) -> bytes:
    (n,) = _unpack(file, _U64)
    content = file.read(n) if n <= size else b""
    if len(content) < n:
        raise _BrokenError
    return content


def _unpack(file: BinaryIO, what: struct.Struct) -> tuple[Any, ...]:
    content = file.read(what.size)
    if len(content) < what.size:
        raise _BrokenError
    return what.unpack(content)
