"""A GGUF model as a pure function of token sequences, computed by llama.cpp.

The one idea: nobody says "go back". A question names a whole sequence; the memory keeps what it shares
with earlier questions, and only the rest is evaluated, every distinct position once. The proof is
tests/llama/test_model.py: over random calls, cached answers equal those of a fresh model.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import EvaluationError, MemoryFullError, ModelFileError
from llamaspec.llama import runtime
from llamaspec.llama.batch import Batch
from llamaspec.llama.facts import MemoryFacts, ModelFacts, model_facts, try_memory
from llamaspec.llama.files import check_gguf
from llamaspec.llama.memory import LaneMemory
from llamaspec.llama.options import (
    BATCH,
    CACHE_BYTES,
    CACHE_TYPES,
    DEFAULT_CONTEXT,
    FLASH_ATTENTION,
    ModelOptions,
)
from llamaspec.llama.snapshots import Snapshots
from llamaspec.llama.trie import Node, merge
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.values import Ask, Logits, TokenArray

STATES_BACK = 8  # earlier states that the memory keeps itself, where llama.cpp can: (1 + this) times the room
LoadProgress = Callable[[float], None]  # fraction loaded, 0 to 1


class LlamaModel:
    """A loaded model. Close it, or use it as a context manager.

    Parameters
    ----------
    path : Path
        A GGUF file.
    options : ModelOptions
    on_load : callable, optional
        Told the fraction that is loaded.

    Raises
    ------
    ModelFileError
        The file is missing, damaged, or cannot generate text.
    MemoryFullError
        The machine has no room for the weights or the context.
    """

    def __init__(
        self, path: Path, options: ModelOptions | None = None, on_load: LoadProgress | None = None
    ) -> None:
        self.path = path
        self.options = options or ModelOptions()
        self._model: Any = None
        self._context: Any = None
        runtime.start()
        check_gguf(path)
        try:
            self._load_weights(on_load)
            self._check_kind()
            self.vocabulary = LlamaVocabulary(self._model)
            self.trained_context_size: int = lib.llama_model_n_ctx_train(self._model)
            self._open_context()
            self.context_size: int = lib.llama_n_ctx(self._context)
            self._shares = not self._keeps_states()
            window = lib.llama_model_n_swa(self._model) if self._shares else 0
            self._memory = LaneMemory(
                self._context,
                self.options.n_lanes,
                shares=self._shares,
                window=window or None,
                snapshots=Snapshots(self._context, 1) if self._can_go_back_to_states() else None,
            )
            self._batch_size: int = lib.llama_n_batch(self._context)  # no more than the context
            self._batch = Batch(self._batch_size, self.options.n_lanes)
        except BaseException:
            self.close()
            raise

    @property
    def vocabulary_size(self) -> int:
        """V, the number of scores for each position."""
        return self.vocabulary.size

    @property
    def description(self) -> str:
        """Architecture, size and quantisation, as llama.cpp names them."""
        self._check_open()
        buffer = ctypes.create_string_buffer(128)
        lib.llama_model_desc(self._model, buffer, len(buffer))
        return buffer.value.decode("utf-8", errors="replace")

    def metadata(self, key: str) -> str | None:
        """One metadata entry of the file as text; None where there is none."""
        self._check_open()
        buffer = ctypes.create_string_buffer(1 << 16)
        n = lib.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", errors="replace") if n >= 0 else None

    def logits(self, asks: Sequence[Ask]) -> list[Logits]:
        """Scores after each of the last `n` tokens of every asked sequence: views [n, V] float32.

        Raises
        ------
        ValueError
            An ask is not possible: llama.cpp would abort the process.
        MemoryFullError
            The memory has no room for the sequences together.
        EvaluationError
            llama.cpp failed.
        """
        self._check(asks)
        if self._memory.has_much_to_repeat(asks):
            self.logits([replace(ask, tokens=ask.tokens[: -ask.n], n=0) for ask in asks])
        trie = merge(asks, self._memory.keep(asks), shares=self._shares)
        scores = self._evaluate(trie.nodes)
        self._memory.remember(asks)
        n_wanted_before = list(accumulate((node.wanted for node in trie.nodes), initial=0))
        return [_rows(scores, [n_wanted_before[node] for node in path]) for path in trie.paths]

    def remembered(self, tokens: TokenArray) -> int:
        """How many of the first tokens need no evaluation when the score after the last is asked next."""
        self._check_open()
        return self._memory.known(tokens[:-1])

    def facts(self) -> ModelFacts:
        """What the weights are."""
        self._check_open()
        return model_facts(self._model, self.metadata)

    def try_memory(self) -> MemoryFacts:
        """Find out by trying what the memory needs and how it goes back; it is emptied."""
        self._check_open()

        def read(tokens: TokenArray, n_scored: int) -> None:
            self.logits([Ask(0, tokens, n_scored)])

        return try_memory(self._context, self._memory, read, self.options.max_scored)

    def forget(self) -> None:
        """Empty the memory, as if nothing had been asked."""
        self._check_open()
        self._memory.clear()

    def close(self) -> None:
        """Free everything, in reverse order of making; more than once is allowed."""
        if self._context is not None:
            lib.llama_free(self._context)
            self._context = None
        if self._model is not None:
            if hasattr(self, "vocabulary"):
                self.vocabulary.close()
            lib.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._context is None:
            raise ValueError("the model is closed")

    def _check(self, asks: Sequence[Ask]) -> None:
        self._check_open()
        lanes = [ask.lane for ask in asks]
        if len(set(lanes)) != len(lanes) or not set(lanes) <= set(range(self.options.n_lanes)):
            raise ValueError(f"asks need distinct lanes below {self.options.n_lanes}, got {lanes}")
        if not asks:
            raise ValueError("a call needs at least one ask")
        if sum(ask.n for ask in asks) > self.options.max_scored:
            raise ValueError(f"one call scores at most {self.options.max_scored} positions")
        for ask in asks:
            if not 0 <= ask.n <= len(ask.tokens) <= self.context_size or len(ask.tokens) == 0:
                raise ValueError(
                    f"cannot score {ask.n} of {len(ask.tokens)} tokens in a context of {self.context_size}"
                )
            if ask.tokens.min() < 0 or ask.tokens.max() >= self.vocabulary.size:
                raise ValueError(f"token ids must be below {self.vocabulary.size}")

    def _evaluate(self, nodes: Sequence[Node]) -> Logits:
        """Scores of the wanted positions, in order: float32 [wanted, V]."""
        parts = []
        for start in range(0, len(nodes), self._batch_size):
            part = nodes[start : start + self._batch_size]
            status = lib.llama_decode(self._context, self._batch.fill(part))
            if status:
                self._fail(status)
            n_wanted = sum(node.wanted for node in part)
            if n_wanted:
                view = self._scores(n_wanted)
                # The next part would overwrite the buffer.
                parts.append(view if start + len(part) >= len(nodes) else view.copy())
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, self.vocabulary.size), dtype=np.float32)

    def _scores(self, n: int) -> Logits:
        """The first `n` rows of llama.cpp's own buffer."""
        address = ctypes.addressof(lib.llama_get_logits(self._context).contents)
        memory = (ctypes.c_float * (n * self.vocabulary.size)).from_address(address)
        return np.ndarray((n, self.vocabulary.size), np.float32, buffer=memoryview(memory))

    def _fail(self, status: int) -> None:
        """Raise what a return code of llama_decode means, with the memory in a known state."""
        self._memory.clear()
        if status == 1:
            raise MemoryFullError(f"the context of {self.context_size} tokens is full; pass a larger --n-ctx")
        if status == 2:
            raise EvaluationError("the evaluation was aborted")
        raise EvaluationError(f"llama.cpp could not evaluate (code {status}): {runtime.last_error()}")

    def _load_weights(self, on_load: LoadProgress | None) -> None:
        parameters = lib.llama_model_default_params()
        if self.options.gpu_layers is not None:
            parameters.n_gpu_layers = self.options.gpu_layers
        parameters.use_extra_bufts = self.options.repack and runtime.repacking_is_safe()

        def report(fraction: float, _user_data: object) -> bool:
            if on_load is not None:
                on_load(fraction)
            return True

        parameters.progress_callback = callback = lib.llama_progress_callback(report)
        runtime.clear_errors()
        with runtime.raising_callbacks():
            self._model = lib.llama_model_load_from_file(os.fsencode(self.path), parameters)
        del callback  # it had to live until here
        if not self._model:
            self._model = None
            reason = runtime.last_error()
            if "alloc" in reason or "memory" in reason:
                raise MemoryFullError(
                    f"no room for {self.path}: {reason}; close programs or lower --gpu-layers"
                )
            raise ModelFileError(f"llama.cpp cannot load {self.path}: {reason}; download or convert it again")

    def _check_kind(self) -> None:
        remedy = "give a decoder-only text model"
        if lib.llama_model_has_encoder(self._model):
            raise ModelFileError(f"{self.path} has an encoder; {remedy}")
        if lib.llama_model_is_diffusion(self._model):
            raise ModelFileError(f"{self.path} is a diffusion model; {remedy}")

    def _keeps_states(self) -> bool:
        """Whether some layers remember a state instead of positions."""
        return bool(lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model))

    def _can_go_back_to_states(self) -> bool:
        """Whether the memory keeps a state, and earlier ones can be put in its place.

        Not where other layers look through a window: llama.cpp may have given away the positions that a
        snapshot would need, and does not tell. Not with several lanes: putting one back overwrites states of
        others that llama.cpp has moved, but not copied yet.
        """
        return self._keeps_states() and not lib.llama_model_n_swa(self._model) and self.options.n_lanes == 1

    def _open_context(self) -> None:
        options, parameters = self.options, lib.llama_context_default_params()
        n_ctx = options.n_ctx or min(DEFAULT_CONTEXT, self.trained_context_size)
        self._check_room(n_ctx)
        parameters.n_ctx = n_ctx
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_seq_max = options.n_lanes
        parameters.n_outputs_max = options.max_scored
        parameters.kv_unified = True
        parameters.swa_full = True
        parameters.n_rs_seq = STATES_BACK if self._can_go_back_to_states() else 0
        parameters.n_threads = parameters.n_threads_batch = options.threads or runtime.default_threads()
        parameters.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
        parameters.type_k = CACHE_TYPES[options.cache_type_k]
        parameters.type_v = CACHE_TYPES[options.cache_type_v]
        runtime.clear_errors()
        with runtime.raising_callbacks():
            self._context = lib.llama_init_from_model(self._model, parameters)
        if not self._context:
            self._context = None
            raise MemoryFullError(
                f"llama.cpp cannot make a context of {n_ctx} tokens for {self.path}: "
                f"{runtime.last_error()}; pass a smaller --n-ctx"
            )
        if not lib.llama_get_memory(self._context):
            raise ModelFileError(f"{self.path} is an embedding model; give a model that generates text")

    def _check_room(self, n_ctx: int) -> None:
        """Refuse a memory larger than the machine: the system would end the process, not the call."""
        room = runtime.available_bytes()
        if room is None or (runtime.can_offload() and self.options.gpu_layers != 0):
            return
        if lib.llama_model_is_recurrent(self._model):
            return  # a state has one size, whatever the context
        n_layers, n_heads_kv = lib.llama_model_n_layer(self._model), lib.llama_model_n_head_kv(self._model)
        if n_heads_kv == 0:  # the first layer keeps a state; some other keeps at least one head's positions
            n_layers, n_heads_kv = max(1, n_layers // 8), 1
        row = n_heads_kv * lib.llama_model_n_embd(self._model) / max(1, lib.llama_model_n_head(self._model))
        per_element = CACHE_BYTES[self.options.cache_type_k] + CACHE_BYTES[self.options.cache_type_v]
        needed = n_layers * row * per_element * n_ctx
        if needed > room:
            raise MemoryFullError(
                f"a context of {n_ctx} tokens needs {needed / 2**30:.1f} GiB, this machine has "
                f"{room / 2**30:.1f} GiB to give; pass a smaller --n-ctx"
            )


def _rows(scores: Logits, rows: list[int]) -> Logits:
    """Some rows, as a view where they lie side by side."""
    if not rows or rows[-1] - rows[0] == len(rows) - 1:
        return scores[rows[0] : rows[-1] + 1] if rows else scores[:0]
    picked: Logits = scores[rows]
    return picked
