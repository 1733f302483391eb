"""One prediction head: a context that reads tokens together with hidden rows, and what it has read.

A `Head` has a KV cache. It tells text, whose hidden rows are the target's, from draft tokens, whose hidden
rows are a head's own: text counts as it is, draft tokens as their complement (`~token`). So a draft token
that has become text is read again, with the right row. Tokens whose hidden rows nobody knows any more,
because the target had cached them, are left out: a gap.

A `SharedHead`, Gemma 4's assistant, has none and reads the target's: one token at a time, the last of the
text with the target's hidden row, then its own draft tokens with its own rows, all at the position behind
what the target has evaluated. So rejected draft tokens must be out of the target's cache before.
tests/llama/test_heads.py, tests/llama/test_shared_head.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamaspec.errors import ContextFullError, PairError
from llamaspec.llama.batch import Segment
from llamaspec.llama.context import Context
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.runtime import AbortFlag
from llamaspec.llama.sequences import HiddenRows, Rows
from llamaspec.llama.weights import Weights
from llamaspec.values import MTP, NO_TOKENS, TARGET, ForwardRequest, Logits, TokenArray, n_common

_OWN = -(1 << 30)  # keys from here down belong to one row: no other text may share what follows


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a row wants read, and the hidden rows for it: that of a position goes with the token behind it."""

    row: int
    tokens: TokenArray  # [n] text, and draft tokens behind it
    n_text: int  # at least 1; the target has evaluated all of them, perhaps not the last
    n_scored: int  # 1 = logits and the hidden row of the last token are wanted; else 0
    hidden_size: int  # E
    hidden: HiddenRows  # the target's
    own: HiddenRows  # the heads' own, behind the text

    def can_start(self, start: int) -> bool:
        """Whether the hidden rows are known that go with the tokens from `start` on."""
        return all(known.has(first, end) for known, first, end in self._needed(start))

    def rows(self, start: int) -> Rows:
        """These hidden rows: [n - start, E]; zeros for the first token of a text."""
        rows = np.zeros((len(self.tokens) - start, self.hidden_size), dtype=np.float32)
        for known, first, end in self._needed(start):
            if first < end:
                rows[first + 1 - start : end + 1 - start] = known.rows(first, end)
        return rows

    def _needed(self, start: int) -> tuple[tuple[HiddenRows, int, int], ...]:
        """The positions whose rows go with the tokens from `start` on: start and end."""
        return (
            (self.hidden, max(start, 1) - 1, self.n_text - 1),
            (self.own, max(start, self.n_text) - 1, len(self.tokens) - 1),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Gap:
    """Tokens that a head has not read; what it has read before and behind them stands side by side."""

    keys: TokenArray  # of what it read before
    text: TokenArray  # up to the first token behind the gap, with that one

    @property
    def n_left_out(self) -> int:
        """Tokens in the gap."""
        return max(0, len(self.text) - 1 - len(self.keys))


_NO_GAP = _Gap(NO_TOKENS, NO_TOKENS)


class Head:
    """A head with a KV cache; `scored_only`: its context has hidden rows of scored positions only."""

    def __init__(self, context: Context, *, scored_only: bool) -> None:
        self.context = context
        self._scored_only = scored_only
        self._gaps: dict[int, _Gap] = {}  # by row

    def prepare(self, batch: Sequence[Reading]) -> list[int | ContextFullError]:
        """Make room: for each how many of its tokens are read or left out, or why it cannot be read."""
        while True:
            wanted = [(r.row, ForwardRequest(MTP, self._keys(r), r.n_scored), 0) for r in batch]
            prepared = self.context.cache.prepare_all(wanted)
            answers = [self._start(*pair) for pair in zip(batch, prepared, strict=True)]
            if None not in answers:  # else tokens must be left out
                return [answer for answer in answers if answer is not None]

    def evaluate(self, batch: Sequence[Reading]) -> list[tuple[Logits, Rows]]:
        """Read what has been prepared: logits [n_scored, V] and the hidden row [n_scored, E] of each."""
        segments = [self._segment(reading) for reading in batch]
        keys = [(r.row, self._keys(r)[self.context.cache.sequence(r.row).n :]) for r in batch]
        self.context.decode(segments)
        self.context.cache.commit(keys)
        return self._answers(batch, segments)

    def is_ready(self, reading: Reading) -> bool:
        """Whether what was prepared can still be read: not if the target has forgotten it since."""
        start = self.context.cache.sequence(reading.row).n + self._gap(reading).n_left_out
        return reading.can_start(start)

    def lacks(self, reading: Reading) -> bool:
        """Whether something of what has been prepared is still to be read."""
        return self.context.cache.sequence(reading.row).n < len(self._keys(reading))

    def release(self, row: int) -> None:
        """The row has ended."""
        self.context.cache.release(row)
        self._gaps.pop(row, None)

    def forget(self) -> None:
        """Empty the KV cache."""
        self._gaps.clear()
        self.context.clear()

    def _start(self, reading: Reading, prepared: int | ContextFullError) -> int | ContextFullError | None:
        """Where reading goes on; None where it must be asked again, because a gap has been opened."""
        if isinstance(prepared, ContextFullError):
            return prepared
        gap, resume = self._gap(reading), reading.hidden.first + 1
        if prepared < len(gap.keys):  # what was read before the gap has been given up
            del self._gaps[reading.row]
            return None
        start = prepared + gap.n_left_out
        if reading.can_start(start):
            return start
        if not start < resume < reading.n_text or not reading.can_start(resume):
            return ContextFullError("the hidden rows of this text are not known")
        self._gaps[reading.row] = _Gap(self._keys(reading)[:prepared], reading.tokens[: resume + 1])
        return None

    def _gap(self, reading: Reading) -> _Gap:
        gap = self._gaps.get(reading.row, _NO_GAP)
        fits = n_common(gap.text, reading.tokens[: reading.n_text]) == len(gap.text)
        return gap if fits and len(gap.text) else _NO_GAP

    def _keys(self, reading: Reading) -> TokenArray:
        """What stands for the tokens in the KV cache."""
        gap, tokens, n_text = self._gap(reading), reading.tokens, reading.n_text
        behind = max(0, len(gap.text) - 1)
        keys = np.concatenate([gap.keys, tokens[behind:n_text], ~tokens[n_text:]])
        if behind:
            keys[len(gap.keys)] = _OWN - reading.row % -_OWN
        return keys

    def _segment(self, reading: Reading) -> Segment:
        held = self.context.cache.sequence(reading.row)
        start = held.n + self._gap(reading).n_left_out
        return Segment(held.number, held.n, reading.tokens[start:], reading.n_scored, reading.rows(start))

    def _answers(self, batch: Sequence[Reading], segments: Sequence[Segment]) -> list[tuple[Logits, Rows]]:
        n_scored = sum(segment.n_scored for segment in segments)
        n_sequences = n_scored if self._scored_only else sum(len(segment.tokens) for segment in segments)
        logits, rows = self.context.logits(n_scored), self.context.hidden_rows(n_sequences)
        answers, scored, end = [], 0, 0
        for reading, segment in zip(batch, segments, strict=True):
            scored, end = scored + segment.n_scored, end + len(segment.tokens)
            last = scored if self._scored_only else end
            n = reading.n_scored
            answers.append((logits[scored - n : scored], rows[last - n : last]))
        return answers


class SharedHead:
    """The head over its own weights and the KV cache of a target; PairError if it was made for another."""

    def __init__(self, weights: Weights, target: LlamaModel, abort: AbortFlag) -> None:
        if weights.hidden_size != target.weights.hidden_size or target.weights.architecture != "gemma4":
            raise PairError(f"{weights.path} drafts for another target than {target.path}; name that")
        self.context = target.context_beside(weights, abort)
        self._target = target

    def prepare(self, batch: Sequence[Reading]) -> list[int | ContextFullError]:
        """Take rejected draft tokens out of the target's cache; all tokens but the last count as read."""
        return [self._prepared(reading) if reading.n_scored else len(reading.tokens) for reading in batch]

    def evaluate(self, batch: Sequence[Reading]) -> list[tuple[Logits, Rows]]:
        """Logits [1, V] and the hidden row [1, E] behind the last token of each."""
        self.context.decode([self._segment(reading) for reading in batch])
        logits, rows = self.context.logits(len(batch)), self.context.hidden_rows(len(batch))
        return [(logits[i : i + 1], rows[i : i + 1]) for i in range(len(batch))]

    def is_ready(self, reading: Reading) -> bool:
        """Whether what was prepared can still be read: not if the target has forgotten it since."""
        cached = self._target.cached(reading.row)
        return (
            cached is not None
            and cached.n == reading.n_text - 1
            and reading.can_start(len(reading.tokens) - 1)
        )

    def lacks(self, reading: Reading) -> bool:
        """Whether there is something to read."""
        return bool(reading.n_scored)

    def release(self, row: int) -> None:
        """Nothing is kept of a row."""

    def forget(self) -> None:
        """Nothing is kept."""

    def _prepared(self, reading: Reading) -> int | ContextFullError:
        n_read, n_evaluated = len(reading.tokens) - 1, reading.n_text - 1
        if not n_evaluated or not reading.can_start(n_read):
            return ContextFullError("the hidden rows of this text are not known")
        request = ForwardRequest(TARGET, reading.tokens[: reading.n_text])
        (n_cached,) = self._target.prepare([(reading.row, request, 0)])
        if n_cached != n_evaluated:
            return ContextFullError("the target has not cached this text")
        return n_read

    def _segment(self, reading: Reading) -> Segment:
        cached = self._target.cached(reading.row)
        assert cached is not None  # prepared
        rows = reading.rows(len(reading.tokens) - 1)
        return Segment(cached.number, reading.n_text - 1, reading.tokens[-1:], 1, rows)
