"""Turns: a sequence waits for at most one chunk of another prompt, and interactive ones go first."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fakes import Batch, Clock, FakeModel, Length
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.batching import INTERACTIVE_SECONDS
from llamaspec.engine.sequence import INTERACTIVE_TOKENS
from llamaspec.engine.stream import TextStream
from llamaspec.values import CHUNK, DRAFT, TARGET, WAIT_SECONDS, Logits
from stepped import Stepped
from texts import V, alone, draft, stream, target

LONG = (np.arange(500) % V).tolist()
ROUND = 0.1  # seconds


def machine(clock: Clock, position_seconds: float = 0.01, **settings: object) -> dict[str, FakeModel]:
    """Return a target that takes this long for each position."""
    costs = {"seconds": ROUND, "position_seconds": position_seconds, "clock": clock}
    sizes = {"context_size": 2000, "batch_size": 128}
    return {TARGET: target(**sizes | costs | settings)}


def begun(thread: Stepped, models: dict[str, FakeModel], first: int, n: int = 300, **more: Any) -> TextStream:
    """Return a stream with a prompt of `n` tokens, different from others from the first token on."""
    of = stream(
        thread, models, [first, *LONG[: n - 1]], seed=first, max_tokens=3, drafter=NoDrafter(), **more
    )
    of.begin()
    return of


@dataclass
class Watched(FakeModel):
    """Records the begin, the end and the sequences of each evaluation."""

    times: list[tuple[float, float, tuple[int, ...]]] = field(default_factory=list)

    def evaluate(self, batch: Batch, n_padding: int = 0) -> list[Logits]:
        begin = self.clock.now
        logits = super().evaluate(batch, n_padding)
        self.times.append((begin, self.clock.now, tuple(row for row, _ in batch)))
        return logits


def rows(model: FakeModel) -> list[tuple[int, ...]]:
    return [evaluated.rows for evaluated in model.evaluated]


@pytest.mark.parametrize("max_chunked_prefill", [0, 512])
@pytest.mark.parametrize("position_seconds", [0.0001, 0.003, 0.02])
def test_a_running_sequence_waits_for_one_chunk_at_most(
    position_seconds: float, max_chunked_prefill: int
) -> None:
    """Before every token: half a second, or the time of a chunk of 64 positions, and a round."""
    clock = Clock()
    models = machine(clock, position_seconds, max_chunked_prefill=max_chunked_prefill, batch_size=512)
    thread = Stepped(models, clock=clock)
    talker = stream(thread, models, seed=1, length=Length(0), max_tokens=20)
    next(talker)
    newcomers = [begun(thread, models, first) for first in (2, 3)]
    gaps, last = list[float](), clock.now
    for _ in talker:
        gaps.append(clock.now - last)
        last = clock.now
    assert max(gaps) <= max(WAIT_SECONDS, CHUNK * position_seconds) + 2 * (ROUND + position_seconds)
    if position_seconds < 0.001:  # and it takes no more evaluations than that
        assert max(e.width for e in models[TARGET].evaluated) > 200
    assert talker.completion.tokens == alone(seed=1, max_tokens=20)
    for first, of in zip((2, 3), newcomers, strict=True):
        assert of.run().tokens == alone([first, *LONG[:299]], seed=first, max_tokens=3)


@pytest.mark.parametrize("position_seconds", [0.0001, 0.02])
def test_a_prompt_alone_has_fixed_chunks_however_long_they_take(position_seconds: float) -> None:
    """Nobody waits."""
    clock = Clock()
    models = machine(clock, position_seconds)
    begun(Stepped(models, clock=clock), models, 1, 500).run()
    assert [e.width for e in models[TARGET].evaluated if not e.requests[0].n_scored] == [128, 128, 128, 115]


def test_a_new_prompt_is_processed_next() -> None:
    clock = Clock()
    models = machine(clock)
    thread = Stepped(models, clock=clock)
    texts = [begun(thread, models, 1)]
    assert thread.step()
    texts += [begun(thread, models, 2, 20), begun(thread, models, 3)]
    for _ in range(8):
        assert thread.step()
    readers = [e.rows[0] for e in models[TARGET].evaluated if not e.requests[0].n_scored]
    assert readers[:5] == [0, 1, 2, 0, 2]
    assert len(texts) == 3


@pytest.mark.parametrize("max_chunked_prefill", [0, 512])
def test_an_interactive_prompt_overtakes_others(max_chunked_prefill: int) -> None:
    clock = Clock()
    models = machine(clock, max_chunked_prefill=max_chunked_prefill)
    thread = Stepped(models, clock=clock)
    talker = stream(thread, models, seed=1, length=Length(0), max_tokens=40)
    next(talker)
    others = [begun(thread, models, first) for first in (2, 3)]
    for _ in range(4):
        thread.step()
    n = len(rows(models[TARGET]))
    cursor = begun(thread, models, 4, 150, is_interactive=True)
    while not cursor.completion.rounds:
        thread.step()
        cursor.ready()
    between = rows(models[TARGET])[n:]
    assert {row for group in between for row in group} <= {0, 3}, "those that speak, and the interactive one"
    assert sum(0 in group for group in between) >= 3, "running texts go on"
    assert cursor.run().tokens == alone([4, *LONG[:149]], seed=4, max_tokens=3)
    assert [of.run().tokens for of in others] == [
        alone([first, *LONG[:299]], seed=first, max_tokens=3) for first in (2, 3)
    ]


def test_a_sequence_that_was_swapped_out_does_not_wait_for_an_interactive_one() -> None:
    models = machine(Clock())
    thread = Stepped(models)
    talker = stream(thread, models, LONG[:200], seed=1, drafter=NoDrafter(), max_tokens=20)
    next(talker)
    cursor = stream(thread, models, seed=2, drafter=NoDrafter(), max_tokens=40, is_interactive=True)
    next(cursor)
    thread.scheduler.forget()
    for _ in range(15):
        next(cursor)
        talker.ready()
    assert len(talker.rounds) > 5
    assert cursor.run().tokens == alone(seed=2, max_tokens=40)


def test_an_interactive_sequence_has_room_before_older_ones() -> None:
    models = {TARGET: target(n_cells=48)}
    thread = Stepped(models)
    older = stream(thread, models, seed=1, drafter=NoDrafter(), max_tokens=36)
    next(older)
    cursor = stream(thread, models, seed=2, drafter=NoDrafter(), max_tokens=36, is_interactive=True)
    cursor.begin()
    while not cursor.is_over:
        assert thread.step()
        assert not cursor.is_swapped_out
        cursor.ready()
        older.ready()
    assert cursor.completion.tokens == alone(seed=2, max_tokens=36)
    assert older.run().tokens == alone(seed=1, max_tokens=36)


def test_a_prompt_of_the_target_waits_for_one_chunk_of_a_draft() -> None:
    """A new prompt once waited until the draft had processed all of another prompt."""
    clock = Clock()
    models = machine(clock) | {
        DRAFT: draft(context_size=2000, batch_size=128, position_seconds=0.01, clock=clock)
    }
    thread = Stepped(models, clock=clock)
    first = stream(thread, models, LONG, seed=1, length=Length(1))
    first.begin()
    while not models[DRAFT].evaluated:
        assert thread.step()
    newcomer = begun(thread, models, 2, 20)
    for _ in range(2):
        assert thread.step()
    assert (1,) in rows(models[TARGET])
    assert not newcomer.is_over
    n = len(models[DRAFT].evaluated)
    cursor = begun(thread, models, 3, 150, is_interactive=True)
    while not cursor.completion.rounds:
        assert thread.step()
        cursor.ready()
        newcomer.ready()
    assert len(models[DRAFT].evaluated) == n, "an interactive text waits for no draft"


@pytest.mark.parametrize("n_texts", [1, 40])
def test_interactive_sequences_delay_a_prompt_for_a_limited_time(n_texts: int) -> None:
    """One without a limit, or one for each key: a prompt once waited until they ended."""
    clock = Clock()
    models = machine(clock, max_chunked_prefill=0)
    thread = Stepped(models, clock=clock)
    other = begun(thread, models, 1)
    begin = clock.now
    for i in range(n_texts):
        cursor = stream(
            thread, models, [2 + i % 2] * 20, seed=i, drafter=NoDrafter(), is_interactive=True,
            max_tokens=640 // n_texts,
        )  # fmt: skip
        cursor.begin()
        while not cursor.is_over:
            assert thread.step()
            cursor.ready()
            other.ready()
            if other.is_over:
                break
    assert other.is_over
    n_chunks = 300 // CHUNK + 3  # and the rounds
    assert clock.now - begin < n_chunks * (INTERACTIVE_SECONDS + CHUNK * 0.01 + 2 * ROUND)
    assert other.completion.tokens == alone([1, *LONG[:299]], seed=1, max_tokens=3)


def test_a_long_interactive_sequence_takes_turns() -> None:
    clock = Clock()
    models = machine(clock)
    thread = Stepped(models, clock=clock)
    cursor = stream(thread, models, seed=2, drafter=NoDrafter(), max_tokens=300, is_interactive=True)
    for _ in range(INTERACTIVE_TOKENS + 1):
        next(cursor)
    other, n = begun(thread, models, 1), len(cursor.rounds)
    while not other.rounds:
        assert thread.step()
        cursor.ready()
        other.ready()
    assert len(cursor.rounds) - n <= 300 // CHUNK + 2, "a round between two chunks"
    assert cursor.run().tokens == alone(seed=2, max_tokens=300)


@pytest.mark.parametrize("n_steps", range(1, 40, 12))
@pytest.mark.parametrize("position_seconds", [0.003, 0.02])
@pytest.mark.parametrize("max_chunked_prefill", [0, 512])
def test_two_agents_and_an_editor(max_chunked_prefill: int, position_seconds: float, n_steps: int) -> None:
    """One agent generates, one has a long prompt, and a key is pressed at some step of its processing.

    The first agent and the editor wait for one prompt chunk and one round. The long prompt also waits for the
    editor, for a limited time; there is a round before and after each of its chunks.
    """
    clock = Clock()
    costs: dict[str, Any] = {"position_seconds": position_seconds, "clock": clock}
    sizes: dict[str, Any] = {"vocabulary_size": V, "context_size": 2000, "batch_size": 512}
    big = Watched(1, seconds=ROUND, max_chunked_prefill=max_chunked_prefill, **costs, **sizes)
    small = Watched(2, seconds=ROUND / 5, **costs, **sizes)
    models: dict[str, FakeModel] = {TARGET: big, DRAFT: small}
    thread = Stepped(models, clock=clock)
    texts = [stream(thread, models, seed=1, max_tokens=150)]
    next(texts[0])
    texts.append(stream(thread, models, [2, *LONG[:399]], seed=2, max_tokens=20))
    texts[1].begin()
    asked = [clock.now] * 3
    for n in itertools.count():
        if n == n_steps:  # it came during the previous evaluation
            prompt = [3, *LONG[:149]]
            texts.append(stream(thread, models, prompt, seed=3, max_tokens=12, is_interactive=True))
            asked[2] = big.times[-1][0] if big.times[-1][1] == clock.now else small.times[-1][0]
        if not thread.step():
            break
        for of in texts:
            of.ready()
    assert texts[0].completion.tokens == alone(seed=1, max_tokens=150)
    assert texts[1].completion.tokens == alone([2, *LONG[:399]], seed=2, max_tokens=20)
    assert texts[2].completion.tokens == alone(prompt, seed=3)

    chunk = ROUND + max(WAIT_SECONDS, CHUNK * position_seconds)
    positions = 2 * 4 + 8  # two draft steps for two sequences of two tokens, and both verifications
    round_ = 2 * ROUND / 5 + ROUND + positions * position_seconds
    limits = (chunk + round_, INTERACTIVE_SECONDS + chunk + 2 * round_, chunk + 2 * round_)
    waits: list[list[float]] = [[], [], []]
    last = asked.copy()
    for begin, end, rows in sorted([*big.times, *small.times]):
        for row in rows:
            if begin >= asked[row]:
                waits[row].append(begin - last[row])
                last[row] = end
    assert waits[2][0] <= chunk + round_
    assert all(max(each) <= limit for each, limit in zip(waits, limits, strict=True)), list(map(max, waits))
