"""Contexts that return hidden rows: of targets, of prediction heads, and of drafts that read such rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import PairError
from llamaspec.llama.batch import Batch, Segment
from llamaspec.llama.context import Context
from llamaspec.llama.hidden_draft_file import HiddenDraftFile, check_tokens
from llamaspec.llama.hidden_rows import (
    SCORED_ROWS_ONLY,
    choose_head,
    hidden_rows,
    keep_layer,
    layer_rows,
    show_hidden_rows,
)
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.runtime import AbortFlag
from llamaspec.llama.vocabulary import check_pair
from llamaspec.llama.weights import LoadProgress, Weights
from llamaspec.values import ForwardRequest, HiddenRows, Logits, Rows, TokenArray

ENCODED = 64  # hidden rows that are encoded at once: llama.cpp makes room for as many rows of logits
_M_ROPE = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)


class RowContext(Context):
    """A context that returns the hidden rows of its last layer.

    That of a draft takes and scores the tokens of its target, of which it may lack some. It may have more.
    """

    scored_only = False  # whether llama.cpp returns hidden rows of the scored positions only
    n_tokens: int | None = None  # of the target that a draft was loaded for; None = its own

    def logits(self, n: int) -> Logits:
        """Return the first `n` rows of logits, -inf for tokens that it lacks; errors as for `Context`."""
        own = super().logits(n)
        n_own, n_tokens = own.shape[1], self.n_tokens
        if n_tokens is None or n_tokens <= n_own:
            return own[:, :n_tokens]
        logits = np.full((n, n_tokens), -np.inf, dtype=np.float32)
        logits[:, :n_own] = own
        return logits

    def known(self, tokens: TokenArray) -> TokenArray:
        """Return the tokens with token 0 in place of those that it lacks."""
        n_own = self.weights.vocabulary.size
        return tokens if (self.n_tokens or 0) <= n_own else np.where(tokens < n_own, tokens, np.int32(0))

    def hidden_rows(self, n: int) -> Rows:
        """Return a view of the first `n` hidden rows, of all positions or only the scored ones: [n, E]."""
        return self._view(hidden_rows(self.pointer), n, self.weights.hidden_size)


class TargetContext(RowContext):
    """A target's context. It returns the rows that the draft reads: `options.hidden_layers`, or the last."""

    def __init__(
        self, weights: Weights, options: ModelOptions, *, abort: AbortFlag, store: PrefixStore
    ) -> None:
        super().__init__(weights, options, abort=abort, store=store)
        self._layers, self._n_layers = options.hidden_layers, int(lib.llama_model_n_layer(weights.pointer))
        # Of each sequence of the last evaluation: its first row in the batch, their number, and the position.
        self._places: dict[int, tuple[int, int, int]] = {}
        self._kept: HiddenRows | None = None  # of the parts of an evaluation before the last
        for layer in self._layers:
            if layer < self._n_layers:
                keep_layer(self.pointer, layer)
        if options.heads or self._n_layers in self._layers:
            show_hidden_rows(self.pointer, scored_only=False)

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests together; return a view of the logits of each: [n_scored, V]."""
        self._kept = None
        return super().evaluate(batch, n_padding)

    def hidden(self, number: int) -> HiddenRows | None:
        """Return the rows of the last evaluation that a sequence has asked for, valid until the next one."""
        place = self._places.get(number)
        if place is None:
            return None
        found, kept = self._rows_at(*place), self._kept
        if kept is None or kept.end != found.start:
            return found
        return HiddenRows(kept.start, np.concatenate((kept.rows, found.rows)))

    def _keep_rows(self, number: int) -> None:
        """Keep the rows of a part of an evaluation while the rest is evaluated."""
        found = self.hidden(number)
        self._kept = None if found is None else found._replace(rows=found.rows.copy())

    def _rows_at(self, first: int, n: int, position: int) -> HiddenRows:
        if not self._layers:
            return HiddenRows(position, self.hidden_rows(first + n)[first:])
        rows = [
            self._view(layer_rows(self.pointer, layer), first + n, self.weights.hidden_size)
            if layer < self._n_layers
            else self.hidden_rows(first + n)
            for layer in self._layers
        ]
        return HiddenRows(position, np.concatenate([each[first:] for each in rows], axis=1))

    def _note_rows(self, batch: Sequence[tuple[int, ForwardRequest]], segments: Sequence[Segment]) -> None:
        """Note which rows of the evaluation each sequence has asked for."""
        self._places, first = {}, 0
        for (number, request), segment in zip(batch, segments, strict=False):  # the last one may be padding
            n = len(segment.tokens)
            n_left_out = n if request.rows_from is None else max(0, request.rows_from - segment.start)
            if n_left_out < n:
                self._places[number] = first + n_left_out, n - n_left_out, segment.start + n_left_out
            first += n


class HeadContext(RowContext):
    """A context for the prediction head number `head` of a model, from 0; see `Context` for `other`."""

    def __init__(
        self,
        weights: Weights,
        options: ModelOptions,
        head: int,
        *,
        abort: AbortFlag | None = None,
        other: Context | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        super().__init__(weights, options, other, abort, store, weights.hidden_size, is_head=True)
        self.n_tokens = None if other is None else other.weights.vocabulary.size
        choose_head(self.pointer, head)
        self.scored_only = weights.facts.architecture in SCORED_ROWS_ONLY
        show_hidden_rows(self.pointer, scored_only=self.scored_only)


class DraftContext(RowContext):
    """A context over a draft's weights; it uses the embedding and output of `target` if it has none.

    Raises MemoryFullError if the machine has no room for the KV cache.
    """

    def __init__(
        self,
        weights: Weights,
        options: ModelOptions,
        draft: HiddenDraftFile,
        target: Context,
        abort: AbortFlag,
        store: PrefixStore,
    ) -> None:
        row_size = 0 if draft.is_block else weights.hidden_size
        options = replace(options, heads=False, hidden_layers=())
        super().__init__(weights, options, target, abort, store, row_size)
        self.n_tokens = target.weights.vocabulary.size
        n_axes = 4 if lib.llama_model_rope_type(weights.pointer) in _M_ROPE else 1
        size = len(draft.layers) * draft.hidden_size
        self._features = Batch(self.batch_size, size, has_tokens=False, n_axes=n_axes)
        self.scored_only = draft.kind != "dflash2"
        show_hidden_rows(self.pointer, scored_only=self.scored_only)
        lib.llama_set_causal_attn(self.pointer, draft.is_causal)

    def inject(self, segments: list[Segment]) -> None:
        """Compute keys and values from hidden rows alone, without logits. Errors as for `decode`."""
        self.compute(lib.llama_decode, self._features, segments)

    def encode(self, rows: Rows) -> Rows:
        """Return what the draft's encoder makes of hidden rows: [n, E]. Errors as for `decode`."""
        encoded = np.empty((len(rows), self.weights.hidden_size), dtype=np.float32)
        # The encoder uses no positions, but llama.cpp wants those that follow the ones of the sequence: none.
        empty = lib.llama_n_seq_max(self.pointer) - 1
        for start in range(0, len(rows), ENCODED):
            part = rows[start : start + ENCODED]
            tokens = np.zeros(len(part), dtype=np.int32)
            self.compute(lib.llama_encode, self._features, [Segment(empty, 0, tokens, len(part), part)])
            encoded[start : start + len(part)] = self.hidden_rows(len(part))
        return encoded


