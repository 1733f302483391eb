"""A llama.cpp context over loaded weights: evaluates rows in one batch, with its KV cache as their memory.

There may be several contexts over the same weights. Logits are views of llama.cpp's buffer, and a view keeps
the context alive.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.errors import (
    ClosedError,
    EvaluationAbortedError,
    EvaluationError,
    MemoryFullError,
    ModelFileError,
    ScoresError,
)
from llamaspec.llama import nextn, resources, runtime
from llamaspec.llama.batch import Batch, Segment
from llamaspec.llama.cells import BLOCK, Cells
from llamaspec.llama.devices import device_of, find_devices
from llamaspec.llama.kv_cache import KVCache
from llamaspec.llama.nextn import Rows
from llamaspec.llama.options import (
    BATCH,
    CACHE_TYPES,
    DEFAULT_CONTEXT,
    FLASH_ATTENTION,
    N_BRANCHES,
    N_SEQUENCES,
    ModelOptions,
)
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.recurrent import RecurrentCache
from llamaspec.llama.resources import ThreadGovernor, governors
from llamaspec.llama.runtime import AbortFlag, Handle
from llamaspec.llama.tree_cells import n_leaves
from llamaspec.llama.weights import Weights
from llamaspec.values import ForwardRequest, Logits

CONTEXT_SHARE = 8  # a default context takes at most 1 / CONTEXT_SHARE of the free memory
CONTEXT_BYTES = 1 << 30  # and no more than the weights, or than this if they are smaller
STATES_BACK = 8  # earlier states that llama.cpp keeps itself, if it can: (1 + this) times the memory


class Context:
    """A context for a model, or for its prediction head `head`, counted from 0; `close` it.

    A head without a KV cache of its own reads that of `other`. Contexts of which one evaluates at a time may
    share `abort`; contexts of one model share `store`, where their finished sequences go.

    MemoryFullError if the machine has no room for the KV cache; ModelFileError if it generates no text.
    """

    def __init__(
        self,
        weights: Weights,
        options: ModelOptions,
        head: int | None = None,
        other: Context | None = None,
        abort: AbortFlag | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        self._path = weights.path
        self._n_vocabulary, self.hidden_size = weights.vocabulary.size, weights.hidden_size  # V, E
        self._keeps_hidden = options.heads and head is None
        self.context_size = options.n_ctx or _free_context_size(weights, options)
        keeps_states = weights.facts.keeps_states and head is None  # heads keep keys and values
        n_wanted = self.context_size if keeps_states else max(self.context_size, options.n_cells or 0)
        n_cells = -(-n_wanted // BLOCK) * BLOCK
        self.max_scored = options.max_scored
        pointer = _open(weights, options, n_cells, None if other is None else other.pointer, head is not None)
        self._abort = abort or AbortFlag()
        needs = (weights.handle, self._abort, None if other is None else other._handle)
        self._handle: Handle | None = Handle(pointer, lib.llama_free, *needs)
        if not lib.llama_get_memory(pointer):
            self.close()
            raise ModelFileError(f"{weights.path} is an embedding model; give a model that generates text")
        self.batch_size: int = min(lib.llama_n_batch(pointer), n_cells)
        lib.llama_set_abort_callback(pointer, AbortFlag.ASK, self._abort.address)
        self._batch = Batch(self.batch_size, self.hidden_size if head is not None else 0)
        if head is not None:
            nextn.choose_head(pointer, head)
        # Whether there are hidden rows of scored positions only.
        self.scored_only = head is not None and weights.facts.architecture in nextn.SCORED_ROWS_ONLY
        if options.heads:
            nextn.show_hidden_rows(pointer, scored_only=self.scored_only)
        self._governors: Sequence[ThreadGovernor] = governors() if options.threads is None else ()
        self._governor = self._governors[options.flash_attention != "off"] if self._governors else None
        self._n_threads = options.threads or resources.default_threads()
        self.cache: KVCache | RecurrentCache
        store = store or PrefixStore()
        if keeps_states:
            self.cache = RecurrentCache(
                pointer, self.context_size, can_restore=_can_restore_states(weights), store=store
            )
        else:
            n_sequences, n_branches = _n_sequences(options), 0 if head is not None else N_BRANCHES
            block = BLOCK if weights.facts.window is None else min(BLOCK, weights.facts.window)
            self.cache = KVCache(
                Cells(pointer, n_sequences + 1 + n_branches, block),
                n_cells,
                n_sequences,
                n_branches,
                store=store,
                keeps_finished=leaves_main_memory(weights, options),
            )

    @property
    def pointer(self) -> Any:
        """The llama_context."""
        if self._handle is None:
            raise ClosedError("the model is closed")
        self._handle.check()
        return self._handle.pointer

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests together: views [n_logits + K, V] float32."""
        if len(batch) > 1 and _n_branches(batch) > N_BRANCHES:  # one half of the rows after the other
            half = len(batch) // 2
            first = [logits.copy() for logits in self.evaluate(batch[:half])]
            return first + self.evaluate(batch[half:], n_padding)
        if isinstance(self.cache, RecurrentCache) and self.cache.reads_first(batch[0][1]):
            row, request = batch[0]
            self.evaluate([(row, request.prefill(request.n_before))])
        rows = [row for row, _ in batch]
        segments = [self.cache.segment(row, request, rows) for row, request in batch]
        new = [(row, segment.tokens) for row, segment in zip(rows, segments, strict=True)]
        n_positions = n_padding + sum([len(segment.tokens) for segment in segments])
        n_scored = sum([segment.n_scored for segment in segments])
        if n_padding:
            segments.append(segments[-1].padding(n_padding, self.max_scored - n_scored))
            n_scored += segments[-1].n_scored
        if n_positions > self.batch_size or n_scored > max(self.max_scored, len(batch)):
            raise ValueError(f"an evaluation of {n_positions} positions, {n_scored} scored, is too wide")
        self.decode(segments)
        self.cache.commit(new, n_padding)
        if self._keeps_hidden:
            self._keep_hidden(rows, segments)
        return parts(self.logits(n_scored), [request.n_scored for _, request in batch])

    def decode(self, segments: Sequence[Segment]) -> None:
        """Evaluate segments with llama.cpp; the caller commits what is new in the KV cache.

        EvaluationAbortedError if `abort` was called. EvaluationError or MemoryFullError if llama.cpp failed;
        then the KV cache is empty.
        """
        pointer, batch = self.pointer, self._batch.fill(segments)
        self.cache.begin(sum([segment.n_scored for segment in segments]))
        runtime.clear_errors()
        self._choose_threads(pointer)
        for each in self._governors:
            each.begin()
        try:
            status = lib.llama_decode(pointer, batch)
        finally:
            self._abort.clear()  # after it: an abort just before an evaluation ends it, too
            for each in self._governors:
                each.finish(self._n_threads)
        if status == 0:
            return
        if status == 2:
            raise EvaluationAbortedError("the evaluation was aborted")
        self.cache.forget()
        if status == 1:
            raise MemoryFullError("the KV cache is full; use a larger context")
        raise EvaluationError(f"llama.cpp could not evaluate (code {status}): {runtime.failure_reason()}")

    def _choose_threads(self, pointer: Any) -> None:
        if self._governor is not None and self._governor.n_threads != self._n_threads:
            self._n_threads = self._governor.n_threads
            lib.llama_set_n_threads(pointer, self._n_threads, self._n_threads)

    def logits(self, n: int) -> Logits:
        """The first `n` rows of llama.cpp's own buffer: a view; ScoresError if they are not numbers."""
        if not n:
            return np.empty((0, self._n_vocabulary), dtype=np.float32)
        logits = self._view(lib.llama_get_logits(self.pointer), n, self._n_vocabulary)
        if not np.isfinite(logits.max(axis=1)).all():
            self.cache.forget()  # its cells would spoil every row
            raise ScoresError(f"{self._path} gives scores that are not numbers; download or convert it again")
        return logits

    def hidden_rows(self, n: int) -> Rows:
        """A view of hidden rows, of all positions or the scored ones: [n, E]."""
        return self._view(nextn.hidden_rows(self.pointer), n, self.hidden_size)

    def clear(self) -> None:
        """Forget everything, including what is in the store."""
        _ = self.pointer  # ClosedError if it is closed
        self.cache.clear()

    def close(self) -> None:
        """Free the context, once no view of its logits is left; more than once is allowed."""
        self._handle = None

    def _keep_hidden(self, rows: Sequence[int], segments: Sequence[Segment]) -> None:
        """Note the hidden rows of tokens that have just been committed, not those of padding or a tree."""
        lengths = [len(segment.tokens) for segment in segments]
        hidden = parts(self.hidden_rows(sum(lengths)), lengths)
        for row, segment, part in zip(rows, segments, hidden, strict=False):
            sequence = self.cache.of_row[row]
            sequence.hidden.add(segment.start, part[: sequence.n - segment.start])

    def _view(self, pointer: Any, n: int, width: int) -> npt.NDArray[np.float32]:
        memory = (ctypes.c_float * (n * width)).from_address(ctypes.addressof(pointer.contents))
        memory.handle = self._handle  # type: ignore[attr-defined]
        return np.ndarray((n, width), np.float32, buffer=memoryview(memory))


