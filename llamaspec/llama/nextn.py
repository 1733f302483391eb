"""Prediction heads (MTP, NextN) in llama.cpp: which files have them, and the functions that they need.

llama.cpp exports the functions, but does not promise them: a build may lack them. What it cannot compute it
meets with an abort of the process, so files are looked at before. Evaluates nothing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamaspec.errors import ModelFileError, PairError
from llamaspec.llama.gguf_file import check_gguf, file_parts, read_gguf

# Architectures whose graph runs one head, which feeds itself.
ONE_HEAD = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe",
    "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next",
})  # fmt: skip
SEVERAL_HEADS = frozenset({"hy_v3", "mimo2", "step35"})  # and those that run any number, one for each token
# Where the graph has a hidden row only for the positions that are scored; elsewhere for all of them.
SCORED_ROWS_ONLY = frozenset({"deepseek4", "gemma4-assistant", "mimo2", "qwen3next", "step35"})
try:
    _ext: Any = importlib.import_module("llama_cpp.llama_cpp_ext")
except (ImportError, AttributeError):  # AttributeError: the library lacks one of the functions
    _ext = None


@dataclass(frozen=True, slots=True)
class HeadsInFile:
    """The prediction heads that a file holds."""

    architecture: str
    n_heads: int  # 0 = none

    @property
    def fault(self) -> str | None:
        """Why they cannot be used, in a few words; None where they can."""
        if not self.n_heads:
            return "has no prediction heads"
        if _ext is None:
            return "has prediction heads, but this build of llama.cpp cannot compute them"
        if self.architecture in SEVERAL_HEADS or (self.architecture in ONE_HEAD and self.n_heads == 1):
            return None
        heads = "a prediction head" if self.n_heads == 1 else f"{self.n_heads} prediction heads"
        return f"has {heads}, which llama.cpp cannot compute for {self.architecture!r}"


def heads_in_file(path: Path) -> HeadsInFile:
    """Look at a file and its other parts, without loading it; ModelFileError if it is no model."""
    check_gguf(path)
    try:
        found = read_gguf(path)
        n_heads, n_layers = found.number("nextn_predict_layers"), found.number("block_count")
        tensor = f"blk.{n_layers - n_heads}.nextn.eh_proj.weight"  # heads may have been left out
        others = (read_gguf(part).names for part in file_parts(path)[1:])
        if n_heads and tensor not in found.names and not any(tensor in names for names in others):
            n_heads = 0
    except OSError as error:
        reason = error.strerror or error
        raise ModelFileError(f"cannot read {path}: {reason}; name a readable file") from error
    return HeadsInFile(found.architecture, n_heads)


def check_heads(path: Path) -> HeadsInFile:
    """The heads of a file, which can be used; else PairError, or ModelFileError if it is no model."""
    found = heads_in_file(path)
    if found.fault is not None:
        raise PairError(f"{path} {found.fault}; name a draft model, or look draft tokens up in earlier text")
    return found


def show_hidden_rows(context: Any, *, scored_only: bool) -> None:
    """Let a context hand out its hidden rows: of all positions, or of the scored ones only."""
    _ext.llama_set_embeddings_nextn(context, True, scored_only)


def choose_head(context: Any, head: int) -> None:
    """Let a context for heads compute this one, counted from 0."""
    _ext.llama_set_nextn_layer_offset(context, head)


def hidden_rows(context: Any) -> Any:
    """Pointer to the hidden rows of the last evaluation."""
    return _ext.llama_get_embeddings_nextn(context)


SHARED = "gemma4-assistant"  # a head in a file of its own
NEEDS_MORE = {"dflash": "DFlash", "eagle3": "EAGLE-3"}  # of the target than llama.cpp's interface hands out
PARTS = frozenset({SHARED, *NEEDS_MORE})  # architectures that cannot be evaluated without their target


def is_shared_head(path: Path) -> bool:
    """Whether a file is a head that reads the target's KV cache; PairError if it cannot be used."""
    try:
        architecture = read_gguf(path).architecture
    except OSError:
        return False  # whoever loads the file says why
    if architecture in NEEDS_MORE:
        raise PairError(
            f"{path} drafts by {NEEDS_MORE[architecture]}, which llamaspec does not have; name a draft model"
        )
    if architecture == SHARED and _ext is None:
        raise PairError(
            f"{path} is a prediction head, which this build of llama.cpp cannot compute; update it"
        )
    return architecture == SHARED
