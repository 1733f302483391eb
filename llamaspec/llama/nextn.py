"""Prediction heads (MTP, NextN): the files that have them, and llama.cpp's functions for them.

The functions are not in llama.h, so a build may lack them. llama.cpp aborts the process if it computes a head
that it does not support, so files are checked before.
"""

from __future__ import annotations

import ctypes
import importlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from llamaspec.errors import ModelFileError, PairError
from llamaspec.llama.gguf_file import check_gguf, file_parts, read_gguf

# Architectures whose graph runs a single head, which drafts any number of tokens.
ONE_HEAD = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe",
    "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next",
})  # fmt: skip
SEVERAL_HEADS = frozenset({"hy_v3", "mimo2", "step35"})  # whose graph runs several, one for each token
# Architectures whose graph returns the hidden rows of scored positions only.
SCORED_ROWS_ONLY = frozenset({"deepseek4", "gemma4-assistant", "mimo2", "qwen3next", "step35"})
try:
    _ext: Any = importlib.import_module("llama_cpp.llama_cpp_ext")
except (ImportError, AttributeError):  # AttributeError: the library lacks one of the functions
    _ext = None


@dataclass(frozen=True, slots=True)
class HeadsInFile:
    """The prediction heads of a file."""

    architecture: str
    n_heads: int  # 0 = none

    @property
    def fault(self) -> str | None:
        """The reason why they cannot be used, as a predicate; None if they can."""
        if not self.n_heads:
            return "has no prediction heads"
        if _ext is None:
            return "has prediction heads, but this build of llama.cpp cannot compute them"
        if self.architecture in SEVERAL_HEADS or (self.architecture in ONE_HEAD and self.n_heads == 1):
            return None
        heads = "a prediction head" if self.n_heads == 1 else f"{self.n_heads} prediction heads"
        return f"has {heads}, which llama.cpp cannot compute for {self.architecture!r}"


def heads_in_file(path: Path) -> HeadsInFile:
    """Find the heads of a model without loading it; ModelFileError if the file is not a model."""
    check_gguf(path)
    try:
        found = read_gguf(path)
        n_heads, n_layers = found.number("nextn_predict_layers"), found.number("block_count")
        tensor = f"blk.{n_layers - n_heads}.nextn.eh_proj.weight"  # a converter may have left the heads out
        others = (read_gguf(part).tensors for part in file_parts(path)[1:])
        if n_heads and tensor not in found.tensors and not any(tensor in tensors for tensors in others):
            n_heads = 0
    except OSError as error:
        reason = error.strerror or error
        raise ModelFileError(f"cannot read {path}: {reason}; name a readable file") from error
    return HeadsInFile(found.architecture, n_heads)


def check_heads(path: Path) -> HeadsInFile:
    """Return the heads of a file. PairError if they cannot be used, ModelFileError if it is not a model."""
    found = heads_in_file(path)
    if found.fault is not None:
        raise PairError(f"{path} {found.fault}; name a draft model, or copy draft tokens from earlier text")
    return found


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


SHARED = "gemma4-assistant"  # a head in a separate file, which uses the target's KV cache
PARTS = frozenset({SHARED, "dflash", "eagle3"})  # architectures that cannot be evaluated without their target


def is_shared_head(path: Path) -> bool:
    """Whether a file is a head that uses the target's KV cache; PairError if it cannot be used."""
    try:
        architecture = read_gguf(path).architecture
    except OSError:
        return False  # loading the file will raise an error that says why
    if architecture == SHARED and _ext is None:
        raise PairError(
            f"{path} is a prediction head, which this build of llama.cpp cannot compute; "
            "update llama-cpp-python"
        )
    return architecture == SHARED
