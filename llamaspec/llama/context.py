"""A llama.cpp context over loaded weights: evaluates sequences in one batch and keeps their KV cache.

Several contexts may use the same weights. Logits are views of llama.cpp's buffer; a view keeps the context
alive.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.errors import (
    EvaluationAbortedError,
    EvaluationError,
    MemoryFullError,
    ModelFileError,
    ScoresError,
)
from llamaspec.kernels import OFF, library
from llamaspec.llama import resources, runtime
from llamaspec.llama.batch import Batch, Segment
from llamaspec.llama.cells import BLOCK, Cells
from llamaspec.llama.devices import device_of, free_gpu_bytes, leaves_main_memory
from llamaspec.llama.kv_cache import KVCache
from llamaspec.llama.likely_tokens import LikelyTokens
from llamaspec.llama.memory_sizes import STATES_BACK
from llamaspec.llama.options import (
    BATCH,
    CACHE_TYPES,
    DEFAULT_CONTEXT,
    FLASH_ATTENTION,
    N_SEQUENCES,
    ModelOptions,
)
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.resources import ThreadGovernor, governors
from llamaspec.llama.runtime import AbortFlag, Handle, Said
from llamaspec.llama.weights import Weights
from llamaspec.values import ForwardRequest, HiddenRows, Logits, Rows

if TYPE_CHECKING:
    from llamaspec.llama.recurrent import RecurrentCache

ATTENDED = {"f16", "bf16", "q8_0"}  # the cache types that our attention reads
TILE = 64  # positions
CONTEXT_SHARE = 8  # a default context takes at most 1 / CONTEXT_SHARE of the free memory
CONTEXT_BYTES = 1 << 30  # and at most as much as the weights, or this if they are smaller


class Context:
    """A context for a model, or for one of its prediction heads. Close it after use.

    A head without its own KV cache uses that of `other`, and a draft the embedding and output of that model
    if it has none. Contexts that never evaluate at the same time may share `abort`. Contexts of one model
    share `store`, which receives their finished sequences. Tokens come with hidden rows of `row_size`
    numbers.

    Raises MemoryFullError if the machine has no room for the KV cache, and ModelFileError if the model cannot
    generate text.
    """

    kind_of_cells: type[Cells] = Cells

    def __init__(
        self,
        weights: Weights,
        options: ModelOptions,
        other: Context | None = None,
        abort: AbortFlag | None = None,
        store: PrefixStore | None = None,
        row_size: int = 0,
        *,
        is_head: bool = False,
    ) -> None:
        self.weights = weights  # only for facts about them: the caller may have closed them
        self._states: RecurrentCache | None = None  # the cache, if layers keep states
        self.context_size = options.n_ctx or _free_context_size(weights, options)
        keeps_states = weights.facts.keeps_states and not is_head  # heads keep keys and values
        n_wanted = self.context_size if keeps_states else max(self.context_size, options.n_cells or 0)
        n_cells = -(-n_wanted // BLOCK) * BLOCK
        self.max_scored = options.max_scored
        pointer, said = _open(weights, options, n_cells, None if other is None else other.pointer, is_head)
        self._abort = abort or AbortFlag()
        is_certain = options.flash_attention == "on" or options.needs_flash_attention
        self.flash_attention = is_certain or said.flash_attention  # None if the log does not say
        needs = (weights.handle, self._abort, None if other is None else other._handle)
        self._handle: Handle | None = Handle(pointer, lib.llama_free, *needs)
        if not lib.llama_get_memory(pointer):
            self.close()
            raise ModelFileError(f"{weights.path} is an embedding model; give a model that generates text")
        lib.llama_set_abort_callback(pointer, AbortFlag.ASK, self._abort.address)
        batch_size = min(lib.llama_n_batch(pointer), n_cells)
        self._batch = Batch(batch_size, row_size)
        self._governors: Sequence[ThreadGovernor] = governors() if options.threads is None else ()
        # No other kernel's bits depend on the number of threads.
        is_sensitive = options.has_llama_cpp_attention
        self._governor = self._governors[is_sensitive] if self._governors else None
        self._n_threads = options.threads or resources.default_threads()
        self.cache: KVCache | RecurrentCache
        store = store or PrefixStore()
        if keeps_states:
            from llamaspec.llama.recurrent import RecurrentCache

            self.cache = self._states = RecurrentCache(
                pointer,
                self.context_size,
                can_restore=_can_restore_states(weights),
                store=store,
                marks=(weights.vocabulary.ends, tuple(weights.vocabulary.controls.values())),
            )
        else:
            n_sequences = _n_sequences(options)
            block = BLOCK if weights.facts.window is None else min(BLOCK, weights.facts.window)
            self.cache = KVCache(
                self.kind_of_cells(pointer, n_sequences + 1, block),
                n_cells,
                n_sequences,
                store=store,
                keeps_finished=leaves_main_memory(options, weights.devices),
            )

    @property
    def pointer(self) -> Any:
        """The llama_context."""
        return runtime.opened(self._handle).pointer

    @property
    def batch_size(self) -> int:
        """Maximum number of positions in one evaluation."""
        return self._batch.size

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests together; return a view of the logits of each: [n_scored, V]."""
        if self._states is not None:
            number, request = batch[0]
            while (n := self._states.pause(request)) is not None:
                self._evaluate([(number, request.prefill(n))], 0)
                self._keep_rows(number)
        return self._evaluate(batch, n_padding)

    def _evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int) -> list[Logits]:
        numbers = [number for number, _ in batch]
        segments = [self.cache.segment(number, request) for number, request in batch]
        new = [(number, segment.tokens) for number, segment in zip(numbers, segments, strict=True)]
        n_positions = n_padding + sum([len(segment.tokens) for segment in segments])
        n_scored = sum([segment.n_scored for segment in segments])
        if n_padding:
            segments.append(segments[-1].padding(n_padding, self.max_scored - n_scored))
            n_scored += segments[-1].n_scored
        if n_positions > self.batch_size or n_scored > max(self.max_scored, len(batch)):
            raise ValueError(f"an evaluation of {n_positions} positions, {n_scored} scored, is too wide")
        if n_positions:  # otherwise a picture ended the part of a prompt
            with self._scoring([request for _, request in batch]):
                self.decode(segments)
        self.cache.commit(new, n_padding)
        self._note_rows(batch, segments)
        return parts(self.logits(n_scored), [request.n_scored for _, request in batch])

    def decode(self, segments: Sequence[Segment]) -> None:
        """Evaluate segments with llama.cpp; the caller commits the new tokens to the KV cache.

        Raises EvaluationAbortedError if `abort` was called, and EvaluationError or MemoryFullError if
        llama.cpp failed; in the latter case the KV cache is empty.
        """
        self.compute(lib.llama_decode, self._batch, segments)

    def compute(self, function: Any, batch: Batch, segments: Sequence[Segment]) -> None:
        """Evaluate segments with `llama_decode` or `llama_encode`; errors as for `decode`."""
        pointer, filled = self.pointer, batch.fill(segments)
        self.cache.begin(sum([segment.n_scored for segment in segments]))
        for each in self._governors:
            each.begin()
        self._choose_threads(pointer)
        try:
            with runtime.log.of_call() as said:
                status = function(pointer, filled)
        finally:
            self._abort.clear()  # only now: an abort just before an evaluation must end it, too
            for each in self._governors:
                each.finish(self._n_threads)
        if status == 0:
            return
        if status == 2:
            raise EvaluationAbortedError("the evaluation was aborted")
        self.cache.forget()
        if status == 1:
            raise MemoryFullError("the KV cache is full; use a larger context")
        raise EvaluationError(f"llama.cpp could not evaluate (code {status}): {said.reason}")

    def _scoring(self, requests: Sequence[ForwardRequest]) -> AbstractContextManager[None]:
        """Compute only the rows of the output matrix that the requests need."""
        if False in [request.likely_only for request in requests]:
            return nullcontext()
        panels = self._likely.panels([request.tokens for request in requests])
        return nullcontext() if panels is None else library.only_panels(panels, self._likely.n_rows)

    @cached_property
    def _likely(self) -> LikelyTokens:
        return LikelyTokens.of(self.weights.vocabulary.size, self.weights.vocabulary.eos)

    def _choose_threads(self, pointer: Any) -> None:
        if self._governor is not None and self._governor.n_threads != self._n_threads:
            self._n_threads = self._governor.n_threads
            lib.llama_set_n_threads(pointer, self._n_threads, self._n_threads)

    @property
    def is_disturbed(self) -> bool:
        """Whether the latest evaluation used fewer threads than on an idle machine."""
        return self._governor is not None and self._n_threads < resources.default_threads()

    def logits(self, n: int) -> Logits:
        """Return a view of the first `n` rows of logits; ScoresError unless all are finite."""
        n_vocabulary = self.weights.vocabulary.size
        if not n:
            return np.empty((0, n_vocabulary), dtype=np.float32)
        logits = self._view(lib.llama_get_logits(self.pointer), n, n_vocabulary)
        self.check_scores(is_right=bool(np.isfinite(logits.max(axis=1)).all()))
        return logits

    def check_scores(self, *, is_right: bool) -> None:
        """Raise ScoresError unless the numbers that the model gives `is_right`."""
        if not is_right:
            self.cache.forget()  # its cells would spoil every later evaluation
            raise ScoresError(
                f"{self.weights.path} gives scores that are not numbers; download or convert it again"
            )

    def clear(self) -> None:
        """Empty the KV cache and the store."""
        _ = self.pointer  # raises ClosedError if the context is closed
        self.cache.clear()

    def recover(self) -> str | None:
        """Check cache and store while no sequence runs. If one contradicts itself, empty both; return how."""
        if self._handle is None:
            return None
        left = [number for number in self.cache.running if number >= 0]  # -1 is of `LlamaModel.forward`
        fault = f"it still holds the ended sequences {left}" if left else self.cache.fault()
        if fault is not None:
            self.cache.reset()
        return fault

    def close(self) -> None:
        """Free the context as soon as no view of its logits is left. Later calls do nothing."""
        self._handle = None
        if self._states is not None:
            self._states.close()

    def hidden(self, number: int) -> HiddenRows | None:
        """Return None: this context returns no hidden rows."""
        return None

    def _keep_rows(self, number: int) -> None:
        """Do nothing: this context returns no hidden rows."""

    def _note_rows(self, batch: Sequence[tuple[int, ForwardRequest]], segments: Sequence[Segment]) -> None:
        """Do nothing: this context returns no hidden rows."""

    def _view(self, pointer: Any, n: int, width: int) -> npt.NDArray[np.float32]:
        memory = (ctypes.c_float * (n * width)).from_address(ctypes.addressof(pointer.contents))
        memory.handle = self._handle  # type: ignore[attr-defined]
        return np.ndarray((n, width), np.float32, buffer=memoryview(memory))


