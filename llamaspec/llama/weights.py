"""The weights of a GGUF model. Any number of contexts can use them.

Knows nothing of KV caches and evaluations.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from llamaspec.errors import MemoryFullError, ModelFileError
from llamaspec.kernels import LLAMA_CPP, library
from llamaspec.llama import runtime
from llamaspec.llama.devices import chosen_devices, leaves_main_memory
from llamaspec.llama.gguf_file import (
    PARTS,
    GgufFile,
    active_parameters,
    check_gguf,
    check_parts,
    file_parts,
    heads_per_key,
    kv_row_sizes,
    multiplied_types,
    read_gguf,
    windowed_share,
)
from llamaspec.llama.huge_pages import HugePages, NewMappings
from llamaspec.llama.memory_sizes import n_states, state_bytes
from llamaspec.llama.options import ModelOptions, cache_bytes
from llamaspec.llama.resources import governors
from llamaspec.llama.runtime import Handle
from llamaspec.llama.trial import FileKeys, ensure_tried
from llamaspec.llama.vocabulary import LlamaVocabulary, read_spellings

LoadProgress = Callable[[float], None]  # fraction loaded, 0 to 1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about loaded weights."""

    architecture: str  # as llama.cpp names it
    n_parameters: int
    n_active_parameters: int | None  # roughly as many as a token uses; None = all
    weights_bytes: int
    window: int | None  # positions that sliding-window layers see; None = all layers see all positions
    windowed_share: float  # share of the layers with such a window, if there are any
    keeps_states: bool  # whether some layers keep a recurrent state
    keeps_positions: bool  # whether some layers cache keys and values

    @property
    def n_computing(self) -> int:
        """Number of parameters that a token uses."""
        return self.n_active_parameters or self.n_parameters


def suits_kernels(parts: Iterable[GgufFile]) -> bool:
    """Whether our kernels are on and take every matrix that a model multiplies with."""
    kinds = multiplied_types(parts)
    return bool(kinds) and all(map(library.covers, kinds))


