"""Hidden rows: llama.cpp's functions, and how the KV cache of a draft that reads such rows names tokens.

The functions are not in llama.h, so a build may lack them. What such a draft computes for a token depends on
all tokens before it, also on those that it does not see, because the hidden rows do.
tests/llama/test_hidden_rows.py.
"""

from __future__ import annotations

import ctypes
import importlib
import zlib
from contextlib import suppress
from typing import Any

from llama_cpp import llama_cpp as lib

from llamaspec.values import TokenArray

# Architectures whose graph returns the hidden rows of scored positions only.
SCORED_ROWS_ONLY = frozenset({"deepseek4", "gemma4-assistant", "mimo2", "qwen3next", "step35"})
_MARK = -(1 << 30)  # above are token ids and their complements
try:
    _ext: Any = importlib.import_module("llama_cpp.llama_cpp_ext")
except (ImportError, AttributeError):  # AttributeError: the library lacks one of the functions
    _ext = None


def can_compute_heads() -> bool:
    """Whether this build of llama.cpp returns hidden rows, which prediction heads need."""
    return _ext is not None


def show_hidden_rows(context: Any, *, scored_only: bool) -> None:
    """Make a context return its hidden rows, of all positions or of the scored ones only."""
    _ext.llama_set_embeddings_nextn(context, True, scored_only)


def choose_head(context: Any, head: int) -> None:
    """Choose the head, from 0, that a context for heads computes."""
    _ext.llama_set_nextn_layer_offset(context, head)


def hidden_rows(context: Any) -> Any:
    """Return a pointer to the hidden rows of the last evaluation."""
    return _ext.llama_get_embeddings_nextn(context)


def _function(name: str, mangled: str, result: Any, *arguments: Any) -> Any:
    """Return a function that the bindings lack, as C or C++ exports it; None if the library has none."""
    for symbol in (name, mangled):
        with suppress(AttributeError):
            found = getattr(ctypes.CDLL(lib._lib._name), symbol)
            found.restype, found.argtypes = result, arguments
            return found
    return None


_context = lib.llama_context_p_ctypes
_keep_layer = _function(
    "llama_set_embeddings_layer_inp", "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    None, _context, ctypes.c_uint32, ctypes.c_bool,
)  # fmt: skip
_layer_rows = _function(
    "llama_get_embeddings_layer_inp", "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
    ctypes.POINTER(ctypes.c_float), _context, ctypes.c_uint32,
)  # fmt: skip


def can_read_layers() -> bool:
    """Whether this build of llama.cpp returns what goes into a layer."""
    return _ext is not None and _keep_layer is not None and _layer_rows is not None


def keep_layer(context: Any, layer: int) -> None:
    """Make a context keep what goes into a layer; before the first evaluation."""
    _keep_layer(context, layer, True)  # a function of C


def layer_rows(context: Any, layer: int) -> Any:
    """Return a pointer to what went into a layer in the last evaluation: [positions, E]."""
    return _layer_rows(context, layer)


def window_keys(tokens: TokenArray, begin: int, n_drafted: int = 0) -> TokenArray:
    """Return the tokens from `begin` on as a KV cache names them: [n - begin].

    The last `n_drafted` ones are complements: an accepted draft token is evaluated again, with the target's
    hidden row. The first one stands for itself and all tokens before it.
    """
    keys = tokens[begin:].copy()
    if n_drafted:
        keys[-n_drafted:] = ~keys[-n_drafted:]
    if begin and len(keys):
        keys[0] = _MARK - (zlib.crc32(tokens[: begin + 1].tobytes()) >> 3)
    return keys
