"""What a model file says about itself: its kind, and how much memory the model takes once it is loaded.

Nothing is loaded. The sizes of weights, KV cache and states are those that llama.cpp will allocate, without
its buffers for computing; that of our attention is included. tests/llama/test_file_facts.py,
tests/llama/test_needed_memory.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from llama_cpp import llama_cpp as lib

from llamaspec.files import file_identity
from llamaspec.llama import resources
from llamaspec.llama.context import attention_bytes, default_context_size
from llamaspec.llama.devices import free_gpu_bytes, leaves_main_memory
from llamaspec.llama.gguf_file import (
    PARTS,
    TOKENS,
    GgufFile,
    TensorFacts,
    active_parameters,
    file_parts,
    heads_per_key,
    kv_row_sizes,
    metadata_fault,
    read_gguf,
)
from llamaspec.llama.memory_sizes import can_restore, n_states, state_bytes
from llamaspec.llama.options import DEFAULT_CONTEXT, ModelOptions, cache_bytes
from llamaspec.llama.recurrent import N_DRAFTED
from llamaspec.llama.runtime import ggml_function

_FILE_TYPES = {  # general.file_type -> "Q4_K_M"
    value: name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    for name, value in vars(lib).items()
    if name.startswith("LLAMA_FTYPE_") and isinstance(value, int)
}

_TENSOR_TYPES = {value for name, value in vars(lib).items() if name.startswith("GGML_TYPE_")}
_TENSOR_TYPES.discard(lib.GGML_TYPE_COUNT)


class Kind(Enum):
    """What a file holds. The values complete the sentence "it is ..."."""

    TEXT = "a model that generates text"
    EMBEDDING = "an embedding model"
    RANKING = "a reranker"
    DIFFUSION = "a diffusion model"
    ENCODER = "a model with an encoder"
    DRAFT = "a draft or a prediction head, which needs its target"
    ADAPTER = "a LoRA adapter"
    CONTROL_VECTOR = "a control vector"
    IMPORTANCE = "an importance matrix"
    PROJECTOR = "a projector of images or sound"
    VOCABULARY = "a vocabulary without weights"
    OTHER = "no language model"


EMBEDDERS = frozenset({Kind.EMBEDDING, Kind.RANKING})
OFFERED = EMBEDDERS | {Kind.TEXT}  # by a server
NO_POOLING = "does not say how the rows of a text become one (pooling_type); convert it again"
_RANK = 4  # the pooling type of a reranker
_BY_TYPE = {"adapter": Kind.ADAPTER, "imatrix": Kind.IMPORTANCE, "mmproj": Kind.PROJECTOR}  # general.type
_BY_ARCHITECTURE = {
    "clip": Kind.PROJECTOR,
    "controlvector": Kind.CONTROL_VECTOR,
    "gemma-embedding": Kind.EMBEDDING,  # its file does not say that attention is not causal
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), Kind.DIFFUSION),
    **dict.fromkeys(("t5", "t5encoder"), Kind.ENCODER),
    **dict.fromkeys(PARTS, Kind.DRAFT),
}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Metadata of a model; a text is empty and a number 0 if the file lacks it."""

    kind: Kind = Kind.OTHER
    fault: str = ""  # why the file cannot be used, as a predicate without its path
    architecture: str = ""
    basename: str = ""  # name of the family, such as "Qwen2.5-Coder"
    size: str = ""  # of its parameters, such as "1.5B"
    quantization: str = ""  # such as "Q4_K_M"
    n_bytes: int = 0  # of all parts of the file
    token_bytes: int = 0  # that are read for each token: less than all in a mixture of experts
    context_length: int = 0  # tokens that the model was trained on
    embedding_length: int = 0
    block_count: int = 0
    pooling_type: int = 0  # how the rows of a text become one: llama.cpp's number, 0 = not at all
    template: str = ""  # the source of its chat template
    identity: str = ""  # see `file_identity`

    @property
    def refusal(self) -> str | None:
        """Why the file generates no text, as a predicate without its path; None if it does."""
        if self.fault:
            return self.fault
        return None if self.kind is Kind.TEXT else f"is {self.kind.value}; name a model that generates text"

    @property
    def offer_refusal(self) -> str | None:
        """Why a server cannot offer the file, as a predicate without its path; None if it can."""
        if self.fault or self.kind not in EMBEDDERS:
            return self.refusal
        return None if self.pooling_type else NO_POOLING


