"""Prediction heads (MTP, NextN) in llama.cpp: which files have them, and what they need of llama.cpp.

llama.cpp exports the functions, but does not promise them: a build may lack them. It aborts the process if it
is asked to compute a head that it does not support, so files are checked before. Evaluates nothing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamaspec.errors import ModelFileError, PairError
from llamaspec.llama.gguf_file import check_gguf, file_parts, read_gguf

# Architectures whose graph runs one head, which feeds itself.
ONE_HEAD = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe",
    "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next",
})  # fmt: skip
SEVERAL_HEADS = frozenset({"hy_v3", "mimo2", "step35"})  # and those that run any number, one for each token
# Architectures whose graph has a hidden row only for the positions that are scored; others have all rows.
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
        """Why they cannot be used, in a few words; None if they can."""
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
        others = (read_gguf(part).tensors for part in file_parts(path)[1:])
        if n_heads and tensor not in found.tensors and not any(tensor in tensors for tensors in others):
            n_heads = 0
    except OSError as error:
        reason = error.strerror or error
        raise ModelFileError(f"cannot read {path}: {reason}; name a readable file") from error
    return HeadsInFile(found.architecture, n_heads)


def check_heads(path: Path) -> HeadsInFile:
    """The heads of a file, which can be used; else PairError, or ModelFileError if it is no model."""
    found = heads_in_file(path)
    if found.fault is not None:
        raise PairError(f"{path} {found.fault}; name a draft model, or copy draft tokens from earlier text")
    return found


def show_hidden_rows(context: Any, *, scored_only: bool) -> None:
    """Make a context provide its hidden rows: of all positions, or of the scored ones only."""
    _ext.llama_set_embeddings_nextn(context, True, scored_only)


def choose_head(context: Any, head: int) -> None:
    """Choose the head that a context for heads computes, counted from 0."""
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
        return False  # loading the file will raise an error that says why
    if architecture in NEEDS_MORE:
        raise PairError(
            f"{path} drafts by {NEEDS_MORE[architecture]}, which llamaspec does not have; name a draft model"
        )
    if architecture == SHARED and _ext is None:
        raise PairError(
            f"{path} is a prediction head, which this build of llama.cpp cannot compute; update it"
        )
    return architecture == SHARED


Rows = npt.NDArray[np.float32]  # [n, E] hidden rows: what the last layer computed at some positions
KEPT_ROWS = 512  # hidden rows kept of a running sequence, if there were so many: one chunk of a prompt
TAIL_ROWS = 65  # hidden rows kept of a sequence that has ended: what a round may have left unread


class HiddenRows:
    """Hidden rows of the last positions of a sequence."""

    def __init__(self) -> None:
        self.first = 0  # position of the first row
        self.end = 0  # position behind the last row
        self._rows: Rows = np.empty((0, 0), dtype=np.float32)  # [capacity, E]; the first `end - first` count

    def has(self, position: int) -> bool:
        """Return whether the row of a position is known."""
        return self.first <= position < self.end

    def rows(self, start: int, end: int) -> Rows:
        """The rows of some positions, all of them known: a view."""
        return self._rows[start - self.first : end - self.first]

    def fill(self, rows: Rows, start: int) -> None:
        """Write what is known of the positions from `start` on into `rows`."""
        first, end = max(self.first, start), min(self.end, start + len(rows))
        if first < end:
            rows[first - start : end - start] = self.rows(first, end)

    def add(self, start: int, rows: Rows) -> None:
        """Note the rows of positions from `start` on, in place of what was known from there on."""
        self.cut(start)
        if start != self.end:
            self.first = self.end = start
        n, n_new = self.end - self.first, len(rows)
        if n + n_new > len(self._rows):
            kept = self.rows(max(self.first, self.end - KEPT_ROWS), self.end)
            grown = np.empty((2 * (len(kept) + n_new), rows.shape[1]), dtype=np.float32)
            grown[: len(kept)] = kept.reshape(len(kept), rows.shape[1])
            self._rows, self.first, n = grown, self.end - len(kept), len(kept)
        self._rows[n : n + n_new] = rows
        self.end = start + n_new  # last, so that an exception leaves what was known before

    def cut(self, n: int) -> None:
        """Forget the rows of positions from `n` on."""
        self.end = min(self.end, n)
        self.first = min(self.first, self.end)

    def tail(self, n: int) -> HiddenRows:
        """Return a copy of the last rows before position `n`."""
        tail, end = HiddenRows(), max(self.first, min(self.end, n))
        tail.first, tail.end = max(self.first, end - TAIL_ROWS), end
        tail._rows = self.rows(tail.first, tail.end).copy()
        return tail