def parts(rows: Rows, lengths: Sequence[int]) -> list[Rows]:
    """Split rows into consecutive views of the given lengths."""
    ends = list(itertools.accumulate(lengths, initial=0))
    return [rows[start:end] for start, end in itertools.pairwise(ends)]


def _open(
    weights: Weights, options: ModelOptions, n_cells: int, other: Any | None, is_head: bool
) -> tuple[Any, Said]:
    """Make a llama_context; `other` is a llama_context whose KV cache it uses. Also returns what was said."""
    parameters = lib.llama_context_default_params()
    parameters.n_ctx = n_cells
    parameters.n_batch = parameters.n_ubatch = BATCH
    keeps_states = weights.facts.keeps_states and not is_head
    if is_head:  # one layer
        parameters.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
    else:
        _check_room(weights, options, n_cells)
    if other is not None:
        parameters.ctx_other = other
    # Two more sequences: one for garbage, one for copying.
    parameters.n_seq_max = 1 if keeps_states else _n_sequences(options) + 2
    parameters.n_outputs_max = max(options.max_scored, parameters.n_seq_max)
    parameters.kv_unified = True
    parameters.swa_full = True
    parameters.n_rs_seq = STATES_BACK if keeps_states and _can_restore_states(weights) else 0
    parameters.n_threads = parameters.n_threads_batch = options.threads or resources.default_threads()
    parameters.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
    parameters.type_k = CACHE_TYPES[options.cache_type_k]
    parameters.type_v = CACHE_TYPES[options.cache_type_v]
    with runtime.raising_callbacks(), runtime.log.of_call() as said:
        context = lib.llama_init_from_model(weights.pointer, parameters)
    if not context:
        raise MemoryFullError(
            f"llama.cpp cannot make a context of {n_cells} tokens for {weights.path}: "
            f"{said.reason}; use a smaller context"
        )
    return context, said


