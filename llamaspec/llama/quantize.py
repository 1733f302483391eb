"""Writes smaller copies of a model with llama.cpp's quantizer, and measures how much each layer matters.

The quantizer cannot be interrupted, and it aborts on unexpected input. So it runs in a child process
(`main`), which Ctrl-C ends. To measure how much each layer changes its input, a callback receives the outputs
of the layers during an evaluation, recognized by the tensor names that llama.cpp's architectures share.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.errors import EvaluationError, LlamaspecError, MemoryFullError, ModelFileError, printable
from llamaspec.llama import resources, runtime
from llamaspec.llama.batch import Batch, Segment
from llamaspec.llama.child import end_with_answer, end_with_parent, run_child
from llamaspec.llama.gguf_file import read_gguf
from llamaspec.llama.options import FLASH_ATTENTION, ModelOptions
from llamaspec.llama.runtime import ggml_function
from llamaspec.llama.weights import Weights
from llamaspec.values import TokenArray

if TYPE_CHECKING:
    from gguf import GGUFReader

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
    pruned: Sequence[int] = (),
    entries: Mapping[str, str | int] | None = None,
    threads: int | None = None,
) -> None:
    """Write a smaller copy of a model. `destination` appears only when it is complete.

    `source` may be the first part of a model. `pruned` are the layers to leave out, ascending from 0.
    `entries` are metadata to add or replace. `threads` = None uses all cores. Raises ModelFileError if
    llama.cpp cannot make this copy.
    """
    unfinished = destination.with_name(destination.name + ".part")
    task = {
        "source": str(source.absolute()),
        "destination": str(unfinished.absolute()),
        "file_type": file_type,
        "pruned": list(pruned),
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
        unfinished.with_suffix(".shortened").unlink(missing_ok=True)  # of a child that was ended


def main() -> None:
    """In the child: make the copy; answer with the reason if that fails."""
    end_with_parent()
    end_with_answer(_copy(**json.loads(sys.argv[1])))


def _copy(
    source: str, destination: str, file_type: str, pruned: list[int], entries: dict[str, Any], threads: int
) -> str:
    """Make a copy; return an empty string, or the reason if that fails."""
    parameters = lib.llama_model_quantize_default_params()
    parameters.nthread = threads
    parameters.allow_requantize = True
    if file_type == COPY:
        parameters.only_copy = True
    else:
        parameters.ftype = FILE_TYPES[file_type]
    layers = (ctypes.c_int32 * (len(pruned) + 1))(*pruned, -1)
    if pruned:
        parameters.prune_layers = ctypes.cast(layers, ctypes.POINTER(ctypes.c_int32))
    overrides = _overrides(entries)
    parameters.kv_overrides = ctypes.cast(overrides, ctypes.POINTER(lib.llama_model_kv_override))
    runtime.start()
    paths = os.fsencode(source), os.fsencode(destination)
    if lib.llama_model_quantize(*paths, ctypes.byref(parameters)):
        return runtime.log.reason
    if pruned:
        try:
            _shorten_arrays(Path(destination), pruned, read_gguf(Path(source)).number("block_count"))
        except OSError as error:
            return str(error)
    return ""


def _shorten_arrays(path: Path, pruned: Sequence[int], n_layers: int) -> None:
    """Remove layers from metadata that lists every layer: llama.cpp's quantizer does not."""
    found = read_gguf(path)
    entries = {
        key: [each for layer, each in enumerate(value) if layer not in pruned]
        for key, value in found.metadata.items()
        if key.startswith(f"{found.architecture}.") and isinstance(value, list) and len(value) == n_layers
    }
    if entries:
        from gguf import GGUFReader  # takes a third of a second

        shortened = path.with_suffix(".shortened")
        rewrite(GGUFReader(path), shortened, entries)
        shortened.replace(path)


