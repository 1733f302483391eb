"""The target's own prediction heads (MTP, NextN) as a model that drafts: more layers over the same weights.

A head predicts the next token from the embedding of the last one and the hidden row of the position before
it: the target's row if the target has evaluated that position, otherwise a head's own. The target keeps its
rows only for a while. If a row is lost, the head reads the next token with zeros, as it reads the first one,
and drafts a little worse. A single head drafts any number of tokens; of several, each drafts one.
tests/llama/test_heads.py, tests/llama/test_shared_head.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llamaspec.errors import ContextFullError, EvaluationAbortedError, PairError
from llamaspec.llama.batch import Segment
from llamaspec.llama.context import Context, parts
from llamaspec.llama.kv_cache import Prepared
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.nextn import HiddenRows, Rows, check_heads
from llamaspec.llama.options import DRAFT_SCORED, ModelOptions
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.runtime import AbortFlag
from llamaspec.llama.vocabulary import check_pair
from llamaspec.llama.weights import LoadProgress, Weights
from llamaspec.values import MTP, NO_TOKENS, TARGET, ForwardRequest, Logits, TokenArray, n_common


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Tokens for a head, and the hidden rows to read them with: each goes with the token behind it."""

    row: int
    tokens: TokenArray  # [n] text, and draft tokens behind it
    n_text: int  # at least 1; the target has evaluated all of them, perhaps not the last
    n_scored: int  # 1 = logits and the hidden row of the last token are wanted; else 0
    hidden: HiddenRows  # the target's
    own: HiddenRows  # the heads' own, behind the text

    @property
    def is_possible(self) -> bool:
        """Whether the hidden row for the last token is known."""
        last = len(self.tokens) - 1
        return last == 0 or (self.hidden if last < self.n_text else self.own).has(last - 1)

    @property
    def keys(self) -> TokenArray:
        """What stands for the tokens in a head's KV cache: draft tokens count as their complement.

        So a draft token that has become text is read again, with the target's hidden row.
        """
        return np.concatenate([self.tokens[: self.n_text], ~self.tokens[self.n_text :]])

    def rows(self, start: int, hidden_size: int) -> Rows:
        """The hidden rows for the tokens from `start` on: [n - start, E]; zeros where they are not known."""
        rows = np.zeros((len(self.tokens) - start, hidden_size), dtype=np.float32)
        n_text = max(0, self.n_text - start)
        self.hidden.fill(rows[:n_text], start - 1)
        self.own.fill(rows[n_text:], start + n_text - 1)
        return rows


