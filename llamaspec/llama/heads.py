"""The target's prediction heads (MTP, NextN) as a draft model: more layers over the same weights.

A head predicts the next token from the embedding of the last token and a hidden row: what the last layer
computed at the position before. Requests bring the rows: the target's, and after the text the head's own. No
row comes before the first token, so heads see the tokens from the second on. A single head drafts any number
of tokens; of several heads, each drafts one. tests/llama/test_heads.py, tests/llama/test_shared_head.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llamaspec.errors import ContextFullError, EvaluationAbortedError, PairError, RowsMissingError
from llamaspec.llama.batch import Segment
from llamaspec.llama.context import parts
from llamaspec.llama.hidden_draft_file import HiddenDraftFile, check_heads
from llamaspec.llama.hidden_rows import window_keys
from llamaspec.llama.kv_cache import Prepared
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import DRAFT_SCORED, ModelOptions
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.row_contexts import (
    DraftCache,
    DraftContext,
    DraftModel,
    HeadContext,
    RowContext,
    draft_weights,
)
from llamaspec.llama.runtime import AbortFlag
from llamaspec.llama.vocabulary import check_pair
from llamaspec.llama.weights import LoadProgress, Weights
from llamaspec.protocols import Unprepared
from llamaspec.values import (
    MTP,
    TARGET,
    ForwardRequest,
    HiddenInput,
    HiddenRows,
    Logits,
    Rows,
    Scope,
    Source,
    TokenArray,
)

MOST_SCORED = 32  # positions of a sequence that are scored at once although only the last one is wanted
LAG = 1  # positions between a token and its hidden row


@dataclass(frozen=True, slots=True, eq=False)
class HeadInput:
    """The input of a head: tokens, each with the hidden row of the position before it."""

    number: int  # of the sequence
    tokens: TokenArray  # [n] text, then draft tokens
    n_scored: int  # 1 = logits and the hidden row of the last token are wanted; otherwise 0
    hidden: HiddenInput
    scope: Scope

    @property
    def n_text(self) -> int:
        """Number of tokens before the drafted ones."""
        return len(self.tokens) - len(self.hidden.own)

    @property
    def keys(self) -> TokenArray:
        """The tokens that the head sees, as its KV cache names them."""
        return window_keys(self.tokens, self.hidden.begin, len(self.hidden.own))

    def has_rows(self, start: int) -> bool:
        """Whether the rows for the tokens from `start` on are known."""
        known = self.hidden.target
        return start >= self.n_text or (known.start < start and self.n_text <= known.end + LAG)

    def rows(self, start: int, encode: Callable[[Rows], Rows] = lambda rows: rows) -> Rows:
        """Return the rows for the tokens from `start` on, all of them known: [n - start, E].

        `encode` makes rows for the head of those of the target.
        """
        n_text, own = self.n_text, self.hidden.own
        if start >= n_text:
            return own[start - n_text :]
        rows = encode(self.hidden.target.part(start - LAG, n_text - LAG))
        return np.concatenate((rows, own)) if len(own) else rows


class Head:
    """A head with its own KV cache."""

    scores_all = False  # llama.cpp returns logits and rows of all positions of a batch, or of the first ones

    def __init__(self, context: RowContext) -> None:
        self.context = context

    def prepare(self, batch: Sequence[HeadInput]) -> list[int | Unprepared]:
        """Make room; return for each input its number of cached tokens, or why it cannot be evaluated."""
        answers: list[int | Unprepared] = []
        prepared = self.context.cache.prepare_all([
            (each.number, ForwardRequest(MTP, each.keys, each.n_scored, scope=each.scope), 0)
            for each in batch
        ])  # fmt: skip
        for each, n_cached in zip(batch, prepared, strict=True):
            if isinstance(n_cached, ContextFullError):
                answers.append(n_cached)
            elif each.has_rows(each.hidden.begin + n_cached):
                answers.append(each.hidden.begin + n_cached)
            else:
                answers.append(RowsMissingError(each.hidden.begin + n_cached))
        return answers

    def evaluate(self, batch: Sequence[HeadInput]) -> list[tuple[Logits, Rows]]:
        """Evaluate prepared inputs; return the logits [n_scored, V] and hidden row [n_scored, E] of each."""
        segments, new = [], []
        for each in batch:
            held, begin = self.context.cache.running[each.number], each.hidden.begin
            start = begin + held.n
            tokens, rows = self.context.known(each.tokens[start:]), self._rows(each, start)
            n_outputs = len(tokens) if each.n_scored and self.scores_all else each.n_scored
            segments.append(Segment(held.seq_id, held.n, tokens, n_outputs, rows))
            new.append((each.number, each.keys[held.n :]))
        self.context.decode(segments)
        self.context.cache.commit(new)
        n_scored = [segment.n_scored for segment in segments]
        n_rows = n_scored if self.context.scored_only else [len(segment.tokens) for segment in segments]
        logits = parts(self.context.logits(sum(n_scored)), n_scored)
        hidden = parts(self.context.hidden_rows(sum(n_rows)), n_rows)
        return [
            (scores[len(scores) - each.n_scored :], rows[len(rows) - each.n_scored :])
            for each, scores, rows in zip(batch, logits, hidden, strict=True)
        ]

    def lacks(self, wanted: HeadInput) -> bool:
        """Whether a prepared input must be evaluated."""
        return self.context.cache.running[wanted.number].n < len(wanted.tokens) - wanted.hidden.begin

    def _rows(self, wanted: HeadInput, start: int) -> Rows:
        return wanted.rows(start)


class Eagle3Head(Head):
    """EAGLE-3: its own layer, which reads what goes into three layers of the target."""

    context: DraftContext
    scores_all = True

    def evaluate(self, batch: Sequence[HeadInput]) -> list[tuple[Logits, Rows]]:
        """Evaluate prepared inputs; if they are long, first without logits."""
        held = self.context.cache.running
        long = [
            replace(each, tokens=each.tokens[:-1], hidden=each.hidden.prefill(1), n_scored=0)
            for each in batch
            if each.n_scored and len(each.keys) - held[each.number].n > MOST_SCORED
        ]
        if long:
            super().evaluate(long)
        return super().evaluate(batch)

    def _rows(self, wanted: HeadInput, start: int) -> Rows:
        return wanted.rows(start, self.context.encode)


class SharedHead:
    """Gemma 4's assistant: its own weights, the target's KV cache. PairError if made for another target.

    It evaluates one token at a time: first the last of the text, with the target's hidden row, then its own
    draft tokens, with its own rows. All of them have the position after those that the target has evaluated,
    so rejected draft tokens must be removed from the target's cache before.
    """

    def __init__(self, weights: Weights, target: LlamaModel, abort: AbortFlag) -> None:
        if weights.hidden_size != target.weights.hidden_size or target.weights.facts.architecture != "gemma4":
            raise PairError(
                f"{weights.path} was made for another target than {target.path}; name its own target"
            )
        options = replace(target.options, n_ctx=target.context_size)
        self.context = HeadContext(weights, options, 0, abort=abort, other=target.context)
        self._target = target

    def prepare(self, batch: Sequence[HeadInput]) -> list[int | Unprepared]:
        """Remove rejected draft tokens from the target's cache. All tokens but the last count as cached."""
        return [self._prepare(each) if each.n_scored else len(each.tokens) for each in batch]

    def evaluate(self, batch: Sequence[HeadInput]) -> list[tuple[Logits, Rows]]:
        """Evaluate the last token of each input; return its logits [1, V] and hidden row [1, E]."""
        segments = []
        for each in batch:
            cached = self._target.cached(each.number)
            assert cached is not None  # prepared
            rows = each.rows(len(each.tokens) - 1)
            token = self.context.known(each.tokens[-1:])
            segments.append(Segment(cached.seq_id, each.n_text - 1, token, 1, rows))
        self.context.decode(segments)
        logits, hidden = self.context.logits(len(batch)), self.context.hidden_rows(len(batch))
        return [(logits[i : i + 1], hidden[i : i + 1]) for i in range(len(batch))]

    def lacks(self, wanted: HeadInput) -> bool:
        """Whether a prepared input must be evaluated; EvaluationAbortedError if the target has dropped it."""
        cached = self._target.cached(wanted.number)
        if cached is None or cached.n != wanted.n_text - 1:
            raise EvaluationAbortedError("the target has dropped a sequence; prepare it again")
        return bool(wanted.n_scored)

    def _prepare(self, wanted: HeadInput) -> int | Unprepared:
        n_evaluated = wanted.n_text - 1
        request = ForwardRequest(TARGET, wanted.tokens[: wanted.n_text], scope=wanted.scope)
        if not n_evaluated or list(self._target.prepare([(wanted.number, request, 0)])) != [n_evaluated]:
            return ContextFullError("the target has not cached this sequence")
        last = len(wanted.tokens) - 1
        return last if wanted.has_rows(last) else RowsMissingError(last)


