"""The inputs of some of a model's layers, which llama.cpp hands out beside the logits: what EAGLE-3 reads.

Functions of llama.cpp's that llama-cpp-python does not bind; a build may lack them, or name them otherwise.
"""

from __future__ import annotations

import ctypes
from typing import Any

from llama_cpp import llama_cpp as lib

# Architectures whose graph hands them out; for others llama.cpp ends the process.
HAVE_LAYER_ROWS = frozenset({
    "bailingmoe3", "gemma4", "gpt-oss", "lfm2", "llama", "mimo2", "minimax-m2", "nemotron_h",
    "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next",
})  # fmt: skip
_POINTER = lib.llama_context_p_ctypes


def _function(names: tuple[str, ...], arguments: list[Any], result: Any) -> Any:
    """The function under the name that this build has for it; None where it has none."""
    for name in names:
        found = getattr(lib._lib, name, None)
        if found is not None:
            found.argtypes, found.restype = arguments, result
            return found
    return None


_set = _function(
    ("llama_set_embeddings_layer_inp", "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"),
    [_POINTER, ctypes.c_uint32, ctypes.c_bool],
    None,
)
_get = _function(
    ("llama_get_embeddings_layer_inp", "_Z30llama_get_embeddings_layer_inpP13llama_contextj"),
    [_POINTER, ctypes.c_uint32],
    ctypes.POINTER(ctypes.c_float),
)
_ids = _function(
    ("llama_model_target_layer_ids", "_Z28llama_model_target_layer_idsPK11llama_model"),
    [lib.llama_model_p_ctypes],
    ctypes.POINTER(ctypes.c_int32),
)
_n_ids = _function(
    ("llama_model_target_layer_ids_n", "_Z30llama_model_target_layer_ids_nPK11llama_model"),
    [lib.llama_model_p_ctypes],
    ctypes.c_uint32,
)


def has_layer_rows() -> bool:
    """Whether this build has the functions."""
    return None not in (_set, _get, _ids, _n_ids)


def layers_read(model: Any) -> tuple[int, ...]:
    """The target's layers whose inputs a draft reads."""
    return tuple(_ids(model)[: _n_ids(model)])


def show_layer(context: Any, layer: int) -> None:
    """Let a context hand out what goes into a layer."""
    _set(context, layer, True)


def layer_rows(context: Any, layer: int) -> Any:
    """Pointer to what went into a layer, of all positions of the last evaluation."""
    return _get(context, layer)
