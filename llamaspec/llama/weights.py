"""The weights of a GGUF model, loaded once. Contexts are opened over them: one or several.

Knows no KV cache and evaluates nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from llamaspec.errors import ClosedError, DeviceError, MemoryFullError, ModelFileError
from llamaspec.llama import runtime
from llamaspec.llama.gguf_file import check_gguf, check_parts, kv_row_sizes, read_gguf
from llamaspec.llama.options import ModelOptions, cache_bytes, device_handles, find_devices, gpus_among
from llamaspec.llama.rpc import connect
from llamaspec.llama.runtime import Handle
from llamaspec.llama.trial import ensure_tried
from llamaspec.llama.vocabulary import LlamaVocabulary

LoadProgress = Callable[[float], None]  # fraction loaded, 0 to 1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the weights are."""

    architecture: str
    n_parameters: int
    n_active_parameters: int | None  # used for one token, roughly; None where all of them are
    weights_bytes: int
    window: int | None  # positions that some layers look back; None = all layers see everything
    keeps_states: bool  # some layers keep a state
    keeps_positions: bool  # some layers keep keys and values

    @property
    def n_computing(self) -> int:
        """Parameters that one token costs."""
        return self.n_active_parameters or self.n_parameters


class Weights:
    """Loaded weights and their vocabulary.

    Of `options`, `gpu_layers`, `repack`, `placement` and `heads` count here, the rest for contexts. With
    `vocabulary_only` no tensors are read, and nothing can be evaluated.

    Raises
    ------
    ModelFileError
        The file is missing, damaged, or cannot generate text.
    MemoryFullError
        The machine has no room for the weights.
    WorkerError
        A worker cannot be reached.
    DeviceError
        There is no such device.
    """

    def __init__(
        self,
        path: Path,
        options: ModelOptions,
        on_load: LoadProgress | None = None,
        *,
        vocabulary_only: bool = False,
    ) -> None:
        self.path = path
        runtime.start()
        self.devices = _devices(options)
        check_gguf(path)
        check_parts(path)
        ensure_tried(path, options.n_ctx, on_load)
        self._handle: Handle | None = Handle(
            self._load(options, on_load, vocabulary_only=vocabulary_only), lib.llama_model_free
        )
        try:
            self._check_kind()
        except ModelFileError:
            self.close()
            raise
        self.vocabulary = LlamaVocabulary(self.handle)
        self.trained_context_size: int = lib.llama_model_n_ctx_train(self.pointer)
        self.is_recurrent = bool(lib.llama_model_is_recurrent(self.pointer))  # all layers keep a state
        self.keeps_states = self.is_recurrent or bool(lib.llama_model_is_hybrid(self.pointer))  # some do
        self.n_layers: int = lib.llama_model_n_layer(self.pointer)  # without the output
        self.hidden_size: int = lib.llama_model_n_embd_out(self.pointer)  # E
        self.window: int | None = int(lib.llama_model_n_swa(self.pointer)) or None

    @property
    def handle(self) -> Handle:
        """What contexts must keep alive."""
        if self._handle is None:
            raise ClosedError("the model is closed")
        self._handle.check()
        return self._handle

    @property
    def pointer(self) -> Any:
        """The llama_model."""
        return self.handle.pointer

    @property
    def description(self) -> str:
        """Architecture, size and quantisation, as llama.cpp names them."""
        buffer = ctypes.create_string_buffer(128)
        lib.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode("utf-8", errors="replace")

    @property
    def architecture(self) -> str:
        """How llama.cpp names it."""
        return self.metadata("general.architecture") or "unknown"

    def metadata(self, key: str) -> str | None:
        """One metadata entry of the file as text, whole; None where there is none."""
        size = 1 << 12
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, size)
            if n < size:
                return buffer.value.decode("utf-8", errors="replace") if n >= 0 else None
            size = n + 1

    def facts(self) -> ModelFacts:
        """What the weights are."""
        n_parameters = int(lib.llama_model_n_params(self.pointer))
        return ModelFacts(
            architecture=self.architecture,
            n_parameters=n_parameters,
            n_active_parameters=active_parameters(self.metadata, n_parameters),
            weights_bytes=int(lib.llama_model_size(self.pointer)),
            window=self.window,
            keeps_states=self.keeps_states,
            keeps_positions=not self.is_recurrent,
        )

    def kv_bytes_per_token(self, options: ModelOptions) -> float:
        """What one token takes in the KV cache; 0 if there are only states."""
        key_bytes, value_bytes = cache_bytes(options.cache_type_k), cache_bytes(options.cache_type_v)
        return sum(n_key * key_bytes + n_value * value_bytes for n_key, n_value in self._kv_row_sizes)

    @functools.cached_property
    def _kv_row_sizes(self) -> list[tuple[int, int]]:
        return [] if self.is_recurrent else kv_row_sizes(read_gguf(self.path))

    def close(self) -> None:
        """Free the weights, once no context needs them; more than once is allowed."""
        if hasattr(self, "vocabulary"):
            self.vocabulary.close()
        self._handle = None

    def _check_kind(self) -> None:
        remedy = "give a decoder-only text model"
        if lib.llama_model_has_encoder(self.pointer):
            raise ModelFileError(f"{self.path} has an encoder; {remedy}")
        if lib.llama_model_is_diffusion(self.pointer):
            raise ModelFileError(f"{self.path} is a diffusion model; {remedy}")

    def _load(self, options: ModelOptions, on_load: LoadProgress | None, *, vocabulary_only: bool) -> Any:
        """The llama_model of the file."""
        parameters = lib.llama_model_default_params()
        if options.gpu_layers is not None:
            parameters.n_gpu_layers = options.gpu_layers
        parameters.use_extra_bufts = options.repack and runtime.repacking_is_safe()
        if self.devices is not None:
            devices = (ctypes.c_void_p * (len(self.devices) + 1))(*self.devices)  # its end is NULL
            parameters.devices = ctypes.cast(devices, ctypes.c_void_p)
        if options.tensor_split:
            parameters.tensor_split = (ctypes.c_float * lib.LLAMA_MAX_DEVICES)(*options.tensor_split)

        def report(fraction: float, _user_data: object) -> bool:
            if on_load is not None:
                on_load(fraction)
            return True

        parameters.progress_callback = callback = lib.llama_progress_callback(report)
        parameters.load_mtp = options.heads
        parameters.vocab_only = vocabulary_only
        runtime.clear_errors()
        with runtime.raising_callbacks():
            model = lib.llama_model_load_from_file(os.fsencode(self.path), parameters)
        del callback  # it had to live until here
        if model:
            return model
        reason = runtime.failure_reason()
        if "alloc" in reason or "memory" in reason:
            raise MemoryFullError(
                f"no room for {self.path}: {reason}; close programs or put fewer layers on the GPU"
            )
        if "split file" in reason:
            raise ModelFileError(
                f"{self.path} is a part of a model under another name; "
                "name the file that ends in -00001-of- and the number of parts"
            )
        raise ModelFileError(f"llama.cpp cannot load {self.path}: {reason}; download or convert it again")


