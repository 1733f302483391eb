"""What a model file says about itself, and how much memory the model takes once it is loaded.

Nothing is loaded. The sizes of weights, KV cache and states are those that llama.cpp will allocate, without
its buffers for computing; that of our attention is included. tests/llama/test_needed_memory.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from llama_cpp import llama_cpp as lib

from llamaspec.llama import resources
from llamaspec.llama.context import STATES_BACK, attention_bytes, default_context_size
from llamaspec.llama.devices import free_gpu_bytes, leaves_main_memory
from llamaspec.llama.gguf_file import GgufFile, file_parts, heads_per_key, kv_row_sizes, read_gguf
from llamaspec.llama.options import DEFAULT_CONTEXT, ModelOptions, cache_bytes

_FILE_TYPES = {  # general.file_type -> "Q4_K_M"
    value: name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    for name, value in vars(lib).items()
    if name.startswith("LLAMA_FTYPE_") and isinstance(value, int)
}

NUMBER_BYTES = 4  # states are f32
_BOTH = {"falcon-h1"}  # architectures whose layers each have attention and a state
_ROLLS_BACK = {  # architectures of which llama.cpp keeps earlier states (llm_arch_supports_rs_rollback)
    "qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Metadata of a model; a text is empty and a number 0 if the file lacks it."""

    architecture: str
    basename: str  # name of the family, such as "Qwen2.5-Coder"
    size: str  # of its parameters, such as "1.5B"
    quantization: str  # such as "Q4_K_M"
    n_bytes: int  # of all parts of the file
    context_length: int  # tokens that the model was trained on
    embedding_length: int
    block_count: int
    template: str  # the source of its chat template


def file_facts(path: Path) -> FileFacts:
    """Read the facts; OSError if the file cannot be read. A file that has not changed is read once."""
    found = path.stat()
    return _facts(path, found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=256)
def _facts(path: Path, _changed: int, _n_bytes: int) -> FileFacts:
    found = read_gguf(path)
    return FileFacts(
        architecture=found.architecture,
        basename=found.text("general.basename"),
        size=found.text("general.size_label"),
        quantization=_FILE_TYPES.get(found.number("general.file_type", -1), ""),
        n_bytes=sum(part.stat().st_size for part in file_parts(path)),
        context_length=found.number("context_length"),
        embedding_length=found.number("embedding_length"),
        block_count=found.number("block_count"),
        template=found.text("tokenizer.chat_template"),
    )


# Memory


def needed_bytes(path: Path, options: ModelOptions, n_sequences: int = 1) -> int:
    """Return the bytes that a model needs to run some sequences at the same time.

    Weights are mapped, but evaluations are fast only while they are in memory. If layers keep states, each
    sequence has a context of its own. May raise OSError.
    """
    found = read_gguf(path)
    n_weights = sum(part.stat().st_size for part in file_parts(path))
    rows = kv_row_sizes(found)
    key_bytes, value_bytes = cache_bytes(options.cache_type_k), cache_bytes(options.cache_type_v)
    per_token = sum(n_key * key_bytes + n_value * value_bytes for n_key, n_value in rows)
    per_layer = _state_numbers(found) * NUMBER_BYTES
    n_layers = sum(row == (0, 0) or found.architecture in _BOTH for row in rows) if per_layer else 0
    is_here = per_token > 0 and not leaves_main_memory(options)
    shared = attention_bytes(options, heads_per_key(found)) if is_here else 0  # contexts evaluate in turn
    n_ctx = options.n_ctx or _default_context(
        found, options, per_token + shared, n_weights, keeps_states=n_layers > 0
    )
    if not n_layers:
        return n_weights + round((per_token + shared) * max(n_ctx, options.n_cells or 0))
    has_window = found.number("attention.sliding_window") > 0
    n_states = 1 + STATES_BACK if found.architecture in _ROLLS_BACK and not has_window else 1
    per_sequence = round(per_token * n_ctx + per_layer * n_layers * n_states)
    return n_weights + shared * n_ctx + n_sequences * per_sequence


def _state_numbers(found: GgufFile) -> int:
    """Return the size of the state of a layer that keeps one, in numbers; 0 = no layer does."""
    width = found.number("embedding_length")
    if head_size := found.number("wkv.head_size"):  # RWKV
        return width * (found.number("token_shift_count", 2) + head_size)
    if length := found.number("shortconv.l_cache"):  # LFM2
        return width * (length - 1)
    n_conv = max(0, found.number("ssm.conv_kernel") - 1)
    if size := found.number("kda.head_dim"):  # Kimi Linear
        n_heads = found.number("attention.head_count")
        return 3 * (n_conv or 3) * n_heads * size + size * size * n_heads
    n_inner, n_state = found.number("ssm.inner_size"), found.number("ssm.state_size")  # Mamba
    return n_conv * (n_inner + 2 * found.number("ssm.group_count") * n_state) + n_state * n_inner


def _default_context(
    found: GgufFile, options: ModelOptions, per_token: float, n_weights: int, *, keeps_states: bool
) -> int:
    """Return the context that is chosen if nobody gives one, with the memory that is free now."""
    room = resources.available_bytes()
    if leaves_main_memory(options):
        room = max(0, free_gpu_bytes() - n_weights)
    if keeps_states:
        n_weights, room = 0, room // 4
    trained = found.number("context_length", DEFAULT_CONTEXT)
    return default_context_size(trained, per_token, n_weights, room)
