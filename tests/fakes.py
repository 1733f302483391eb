"""Fakes for the protocols: a model, length policies, drafters, a clock."""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamaspec.errors import EVALUATION_FAULTS, ContextFullError, EvaluationAbortedError
from llamaspec.protocols import PromptReading, SequenceLength
from llamaspec.values import (
    NO_DRAFT,
    NO_TOKENS,
    Distribution,
    Draft,
    Evaluation,
    Forward,
    ForwardRequest,
    HiddenRows,
    Logits,
    Round,
    Rows,
    TokenArray,
    n_common,
)

Batch = Sequence[tuple[int, ForwardRequest]]


class Clock:
    """A clock that only `passes` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of a fake model."""

    rows: tuple[int, ...]
    requests: tuple[ForwardRequest, ...]
    n_new: int  # positions that were not cached
    n_padding: int

    @property
    def width(self) -> int:
        return self.n_new + self.n_padding


@dataclass
class FakeModel:
    """A model as a pure function: the tokens up to a position seed the generator of its logits.

    It rejects everything that llama.cpp would not survive: requests that were not prepared, batches that are
    too wide, two evaluations at once. Logits that are no longer valid become NaN.
    """

    seed: int = 0
    vocabulary_size: int = 3
    context_size: int = 64
    batch_size: int = 64
    max_scored: int = 64
    can_share: bool = True
    max_chunked_prefill: int = 0
    n_cells: int | None = None
    is_disturbed: bool = False
    spread: float = 1.5
    before: Callable[[int], None] = lambda n: None  # gets the number of the evaluation; may raise or wait
    is_full: Callable[[int, ForwardRequest], bool] = lambda row, request: False
    seconds: float = 0.0  # of an evaluation
    position_seconds: float = 0.0  # more for each position
    clock: Clock = field(default_factory=Clock)
    evaluated: list[Evaluated] = field(default_factory=list)
    n_attempts: int = 0  # evaluations, failed ones included
    aborted: threading.Event = field(default_factory=threading.Event)
    released: list[int] = field(default_factory=list)
    _prepared: dict[int, tuple[ForwardRequest, int, int]] = field(default_factory=dict)
    _cached: dict[int, TokenArray] = field(default_factory=dict)
    _latest: list[Logits] = field(default_factory=list)
    _hidden: dict[int, HiddenRows] = field(default_factory=dict)  # of each row in the last evaluation
    _known: dict[bytes, Logits] = field(default_factory=dict)
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def attended(self, n_tokens: int) -> float:
        return n_tokens

    def after(self, tokens: TokenArray) -> Logits:
        """Return the logits after the last of some tokens, float32 [V]."""
        key = tokens.tobytes()
        if key not in self._known:
            random = np.random.default_rng([self.seed, *tokens.tolist()])
            row = random.standard_normal(self.vocabulary_size) * self.spread
            self._known[key] = row.astype(np.float32)
        return self._known[key]

    def logits(self, request: ForwardRequest) -> Logits:
        """Return the logits of a request, computed from its tokens alone."""
        tokens, n = request.tokens, len(request.tokens)
        assert request.n_tokens <= self.context_size, "the context has no such position"
        whole = np.concatenate([tokens, request.draft])
        rows = [self.after(whole[:end]) for end in range(n - request.n_logits + 1, len(whole) + 1)]
        return np.array(rows, dtype=np.float32).reshape(request.n_scored, self.vocabulary_size)

    def prepare(self, batch: Sequence[tuple[int, ForwardRequest, int]]) -> list[int | ContextFullError]:
        assert len({row for row, _, _ in batch}) == len(batch)
        for _, request, _ in batch:
            for token in [*request.tokens.tolist(), *request.draft.tolist()]:
                if not 0 <= token < self.vocabulary_size:
                    raise ValueError(f"token ids must be from 0 to {self.vocabulary_size - 1}")
        return [self._prepare(*entry) for entry in batch]

    def _prepare(self, row: int, request: ForwardRequest, n_padding: int) -> int | ContextFullError:
        if self.is_full(row, request):
            return ContextFullError("the context is full")
        assert request.n_tokens + n_padding <= self.context_size
        n_cached = max((n_common(tokens, request.tokens) for tokens in self._cached.values()), default=0)
        n_cached = min(n_cached, request.n_reusable)
        self._cached[row] = request.tokens[:n_cached]
        self._prepared[row] = request, n_cached, n_padding
        return n_cached

    def evaluate(self, batch: Batch, n_padding: int = 0) -> list[Logits]:
        assert self._busy.acquire(blocking=False), "two evaluations at once"
        try:
            return self._evaluate(batch, n_padding)
        finally:
            self._busy.release()

    def _evaluate(self, batch: Batch, n_padding: int) -> list[Logits]:
        prepared = [self._prepared[row] for row, _ in batch]
        for (_, request), (whole, _, _) in zip(batch, prepared, strict=True):
            is_part = not request.n_scored and n_common(request.tokens, whole.tokens) == len(request.tokens)
            assert request is whole or is_part, "not what was prepared"
        n_new = sum(request.n_tokens - n for (_, request), (_, n, _) in zip(batch, prepared, strict=True))
        assert n_new > 0
        assert 0 <= n_padding <= sum(padding for _, _, padding in prepared), "no room for the padding"
        assert n_new + n_padding <= self.batch_size
        assert sum(request.n_scored for _, request in batch) <= self.max_scored
        self.n_attempts += 1
        self.aborted.clear()
        self.before(self.n_attempts)
        if self.aborted.is_set():
            raise EvaluationAbortedError("aborted")
        for old in self._latest:
            old[:] = np.nan
        self.clock.passes(self.seconds + self.position_seconds * (n_new + n_padding))
        self._latest = [self.logits(request) for _, request in batch]
        for hidden in self._hidden.values():
            hidden.rows[:] = np.nan
        self._hidden = {row: self._rows_of(request, self._prepared[row][1]) for row, request in batch}
        for row, request in batch:
            self._cached[row] = np.concatenate([request.tokens, request.draft])
            del self._prepared[row]
        rows, requests = tuple(row for row, _ in batch), tuple(request for _, request in batch)
        self.evaluated.append(Evaluated(rows, requests, n_new, n_padding))
        return self._latest

    def _rows_of(self, request: ForwardRequest, n_cached: int) -> HiddenRows:
        path = np.concatenate([request.tokens, request.draft])
        start = max(n_cached, request.rows_from or 0)
        return HiddenRows(start, hidden_rows(path, start, len(path)))

    def rows(self, request: ForwardRequest) -> HiddenRows | None:
        """Return the hidden rows that a request asks for: the target's, or a draft's own of its last."""
        n = request.n_tokens
        start = n - 1 if request.hidden is not None else request.rows_from
        if start is None:
            return None
        return HiddenRows(start, hidden_rows(np.concatenate([request.tokens, request.draft]), start, n))

    def hidden(self, row: int) -> HiddenRows | None:
        hidden = self._hidden.get(row)
        return hidden if hidden is not None and len(hidden.rows) else None

    def release(self, row: int) -> None:
        self.released.append(row)

    def forget(self) -> None:
        self._cached.clear()

    def recover(self) -> str | None:
        return None

    def abort(self) -> None:
        self.aborted.set()