class Head:
    """A head with a KV cache of its own."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def prepare(self, batch: Sequence[Reading]) -> list[int | ContextFullError]:
        """Make room: for each how many of its tokens are read, or why it cannot be read."""
        return self.context.cache.prepare_all([
            (each.row, ForwardRequest(MTP, each.keys, each.n_scored), 0) for each in batch
        ])  # fmt: skip

    def evaluate(self, batch: Sequence[Reading]) -> list[tuple[Logits, Rows]]:
        """Read what has been prepared: logits [n_scored, V] and the hidden row [n_scored, E] of each."""
        segments, new = [], []
        for each in batch:
            held = self.context.cache.of_row[each.row]
            rows = each.rows(held.n, self.context.hidden_size)
            segments.append(Segment(held.number, held.n, each.tokens[held.n :], each.n_scored, rows))
            new.append((each.row, each.keys[held.n :]))
        self.context.decode(segments)
        self.context.cache.commit(new)
        n_scored = [segment.n_scored for segment in segments]
        n_rows = n_scored if self.context.scored_only else [len(segment.tokens) for segment in segments]
        logits = parts(self.context.logits(sum(n_scored)), n_scored)
        hidden = parts(self.context.hidden_rows(sum(n_rows)), n_rows)
        return [(part, rows[len(rows) - len(part) :]) for part, rows in zip(logits, hidden, strict=True)]

    def lacks(self, reading: Reading) -> bool:
        """Whether something prepared is still to be read; EvaluationAbortedError if the text has changed."""
        held = self.context.cache.of_row[reading.row]
        if held.shared(reading.keys) < min(held.n, len(reading.tokens)):
            raise _forgotten()
        return held.n < len(reading.tokens)

    def release(self, row: int) -> None:
        """End a row."""
        self.context.cache.release(row)

    def forget(self) -> None:
        """Empty the KV cache."""
        self.context.clear()


class SharedHead:
    """Gemma 4's assistant: its own weights, the target's KV cache; PairError if made for another target.

    It reads one token at a time: the last of the text with the target's hidden row, then its own draft tokens
    with its own rows, all at the position behind what the target has evaluated. So rejected draft tokens must
    be out of the target's cache before.
    """

    def __init__(self, weights: Weights, target: LlamaModel, abort: AbortFlag) -> None:
        if weights.hidden_size != target.weights.hidden_size or target.weights.facts.architecture != "gemma4":
            raise PairError(f"{weights.path} drafts for another target than {target.path}; name that")
        self.context = target.context_beside(weights, abort)
        self._target = target

    def prepare(self, batch: Sequence[Reading]) -> list[int | ContextFullError]:
        """Take rejected draft tokens out of the target's cache; all tokens but the last count as read."""
        return [self._prepared(reading) if reading.n_scored else len(reading.tokens) for reading in batch]

    def evaluate(self, batch: Sequence[Reading]) -> list[tuple[Logits, Rows]]:
        """Read the last token of each: logits [1, V] and the hidden row [1, E]."""
        segments = []
        for reading in batch:
            cached = self._target.cached(reading.row)
            assert cached is not None  # prepared
            rows = reading.rows(len(reading.tokens) - 1, self.context.hidden_size)
            segments.append(Segment(cached.number, reading.n_text - 1, reading.tokens[-1:], 1, rows))
        self.context.decode(segments)
        logits, hidden = self.context.logits(len(batch)), self.context.hidden_rows(len(batch))
        return [(logits[i : i + 1], hidden[i : i + 1]) for i in range(len(batch))]

    def lacks(self, reading: Reading) -> bool:
        """Whether there is something to read; EvaluationAbortedError if the target has forgotten the text."""
        cached = self._target.cached(reading.row)
        if cached is None or cached.n != reading.n_text - 1:
            raise _forgotten()
        return bool(reading.n_scored)

    def release(self, row: int) -> None:
        """Nothing is kept of a row."""

    def forget(self) -> None:
        """Nothing is kept."""

    def _prepared(self, reading: Reading) -> int | ContextFullError:
        n_evaluated = reading.n_text - 1
        request = ForwardRequest(TARGET, reading.tokens[: reading.n_text])
        if not n_evaluated or list(self._target.prepare([(reading.row, request, 0)])) != [n_evaluated]:
            return ContextFullError("the target has not cached this text")
        return len(reading.tokens) - 1


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
        options = replace(
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
        self._abort = AbortFlag()
        try:
            if path is not None:
                at_home = replace(options, workers=(), devices=None, tensor_split=())
                with closing(Weights(path, at_home, on_load)) as weights:  # the context keeps what it needs
                    check_pair(target.vocabulary, weights.vocabulary)
                    self._heads.append(SharedHead(weights, target, self._abort))
            # A context for each: its KV cache holds what this head has read.
            for i in range(n_heads if path is None else 0):
                store = PrefixStore(beside=target.store)
                context = Context(target.weights, options, head=i, abort=self._abort, store=store)
                self._heads.append(Head(context))
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
            asked = [n for n, each in enumerate(readings) if each.is_possible and self._reads(i, each)]
            for n, answer in zip(asked, head.prepare([readings[n] for n in asked]), strict=True):
                answers[n].append(answer)
        return [_least(*each) for each in zip(readings, answers, strict=True)]

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests: views [n_logits, V] float32, valid until the next call.

        EvaluationAbortedError if `abort` was called, or the target has forgotten a text since `prepare`.
        EvaluationError, MemoryFullError or ScoresError if llama.cpp failed, or the logits are not numbers;
        then the KV cache of a head is empty.
        """
        readings = [self._reading(row, request) for row, request in batch]
        if not all(reading.is_possible for reading in readings):
            raise _forgotten()
        logits: list[Logits] = [np.empty((0, self.vocabulary_size), dtype=np.float32) for _ in batch]
        for i, head in enumerate(self._heads):
            asked = [n for n, each in enumerate(readings) if self._reads(i, each) and head.lacks(each)]
            answers = head.evaluate([readings[n] for n in asked]) if asked else []
            for n, (scores, rows) in zip(asked, answers, strict=True):
                logits[n] = scores
                if len(rows):
                    self._keep(readings[n], rows[-1:])
        return logits

    def can_share(self, row: int) -> bool:
        """Rows are evaluated together."""
        return True

    def release(self, row: int) -> None:
        """End a row. What the heads have read of it may serve others."""
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

    def _reads(self, i: int, reading: Reading) -> bool:
        """Whether head `i` reads this: all heads read a prompt, one drafts."""
        n_drafted = len(reading.tokens) - reading.n_text
        return not reading.n_scored or i == (0 if self.longest is None else n_drafted)

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
            hidden=HiddenRows() if cached is None else cached.hidden,
            own=own,
        )

    def _keep(self, reading: Reading, rows: Rows) -> None:
        """Note the hidden row behind the last token, [1, E]: the next draft token needs it."""
        is_drafted = len(reading.tokens) > reading.n_text
        own = reading.own if is_drafted else HiddenRows()
        own.add(len(reading.tokens) - 1, rows)
        self._own[reading.row] = reading.tokens, own


def _least(reading: Reading, answers: Sequence[int | ContextFullError]) -> int | ContextFullError:
    """Combine the answers of several heads to one request."""
    if not answers:
        reason = "no head drafts so far ahead" if reading.is_possible else "the hidden rows are not known"
        return ContextFullError(reason)
    faults = [answer for answer in answers if isinstance(answer, ContextFullError)]
    return faults[0] if faults else min(answer for answer in answers if isinstance(answer, int))


def _forgotten() -> EvaluationAbortedError:
    return EvaluationAbortedError("the target has forgotten a text; prepare again")
