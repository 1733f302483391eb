"""How much each layer changes what flows through a model: which layers a smaller copy could do without.

llama.cpp shows every tensor of its graph to a callback; of each layer the output is looked at. Works for
every architecture that names these outputs as llama.cpp's own do.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib
from llama_cpp._ggml import libggml

from llamaspec.errors import EvaluationError, MemoryFullError
from llamaspec.llama import runtime
from llamaspec.llama.options import FLASH_ATTENTION, ModelOptions
from llamaspec.llama.weights import Weights
from llamaspec.values import TokenArray

MOST_POSITIONS = 128  # that are looked at together
_OUTPUT = re.compile(rb"l_out-(\d+)$")
_INPUTS = (b"embd", b"inp_embd", b"inp_scaled")  # what the first layer reads; a scale does not count

Hidden = npt.NDArray[np.float32]  # [n, E]

_name = libggml.ggml_get_name
_name.argtypes, _name.restype = [ctypes.c_void_p], ctypes.c_char_p
_n_elements = libggml.ggml_nelements
_n_elements.argtypes, _n_elements.restype = [ctypes.c_void_p], ctypes.c_int64
_get = libggml.ggml_backend_tensor_get
_get.argtypes, _get.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t], None


def layer_influence(weights: Weights, options: ModelOptions, tokens: TokenArray) -> list[float]:
    """What each layer adds: [n_layers] 1 - the cosine of its input and output, averaged over positions.

    0 = the layer changes nothing; 1 where it is not known. Men et al., "ShortGPT", arXiv 2403.03853.

    Parameters
    ----------
    weights : Weights
    options : ModelOptions
        `threads` and `flash_attention` count.
    tokens : [n] int32
        An ordinary text; at most the first 128 tokens are read.

    Raises
    ------
    MemoryFullError, EvaluationError
        llama.cpp has no room for the text, or cannot evaluate it.
    """
    tokens = np.ascontiguousarray(tokens[:MOST_POSITIONS], dtype=np.int32)
    look = _Look(len(tokens), weights.hidden_size)
    parameters = lib.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = MOST_POSITIONS
    parameters.n_outputs_max = MOST_POSITIONS  # the last layer computes scored positions only
    parameters.n_threads = parameters.n_threads_batch = options.threads or runtime.default_threads()
    parameters.flash_attn_type = FLASH_ATTENTION[weights.flash_attention(options)]
    parameters.cb_eval = look.callback
    runtime.clear_errors()
    context = lib.llama_init_from_model(weights.pointer, parameters)
    if not context:
        raise MemoryFullError(f"no room to look at the layers of {weights.path}: {runtime.failure_reason()}")
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        with runtime.raising_callbacks():
            status = lib.llama_decode(context, batch)
    finally:
        lib.llama_batch_free(batch)
        lib.llama_free(context)
    if status:
        raise EvaluationError(
            f"{weights.path} cannot be evaluated (code {status}): {runtime.failure_reason()}"
        )
    return [look.influence.get(layer, 1.0) for layer in range(lib.llama_model_n_layer(weights.pointer))]


class _Look:
    """Receives the tensors of a graph, and compares each layer's output with the one before."""

    def __init__(self, n_positions: int, width: int) -> None:
        self.influence: dict[int, float] = {}
        self._n = n_positions
        self._width = width
        self._before: tuple[int, Hidden] | None = None  # a layer, -1 = none yet, and what it handed on
        self.callback = lib.ggml_backend_sched_eval_callback(self._receive)

    def _receive(self, tensor: Any, ask: bool, _user_data: object) -> bool:
        layer = self._layer(_name(tensor))
        if ask or layer is None:
            return layer is not None if ask else True
        if _n_elements(tensor) != self._n * self._width:
            return True
        hidden = np.empty((self._n, self._width), dtype=np.float32)
        _get(tensor, hidden.ctypes.data, 0, hidden.nbytes)
        if self._before is not None and self._before[0] == layer - 1:
            self.influence[layer] = _turn(self._before[1], hidden)
        self._before = layer, hidden
        return True

    @staticmethod
    def _layer(name: bytes) -> int | None:
        found = _OUTPUT.match(name)
        return int(found[1]) if found else -1 if name in _INPUTS else None


def _turn(before: Hidden, after: Hidden) -> float:
    """1 - the mean cosine of two sets of rows."""
    sizes = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    cosines = np.einsum("ij,ij->i", before, after) / np.maximum(sizes, 1e-30)
    return float(max(0.0, 1.0 - np.nan_to_num(cosines, nan=0.0).mean()))
