"""Measures how much each layer of a model changes its input, to find those that a draft can skip.

A callback receives the outputs of the layers during an evaluation, recognized by the tensor names that
llama.cpp's architectures share. tests/draft_making/test_skip_layers.py.
"""

from __future__ import annotations

import ctypes
import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.errors import EvaluationError, MemoryFullError
from llamaspec.llama import resources, runtime
from llamaspec.llama.batch import Batch, Segment
from llamaspec.llama.options import FLASH_ATTENTION, ModelOptions
from llamaspec.llama.runtime import ggml_function
from llamaspec.llama.weights import Weights
from llamaspec.values import TokenArray

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