class PredictionHeads(DraftModel):
    """The heads of a target that was loaded with `ModelOptions(heads=True)` and stays open.

    Only the threads and cache types of `options` matter; the target's are the default. `path` is a separate
    file with a head that uses the target's KV cache. `draft` is an EAGLE-3 draft instead of heads; for it the
    target was loaded with `hidden_layers`.

    Raises
    ------
    PairError
        The file has no heads, llama.cpp cannot compute them, or they were made for another target.
    MemoryFullError
        The machine has no room for their KV cache.
    """

    max_scored = DRAFT_SCORED

    def __init__(
        self,
        target: LlamaModel,
        options: ModelOptions | None = None,
        path: Path | None = None,
        on_load: LoadProgress | None = None,
        draft: HiddenDraftFile | None = None,
    ) -> None:
        super().__init__()
        path = path if draft is None else draft.path
        n_heads = 1 if path is not None else check_heads(target.path).n_heads
        options = replace(
            options or target.options,
            n_ctx=target.context_size,
            n_cells=target.options.n_cells,
            max_scored=DRAFT_SCORED,
            heads=True,
        )
        self._target, self.path, self.identity = target, path or target.path, target.identity
        self.vocabulary_size, self.context_size = target.vocabulary_size, target.context_size
        self.source = Source.MTP if draft is None else Source.EAGLE3
        self.longest = None if n_heads == 1 else n_heads  # draft tokens in one round; None = any number
        self._heads: list[Head | SharedHead] = []
        try:
            if path is None:
                for i in range(n_heads):
                    store = PrefixStore(limit_of=target.store)
                    context = HeadContext(target.weights, options, i, abort=self._abort, store=store)
                    self._heads.append(Head(context))
                    self.caches.append(DraftCache(context, store, options, target.weights.keys.release, i))
            else:
                local = replace(options, workers=(), devices=None, tensor_split=())
                if draft is None:
                    with closing(Weights(path, local, on_load)) as weights:  # the context keeps them alive
                        self.identity = weights.keys.identity
                        check_pair(target.vocabulary, weights.vocabulary)
                        self._heads.append(SharedHead(weights, target, self._abort))
                else:
                    with closing(draft_weights(draft, target.weights, local, on_load)) as weights:
                        self.identity = weights.keys.identity
                        store = PrefixStore(limit_of=target.store)
                        own = DraftContext(weights, local, draft, target.context, self._abort, store)
                        self._heads.append(Eagle3Head(own))
                        self.caches.append(DraftCache(own, store, local, target.weights.keys.release))
        except BaseException:
            self.close()
            raise
        self.batch_size = self._heads[0].context.batch_size

    def prepare(self, batch: Sequence[Prepared]) -> Sequence[int | Unprepared]:
        """Make room for requests; return for each its number of cached tokens, or why it gets no draft.

        Raises ValueError if a request scores more than its last token, or if llama.cpp would abort.
        """
        inputs = [self._input(number, request) for number, request, _ in batch]
        answers: list[list[int | Unprepared]] = [[] for _ in batch]
        for i, head in enumerate(self._heads):
            asked = [n for n, each in enumerate(inputs) if self._uses(i, each)]
            for n, answer in zip(asked, head.prepare([inputs[n] for n in asked]), strict=True):
                answers[n].append(answer)
        return [_combine(each) for each in answers]

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests; return a view of the logits of each, valid until the next call.

        The views have shape [n_logits, V]. Raises EvaluationAbortedError if `abort` was called or the target
        has dropped a sequence since `prepare`, and EvaluationError, MemoryFullError or ScoresError if
        llama.cpp failed or the logits are not finite; in the latter case the KV cache of a head is empty.
        """
        inputs = [self._input(number, request) for number, request in batch]
        logits: list[Logits] = [np.empty((0, self.vocabulary_size), dtype=np.float32) for _ in batch]
        self._latest = {}
        for i, head in enumerate(self._heads):
            asked = [n for n, each in enumerate(inputs) if self._uses(i, each) and head.lacks(each)]
            answers = head.evaluate([inputs[n] for n in asked]) if asked else []
            for n, (scores, rows) in zip(asked, answers, strict=True):
                logits[n] = scores
                if len(rows):
                    self._latest[inputs[n].number] = HiddenRows(len(inputs[n].tokens) - 1, rows[-1:])
        return logits

    def close(self) -> None:
        """Free the contexts. Later calls do nothing."""
        for head in self._heads:
            head.context.close()

    def _uses(self, i: int, wanted: HeadInput) -> bool:
        """Whether head `i` evaluates an input: all heads process a prompt, one head drafts a token."""
        return not wanted.n_scored or i == (0 if self.longest is None else len(wanted.hidden.own))

    def _input(self, number: int, request: ForwardRequest) -> HeadInput:
        self._target.check(request)
        hidden = request.hidden
        if request.n_scored > 1 or len(request.draft):
            raise ValueError("a prediction head scores the last token only")
        if hidden is None or not LAG <= hidden.begin < len(request.tokens) - len(hidden.own):
            raise ValueError("a prediction head needs hidden rows, and a token after one of them")
        return HeadInput(number, request.tokens, request.n_scored, hidden, request.scope)


def _combine(answers: Sequence[int | Unprepared]) -> int | Unprepared:
    """Combine the answers of several heads to one request."""
    if not answers:
        return ContextFullError("no head drafts so far ahead")
    missing = [answer for answer in answers if isinstance(answer, RowsMissingError)]
    others = [answer for answer in answers if isinstance(answer, ContextFullError)]
    known = [answer for answer in answers if isinstance(answer, int)]
    return next(iter(others), min(missing, key=lambda each: each.n_cached, default=min(known, default=0)))
