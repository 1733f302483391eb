"""A llama.cpp context over loaded weights: evaluates rows in one batch, with its KV cache as their memory.

Several contexts may lie over the same weights. Logits are views of llama.cpp's buffer, and a view keeps the
context alive. Knows neither texts nor drafts. tests/test_rows.py compares rows with texts that are
alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.errors import (
    ClosedError,
    ContextFullError,
    EvaluationAbortedError,
    EvaluationError,
    MemoryFullError,
    ModelFileError,
    ScoresError,
)
from llamaspec.llama import nextn, runtime
from llamaspec.llama.abort import STRLEN, AbortFlag
from llamaspec.llama.batch import Batch, Segment, branching, padding
from llamaspec.llama.cells import LlamaCells, Rows
from llamaspec.llama.handles import Handle
from llamaspec.llama.kv_cache import BLOCK, GARBAGE, KVCache, Prepared
from llamaspec.llama.layer_rows import layer_rows, show_layer
from llamaspec.llama.new_context import (
    can_restore_states,
    context_size_for,
    leaves_main_memory,
    n_sequences,
    open_context,
)
from llamaspec.llama.options import N_BRANCHES, ModelOptions
from llamaspec.llama.recurrent import Checkpoints, RecurrentCache
from llamaspec.llama.threads import governor
from llamaspec.llama.tree_cells import n_leaves
from llamaspec.llama.weights import Weights
from llamaspec.values import ForwardRequest, Logits, TokenArray

LONG = 64  # positions of an evaluation that is long enough to be interrupted


class Context:
    """A context; `close` it.

    Parameters
    ----------
    weights : Weights
    options : ModelOptions
    head : int, optional
        Compute this prediction head, counted from 0, in place of the model.
    other : Context, optional
        Read the KV cache of this one: for a head that has none.

    Raises
    ------
    MemoryFullError
        The machine has no room for the KV cache.
    ModelFileError
        The model does not generate text.
    """

    def __init__(
        self,
        weights: Weights,
        options: ModelOptions,
        head: int | None = None,
        other: Context | None = None,
    ) -> None:
        self._path, self._weights = weights.path, weights
        self._n_vocabulary, self._hidden_size = weights.vocabulary.size, weights.hidden_size
        self._keeps_hidden = options.heads and head is None
        self._layers: tuple[int, ...] = ()  # whose inputs are kept, in place of what leaves the last one
        n_ctx = options.n_ctx or context_size_for(weights, options)
        self.context_size = n_ctx
        n_cells = -(-max(n_ctx, options.n_cells or 0) // BLOCK) * BLOCK
        self.max_scored = options.max_scored
        pointer = open_context(
            weights, options, n_cells, None if other is None else other.pointer, is_head=head is not None
        )
        self._abort = AbortFlag()
        needs = (weights.handle, self._abort, None if other is None else other._handle)
        self._handle: Handle | None = Handle(pointer, lib.llama_free, *needs)
        if not lib.llama_get_memory(pointer):
            self.close()
            raise ModelFileError(f"{weights.path} is an embedding model; give a model that generates text")
        self.batch_size: int = min(lib.llama_n_batch(pointer), n_cells)
        lib.llama_set_abort_callback(pointer, STRLEN, self._abort.address)
        self._batch = Batch(self.batch_size, self._hidden_size if head is not None else 0)
        if head is not None and weights.architecture != nextn.EAGLE:
            nextn.choose_head(pointer, head)
        if options.heads:
            scored_only = head is not None and weights.architecture in nextn.SCORED_ROWS_ONLY
            nextn.show_hidden_rows(pointer, scored_only=scored_only)
        self._governor = governor() if options.threads is None else None
        self._n_threads = options.threads or runtime.default_threads()
        self.cache: KVCache | RecurrentCache
        if weights.keeps_states and head is None:  # heads keep keys and values
            checkpoints = Checkpoints(pointer) if can_restore_states(weights) else None
            self.cache = RecurrentCache(pointer, n_ctx, checkpoints)
        else:
            cells = LlamaCells(pointer, can_copy=weights.window is None)
            n_branches = 0 if head is not None else N_BRANCHES
            # A GPU passes over garbage fast, and moving cells goes through main memory.
            max_garbage = 1.0 if leaves_main_memory(weights, options) else GARBAGE
            self.cache = KVCache(cells, n_cells, n_sequences(options), n_branches, max_garbage)

    @property
    def pointer(self) -> Any:
        """The llama_context."""
        if self._handle is None:
            raise ClosedError("the model is closed")
        self._handle.check()
        return self._handle.pointer

    def prepare(self, batch: Sequence[Prepared]) -> list[int | ContextFullError]:
        """Make room for requests; how many tokens of each are cached, or why there is no room."""
        _ = self.pointer
        return self.cache.prepare_all(batch)

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests together: views [n_logits + K, V] float32."""
        segments: list[Segment] = []
        new: list[tuple[int, TokenArray]] = []
        n_positions, n_scored, n_branches = n_padding, 0, 0
        for _, request in batch:
            if request.parents is not None:
                n_branches += n_leaves(request.parents) - 1
        if n_branches > N_BRANCHES and len(batch) > 1:
            return self._evaluate_in_halves(batch, n_padding)
        for row, request in batch:
            segment = self._segment(row, request, batch)
            segments.append(segment)
            new.append((row, segment.tokens))
            n_positions += len(segment.tokens)
            n_scored += segment.n_scored
        if n_padding:
            segments.append(padding(segments[-1], n_padding, self.max_scored - n_scored))
            n_scored += segments[-1].n_scored
        if n_positions > self.batch_size or n_scored > max(self.max_scored, len(batch)):
            raise ValueError(f"an evaluation of {n_positions} positions, {n_scored} scored, is too wide")
        if isinstance(self.cache, RecurrentCache):
            self.cache.take_checkpoint(n_scored)
        self.decode(segments)
        self.cache.commit(new, n_padding)
        if self._keeps_hidden:
            self._keep_hidden(new)
        return self._answers(batch, n_scored)

    def encode(self, batch: lib.llama_batch) -> None:
        """Let llama.cpp's encoder evaluate hidden rows; `hidden_rows` are then what it made of them."""
        self._abort.clear()
        self._check(lib.llama_encode(self.pointer, batch))

    def keep_layers(self, layers: tuple[int, ...]) -> None:
        """Keep from now on, as hidden rows, what goes into some layers, side by side."""
        for layer in layers:
            show_layer(self.pointer, layer)
        self._layers, self._keeps_hidden = layers, True

    def release(self, row: int) -> None:
        """The row has ended."""
        self.cache.release(row)

    def forget(self) -> None:
        """Empty the KV cache, as if nothing had been evaluated."""
        _ = self.pointer
        self.cache.forget()

    def abort(self) -> None:
        """End a running evaluation soon; from any thread."""
        self._abort.set()

    def close(self) -> None:
        """Free the context, once no view of its logits is left; more than once is allowed."""
        self._handle = None

    def _evaluate_in_halves(
        self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int
    ) -> list[Logits]:
        """Trees with so many branches, one half of the rows after the other."""
        half = len(batch) // 2
        first = [logits.copy() for logits in self.evaluate(batch[:half])]
        return first + self.evaluate(batch[half:], n_padding)

    def _segment(
        self, row: int, request: ForwardRequest, batch: Sequence[tuple[int, ForwardRequest]]
    ) -> Segment:
        held = self.cache.sequence(row)
        if request.is_tree:
            assert isinstance(self.cache, KVCache)
            growth = self.cache.grow(row, request, [other for other, _ in batch])
            return branching(held.number, held.n, request, growth)
        new = request.tokens[held.n :]
        if len(request.draft):
            new = np.concatenate((new, request.draft))
        return Segment(held.number, held.n, new, request.n_scored)

    def _keep_hidden(self, evaluated: Sequence[tuple[int, TokenArray]]) -> None:
        """Note the hidden rows of what has just been committed."""
        n, end = sum(len(tokens) for _, tokens in evaluated), 0
        rows = self._layer_rows(n) if self._layers else self.hidden_rows(n)
        for row, tokens in evaluated:
            start, end = end, end + len(tokens)
            sequence = self.cache.sequence(row)
            n_text = self.cache.n_text(row, len(tokens))
            sequence.hidden.add(sequence.n - n_text, rows[start : start + n_text])

    def decode(self, segments: Sequence[Segment]) -> None:
        """Let llama.cpp evaluate; what is new in the KV cache has yet to be committed."""
        pointer, batch = self.pointer, self._batch.fill(segments)
        self.cache.begin()
        self._choose_threads(pointer)
        if batch.n_tokens < LONG:
            self._abort.clear()
            status = lib.llama_decode(pointer, batch)
        else:
            with self._abort.armed(), runtime.raising_signals():
                status = lib.llama_decode(pointer, batch)
        if self._governor is not None:
            self._governor.finish()
        self._check(status)

    def _check(self, status: int) -> None:
        """Raise what llama.cpp's answer means."""
        if status == 0:
            return
        if status == 1:
            self.cache.forget()
            raise MemoryFullError("the KV cache is full; use a larger context")
        if status == 2:
            raise EvaluationAbortedError("the evaluation was aborted")
        self.cache.forget()
        raise EvaluationError(f"llama.cpp could not evaluate (code {status}): {runtime.last_error()}")

    def _choose_threads(self, pointer: Any) -> None:
        if self._governor is None:
            return
        self._governor.begin()
        if self._governor.n_threads != self._n_threads:
            self._n_threads = self._governor.n_threads
            lib.llama_set_n_threads(pointer, self._n_threads, self._n_threads)

    def _answers(self, batch: Sequence[tuple[int, ForwardRequest]], n_scored: int) -> list[Logits]:
        if not n_scored:
            return [np.empty((0, self._n_vocabulary), dtype=np.float32) for _ in batch]
        logits, end, answers = self.logits(n_scored), 0, []
        for _, request in batch:
            start, end = end, end + request.n_scored
            answers.append(logits[start:end])
        return answers

    def logits(self, n: int) -> Logits:
        """The first `n` rows of llama.cpp's own buffer; the view keeps the context alive.

        Raises
        ------
        ScoresError
            They are not numbers. The KV cache is empty: its cells would spoil every row.
        """
        logits = self._view(lib.llama_get_logits(self.pointer), n, self._n_vocabulary)
        if n and not np.isfinite(logits.max(axis=1)).all():
            self.cache.forget()
            raise ScoresError(f"{self._path} gives scores that are not numbers; download or convert it again")
        return logits

    def hidden_rows(self, n: int) -> Rows:
        """The same for hidden rows, of all positions or the scored ones: [n, E]."""
        return self._view(nextn.hidden_rows(self.pointer), n, self._hidden_size)

    def _layer_rows(self, n: int) -> Rows:
        """What went into the layers that are kept: [n, layers * E]."""
        views = [self._view(layer_rows(self.pointer, i), n, self._hidden_size) for i in self._layers]
        return np.concatenate(views, axis=1)

    def _view(self, pointer: Any, n: int, width: int) -> npt.NDArray[np.float32]:
        memory = (ctypes.c_float * (n * width)).from_address(ctypes.addressof(pointer.contents))
        memory.handle = self._handle  # type: ignore[attr-defined]
        return np.ndarray((n, width), np.float32, buffer=memoryview(memory))