def _n_sequences(options: ModelOptions) -> int:
    """Number of cached sequences: llama.cpp reserves one row of logits for each."""
    return max(2, min(N_SEQUENCES - 1, options.max_scored))


def _can_restore_states(weights: Weights) -> bool:
    """Whether earlier states can be restored. With a sliding window, llama.cpp may have dropped positions."""
    return weights.facts.keeps_states and weights.facts.window is None


def _free_context_size(weights: Weights, options: ModelOptions) -> int:
    """Return the default size for the free memory of this machine, or of the devices that hold the layers."""
    n_bytes, room = weights.facts.weights_bytes, resources.available_bytes()
    if weights.devices:
        free = sum(device_of(handle).free_bytes for handle in weights.devices)
        room = max(0, free - n_bytes) if options.workers else free  # a worker's CPU reports all its memory
    elif leaves_main_memory(options):
        room = free_gpu_bytes()  # the weights are loaded already
    if weights.facts.keeps_states:
        n_bytes, room = 0, max(0, room - weights.states_bytes) // 4  # each sequence gets its own context
    per_token = weights.kv_bytes_per_token(options) + attention_bytes_per_token(weights, options)
    return default_context_size(weights.trained_context_size, per_token, n_bytes, room)


def default_context_size(trained: int, kv_bytes_per_token: float, weights_bytes: int, room: int) -> int:
    """Return the default size of a context in tokens, with `room` bytes of free memory.

    It is the size the model was trained for if that fits, otherwise 4096, doubled as often as fits.
    """
    n = min(DEFAULT_CONTEXT, trained)
    budget = min(room // CONTEXT_SHARE, max(weights_bytes, CONTEXT_BYTES))
    if trained * kv_bytes_per_token <= budget:
        return trained
    while 2 * n <= trained and 2 * n * kv_bytes_per_token <= budget:
        n *= 2
    return n


def attention_bytes_per_token(weights: Weights, options: ModelOptions) -> int:
    """Return the main memory that our attention takes for each token of a context while it evaluates."""
    is_here = weights.facts.keeps_positions and not leaves_main_memory(options, weights.devices)
    return attention_bytes(options, weights.heads_per_key) if is_here else 0


def attention_bytes(options: ModelOptions, heads_per_key: int) -> int:
    """Return the same for a model in main memory whose weights are not loaded."""
    is_ours = options.flash_attention != "off" and {options.cache_type_k, options.cache_type_v} <= ATTENDED
    if not is_ours or options.kernels == OFF or runtime.kernels().level is None:
        return 0
    return library.bytes_per_cell(heads_per_key, options.threads or resources.default_threads())


def with_room(weights: Weights, options: ModelOptions, n_tokens: int) -> ModelOptions:
    """Return options for a context with room for a sequence of `n_tokens`, if the default is much larger.

    One or two blocks are left for draft tokens, padding, and what measurements have cached.
    """
    n_ctx = (n_tokens // BLOCK + 2) * BLOCK
    # Of two kinds of rotary factors, llama.cpp chooses by the size of the context, not of the text.
    n_ctx = max(n_ctx, weights.original_context_size + 1)
    is_smaller = options.n_ctx is None and n_ctx < _free_context_size(weights, options)
    return replace(options, n_ctx=n_ctx) if is_smaller else options


def _check_room(weights: Weights, options: ModelOptions, n_cells: int) -> None:
    """Raise MemoryFullError if a full KV cache does not fit: the system would kill the process."""
    if leaves_main_memory(options, weights.devices):
        return
    per_token = weights.kv_bytes_per_token(options) + attention_bytes_per_token(weights, options)
    n_bytes, room = per_token * n_cells + weights.states_bytes, resources.available_bytes()
    if n_bytes > room:
        raise MemoryFullError(
            f"a context of {n_cells} tokens needs {n_bytes / 2**30:.1f} GiB, but only "
            f"{room / 2**30:.1f} GiB are free; use a smaller context"
        )


def max_chunked_prefill(weights: Weights, options: ModelOptions, context: Context) -> int:
    """Return the widest evaluation that rounds like a narrow one.

    On CPUs, llama.cpp's flash attention over f16 adds up in another order from 64 positions on.
    """
    is_f16 = options.cache_type_k == options.cache_type_v == "f16"
    is_tiled = options.has_llama_cpp_attention and is_f16 and not leaves_main_memory(options, weights.devices)
    return min(context.batch_size, TILE - 1) if is_tiled else context.batch_size