def hidden_rows(path: TokenArray, start: int, end: int) -> Rows:
    """Return the rows of a fake model for some positions: each depends on all tokens up to there."""
    rows = [(p, zlib.crc32(path[: p + 1].tobytes()) % 9973) for p in range(start, end)]
    return np.array(rows, dtype=np.float32).reshape(len(rows), 2)


def answered(
    asking: Generator[ForwardRequest, Forward, Any], answer: Callable[[ForwardRequest], Forward | Exception]
) -> Any:
    """Answer each request of a coroutine, or raise an error in it; return the coroutine's result."""
    try:
        request = next(asking)
        while True:
            found = answer(request)
            request = asking.throw(found) if isinstance(found, Exception) else asking.send(found)
    except StopIteration as end:
        return end.value


def answer_alone(
    text: Any, models: Mapping[str, FakeModel], observe: Callable[[Round], Round]
) -> list[Round]:
    """Answer each request of the loop at once, without a scheduler; return its rounds, as they are observed.

    If a model fails, the error is raised in the coroutine.
    """
    said: list[Round] = []
    try:
        wanted = next(text)
        while True:
            if isinstance(wanted, ForwardRequest):
                try:
                    logits = models[wanted.model].logits(wanted)
                except EVALUATION_FAULTS as error:
                    wanted = text.throw(error)
                    continue
                seen, rows = Evaluation(wanted.n_scored, 1, len(said)), models[wanted.model].rows(wanted)
                wanted = text.send(Forward(logits, 0.0, 0, seen, rows))
            else:
                said.append(observe(wanted))
                wanted = text.send(said[-1])
    except StopIteration:
        return said


