"""A draft that computes a block of tokens at once from the target's hidden rows: DFlash, DSpark, DFlash2.

The target's rows become keys and values of the draft, one position each. A block is the last token and open
positions after it, evaluated together and then dropped. Requests name the open positions as draft tokens.
The answer has logits for each position of the block, and as hidden rows what else the draft returns:
confidences (DSpark) or a lattice of candidates (DFlash2). tests/drafters/test_block.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from llamaspec.errors import ContextFullError, RowsMissingError
from llamaspec.llama.batch import Segment
from llamaspec.llama.context import parts
from llamaspec.llama.hidden_draft_file import HiddenDraftFile
from llamaspec.llama.hidden_rows import window_keys
from llamaspec.llama.kv_cache import Prepared
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import BATCH, DRAFT_SCORED, ModelOptions
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.row_contexts import DraftCache, DraftContext, DraftModel, draft_weights
from llamaspec.llama.weights import LoadProgress
from llamaspec.protocols import Unprepared
from llamaspec.values import MTP, ForwardRequest, HiddenRows, Logits, Rows, Source


class BlockDraft(DraftModel):
    """A loaded draft. The target was loaded with `hidden_layers` and stays open.

    Only the threads and cache types of `options` matter; the target's are the default.

    Raises
    ------
    PairError
        It was made for another target.
    ModelFileError, MemoryFullError
        It cannot be loaded.
    """

    source = Source.BLOCK

    def __init__(
        self,
        target: LlamaModel,
        file: HiddenDraftFile,
        options: ModelOptions | None = None,
        on_load: LoadProgress | None = None,
    ) -> None:
        super().__init__()
        self.file, self.path, self._target = file, file.path, target
        self.vocabulary_size, self.context_size = target.vocabulary_size, target.context_size
        self.longest = file.longest  # draft tokens in one round
        self.max_scored = min(BATCH, DRAFT_SCORED * file.block)
        options = replace(
            options or target.options,
            n_ctx=target.context_size + file.block,
            n_cells=(target.options.n_cells or target.context_size) + self.max_scored,
            max_scored=self.max_scored,
            workers=(),
            devices=None,
            tensor_split=(),
        )
        weights = draft_weights(file, target.weights, options, on_load)
        with closing(weights):  # the context keeps them alive
            self.identity = weights.keys.identity
            store = PrefixStore(limit_of=target.store)
            self.context = DraftContext(weights, options, file, target.context, self._abort, store)
        self.caches = [DraftCache(self.context, store, options, target.weights.keys.release)]
        self.batch_size = self.context.batch_size

    def prepare(self, batch: Sequence[Prepared]) -> list[int | Unprepared]:
        """Make room for requests; return for each its number of cached tokens, or why it gets no draft.

        Raises ValueError if a request is neither a block nor a prompt, or if llama.cpp would abort.
        """
        for _, request, _ in batch:
            self._check_request(request)
        prepared = self.context.cache.prepare_all([
            (number, _named(request), 0) for number, request, _ in batch
        ])  # fmt: skip
        return [
            each if isinstance(each, ContextFullError) else _answer(request, each)
            for (_, request, _), each in zip(batch, prepared, strict=True)
        ]

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests; return a view of the logits of each, valid until the next call.

        The views have shape [block, V], or [0, V] for a prompt and for DFlash2. Raises EvaluationAbortedError
        if `abort` was called, and EvaluationError, MemoryFullError or ScoresError if llama.cpp failed or the
        logits are not finite; in the latter case the KV cache is empty.
        """
        self._inject(batch)
        blocks = [(number, request) for number, request in batch if request.n_scored]
        if not blocks:
            return [self.context.logits(0)] * len(batch)
        segments, names = [], []
        has_logits = self.context.scored_only
        for number, request in blocks:
            held = self.context.cache.running[number]
            last, n = request.tokens[-1:], request.n_scored
            tokens = np.concatenate((self.context.known(last), request.draft))
            segments.append(Segment(held.seq_id, held.n, tokens, n if has_logits else 0))
            names.append((number, ~np.concatenate((last, request.draft))))
        self.context.decode(segments)
        self.context.cache.commit(names)
        lengths = [len(segment.tokens) for segment in segments]
        self._note_rows(blocks, lengths)
        logits = parts(self.context.logits(sum(lengths)), lengths) if has_logits else []
        views = iter(logits)
        nothing = self.context.logits(0)
        return [next(views, nothing) if request.n_scored else nothing for _, request in batch]

    def close(self) -> None:
        """Free the context. Later calls do nothing."""
        self.context.close()

    def _inject(self, batch: Sequence[tuple[int, ForwardRequest]]) -> None:
        """Compute keys and values of the tokens that the target has evaluated."""
        segments, names = [], []
        for number, request in batch:
            hidden, held, end = request.hidden, self.context.cache.running[number], _n_known(request)
            assert hidden is not None
            start = hidden.begin + held.n
            if start < end:
                rows = hidden.target.part(start, end)
                segments.append(Segment(held.seq_id, held.n, request.tokens[start:end], 0, rows))
                names.append((number, window_keys(request.tokens[:end], hidden.begin)[held.n :]))
        if segments:
            self.context.inject(segments)
            self.context.cache.commit(names)

    def _note_rows(self, blocks: Sequence[tuple[int, ForwardRequest]], lengths: Sequence[int]) -> None:
        self._latest = {}
        if not (self.file.has_confidence or self.file.kind == "dflash2"):
            return
        rows = self.context.hidden_rows(sum(lengths))
        self.context.check_scores(is_right=self._are_numbers(rows.reshape(len(blocks), self.file.block, -1)))
        for (number, request), part in zip(blocks, parts(rows, lengths), strict=True):
            self._latest[number] = HiddenRows(len(request.tokens) - 1, part)

    def _are_numbers(self, rows: Rows) -> bool:
        """Whether what is drawn from the rows of blocks is finite, and every candidate a token: [n, B, E]."""
        drawn, k = rows[:, 0 if self.file.from_anchor else 1 :], self.file.n_candidates
        if k is None:  # confidences
            return bool(np.isfinite(drawn[..., 0]).all())
        ids, scores = drawn[..., :k], drawn[..., k : k * (1 + k)].reshape(*drawn.shape[:2], k, k)
        n_tokens = self.context.weights.vocabulary.size
        return bool(np.isfinite(scores.max(axis=-1)).all() and 0 <= ids.min() <= ids.max() < n_tokens)

    def _check_request(self, request: ForwardRequest) -> None:
        self._target.check(replace(request, draft=request.draft[:0], n_logits=0))
        n = request.n_scored
        if request.hidden is None or len(request.hidden.own) or n not in (0, self.file.block):
            raise ValueError(f"a block needs hidden rows and {self.file.block} positions")
        if not 0 <= request.hidden.begin < len(request.tokens):
            raise ValueError("a block needs a token")


def _n_known(request: ForwardRequest) -> int:
    """Return the number of tokens whose hidden rows become keys and values: not the last one of a block."""
    return len(request.tokens) - request.n_logits


def _named(request: ForwardRequest) -> ForwardRequest:
    """Return the request with the names of tokens in the KV cache. Those of a block match no others."""
    assert request.hidden is not None
    keys = window_keys(request.tokens[: _n_known(request)], request.hidden.begin)
    block = ~np.concatenate((request.tokens[_n_known(request) :], request.draft))
    return ForwardRequest(MTP, np.concatenate((keys, block)), request.n_scored, scope=request.scope)


def _answer(request: ForwardRequest, n_cached: int) -> int | Unprepared:
    assert request.hidden is not None
    start, end, known = request.hidden.begin + n_cached, _n_known(request), request.hidden.target
    if start < end and not known.start <= start <= end <= known.end:
        return RowsMissingError(start)
    return start