_Change = tuple[tuple[int, int], ...]  # time and size of each part
_known: dict[Path, tuple[_Change, FileFacts]] = {}
_prints: dict[Path, tuple[_Change, frozenset[str]]] = {}
_TAIL = 128  # tokens at the end of a vocabulary that two models of a family may not share


def file_facts(path: Path) -> FileFacts:
    """Read the facts; OSError if the file cannot be read. A file that has not changed is read once."""
    change, known = _change_of(path), _known.get(path)
    if known is None or known[0] != change:
        known = _known[path] = change, _read_facts(file_parts(path), [size for _, size in change])
    return known[1]


def vocabulary_prints(path: Path) -> frozenset[str]:
    """Return hashes of the tokens of a file, which has one in common with files of the same tokens.

    Up to 128 more tokens at the end make no difference. OSError if the file cannot be read; a file that has
    not changed is read once.
    """
    change, known = _change_of(path), _prints.get(path)
    if known is None or known[0] != change:
        known = _prints[path] = change, _read_prints(path)
    return known[1]


def _read_prints(path: Path) -> frozenset[str]:
    found = read_gguf(path, with_tokens=True)
    tokens, kind = found.metadata.get(TOKENS) or [], found.text("tokenizer.ggml.model").encode()
    whole = len(tokens) // _TAIL * _TAIL
    beginnings = {n for n in (len(tokens), whole, whole - _TAIL) if n > 0}
    return frozenset(hashlib.sha256(b"\0".join([kind, *tokens[:n]])).hexdigest() for n in beginnings)


def _change_of(path: Path) -> _Change:
    found = [part.stat() for part in file_parts(path)]
    return tuple((each.st_mtime_ns, each.st_size) for each in found)


def _read_facts(paths: Sequence[Path], sizes: Sequence[int]) -> FileFacts:
    parts = [read_gguf(path) for path in paths]
    found, n_bytes = parts[0], sum(sizes)
    n_parameters = sum(math.prod(each.sizes) for part in parts for each in part.tensors.values())
    n_active = active_parameters(found, n_parameters) or n_parameters
    return FileFacts(
        kind=_kind_of(found, {name for part in parts for name in part.tensors}),
        fault=_fault(parts, sizes),
        architecture=found.architecture,
        basename=found.text("general.basename"),
        size=found.text("general.size_label"),
        quantization=_FILE_TYPES.get(found.number("general.file_type", -1), ""),
        n_bytes=n_bytes,
        token_bytes=n_bytes * n_active // max(1, n_parameters),
        context_length=found.number("context_length"),
        embedding_length=found.number("embedding_length"),
        block_count=found.number("block_count"),
        pooling_type=found.number("pooling_type"),
        template=found.text("tokenizer.chat_template"),
        identity=file_identity(paths[0]),
    )


def _kind_of(found: GgufFile, tensors: set[str]) -> Kind:
    """Return the kind of a file from its metadata and the names of all its tensors."""
    if found.number("pooling_type") == _RANK:
        return Kind.RANKING
    special = _BY_TYPE.get(found.text("general.type")) or _BY_ARCHITECTURE.get(found.architecture)
    if special is not None:
        return special
    is_causal = found.metadata.get(f"{found.architecture}.attention.causal", True)
    if is_causal is False or found.number("pooling_type") > 0:
        return Kind.EMBEDDING
    if found.text("tokenizer.ggml.model") in ("", "none", "no_vocab"):
        return Kind.OTHER
    if not tensors:
        return Kind.VOCABULARY
    if not any(name.startswith("blk.0.") for name in tensors):
        return Kind.DRAFT if any(".nextn." in name for name in tensors) else Kind.OTHER
    return Kind.TEXT if "token_embd.weight" in tensors else Kind.OTHER