def parts(rows: Rows, lengths: Sequence[int]) -> list[Rows]:
    """Views of consecutive rows."""
    ends = list(itertools.accumulate(lengths, initial=0))
    return [rows[start:end] for start, end in itertools.pairwise(ends)]


def leaves_main_memory(weights: Weights, options: ModelOptions) -> bool:
    """Whether layers, and their cells, are in the memory of other devices."""
    return bool(weights.devices) or (runtime.can_offload() and options.offloads)


def _open(weights: Weights, options: ModelOptions, n_cells: int, other: Any | None, is_head: bool) -> Any:
    """Make a llama_context; `other` is one whose KV cache it reads."""
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
    n_branches = 0 if is_head else N_BRANCHES
    # Two more sequences: for garbage, and for what is copied.
    parameters.n_seq_max = 1 if keeps_states else _n_sequences(options) + n_branches + 2
    parameters.n_outputs_max = max(options.max_scored, parameters.n_seq_max)
    parameters.kv_unified = True
    parameters.swa_full = True
    parameters.n_rs_seq = STATES_BACK if keeps_states and _can_restore_states(weights) else 0
    parameters.n_threads = parameters.n_threads_batch = options.threads or resources.default_threads()
    parameters.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
    parameters.type_k = CACHE_TYPES[options.cache_type_k]
    parameters.type_v = CACHE_TYPES[options.cache_type_v]
    runtime.clear_errors()
    runtime.expect_flash_attention()
    with runtime.raising_callbacks():
        context = lib.llama_init_from_model(weights.pointer, parameters)
    if not context:
        raise MemoryFullError(
            f"llama.cpp cannot make a context of {n_cells} tokens for {weights.path}: "
            f"{runtime.failure_reason()}; use a smaller context"
        )
    return context


