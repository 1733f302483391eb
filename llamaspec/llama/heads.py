"""The target's prediction heads (MTP, NextN) as a draft model: more layers over the same weights.

A head predicts the next token from the embedding of the last token and a hidden row: what the last layer
computed at the position before. The row is the target's if the target has evaluated that position, otherwise
a head's own. The target keeps only its latest rows. For a row that is not known, as before the first token, a
head gets zeros, and drafts a little worse. A single head drafts any number of tokens; of several heads, each
drafts one. tests/llama/test_heads.py, tests/llama/test_shared_head.py.
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
class HeadInput:
    """The input of a head: tokens, each with the hidden row of the position before it."""

    number: int  # of the sequence
    tokens: TokenArray  # [n] text, then draft tokens
    n_text: int  # at least 1; the target has evaluated all of these but perhaps the last
    n_scored: int  # 1 = logits and the hidden row of the last token are wanted; otherwise 0
    hidden: HiddenRows  # the target's
    own: HiddenRows  # the heads' own, after the text

    @property
    def is_possible(self) -> bool:
        """Whether the hidden row for the last token is known."""
        last = len(self.tokens) - 1
        return last == 0 or (self.hidden if last < self.n_text else self.own).has(last - 1)

    @property
    def keys(self) -> TokenArray:
        """The tokens as a head's KV cache names them: draft tokens as their complement.

        So an accepted draft token is evaluated again, with the target's hidden row.
        """
        return np.concatenate([self.tokens[: self.n_text], ~self.tokens[self.n_text :]])

    def rows(self, start: int, hidden_size: int) -> Rows:
        """Return the hidden rows for the tokens from `start` on: [n - start, E], zeros if not known."""
        rows = np.zeros((len(self.tokens) - start, hidden_size), dtype=np.float32)
        n_text = max(0, self.n_text - start)
        self.hidden.fill(rows[:n_text], start - 1)
        self.own.fill(rows[n_text:], start + n_text - 1)
        return rows


class Head:
    """A head with its own KV cache."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def prepare(self, batch: Sequence[HeadInput]) -> list[int | ContextFullError]:
        """Make room; return for each input its number of cached tokens, or why there is no room."""
        return self.context.cache.prepare_all([
            (each.number, ForwardRequest(MTP, each.keys, each.n_scored), 0) for each in batch
        ])  # fmt: skip

    def evaluate(self, batch: Sequence[HeadInput]) -> list[tuple[Logits, Rows]]:
        """Evaluate prepared inputs; return the logits [n_scored, V] and hidden row [n_scored, E] of each."""
        segments, new = [], []
        for each in batch:
            held = self.context.cache.running[each.number]
            rows = each.rows(held.n, self.context.weights.hidden_size)
            segments.append(Segment(held.seq_id, held.n, each.tokens[held.n :], each.n_scored, rows))
            new.append((each.number, each.keys[held.n :]))
        self.context.decode(segments)
        self.context.cache.commit(new)
        n_scored = [segment.n_scored for segment in segments]
        n_rows = n_scored if self.context.scored_only else [len(segment.tokens) for segment in segments]
        logits = parts(self.context.logits(sum(n_scored)), n_scored)
        hidden = parts(self.context.hidden_rows(sum(n_rows)), n_rows)
        return [(part, rows[len(rows) - len(part) :]) for part, rows in zip(logits, hidden, strict=True)]

    def lacks(self, wanted: HeadInput) -> bool:
        """Whether a prepared input must be evaluated; EvaluationAbortedError if it has changed since."""
        held = self.context.cache.running[wanted.number]
        if held.shared(wanted.keys) < min(held.n, len(wanted.tokens)):
            raise _lost()
        return held.n < len(wanted.tokens)

    def release(self, number: int) -> None:
        """End a sequence."""
        self.context.cache.release(number)

    def forget(self) -> None:
        """Empty the KV cache."""
        self.context.clear()


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
        self.context = target.open_shared_head(weights, abort)
        self._target = target

    def prepare(self, batch: Sequence[HeadInput]) -> list[int | ContextFullError]:
        """Remove rejected draft tokens from the target's cache. All tokens but the last count as cached."""
        return [self._prepare(each) if each.n_scored else len(each.tokens) for each in batch]

    def evaluate(self, batch: Sequence[HeadInput]) -> list[tuple[Logits, Rows]]:
        """Evaluate the last token of each input; return its logits [1, V] and hidden row [1, E]."""
        segments = []
        for each in batch:
            cached = self._target.cached(each.number)
            assert cached is not None  # prepared
            rows = each.rows(len(each.tokens) - 1, self.context.weights.hidden_size)
            segments.append(Segment(cached.seq_id, each.n_text - 1, each.tokens[-1:], 1, rows))
        self.context.decode(segments)
        logits, hidden = self.context.logits(len(batch)), self.context.hidden_rows(len(batch))
        return [(logits[i : i + 1], hidden[i : i + 1]) for i in range(len(batch))]

    def lacks(self, wanted: HeadInput) -> bool:
        """Whether a prepared input must be evaluated; EvaluationAbortedError if the target has dropped it."""
        cached = self._target.cached(wanted.number)
        if cached is None or cached.n != wanted.n_text - 1:
            raise _lost()
        return bool(wanted.n_scored)

    def release(self, number: int) -> None:
        """Do nothing: the target's KV cache is not this head's."""

    def forget(self) -> None:
        """Do nothing: the target's KV cache is not this head's."""

    def _prepare(self, wanted: HeadInput) -> int | ContextFullError:
        n_evaluated = wanted.n_text - 1
        request = ForwardRequest(TARGET, wanted.tokens[: wanted.n_text])
        if not n_evaluated or list(self._target.prepare([(wanted.number, request, 0)])) != [n_evaluated]:
            return ContextFullError("the target has not cached this sequence")
        return len(wanted.tokens) - 1