def _fault(parts: Sequence[GgufFile], sizes: Sequence[int]) -> str:
    """Say why a file is not whole; empty if it is."""
    first = parts[0]
    if not all(map(_is_whole, parts, sizes)):
        return "is cut short or damaged; download it again"
    if (n_parts := first.number("split.count", 1)) > len(parts):
        return f"has {len(parts)} of {n_parts} parts; put all into one folder, with their original names"
    fault = metadata_fault(first)
    return "" if fault is None else f"is damaged: {fault}; download or convert it again"


def _is_whole(found: GgufFile, n_bytes: int) -> bool:
    """Whether a file of this size has all its metadata and tensors."""
    if not found.data_start:
        return False
    last = max(found.tensors.values(), key=lambda tensor: tensor.offset, default=None)
    return last is None or found.data_start + last.offset + _tensor_bytes(last) <= n_bytes


def _tensor_bytes(tensor: TensorFacts) -> int:
    """Return the size of a tensor; 0 if this release of llama.cpp does not know its type."""
    if tensor.kind not in _TENSOR_TYPES:
        return 0
    block_bytes = ggml_function("ggml_type_size", ctypes.c_size_t, ctypes.c_int)(tensor.kind)
    block_length = ggml_function("ggml_blck_size", ctypes.c_int64, ctypes.c_int)(tensor.kind)
    return math.prod(tensor.sizes) // max(1, int(block_length)) * int(block_bytes)


# Memory


def needed_bytes(path: Path, options: ModelOptions, n_sequences: int = 1, *, is_draft: bool = False) -> int:
    """Return the bytes that a model, or a draft model, needs to run some sequences at the same time.

    Weights are mapped, but evaluations are fast only while they are in memory. If layers keep states, each
    sequence has a context of its own, and copies of states beside those that count as stored. May raise
    OSError.
    """
    found = read_gguf(path)
    n_weights = sum(part.stat().st_size for part in file_parts(path))
    rows = kv_row_sizes(found)
    key_bytes, value_bytes = cache_bytes(options.cache_type_k), cache_bytes(options.cache_type_v)
    per_token = sum(n_key * key_bytes + n_value * value_bytes for n_key, n_value in rows)
    per_state, n_kept = state_bytes(found), n_states(found)
    is_here = per_token > 0 and not leaves_main_memory(options)
    shared = attention_bytes(options, heads_per_key(found)) if is_here else 0  # contexts evaluate in turn
    n_ctx = options.n_ctx or _default_context(
        found, options, per_token + shared, n_weights, n_kept * per_state
    )
    if not per_state:
        return n_weights + round((per_token + shared) * max(n_ctx, options.n_cells or 0))
    n_copied = (N_DRAFTED if is_draft else int(n_kept == 1)) if can_restore(found) else 0
    per_sequence = round(per_token * n_ctx + per_state * (n_kept + n_copied))
    return n_weights + shared * n_ctx + n_sequences * per_sequence


def _default_context(
    found: GgufFile, options: ModelOptions, per_token: float, n_weights: int, n_states_bytes: int
) -> int:
    """Return the context that is chosen if nobody gives one, with the memory that is free now."""
    room = resources.available_bytes()
    if leaves_main_memory(options):
        room = max(0, free_gpu_bytes() - n_weights)
    if n_states_bytes:
        n_weights, room = 0, max(0, room - n_states_bytes) // 4
    trained = found.number("context_length", DEFAULT_CONTEXT)
    return default_context_size(trained, per_token, n_weights, room)
