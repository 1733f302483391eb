"""Files with prediction heads (MTP, NextN): which have them, and which of them llama.cpp can compute.

llama.cpp aborts the process if it computes a head that it does not support, so files are checked before.
tests/llama/test_heads.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamaspec.errors import ModelFileError, PairError
from llamaspec.llama.gguf_file import check_gguf, file_parts, read_gguf
from llamaspec.llama.hidden_rows import can_compute_heads

# Architectures whose graph runs a single head, which drafts any number of tokens.
ONE_HEAD = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe",
    "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next",
})  # fmt: skip
SEVERAL_HEADS = frozenset({"hy_v3", "mimo2", "step35"})  # whose graph runs several, one for each token
SHARED = "gemma4-assistant"  # a head in a separate file, which uses the target's KV cache
PARTS = frozenset({SHARED, "dflash", "eagle3"})  # architectures that cannot be evaluated without their target


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
        if not can_compute_heads():
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


def is_shared_head(path: Path) -> bool:
    """Whether a file is a head that uses the target's KV cache; PairError if it cannot be used."""
    try:
        architecture = read_gguf(path).architecture
    except OSError:
        return False  # loading the file will raise an error that says why
    if architecture == SHARED and not can_compute_heads():
        raise PairError(
            f"{path} is a prediction head, which this build of llama.cpp cannot compute; "
            "update llama-cpp-python"
        )
    return architecture == SHARED