def _n_sequences(options: ModelOptions) -> int:
    """Sequences for rows and prefixes: llama.cpp wants room for one row of logits for each."""
    return max(2, min(N_SEQUENCES - 1, options.max_scored))


def _n_branches(batch: Sequence[tuple[int, ForwardRequest]]) -> int:
    """Sequences that the trees of some requests need beside the rows' own."""
    return sum([n_leaves(request.parents) - 1 for _, request in batch if request.parents is not None])


def _can_restore_states(weights: Weights) -> bool:
    """Not beside a sliding window: llama.cpp may have given away positions it would need."""
    return weights.facts.keeps_states and weights.facts.window is None


def _free_context_size(weights: Weights, options: ModelOptions) -> int:
    """The default size: by free main memory, or by that of the devices that compute the model."""
    n_bytes, room = int(lib.llama_model_size(weights.pointer)), resources.available_bytes()
    if weights.devices:
        free = sum(device_of(handle).free_bytes for handle in weights.devices)
        room = max(0, free - n_bytes) if options.workers else free  # CPUs report all they have
    elif runtime.can_offload() and options.offloads:
        gpus = [device for device in find_devices() if device.is_gpu]
        room = sum(device.free_bytes for device in gpus) if gpus else room  # the weights have been loaded
    if weights.facts.keeps_states:
        n_bytes, room = 0, room // 4  # every row has a context of its own
    per_token = weights.kv_bytes_per_token(options)
    return default_context_size(weights.trained_context_size, per_token, n_bytes, room)


def default_context_size(trained: int, kv_bytes_per_token: float, weights_bytes: int, room: int) -> int:
    """Default tokens of a context, with `room` bytes of free memory.

    As many as the model was trained for if they fit, otherwise 4096, doubled as often as fits.
    """
    n = min(DEFAULT_CONTEXT, trained)
    budget = min(room // CONTEXT_SHARE, max(weights_bytes, CONTEXT_BYTES))
    if trained * kv_bytes_per_token <= budget:
        return trained
    while 2 * n <= trained and 2 * n * kv_bytes_per_token <= budget:
        n *= 2
    return n


def _check_room(weights: Weights, options: ModelOptions, n_cells: int) -> None:
    """Refuse a KV cache larger than the machine: the system would end the process, not the call."""
    if leaves_main_memory(weights, options):
        return
    n_bytes, room = weights.kv_bytes_per_token(options) * n_cells, resources.available_bytes()
    if n_bytes > room:
        raise MemoryFullError(
            f"a context of {n_cells} tokens needs {n_bytes / 2**30:.1f} GiB, this machine has "
            f"{room / 2**30:.1f} GiB to give; use a smaller context"
        )