def active_parameters(metadata: Callable[[str], str | None], n_parameters: int) -> int | None:
    """Parameters of a mixture of experts that one token uses; None for other models.

    All but the matrices (gate, up, down) of the experts that are not chosen, by the sizes in the metadata.
    """

    def number(key: str) -> int | None:
        text = metadata(f"{metadata('general.architecture')}.{key}")
        return int(text) if text is not None and text.isdigit() else None

    n_experts, n_used = number("expert_count"), number("expert_used_count")
    width, n_layers = number("embedding_length"), number("block_count")
    inner = number("expert_feed_forward_length") or number("feed_forward_length")
    if not (n_experts and n_used and width and n_layers and inner):
        return None
    n_chunked = (n_layers - (number("leading_dense_block_count") or 0)) // (
        number("interleave_moe_layer_step") or 1
    )
    active = n_parameters - 3 * width * inner * (n_experts - n_used) * n_chunked
    return active if 0 < active < n_parameters else None


def _devices(options: ModelOptions) -> list[int] | None:
    """llama.cpp's handles of what computes offloaded layers; None where llama.cpp chooses.

    Its own choice knows no workers, which are not registered, so that drafts stay at home.
    """
    remote = connect(options.workers) if options.workers else []
    if options.devices is not None:
        return [_named(name, remote) for name in options.devices]
    if not options.workers:
        return None
    gpus = gpus_among(find_devices())
    return [*remote, *device_handles([device.name for device in gpus])]


def _named(name: str, remote: Sequence[int]) -> int:
    if remote and name.startswith("RPC"):
        number = name.removeprefix("RPC")
        if not number.isdecimal() or int(number) >= len(remote):
            raise DeviceError(f"there is no device {name}; the workers have RPC0 to RPC{len(remote) - 1}")
        return remote[int(number)]
    return device_handles([name])[0]
