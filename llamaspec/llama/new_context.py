"""How a context of llama.cpp is made: its size, its parameters, and whether the machine has room for it."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp as lib

from llamaspec.errors import MemoryFullError
from llamaspec.llama import nextn, runtime
from llamaspec.llama.context_size import default_context_size
from llamaspec.llama.devices import device_of, find_devices
from llamaspec.llama.options import (
    BATCH,
    CACHE_BYTES,
    CACHE_TYPES,
    FLASH_ATTENTION,
    N_BRANCHES,
    N_SEQUENCES,
    ModelOptions,
)
from llamaspec.llama.weights import Weights

EAGLE_BATCH = 64  # it computes logits of every position
STATES_BACK = 8  # earlier states that llama.cpp keeps itself, where it can: (1 + this) times the room


def can_restore_states(weights: Weights) -> bool:
    """Not where other layers look through a window: llama.cpp may have given away positions it would need."""
    return weights.keeps_states and weights.window is None


def n_sequences(options: ModelOptions) -> int:
    """Sequences for rows and prefixes: llama.cpp wants room for one row of logits for each."""
    return max(2, min(N_SEQUENCES, options.max_scored))


def open_context(
    weights: Weights, options: ModelOptions, n_cells: int, other: Any | None, *, is_head: bool
) -> Any:
    """The llama_context.

    Parameters
    ----------
    other : llama_context pointer, optional
        Read the KV cache of this one.
    is_head : bool
        Compute a prediction head.

    Raises
    ------
    MemoryFullError
        The machine has no room for the KV cache.
    """
    if not is_head:  # one layer
        _check_room(weights, options, n_cells)
    parameters = lib.llama_context_default_params()
    parameters.n_ctx = n_cells
    parameters.n_batch = parameters.n_ubatch = BATCH
    keeps_states = weights.keeps_states and not is_head
    if is_head and weights.architecture == nextn.EAGLE:
        parameters.n_batch = parameters.n_ubatch = EAGLE_BATCH
    elif is_head:
        parameters.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
    if other is not None:
        parameters.ctx_other = other
    parameters.n_seq_max = 1 if keeps_states else n_sequences(options) + 1 + (0 if is_head else N_BRANCHES)
    parameters.n_outputs_max = max(options.max_scored, parameters.n_seq_max)
    parameters.kv_unified = True
    parameters.swa_full = True
    parameters.n_rs_seq = STATES_BACK if keeps_states and can_restore_states(weights) else 0
    parameters.n_threads = parameters.n_threads_batch = options.threads or runtime.default_threads()
    parameters.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
    parameters.type_k = CACHE_TYPES[options.cache_type_k]
    parameters.type_v = CACHE_TYPES[options.cache_type_v]
    runtime.clear_errors()
    with runtime.raising_callbacks():
        context = lib.llama_init_from_model(weights.pointer, parameters)
    if not context:
        raise MemoryFullError(
            f"llama.cpp cannot make a context of {n_cells} tokens for {weights.path}: "
            f"{runtime.last_error()}; use a smaller context"
        )
    return context


def context_size_for(weights: Weights, options: ModelOptions) -> int:
    """By main memory, or by that of the devices that take the model."""
    model = weights.pointer
    n_bytes, room = int(lib.llama_model_size(model)), runtime.available_bytes()
    if weights.devices:
        free = sum(device_of(handle).free_bytes for handle in weights.devices)
        room = max(0, free - n_bytes) if options.workers else free  # CPUs report all they have
    elif runtime.can_offload() and options.offloads:
        gpus = [device for device in find_devices() if device.is_gpu]
        room = sum(device.free_bytes for device in gpus) if gpus else room  # the weights have been loaded
    types = CACHE_BYTES[options.cache_type_k], CACHE_BYTES[options.cache_type_v]
    per_token = weights.kv_bytes_per_token(*types)
    if weights.keeps_states and room is not None:
        n_bytes, room = 0, room // 4  # every text has a context of its own
    return default_context_size(weights.trained_context_size, per_token, n_bytes, room)


def leaves_main_memory(weights: Weights, options: ModelOptions) -> bool:
    """Whether layers, and their cells, are in the memory of other devices."""
    return bool(weights.devices) or (runtime.can_offload() and options.offloads)


def _check_room(weights: Weights, options: ModelOptions, n_cells: int) -> None:
    """Refuse a KV cache larger than the machine: the system would end the process, not the call."""
    room = runtime.available_bytes()
    if room is None or leaves_main_memory(weights, options):
        return
    per_token = weights.kv_bytes_per_token(
        CACHE_BYTES[options.cache_type_k], CACHE_BYTES[options.cache_type_v]
    )
    if per_token * n_cells > room:
        raise MemoryFullError(
            f"a context of {n_cells} tokens needs {per_token * n_cells / 2**30:.1f} GiB, this machine has "
            f"{room / 2**30:.1f} GiB to give; use a smaller context"
        )
