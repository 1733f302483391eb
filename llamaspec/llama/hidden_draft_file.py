"""Files of drafts that read hidden rows: prediction heads (MTP, NextN), EAGLE-3, DFlash, DSpark, DFlash2.

llama.cpp aborts the process if it cannot compute such a draft, or if its file does not fit the target or
contradicts itself. So everything that it relies on is checked before. tests/llama/test_heads.py,
tests/llama/test_hidden_draft_file.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from llamaspec.errors import ModelFileError, PairError, printable
from llamaspec.llama.gguf_file import (
    DFLASH,
    EAGLE3,
    GgufFile,
    check_gguf,
    file_parts,
    key_sizes,
    read_gguf,
    read_numbers,
)
from llamaspec.llama.hidden_rows import can_compute_heads, can_read_layers

# Architectures whose graph runs a single head, which drafts any number of tokens.
ONE_HEAD = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe",
    "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next",
})  # fmt: skip
SEVERAL_HEADS = frozenset({"hy_v3", "mimo2", "step35"})  # whose graph runs several, one for each token

NAMES = {"eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}
# Architectures whose graph keeps the inputs of its layers; llama.cpp aborts for any other.
TARGETS = frozenset({
    "bailingmoe3", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama", "mimo2",
    "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen3",
    "qwen35", "qwen35moe", "qwen3moe", "qwen3next",
})  # fmt: skip
# Of these, architectures that also return the output of the last layer, which EAGLE-3 may read.
LAST_OUTPUT = frozenset({
    "bailingmoe3", "gemma4", "gpt-oss", "mimo2", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe",
    "qwen3next",
})  # fmt: skip
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
MAX_LAYERS, MAX_BLOCK = 16, 64  # layers that a draft reads; positions of a block
_I64 = 27  # GGML_TYPE_I64


# Prediction heads


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


def check_shared_head(path: Path, target: Path) -> None:
    """Raise PairError if a head that uses the target's KV cache cannot be computed, or not for this target.

    llama.cpp reads keys of the head's size from the target's KV cache, and aborts if that has smaller ones.
    """
    if not can_compute_heads():
        raise PairError(
            f"{path} is a prediction head, which this build of llama.cpp cannot compute; "
            "update llama-cpp-python"
        )
    head, found = read_gguf(path), read_gguf(target)
    own, cached = key_sizes(head, head.number("block_count")), key_sizes(found, found.number("block_count"))
    for kind in own.keys() & cached.keys():
        if own[kind] > cached[kind]:
            raise PairError(
                f"{path} was made for another target than {target}, which caches {cached[kind]} numbers of a "
                f"key where it reads {own[kind]}; name its own target"
            )


# Drafts with layers of their own


@dataclass(frozen=True, slots=True)
class HiddenDraftFile:
    """What a draft reads of its target, and how it drafts."""

    path: Path
    kind: str  # eagle3, dflash, dspark or dflash2
    layers: tuple[int, ...]  # layers of the target whose inputs it reads; its number of layers = the output
    hidden_size: int  # of the target, E
    block: int = 1  # positions that it computes at once, the last token included
    from_anchor: bool = False  # the row of the last token predicts, too
    is_causal: bool = True
    mask: int = 0  # the token of positions that a block leaves open
    has_confidence: bool = False
    n_candidates: int | None = None  # of each position in DFlash2's lattice
    has_embedding: bool = False  # of its own; otherwise it uses the target's
    has_output: bool = False
    has_token_rows: bool = False  # whether a tensor of its own has a row for each token

    @property
    def name(self) -> str:
        """The name of the method."""
        return NAMES[self.kind]

    @property
    def is_block(self) -> bool:
        """Whether it drafts a block at once."""
        return self.kind != EAGLE3

    @property
    def longest(self) -> int:
        """Maximum number of draft tokens in a block."""
        return self.block if self.from_anchor else self.block - 1


def hidden_draft(path: Path) -> HiddenDraftFile | None:
    """Read the file of a draft; None if it is of another kind.

    Raises
    ------
    PairError
        The file contradicts itself, or this build of llama.cpp cannot use it.
    """
    try:
        found = _read_parts(path)
    except OSError:
        return None  # loading the file will raise an error that says why
    if found.architecture not in (EAGLE3, DFLASH):
        return None
    check_gguf(path)
    kind = _kind(found)
    fault = _fault(found, kind) or _vocabulary_fault(path, found)
    if fault is not None:
        raise PairError(f"{path} is no usable {NAMES[kind]} draft: {fault}; convert or download it again")
    if not can_read_layers():
        raise PairError(
            f"{path} drafts with {NAMES[kind]}, for which this build of llama.cpp lacks functions; "
            "update llama-cpp-python"
        )
    layers = tuple(found.metadata[f"{found.architecture}.target_layers"])
    own = {name for name in (EMBEDDING, OUTPUT, "d2t") if name in found.tensors}
    draft = HiddenDraftFile(
        path,
        kind,
        layers,
        hidden_size=found.number("target_hidden_size" if kind == EAGLE3 else "embedding_length"),
        has_embedding=EMBEDDING in own,
        has_output=OUTPUT in own,
        has_token_rows=bool(own) or kind in ("dspark", "dflash2"),
    )
    if kind == EAGLE3:
        return draft
    return replace(
        draft,
        block=found.number("block_size"),
        from_anchor=kind == "dspark" and _flag(found, "sample_from_anchor", default=True),
        is_causal=_flag(found, "attention.causal", default=False),
        mask=found.number("tokenizer.ggml.mask_token_id", -1),
        has_confidence=kind == "dspark" and "conf_proj.weight" in found.tensors,
        n_candidates=found.number("selector_top_k") if kind == "dflash2" else None,
    )


def check_target(draft: HiddenDraftFile, target: Path) -> None:
    """Raise PairError if a draft was made for another target, or llama.cpp does not return what it reads."""
    found = read_gguf(target)
    architecture = found.architecture
    n_layers = found.number("block_count") - found.number("nextn_predict_layers")
    if architecture not in TARGETS:
        raise PairError(
            f"{draft.path} drafts with {draft.name}, but llama.cpp does not return the hidden rows of "
            f"{printable(architecture)!r}, the architecture of {target}; name a draft model"
        )
    if found.number("embedding_length") != draft.hidden_size:
        raise PairError(
            f"{draft.path} was made for a target with hidden rows of {draft.hidden_size} numbers, but "
            f"{target} has {found.number('embedding_length')}; name its own target"
        )
    reads_output = draft.kind == EAGLE3 and architecture in LAST_OUTPUT
    if max(draft.layers) > (n_layers if reads_output else n_layers - 1):
        raise PairError(
            f"{draft.path} reads layer {max(draft.layers)} of its target, but {target} has {n_layers} layers "
            "to read; name its own target"
        )


def check_tokens(draft: HiddenDraftFile, n_own: int, target: Path, n_target: int) -> None:
    """Raise PairError if a draft with `n_own` tokens cannot use what it borrows of a target with `n_target`.

    Vocabularies of different sizes work if the draft has its own output, or no row for each token: then it
    is loaded with as many tokens as the target. DFlash2 only looks up candidates among the target's tokens.
    """
    fits = n_own == n_target or draft.has_output or not draft.has_token_rows
    if not fits and not (draft.kind == "dflash2" and n_own > n_target):
        raise PairError(
            f"{draft.path} was made for a target with {n_own} tokens, but {target} has {n_target}; "
            "name its own target"
        )
    n_embedded = n_own if draft.has_embedding else min(n_own, n_target)
    if draft.is_block and draft.mask >= n_embedded:
        raise PairError(
            f"{draft.path} uses token {draft.mask} for open positions, a token beyond the {n_embedded} that "
            f"it can read with {target}; name its own target, or convert it again"
        )


def _kind(found: GgufFile) -> str:
    if found.architecture == EAGLE3:
        return EAGLE3
    if "selector_hidden.weight" in found.tensors:
        return "dflash2"
    return "dspark" if "markov_w1.weight" in found.tensors else DFLASH


def _fault(found: GgufFile, kind: str) -> str | None:
    """Describe the first number in the metadata on which llama.cpp would abort; None if there is none."""
    layers = found.metadata.get(f"{found.architecture}.target_layers")
    if not isinstance(layers, list) or not all(type(each) is int for each in layers):
        return "it does not say which layers of the target it reads"
    if kind == EAGLE3 and len(layers) != 3:
        return f"it reads {len(layers)} layers of the target, not 3"
    if not 0 < len(layers) <= MAX_LAYERS or min(layers) < 0:
        return f"it reads the layers {layers[: MAX_LAYERS + 1]} of the target"
    if kind == EAGLE3 and found.number("block_count") != 1:
        return f"it has {found.number('block_count')} layers, not 1"
    size, target_size = found.number("embedding_length"), found.number("target_hidden_size")
    if kind == EAGLE3 and size != target_size and not {EMBEDDING, OUTPUT} <= found.tensors.keys():
        return f"it has rows of {size} numbers, but the embedding or output of a target with {target_size}"
    if found.number("hyper_connection_count"):
        return "it has the layers of DeepSeek 4, which llamaspec does not support"
    return _attention_fault(found) or (None if kind == EAGLE3 else _block_fault(found, kind))


def _attention_fault(found: GgufFile) -> str | None:
    size, n_heads = found.number("embedding_length"), found.number("attention.head_count")
    n_kv_heads = found.number("attention.head_count_kv", n_heads)
    if min(size, n_heads, n_kv_heads) < 1 or n_heads % n_kv_heads:
        return f"it has {n_heads} heads over {n_kv_heads} heads of keys and values"
    length = found.number("attention.key_length", size // n_heads)
    rotated = found.number("rope.dimension_count", length)
    if length < 1 or found.number("attention.value_length", length) != length:
        return f"keys have {length} numbers, but values {found.number('attention.value_length', length)}"
    if rotated % 2 or not 0 < rotated <= length:
        return f"{rotated} numbers of a key with {length} are rotated"
    return None


def _block_fault(found: GgufFile, kind: str) -> str | None:
    block = found.number("block_size", 0)
    if not (2 if kind != "dspark" else 1) <= block <= MAX_BLOCK:
        return f"a block of {block} positions"
    if found.number("tokenizer.ggml.mask_token_id", -1) < 0:
        return "it names no token for open positions"
    if kind == "dflash2" and not 0 < found.number("selector_top_k") <= 64:
        return f"it selects among {found.number('selector_top_k')} tokens"
    return None


def _vocabulary_fault(path: Path, found: GgufFile) -> str | None:
    """Describe what is wrong with the map from its own tokens to the target's."""
    embedding, ids = found.tensors.get(EMBEDDING), found.tensors.get("d2t")
    if embedding is None and ids is None:
        return None
    n_tokens = _n_tokens(path)
    if embedding is not None and (len(embedding.sizes) != 2 or embedding.sizes[1] < n_tokens):
        return f"its embedding has no row for each of its {n_tokens} tokens"
    if ids is None:
        return None
    if ids.kind != _I64 or len(ids.sizes) != 1 or not 0 < math.prod(ids.sizes) <= n_tokens:
        return "d2t is no list of tokens"
    if OUTPUT not in found.tensors:
        return "d2t renames the tokens of an output that it does not have"
    part = next(part for part in file_parts(path) if "d2t" in read_gguf(part).tensors)
    numbers = read_numbers(part, read_gguf(part), "d2t")
    if not numbers or min(numbers) < 0 or max(numbers) >= n_tokens:
        return f"d2t names tokens beyond the vocabulary of {n_tokens}"
    return None


def _read_parts(path: Path) -> GgufFile:
    """Read the metadata of a file, and the names of all tensors of its parts."""
    found = read_gguf(path)
    for part in file_parts(path)[1:]:
        found.tensors |= read_gguf(part).tensors
    return found


def _n_tokens(path: Path) -> int:
    tokens = read_gguf(path, with_tokens=True).metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else 0


def _flag(found: GgufFile, key: str, *, default: bool) -> bool:
    value = found.metadata.get(f"{found.architecture}.{key}", default)
    return value if isinstance(value, bool) else default
