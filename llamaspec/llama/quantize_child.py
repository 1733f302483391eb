"""Runs in the process that copies a model (`llama/quantize.py`): its argument is the task, as JSON.

It says on stdout why it failed, and nothing where it did not.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from llamaspec.llama import runtime
from llamaspec.llama.gguf_arrays import drop_layers
from llamaspec.llama.gguf_tensors import read_tensors
from llamaspec.llama.quantize import COPY, FILE_TYPES


def main() -> None:
    """Copy, say what went wrong, and end."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(_copy(json.loads(sys.argv[1])), end="", flush=True)  # noqa: T201
    os._exit(0)


def _copy(task: dict[str, Any]) -> str:
    """Why it failed; nothing where it did not."""
    parameters = lib.llama_model_quantize_default_params()
    parameters.nthread = task["threads"]
    parameters.allow_requantize = True
    if task["file_type"] == COPY:
        parameters.only_copy = True
    else:
        parameters.ftype = FILE_TYPES[task["file_type"]]
    pruned = (ctypes.c_int32 * (len(task["pruned"]) + 1))(*task["pruned"], -1)
    if task["pruned"]:
        parameters.prune_layers = ctypes.cast(pruned, ctypes.POINTER(ctypes.c_int32))
    entries = _overrides(task["texts"].items(), task["numbers"].items())
    parameters.kv_overrides = ctypes.cast(entries, ctypes.POINTER(lib.llama_model_kv_override))
    runtime.start()
    paths = [os.fsencode(task[name]) for name in ("source", "destination")]
    if lib.llama_model_quantize(*paths, ctypes.byref(parameters)):
        return runtime.failure_reason()
    if task["pruned"]:
        source = read_tensors(Path(task["source"]))
        n_layers = source.numbers.get(f"{source.texts.get('general.architecture')}.block_count", 0)
        try:
            drop_layers(Path(task["destination"]), task["pruned"], n_layers)
        except OSError as error:
            return str(error)
    return ""


def _overrides(texts: Any, numbers: Any) -> ctypes.Array[lib.llama_model_kv_override]:
    """The entries that are added or replaced; an empty key ends them."""
    given: Sequence[tuple[str, str | int]] = [*texts, *numbers]
    entries = (lib.llama_model_kv_override * (len(given) + 1))()
    for entry, (key, value) in zip(entries, given, strict=False):
        entry.key = key.encode()
        if isinstance(value, str):
            entry.tag = lib.LLAMA_KV_OVERRIDE_TYPE_STR
            entry.value.val_str = value.encode()
        else:
            entry.tag = lib.LLAMA_KV_OVERRIDE_TYPE_INT
            entry.value.val_i64 = value
    return entries


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