def draft_weights(
    draft: HiddenDraftFile, target: Weights, options: ModelOptions, on_load: LoadProgress | None = None
) -> Weights:
    """Load a draft for a target.

    Raises
    ------
    PairError
        It was made for another target.
    ModelFileError, MemoryFullError
        It cannot be loaded.
    """
    weights = Weights(draft.path, options, on_load)
    n_target, n_own = target.vocabulary.size, weights.vocabulary.size
    try:
        check_pair(target.vocabulary, weights.vocabulary)
        check_tokens(draft, n_own, target.path, n_target)
    except PairError:
        weights.close()
        raise
    if n_own != n_target and not draft.has_token_rows:
        weights.close()  # the target's output gives as many scores as the target has tokens
        weights = Weights(draft.path, options, on_load, n_tokens=n_target)
    weights.huge_pages.start()
    return weights


@dataclass(frozen=True, slots=True, eq=False)
class DraftCache:
    """The KV cache of a draft that reads hidden rows, or of a head, and what names its prefixes."""

    context: RowContext
    store: PrefixStore
    options: ModelOptions
    target: str  # the key of the target's file, whose rows it reads
    number: int = 0  # of the head

    @property
    def weights(self) -> Weights:
        """The draft's file, opened."""
        return self.context.weights

    @property
    def part(self) -> tuple[object, ...]:
        """What names its prefixes beside its file and options."""
        return self.number, self.target

    def store_finished(self, n_most: int) -> int:
        """Copy some tokens of finished sequences to the store; return how many, 0 = none is left."""
        return self.context.cache.store_finished(n_most)


class DraftModel:
    """What the drafts that read hidden rows have in common as models of the engine."""

    can_share = True
    max_chunked_prefill = 0
    n_cells = None
    is_disturbed = False  # only the target is asked

    def __init__(self) -> None:
        self._abort = AbortFlag()
        self.caches: list[DraftCache] = []  # one for each context that has a KV cache of its own
        self._latest: dict[int, HiddenRows] = {}  # of the latest evaluation, by the number of the sequence

    def hidden(self, number: int) -> HiddenRows | None:
        """Return what the latest evaluation gave a sequence beside logits, valid until the next one."""
        return self._latest.get(number)

    def release(self, number: int) -> None:
        """End a sequence. Its tokens in the KV caches may serve others."""
        for each in self.caches:
            each.context.cache.release(number)

    def forget(self) -> None:
        """Empty the KV caches."""
        for each in self.caches:
            each.context.clear()

    def recover(self) -> str | None:
        """Check the KV caches while no sequence runs. Empty those that contradict themselves; return how."""
        faults = [each.context.recover() for each in self.caches]
        return next((fault for fault in faults if fault is not None), None)

    def attended(self, n_tokens: int) -> float:
        """Return all tokens: only the target is asked."""
        return n_tokens

    def abort(self) -> None:
        """Abort the running evaluation; may be called from any thread."""
        self._abort.set()