def rewrite(
    reader: GGUFReader, path: Path, entries: Mapping[str, Any], rows: Mapping[str, TokenArray] | None = None
) -> None:
    """Write the file of a reader to another path with some changes, one tensor after another.

    `entries` are new values of metadata; None removes an entry. Entries that the file lacks must be strings.
    `rows` are the rows to keep of some tensors; the others keep all.
    """
    import gguf

    rows = rows or {}
    writer = gguf.GGUFWriter(path, str(reader.fields[gguf.Keys.General.ARCHITECTURE].contents()))
    writer.data_alignment = int(reader.alignment)
    for entry in reader.fields.values():
        if entry.name.startswith("GGUF.") or entry.name == gguf.Keys.General.ARCHITECTURE:
            continue  # the writer adds these itself
        value = entries[entry.name] if entry.name in entries else entry.contents()
        part = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        if value is not None:
            writer.add_key_value(entry.name, value, entry.types[0], sub_type=part)
    for key in entries.keys() - reader.fields.keys():
        writer.add_string(key, entries[key])
    for tensor in reader.tensors:
        data = tensor.data
        shape = (len(rows[tensor.name]), *data.shape[1:]) if tensor.name in rows else data.shape
        n_bytes = data.nbytes // data.shape[0] * shape[0]
        writer.add_tensor_info(tensor.name, shape, data.dtype, n_bytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(tensor.data[rows[tensor.name]] if tensor.name in rows else tensor.data)
    writer.close()


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


MAX_POSITIONS = 128  # in the observed evaluation
_OUTPUT = re.compile(rb"l_out-(\d+)$")
_INPUTS = (b"embd", b"inp_embd", b"inp_scaled")  # inputs of the first layer, scaled or not

Hidden = npt.NDArray[np.float32]  # [n, E]

_name = ggml_function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
_n_elements = ggml_function("ggml_nelements", ctypes.c_int64, ctypes.c_void_p)
_get = ggml_function(
    "ggml_backend_tensor_get", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


def layer_influence(weights: Weights, options: ModelOptions, tokens: TokenArray) -> list[float]:
    """Measure how much each layer changes its input: 1 - the mean cosine of input and output, [n_layers].

    0 = the layer changes nothing. A layer that cannot be measured gets 1. Only the first 128 tokens are
    evaluated. Only `threads` and `flash_attention` of the options matter. Raises MemoryFullError if there is
    no room, and EvaluationError if llama.cpp fails. Men et al., "ShortGPT", arXiv 2403.03853.
    """
    tokens = tokens[:MAX_POSITIONS]
    observer = _Observer(len(tokens), weights.hidden_size)
    parameters = lib.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = MAX_POSITIONS
    parameters.n_outputs_max = MAX_POSITIONS  # the last layer computes only scored positions
    parameters.n_threads = parameters.n_threads_batch = options.threads or resources.default_threads()
    parameters.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
    parameters.cb_eval = observer.callback
    runtime.log.errors.clear()
    context = lib.llama_init_from_model(weights.pointer, parameters)
    if not context:
        raise MemoryFullError(f"no room to measure the layers of {weights.path}: {runtime.log.reason}")
    batch = Batch(MAX_POSITIONS)
    try:
        with runtime.raising_callbacks():
            status = lib.llama_decode(context, batch.fill([Segment(0, 0, tokens, len(tokens))]))
    finally:
        lib.llama_free(context)
    if status:
        raise EvaluationError(f"{weights.path} cannot be evaluated (code {status}): {runtime.log.reason}")
    return [observer.influence.get(layer, 1.0) for layer in range(lib.llama_model_n_layer(weights.pointer))]


class _Observer:
    """A receiver of the tensors of a graph: compares the output of each layer with that of the one before."""

    def __init__(self, n_positions: int, hidden_size: int) -> None:
        self.influence: dict[int, float] = {}  # by layer
        self._shape = n_positions, hidden_size
        self._before: tuple[int, Hidden] | None = None  # the latest layer, -1 = the input, and its output
        self.callback = lib.ggml_backend_sched_eval_callback(self._receive)

    def _receive(self, tensor: Any, ask: bool, _user_data: object) -> bool:
        layer = self._layer(_name(tensor))
        if ask or layer is None:
            return layer is not None if ask else True
        if _n_elements(tensor) != math.prod(self._shape):
            return True
        hidden = np.empty(self._shape, dtype=np.float32)
        _get(tensor, hidden.ctypes.data, 0, hidden.nbytes)
        if self._before is not None and self._before[0] == layer - 1:
            self.influence[layer] = _distance(self._before[1], hidden)
        self._before = layer, hidden
        return True

    @staticmethod
    def _layer(name: bytes) -> int | None:
        found = _OUTPUT.match(name)
        return int(found[1]) if found else -1 if name in _INPUTS else None


def _distance(before: Hidden, after: Hidden) -> float:
    """Return 1 - the mean cosine of corresponding rows."""
    sizes = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    cosines = np.einsum("ij,ij->i", before, after) / np.maximum(sizes, 1e-30)
    return float(max(0.0, 1.0 - np.nan_to_num(cosines, nan=0.0).mean()))