@dataclass
class Length:
    """A length policy, and its own share for one sequence: `n_draft` tokens, and a width to time."""

    n_draft: int = 0
    timed: Callable[[], int | None] = lambda: None
    rounds: list[Round] = field(default_factory=list)  # observed
    begun: list[tuple[float, Sequence[SequenceLength]]] = field(default_factory=list)  # depth, others
    n_closed: int = 0
    reading: PromptReading | None = None

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> Length:
        return self

    def wants_more(self, draft: Draft) -> bool:
        return len(draft) < self.n_draft

    def longest_copy(self) -> int:
        return self.n_draft

    def n_verified(self, draft: Draft) -> int:
        return len(draft)

    def begin_round(self, depth: float, others: Sequence[SequenceLength]) -> None:
        self.begun.append((depth, others))

    def timed_width(self) -> int | None:
        return self.timed()

    def observe(self, round_: Round) -> Round:
        self.rounds.append(round_)
        return round_

    def close(self) -> None:
        self.n_closed += 1


class UntilToken(Length):
    """Drafts until a certain token: a length that depends on the draft tokens."""

    def __init__(self, token: int | None, longest: int = 3) -> None:
        super().__init__(longest, lambda: longest + 2)
        self.token = token

    def wants_more(self, draft: Draft) -> bool:
        return super().wants_more(draft) and (len(draft) == 0 or int(draft.tokens[-1]) != self.token)


class Partly(UntilToken):
    """Verifies `n(draft, earlier rounds)` tokens of a draft."""

    def __init__(
        self, n_draft: int, n: Callable[[Draft, Sequence[Round]], int], token: int | None = None
    ) -> None:
        super().__init__(token, n_draft)
        self.timed, self.n = lambda: None, n
        self.made: list[Draft] = []  # the draft of each round

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> Partly:
        return Partly(self.n_draft, self.n, self.token)

    def n_verified(self, draft: Draft) -> int:
        self.made.append(draft)
        return self.n(draft, self.rounds)


def every_second(draft: Draft, rounds: Sequence[Round]) -> int:
    """All tokens in every second round, else none: decided before drafting."""
    return len(draft) if len(rounds) % 2 else 0


def behind_even(draft: Draft, rounds: Sequence[Round]) -> int:
    """All tokens after an even number of new tokens, else none: decided before drafting."""
    return 0 if sum(len(round_.tokens) for round_ in rounds) % 2 else len(draft)


def sure(draft: Draft, rounds: Sequence[Round]) -> int:
    """The tokens before the first unsure one: depends on the tokens drawn."""
    return len([*itertools.takewhile(lambda confidence: confidence > 0.5, draft.confidences)])


def all_but_last(draft: Draft, rounds: Sequence[Round]) -> int:
    return max(len(draft) - 1, 0)


def nothing(draft: Draft, rounds: Sequence[Round]) -> int:
    return 0


class CountingUp:
    """Drafts tokens that count up, without chance, by plain functions."""

    def __init__(self, vocabulary_size: int = 3) -> None:
        self.vocabulary_size = vocabulary_size

    def prepare(self, context: TokenArray) -> None:
        pass

    def propose(self, context: TokenArray, length: SequenceLength) -> Draft:
        draft = NO_DRAFT
        while length.wants_more(draft):
            token = (int(context[-1]) + len(draft) + 1) % self.vocabulary_size
            draft = draft.plus(token, Distribution.certain(token), 0.6)
        return draft


class OverDelivers(CountingUp):
    """Drafts `n` tokens, however many the policy asks for."""

    def __init__(self, n: int = 5, vocabulary_size: int = 3) -> None:
        super().__init__(vocabulary_size)
        self.n = n

    def propose(self, context: TokenArray, length: SequenceLength) -> Draft:
        return super().propose(context, Length(self.n)) if length.wants_more(NO_DRAFT) else NO_DRAFT


def tokens(*ids: int) -> TokenArray:
    return np.array(ids, dtype=np.int32) if ids else NO_TOKENS


class Asleep:
    """Lets a model process the prompt when it drafts; notes the tokens that it has not processed."""

    unused, is_winning = None, False

    def __init__(self, n_to_read: int = 0) -> None:
        self.n_to_read, self.n_unread, self.n_read = n_to_read, 0, 0

    def start_prompt(self, n_unread: int) -> None:
        self.n_unread = n_unread

    def observe_prompt(self, evaluation: Evaluation, seconds: float) -> None: ...

    def observe_reading(self, n: int, seconds: float) -> None:
        self.n_read += n

    def plain_seconds(self, evaluation: Evaluation) -> float | None: ...