class PredictionHeads:
    """The heads of a target that was loaded with `ModelOptions(heads=True)` and stays open.

    Only the threads and cache types of `options` matter; the target's are the default. `path` is a separate
    file with a head that uses the target's KV cache.

    Raises
    ------
    PairError
        The file has no heads, llama.cpp cannot compute them, or they were made for another target.
    MemoryFullError
        The machine has no room for their KV cache.
    """

    max_scored = DRAFT_SCORED
    can_share = True
    max_chunked_prefill = 0
    n_cells = None

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
        self.longest = None if n_heads == 1 else n_heads  # draft tokens in one round; None = any number
        self._heads: list[Head | SharedHead] = []
        self._abort = AbortFlag()
        try:
            if path is None:
                for i in range(n_heads):
                    store = PrefixStore(limit_of=target.store)
                    context = Context(target.weights, options, head=i, abort=self._abort, store=store)
                    self._heads.append(Head(context))
            else:
                local = replace(options, workers=(), devices=None, tensor_split=())
                with closing(Weights(path, local, on_load)) as weights:  # the context keeps them alive
                    check_pair(target.vocabulary, weights.vocabulary)
                    self._heads.append(SharedHead(weights, target, self._abort))
        except BaseException:
            self.close()
            raise
        self.batch_size = self._heads[0].context.batch_size
        # By the number of the sequence: its tokens with the draft, and the heads' hidden rows of the last.
        self._own: dict[int, tuple[TokenArray, HiddenRows]] = {}

    def prepare(self, batch: Sequence[Prepared]) -> Sequence[int | ContextFullError]:
        """Make room for requests; return for each its number of cached tokens, or why it gets no draft.

        Raises ValueError if a request scores more than its last token, or if llama.cpp would abort.
        """
        inputs = [self._input(number, request) for number, request, _ in batch]
        answers: list[list[int | ContextFullError]] = [[] for _ in batch]
        for i, head in enumerate(self._heads):
            asked = [n for n, each in enumerate(inputs) if each.is_possible and self._uses(i, each)]
            for n, answer in zip(asked, head.prepare([inputs[n] for n in asked]), strict=True):
                answers[n].append(answer)
        return [_combine(*each) for each in zip(inputs, answers, strict=True)]

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests; return a view of the logits of each, valid until the next call.

        The views have shape [n_logits, V]. Raises EvaluationAbortedError if `abort` was called or the target
        has dropped a sequence since `prepare`, and EvaluationError, MemoryFullError or ScoresError if
        llama.cpp failed or the logits are not finite; in the latter case the KV cache of a head is empty.
        """
        inputs = [self._input(number, request) for number, request in batch]
        if not all(each.is_possible for each in inputs):
            raise _lost()
        logits: list[Logits] = [np.empty((0, self.vocabulary_size), dtype=np.float32) for _ in batch]
        for i, head in enumerate(self._heads):
            asked = [n for n, each in enumerate(inputs) if self._uses(i, each) and head.lacks(each)]
            answers = head.evaluate([inputs[n] for n in asked]) if asked else []
            for n, (scores, rows) in zip(asked, answers, strict=True):
                logits[n] = scores
                if len(rows):
                    self._keep(inputs[n], rows[-1:])
        return logits

    def release(self, number: int) -> None:
        """End a sequence. Its tokens in the heads' KV caches may serve others."""
        for head in self._heads:
            head.release(number)
        self._own.pop(number, None)

    def forget(self) -> None:
        """Empty the KV caches."""
        self._own.clear()
        for head in self._heads:
            head.forget()

    @property
    def is_disturbed(self) -> bool:
        """As for the target."""
        return self._target.is_disturbed

    def attended(self, n_tokens: int) -> float:
        """As for the target."""
        return self._target.attended(n_tokens)

    def abort(self) -> None:
        """Abort the running evaluation; may be called from any thread."""
        self._abort.set()

    def close(self) -> None:
        """Free the contexts. Later calls do nothing."""
        for head in self._heads:
            head.context.close()

    def _uses(self, i: int, wanted: HeadInput) -> bool:
        """Whether head `i` evaluates an input: all heads process a prompt, one head drafts a token."""
        n_drafted = len(wanted.tokens) - wanted.n_text
        return not wanted.n_scored or i == (0 if self.longest is None else n_drafted)

    def _input(self, number: int, request: ForwardRequest) -> HeadInput:
        self._target.check(request)
        if request.n_scored > 1 or len(request.draft):
            raise ValueError("a prediction head scores the last token only")
        tokens, cached = request.tokens, self._target.cached(number)
        n_evaluated = 0 if cached is None else cached.shared(tokens)
        drafted, own = self._own.get(number, (NO_TOKENS, HiddenRows()))
        if not len(drafted) == n_common(drafted, tokens) < len(tokens):
            own = HiddenRows()
        return HeadInput(
            number=number,
            tokens=tokens,
            n_text=min(n_evaluated + 1, len(tokens)),
            n_scored=request.n_scored,
            hidden=HiddenRows() if cached is None else cached.hidden,
            own=own,
        )

    def _keep(self, evaluated: HeadInput, rows: Rows) -> None:
        """Keep the hidden row of the last token, [1, E]: the next draft token needs it."""
        is_drafted = len(evaluated.tokens) > evaluated.n_text
        own = evaluated.own if is_drafted else HiddenRows()
        own.add(len(evaluated.tokens) - 1, rows)
        self._own[evaluated.number] = evaluated.tokens, own


def _combine(wanted: HeadInput, answers: Sequence[int | ContextFullError]) -> int | ContextFullError:
    """Combine the answers of several heads to one request."""
    if not answers:
        reason = "no head drafts so far ahead" if wanted.is_possible else "the hidden rows are not known"
        return ContextFullError(reason)
    faults = [answer for answer in answers if isinstance(answer, ContextFullError)]
    return faults[0] if faults else min(answer for answer in answers if isinstance(answer, int))


def _lost() -> EvaluationAbortedError:
    return EvaluationAbortedError("the target has dropped a sequence; prepare it again")
