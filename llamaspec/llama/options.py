"""Options for loading a model, validated."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path

from llama_cpp import llama_cpp as lib

from llamaspec.kernels import AUTO, OFF
from llamaspec.llama import runtime
from llamaspec.llama.runtime import ggml_function

MAX_DRAFT = 64  # draft tokens in one round
DEFAULT_CONTEXT = 4096  # tokens of the smallest default context, unless the model was trained on fewer
BATCH = 512  # maximum number of positions in one evaluation
DRAFT_SCORED = 16  # maximum number of positions that a draft model scores at once: one for each sequence
N_SEQUENCES = 64  # maximum number of cached sequences, running or finished, in a context

FLASH_ATTENTION = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
CACHE_TYPES = {
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16, which the bindings do not name
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "q4_0": lib.GGML_TYPE_Q4_0,
}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options for loading a model; ValueError if a field is outside its range."""

    n_ctx: int | None = None  # tokens of the longest sequence; None = as trained, as far as memory allows
    gpu_layers: int | None = None  # layers to offload; None = all
    threads: int | None = None  # None = the full-speed physical cores that other programs leave idle
    flash_attention: str = "auto"  # on, off, or auto: llama.cpp chooses
    cache_type_k: str = "f16"  # type of the keys in the KV cache
    cache_type_v: str = "f16"  # type of the values in the KV cache
    n_cells: int | None = None  # size of the KV cache that all sequences share, in tokens; None = n_ctx
    max_scored: int = BATCH  # maximum number of positions in one evaluation that have logits
    repack: bool = True  # let llama.cpp repack weights for faster kernels, if ours do not take them
    kernels: str = AUTO  # our own, or "off"; the same for all models of a process
    devices: tuple[str, ...] | None = None  # llama.cpp's names; None = workers and all GPUs, () = none
    tensor_split: tuple[float, ...] = ()  # shares of the layers for each device; () = by free memory
    workers: tuple[str, ...] = ()  # HOST:PORT of RPC workers, whose devices are RPC0, RPC1, ...
    heads: bool = False  # load the prediction heads, and return the hidden rows that they need
    projector: Path | None = None  # the file that turns pictures into embeddings
    # Layers whose inputs are the hidden rows of a draft; the number of layers stands for the last output.
    hidden_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.n_ctx is not None and not 2 <= self.n_ctx < 2**31:
            raise ValueError(f"n-ctx must be from 2 to {2**31 - 1}, got {self.n_ctx}")
        if self.gpu_layers is not None and not 0 <= self.gpu_layers < 2**31:
            raise ValueError(f"gpu-layers must be >= 0 and below 2^31, got {self.gpu_layers}")
        if self.threads is not None and not 1 <= self.threads <= 512:
            raise ValueError(f"threads must be from 1 to 512, got {self.threads}")
        if self.flash_attention not in FLASH_ATTENTION:
            raise ValueError(f"flash-attn must be one of {', '.join(FLASH_ATTENTION)}")
        if not {self.cache_type_k, self.cache_type_v} <= CACHE_TYPES.keys():
            raise ValueError(f"cache types must be among {', '.join(CACHE_TYPES)}")
        if self.flash_attention == "off" and self.needs_flash_attention:
            raise ValueError(f"cache-type-v {self.cache_type_v} needs flash attention; drop --flash-attn off")
        if self.n_cells is not None and not 2 <= self.n_cells < 2**31:
            raise ValueError(f"n_cells must be from 2 to {2**31 - 1}, got {self.n_cells}")
        if self.kernels not in (AUTO, OFF):
            raise ValueError(f"kernels must be auto or off, got {self.kernels!r}")
        if self.max_scored < 1:
            raise ValueError(f"max_scored must be >= 1, got {self.max_scored}")
        self._check_placement()

    @property
    def needs_flash_attention(self) -> bool:
        """Whether llama.cpp supports this type of values only with flash attention."""
        return self.cache_type_v not in ("f32", "f16", "bf16")

    @property
    def offloads(self) -> bool:
        """Whether layers may be computed outside this machine's CPU."""
        return self.gpu_layers != 0 and self.devices != ()

    @property
    def has_llama_cpp_attention(self) -> bool:
        """Whether llama.cpp's own flash attention may compute, so that bits depend on widths and threads."""
        return self.flash_attention != "off" and runtime.kernels().level is None

    @property
    def computing(self) -> list[object]:
        """What computes the model, and how, for the key of a cache: costs and states depend on it."""
        attention = [self.flash_attention, self.cache_type_k, self.cache_type_v]
        return [self.gpu_layers, self.repack, *self.placement, *attention]

    @property
    def placement(self) -> list[object]:
        """Devices and workers unless llama.cpp chooses them, and our kernels."""
        is_chosen = self.devices is not None or self.tensor_split or self.workers
        devices = [self.devices, self.tensor_split, self.workers] if is_chosen else []
        return [*devices, *([] if self.kernels == OFF else runtime.kernels().key)]

    def _check_placement(self) -> None:
        for address in self.workers:
            host, _, port = address.rpartition(":")
            if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
                raise ValueError(f"a worker is named as HOST:PORT, got {address!r}")
        if len({*self.workers}) < len(self.workers):
            raise ValueError("a worker is named twice; each serves one client at a time")
        if self.workers and not self.offloads:
            raise ValueError(
                "workers compute only offloaded layers; drop --gpu-layers 0 and --device none, or --rpc"
            )
        if not all(0 <= share < math.inf for share in self.tensor_split):
            raise ValueError(f"shares of tensor-split must be numbers >= 0, got {self.tensor_split}")
        if self.tensor_split and not any(self.tensor_split):
            raise ValueError("one share of tensor-split must be greater than 0")
        if len(self.tensor_split) > lib.LLAMA_MAX_DEVICES:
            raise ValueError(f"tensor-split has at most {lib.LLAMA_MAX_DEVICES} shares")


def cache_bytes(kind: str) -> float:
    """Return the bytes of one number of a cache type."""
    block_bytes = ggml_function("ggml_type_size", ctypes.c_size_t, ctypes.c_int)
    block_length = ggml_function("ggml_blck_size", ctypes.c_int64, ctypes.c_int)
    number = CACHE_TYPES[kind]
    return float(block_bytes(number) / block_length(number))
