"""The target's own prediction heads (MTP, NextN) as a model that drafts: more layers over the same weights.

A head guesses what follows a token from its embedding and the hidden row of the position before it. In the
text that row is the target's; behind it, where the target has computed nothing yet, a head's own. So the
heads are a pure function of the text and the draft tokens, as any model is, and `prepare` and `evaluate` are
the same. One head drafts as far as is wanted; of several, each drafts one token. tests/llama/test_heads.py
compares what a used cache answers with what a fresh one answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np

from llamaspec.errors import ContextFullError, EvaluationAbortedError
from llamaspec.llama.context import Context
from llamaspec.llama.head import Head, Reading, SharedHead
from llamaspec.llama.kv_cache import Prepared
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.nextn import SCORED_ROWS_ONLY, check_heads
from llamaspec.llama.options import DRAFT_SCORED, ModelOptions
from llamaspec.llama.runtime import AbortFlag
from llamaspec.llama.sequences import HiddenRows, Rows
from llamaspec.llama.vocabulary import check_pair
from llamaspec.llama.weights import LoadProgress, Weights
from llamaspec.values import NO_TOKENS, ForwardRequest, Logits, TokenArray, n_common


class PredictionHeads:
    """The heads of a target that was loaded with `ModelOptions(heads=True)`, and stays open.

    Of `options`, threads and types of the KV cache count; default as the target's. `path` is a head in a file
    of its own, which reads the target's KV cache.

    Raises
    ------
    PairError
        The file has no heads, llama.cpp cannot compute them, or they are another target's.
    MemoryFullError
        The machine has no room for their KV cache.
    """

    def __init__(
        self,
        target: LlamaModel,
        options: ModelOptions | None = None,
        path: Path | None = None,
        on_load: LoadProgress | None = None,
    ) -> None:
        n_heads = 1 if path is not None else check_heads(target.path).n_heads
        self.options = replace(
            options or target.options,
            n_ctx=target.context_size,
            n_cells=target.options.n_cells,
            max_scored=DRAFT_SCORED,
            heads=True,
        )
        self._target, self.path = target, path or target.path
        self.vocabulary_size, self.context_size = target.vocabulary_size, target.context_size
        self.max_scored, self.max_chunked_prefill = DRAFT_SCORED, 0
        self.n_cells: int | None = None
        self.longest = None if n_heads == 1 else n_heads  # draft tokens in one round; None = any number
        self._heads: list[Head | SharedHead] = []
        self._weights: Weights | None = None
        self._abort = AbortFlag()
        self._hidden_size = target.weights.hidden_size  # of a row that a head leaves
        scored_only = target.weights.architecture in SCORED_ROWS_ONLY
        try:
            if path is not None:
                at_home = replace(self.options, workers=(), devices=None, tensor_split=())
                self._weights = Weights(path, at_home, on_load)
                check_pair(target.vocabulary, self._weights.vocabulary)
                self._heads.append(SharedHead(self._weights, target, self._abort))
            # A context for each: its KV cache holds what this head has read.
            for i in range(n_heads if path is None else 0):
                context = Context(target.weights, self.options, head=i, abort=self._abort, store=target.store)
                self._heads.append(Head(context, scored_only=scored_only))
        except BaseException:
            self.close()
            raise
        self.batch_size = self.prompt_chunk = self._heads[0].context.batch_size
        # By row: text and draft tokens, and the hidden rows that the heads made of the last of them.
        self._own: dict[int, tuple[TokenArray, HiddenRows]] = {}

    def prepare(self, batch: Sequence[Prepared]) -> Sequence[int | ContextFullError]:
        """Make room for requests: how many tokens of each need not be read, or why there is no draft.

        ValueError if a request scores more than its last token, or llama.cpp would abort.
        """
        readings = [self._reading(row, request) for row, request, _ in batch]
        answers: list[list[int | ContextFullError]] = [[] for _ in batch]
        for i, head in enumerate(self._heads):
            asked = [n for n, reading in enumerate(readings) if self._reads(i, reading)]
            for n, answer in zip(asked, head.prepare([readings[n] for n in asked]), strict=True):
                answers[n].append(answer)
        return [_least(found) for found in answers]

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests: views [n_logits, V] float32, valid until the next call.

        EvaluationAbortedError if `abort` was called, or the target has forgotten a text since `prepare`.
        EvaluationError, MemoryFullError or ScoresError if llama.cpp failed, or the scores are not numbers;
        then the KV cache of a head is empty.
        """
        readings = [self._reading(row, request) for row, request in batch]
        if not all(map(self._is_ready, readings)):
            raise EvaluationAbortedError("the target has forgotten a text; prepare again")
        logits: list[Logits] = [np.empty((0, self.vocabulary_size), dtype=np.float32) for _ in batch]
        for i, head in enumerate(self._heads):
            reads = [self._reads(i, reading) and head.lacks(reading) for reading in readings]
            asked = [n for n, is_asked in enumerate(reads) if is_asked]
            if not asked:
                continue
            for n, (scores, rows) in zip(asked, head.evaluate([readings[n] for n in asked]), strict=True):
                logits[n] = scores
                if len(rows):
                    self._keep(readings[n], rows[-1:])
        return logits

    def can_share(self, row: int) -> bool:
        """Rows are evaluated together."""
        return True

    def release(self, row: int) -> None:
        """The row has ended. What the heads have read of it may serve others."""
        for head in self._heads:
            head.release(row)
        self._own.pop(row, None)

    def forget(self) -> None:
        """Empty the KV caches."""
        self._own.clear()
        for head in self._heads:
            head.forget()

    def abort(self) -> None:
        """End a running evaluation soon; from any thread."""
        self._abort.set()

    def close(self) -> None:
        """Free the contexts; more than once is allowed."""
        for head in self._heads:
            head.context.close()
        if self._weights is not None:
            self._weights.close()

    def __enter__(self) -> PredictionHeads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reads(self, i: int, reading: Reading) -> bool:
        """Whether head `i` reads this: all heads read a prompt, one drafts."""
        n_drafted = len(reading.tokens) - reading.n_text
        return not reading.n_scored or i == (0 if self.longest is None else n_drafted)

    def _is_ready(self, reading: Reading) -> bool:
        """Whether what was prepared can still be read."""
        asked = [head for i, head in enumerate(self._heads) if self._reads(i, reading)]
        return bool(asked) and all(head.is_ready(reading) for head in asked if head.lacks(reading))

    def _reading(self, row: int, request: ForwardRequest) -> Reading:
        self._target.check(request)
        if request.n_scored > 1 or len(request.draft):
            raise ValueError("a prediction head scores the last token only")
        tokens, cached = request.tokens, self._target.cached(row)
        n_evaluated = 0 if cached is None else cached.shared(tokens)
        drafted, own = self._own.get(row, (NO_TOKENS, HiddenRows()))
        if not len(drafted) == n_common(drafted, tokens) < len(tokens):
            own = HiddenRows()
        return Reading(
            row=row,
            tokens=tokens,
            n_text=min(n_evaluated + 1, len(tokens)),
            n_scored=request.n_scored,
            hidden_size=self._hidden_size,
            hidden=HiddenRows() if cached is None else cached.hidden,
            own=own,
        )

    def _keep(self, reading: Reading, rows: Rows) -> None:
        """Note the hidden row behind the last token, [1, E]: the next draft token needs it."""
        is_drafted = len(reading.tokens) > reading.n_text
        own = reading.own if is_drafted else HiddenRows()
        own.add(len(reading.tokens) - 1, rows)
        self._own[reading.row] = reading.tokens, own


def _least(answers: Sequence[int | ContextFullError]) -> int | ContextFullError:
    """The answer of several heads to one request."""
    numbers = [answer for answer in answers if isinstance(answer, int)]
    if len(numbers) < len(answers) or not answers:
        faults = [answer for answer in answers if not isinstance(answer, int)]
        return faults[0] if faults else ContextFullError("no head drafts so far ahead")
    return min(numbers)
