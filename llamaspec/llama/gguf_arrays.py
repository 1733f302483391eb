"""Metadata that lists every layer, in a file that has lost some: llama.cpp's quantiser leaves it as it was.

Works through llama.cpp's own reader and writer of GGUF, and in a process that may be lost: they end it where
a file is not as they expect.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp._ggml import libggml

from llamaspec.llama.gguf_tensors import read_tensors

_ARRAY = 9
_KINDS = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    4: "u4",
    5: "i4",
    6: "f4",
    7: "i1",
    10: "u8",
    11: "i8",
    12: "f8",
}


class _Opening(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(libggml, f"gguf_{name}")
    function.argtypes, function.restype = arguments, result
    return function


_pointer, _number, _text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
_open = _function("init_from_file", _pointer, _text, _Opening)
_free = _function("free", None, _pointer)
_n_entries = _function("get_n_kv", _number, _pointer)
_key = _function("get_key", _text, _pointer, _number)
_kind = _function("get_kv_type", ctypes.c_int, _pointer, _number)
_array_kind = _function("get_arr_type", ctypes.c_int, _pointer, _number)
_array_size = _function("get_arr_n", ctypes.c_size_t, _pointer, _number)
_array = _function("get_arr_data", _pointer, _pointer, _number)
_set = _function("set_arr_data", None, _pointer, _text, ctypes.c_int, _pointer, ctypes.c_size_t)
_data_offset = _function("get_data_offset", ctypes.c_size_t, _pointer)
_write = _function("write_to_file", ctypes.c_bool, _pointer, _text, ctypes.c_bool)


def drop_layers(path: Path, pruned: list[int], n_layers: int) -> None:
    """Take layers out of the arrays that have an entry for each of `n_layers`.

    Raises
    ------
    OSError
        The file cannot be read, or written anew.
    """
    architecture = read_tensors(path).texts.get("general.architecture", "")
    context = _open(os.fsencode(path), _Opening(True, None))
    if not context:
        raise OSError(f"cannot read {path}")
    try:
        shorter = list(_shorter(context, f"{architecture}.", pruned, n_layers))
        if not shorter:
            return
        for key, kind, values in shorter:
            _set(context, key, kind, values.ctypes.data, len(values))
        renewed = path.with_suffix(".renewed")
        if not _write(context, os.fsencode(renewed), True):
            raise OSError(f"cannot write {renewed}")
        with path.open("rb") as old, renewed.open("ab") as new:
            old.seek(_data_offset(context))
            shutil.copyfileobj(old, new, 1 << 20)
        renewed.replace(path)
    finally:
        _free(context)
        path.with_suffix(".renewed").unlink(missing_ok=True)


def _shorter(
    context: Any, prefix: str, pruned: list[int], n_layers: int
) -> Iterator[tuple[bytes, int, np.ndarray[Any, Any]]]:
    """The arrays with an entry for each layer, without those of some layers."""
    for i in range(_n_entries(context)):
        key: bytes = _key(context, i)
        if _kind(context, i) != _ARRAY or not key.startswith(prefix.encode()):
            continue
        kind = _array_kind(context, i)
        if _array_size(context, i) == n_layers and kind in _KINDS:
            item = np.dtype(_KINDS[kind])
            memory = ctypes.string_at(_array(context, i), n_layers * item.itemsize)
            yield key, kind, np.delete(np.frombuffer(memory, item), pruned)