class Weights:
    """Loaded weights and their vocabulary.

    Only these `options` matter: `gpu_layers`, `repack`, `kernels`, `heads`, `devices`, `tensor_split`,
    `workers`. With `vocabulary_only`, no tensors are loaded, so contexts cannot be opened. With `n_tokens`,
    the vocabulary has that many tokens, but no texts: no tensor of the file may have a row for each token.

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
        n_tokens: int | None = None,
    ) -> None:
        self.path = path
        runtime.choose_kernels(options.kernels)
        self.devices = chosen_devices(options)
        check_gguf(path)
        check_parts(path)
        self.keys = ensure_tried(path, options.n_ctx, on_load)
        for governor in governors():
            governor.look()  # not before: the trial would seem to be another program
        file = read_gguf(path)
        spellings = read_spellings(path, file)
        others = (read_gguf(part) for part in file_parts(path)[1:])
        self.suits_kernels = suits_kernels([file, *others])
        # Our kernels take weights as they are in the file. llama.cpp repacks all that it can, or none.
        self.may_be_repacked = options.repack and not self.suits_kernels and runtime.repacking_is_safe()
        is_mapped = self.suits_kernels and not (vocabulary_only or leaves_main_memory(options, self.devices))
        with NewMappings(file_parts(path) if is_mapped else ()) as mappings:
            model = self._load(
                options,
                on_load,
                vocabulary_only=vocabulary_only,
                overrides=None if n_tokens is None else _without_texts(file.architecture, n_tokens),
            )
        self.huge_pages = huge_pages = HugePages(mappings.found)  # whoever opens contexts starts it

        def free(pointer: Any) -> None:
            huge_pages.stop()
            lib.llama_model_free(pointer)

        self._handle: Handle | None = Handle(model, free)
        try:
            self._check_kind()
            if FileKeys.of(path) != self.keys:
                raise ModelFileError(f"{path} changed while it was opened; open it again")
        except ModelFileError:
            self.close()
            raise
        self.vocabulary = LlamaVocabulary(self.handle, spellings)
        self.trained_context_size: int = lib.llama_model_n_ctx_train(self.pointer)
        # Tokens that the model was trained on before its context was extended; 0 if it was not.
        self.original_context_size = file.number("rope.scaling.original_context_length")
        self.hidden_size: int = lib.llama_model_n_embd_out(self.pointer)  # E
        n_parameters = int(lib.llama_model_n_params(self.pointer))
        is_recurrent = bool(lib.llama_model_is_recurrent(self.pointer))  # all layers keep a state
        self.facts = ModelFacts(
            architecture=file.architecture,
            n_parameters=n_parameters,
            n_active_parameters=active_parameters(file, n_parameters),
            weights_bytes=int(lib.llama_model_size(self.pointer)),
            window=int(lib.llama_model_n_swa(self.pointer)) or None,
            windowed_share=windowed_share(file),
            keeps_states=is_recurrent or bool(lib.llama_model_is_hybrid(self.pointer)),
            keeps_positions=not is_recurrent,
        )
        self.states_bytes = (
            state_bytes(file) * n_states(file) if self.facts.keeps_states else 0
        )  # in a context
        self._kv_row_sizes = [] if is_recurrent else kv_row_sizes(file)
        self.heads_per_key = heads_per_key(file)

    @property
    def handle(self) -> Handle:
        """The owner of the llama_model. Contexts must keep it alive."""
        return runtime.opened(self._handle)

    @property
    def pointer(self) -> Any:
        """The llama_model."""
        return self.handle.pointer

    @property
    def description(self) -> str:
        """Architecture, number of parameters and quantization, such as "qwen2 1.78B Q4_K - Medium"."""
        buffer = ctypes.create_string_buffer(128)
        lib.llama_model_desc(self.pointer, buffer, len(buffer))
        written = buffer.value.decode("utf-8", errors="replace")
        architecture, _, rest = written.partition(" ")
        quantization = re.sub(r"^\S+ (\(\w+\) )?", "", rest)  # without a size such as "17Bx16E (Scout)"
        n = self.facts.n_parameters  # llama.cpp has names for some sizes only, and calls 0.5B "1B"
        size = f"{n / 1e9:.2f}B" if n >= 1e8 else f"{n / 1e6:.2f}M"
        return f"{architecture} {size} {quantization}"

    @property
    def kernels(self) -> str:
        """The name of the kernels that multiply with the weights on this machine's CPU."""
        return library.facts.name if self.suits_kernels else LLAMA_CPP

    def metadata(self, key: str) -> str | None:
        """Return a metadata entry of the file as text; None if there is none."""
        size = 1 << 12
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, size)
            if n < size:
                return buffer.value.decode("utf-8", errors="replace") if n >= 0 else None
            size = n + 1

    def kv_bytes_per_token(self, options: ModelOptions) -> float:
        """Return the bytes of a token in the KV cache; 0 if all layers keep states."""
        key_bytes, value_bytes = cache_bytes(options.cache_type_k), cache_bytes(options.cache_type_v)
        return sum(n_key * key_bytes + n_value * value_bytes for n_key, n_value in self._kv_row_sizes)

    def close(self) -> None:
        """Free the weights as soon as no context uses them. Later calls do nothing."""
        if hasattr(self, "vocabulary"):
            self.vocabulary.close()
        self._handle = None

    def _check_kind(self) -> None:
        remedy = "give a decoder-only text model"
        if lib.llama_model_has_encoder(self.pointer) and read_gguf(self.path).architecture not in PARTS:
            raise ModelFileError(f"{self.path} has an encoder; {remedy}")
        if lib.llama_model_is_diffusion(self.pointer):
            raise ModelFileError(f"{self.path} is a diffusion model; {remedy}")

    def _load(
        self,
        options: ModelOptions,
        on_load: LoadProgress | None,
        *,
        vocabulary_only: bool,
        overrides: Any | None,
    ) -> Any:
        """Load the file, with other metadata if there are `overrides`; return its llama_model."""
        parameters = lib.llama_model_default_params()
        if options.gpu_layers is not None:
            parameters.n_gpu_layers = options.gpu_layers
        parameters.use_extra_bufts = self.may_be_repacked
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
        if overrides is not None:
            parameters.kv_overrides = overrides
        with runtime.raising_callbacks(), runtime.log.of_call() as said:
            model = lib.llama_model_load_from_file(os.fsencode(self.path), parameters)
        del callback  # llama.cpp called it until here
        if model:
            return model
        reason = said.reason
        errors = " ".join(said.errors).replace(str(self.path), "")
        if "alloc" in errors or "memory" in errors:
            raise MemoryFullError(
                f"no room for {self.path}: {reason}; close other programs or put fewer layers on the GPU"
            )
        if "split file" in reason:
            raise ModelFileError(
                f"{self.path} is a renamed part of a model; give the parts their original names "
                "and name the first, NAME-00001-of-NUMBER.gguf"
            )
        raise ModelFileError(f"llama.cpp cannot load {self.path}: {reason}; download or convert it again")


def _without_texts(architecture: str, n_tokens: int) -> Any:
    """Return metadata that replaces a file's vocabulary by `n_tokens` tokens without texts."""
    overrides: Any = (lib.llama_model_kv_override * 3)()  # its end is an empty one
    overrides[0].tag, overrides[0].key = lib.LLAMA_KV_OVERRIDE_TYPE_STR, b"tokenizer.ggml.model"
    overrides[0].value.val_str = b"no_vocab"
    overrides[1].tag, overrides[1].key = lib.LLAMA_KV_OVERRIDE_TYPE_INT, f"{architecture}.vocab_size".encode()
    overrides[1].value.val_i64 = n_tokens
    return overrides
