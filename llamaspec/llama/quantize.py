"""Writes smaller copies of a model with llama.cpp's quantizer.

The quantizer cannot be interrupted, and it aborts on unexpected input. So it runs in a child process
(`main`), which Ctrl-C ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from llamaspec.errors import LlamaspecError, ModelFileError, printable
from llamaspec.llama import runtime
from llamaspec.llama.child import end_with_answer, end_with_parent, run_child

COPY = "copy"  # instead of a file type: tensors keep their types
FILE_TYPES = {
    "F16": lib.LLAMA_FTYPE_MOSTLY_F16,
    "Q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q6_K": lib.LLAMA_FTYPE_MOSTLY_Q6_K,
    "Q5_K_M": lib.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "Q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": lib.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q3_K_M": lib.LLAMA_FTYPE_MOSTLY_Q3_K_M,
    "Q2_K": lib.LLAMA_FTYPE_MOSTLY_Q2_K,
}


def write_copy(
    source: Path,
    destination: Path,
    *,
    file_type: str = COPY,
    entries: Mapping[str, str | int] | None = None,
    threads: int | None = None,
) -> None:
    """Write a smaller copy of a model. `destination` appears only when it is complete.

    `source` may be the first part of a model. `entries` are metadata to add or replace. `threads` = None uses
    all cores. Raises ModelFileError if llama.cpp cannot make this copy.
    """
    unfinished = destination.with_name(destination.name + ".part")
    task = {
        "source": str(source.absolute()),
        "destination": str(unfinished.absolute()),
        "file_type": file_type,
        "entries": entries or {},
        "threads": threads or 0,
    }
    try:
        try:
            outcome = run_child(__name__, [json.dumps(task)])
        except OSError as error:
            raise LlamaspecError(f"cannot start a process: {error.strerror}; close other programs") from error
        assert outcome is not None  # no time limit
        reason = printable(outcome.answer.decode("utf-8", errors="replace"))
        if outcome.code or reason:
            reason = reason or f"it ended with code {outcome.code}; is the disk full?"
            raise ModelFileError(f"llama.cpp cannot make this copy of {source}: {reason}")
        unfinished.replace(destination)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    """In the child: make the copy; answer with the reason if that fails."""
    end_with_parent()
    end_with_answer(_copy(**json.loads(sys.argv[1])))


def _copy(source: str, destination: str, file_type: str, entries: dict[str, Any], threads: int) -> str:
    """Make a copy; return an empty string, or the reason if that fails."""
    parameters = lib.llama_model_quantize_default_params()
    parameters.nthread = threads
    parameters.allow_requantize = True
    if file_type == COPY:
        parameters.only_copy = True
    else:
        parameters.ftype = FILE_TYPES[file_type]
    overrides = _overrides(entries)
    parameters.kv_overrides = ctypes.cast(overrides, ctypes.POINTER(lib.llama_model_kv_override))
    runtime.start()
    paths = os.fsencode(source), os.fsencode(destination)
    with runtime.log.of_call() as said:
        status = lib.llama_model_quantize(*paths, ctypes.byref(parameters))
    return said.reason if status else ""


def _overrides(given: Mapping[str, str | int]) -> ctypes.Array[lib.llama_model_kv_override]:
    """Return the entries to add or replace as llama.cpp wants them: ended by an empty key."""
    entries = (lib.llama_model_kv_override * (len(given) + 1))()
    for entry, (key, value) in zip(entries, given.items(), strict=False):
        entry.key = key.encode()
        if isinstance(value, str):
            entry.tag = lib.LLAMA_KV_OVERRIDE_TYPE_STR
            entry.value.val_str = value.encode()
        else:
            entry.tag = lib.LLAMA_KV_OVERRIDE_TYPE_INT
            entry.value.val_i64 = value
    return entries
