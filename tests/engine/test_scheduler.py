"""Evaluations that several sequences share, and their costs, with fake models that count."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fakes import Clock, CountingUp, Evaluated, FakeModel, Length, tokens
from forward_requests import scores
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.sequence import MAX_UNREAD, RunningSequence
from llamaspec.engine.stream import TextStream
from llamaspec.errors import ContextFullError
from llamaspec.length.automatic import AutoLength
from llamaspec.protocols import SequenceLength
from llamaspec.values import DRAFT, TARGET, Draft, ForwardRequest, Round, TokenArray, scope_of
from stepped import Stepped
from texts import Letters, V, alone, draft, stream, target


def both(**settings: object) -> dict[str, FakeModel]:
    return {TARGET: target(**settings), DRAFT: draft()}


def run_together(streams: list[TextStream]) -> list[tuple[int, ...]]:
    """Read one piece of each stream in turn, to the end of all."""
    running = list(streams)
    while running:
        running = [of for of in running if next(of, None) is not None]
    return [of.completion.tokens for of in streams]


def scored(model: FakeModel) -> list[Evaluated]:
    return [evaluated for evaluated in model.evaluated if evaluated.requests[0].n_scored]


def test_caches_are_checked_whenever_no_sequence_runs(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    models, expected, released_before = {TARGET: target()}, alone(seed=1), list[int]()

    def recover(self: FakeModel) -> str:
        released_before.append(len(self.released))
        return "a cell is missing"

    monkeypatch.setattr(FakeModel, "recover", recover)
    scheduler = Stepped(models)
    run_together([stream(scheduler, models, seed=i, drafter=NoDrafter()) for i in range(3)])
    scheduler.call(lambda: None)  # evaluates nothing, so nothing is checked
    assert stream(scheduler, models, seed=1, drafter=NoDrafter()).run().tokens == expected
    assert released_before == [3, 5]
    assert logged == ["the KV cache of the target was emptied: a cell is missing; please report this"] * 2


@pytest.mark.parametrize("drafter", [None, NoDrafter(), CountingUp(V)])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("n_sequences", [1, 3, 9])
@pytest.mark.parametrize("max_chunked_prefill", [0, 5, 512])
def test_the_completion_for_a_seed_is_the_same_beside_others(
    max_chunked_prefill: int, n_sequences: int, k: int, drafter: object
) -> None:
    models = both(context_size=512, batch_size=512, max_scored=512, max_chunked_prefill=max_chunked_prefill)
    scheduler = Stepped(models)
    streams = [
        stream(scheduler, models, (i % V, 2), seed=i, length=Length(k), drafter=drafter)  # type: ignore[arg-type]
        for i in range(n_sequences)
    ]
    assert run_together(streams) == [alone((i % V, 2), seed=i) for i in range(n_sequences)]
    assert sorted(models[TARGET].released) == list(range(n_sequences))


def test_drafts_are_made_in_lock_step_and_verified_together() -> None:
    models = both()
    scheduler = Stepped(models)
    streams = [stream(scheduler, models, seed=i, length=Length(2), max_tokens=3) for i in range(4)]
    for of in streams:  # all start before the first step
        of.begin()
    next(streams[0])
    assert [len(evaluated.rows) for evaluated in scored(models[DRAFT])] == [4, 4]
    assert [(len(e.rows), e.width) for e in scored(models[TARGET])] == [(4, 12)]
    assert {of.run().rounds[0].n_sequences for of in streams} == {4}


def test_sequences_join_and_leave_between_evaluations() -> None:
    models = {TARGET: target()}
    scheduler = Stepped(models)
    first = stream(scheduler, models, seed=1, drafter=NoDrafter())
    made = [next(first).token for _ in range(3)]
    second = stream(scheduler, models, seed=2, drafter=NoDrafter(), max_tokens=2)
    short = second.run().tokens
    n_alone = len(models[TARGET].evaluated)
    made += [piece.token for piece in first]
    assert tuple(made) == alone(seed=1)
    assert short == alone(seed=2, max_tokens=2)
    assert sum(len(evaluated.rows) == 2 for evaluated in models[TARGET].evaluated) == 2
    assert {len(evaluated.rows) for evaluated in models[TARGET].evaluated[n_alone:]} == {1}


def test_a_reader_is_notified_of_a_sequence_that_ends_before_its_start_returns() -> None:
    class Quick(Stepped):
        def start(self, sequence: RunningSequence[Any]) -> None:
            super().start(sequence)
            while self.step():
                pass

    models, told = {TARGET: target()}, []
    of = stream(Quick(models), models, seed=1, drafter=NoDrafter(), max_tokens=1)
    of.begin(lambda: told.append(True))
    assert told
    assert len(of.ready()) == 1


def test_room_for_a_common_beginning_is_counted_once() -> None:
    """Of four sequences with one system prompt, two were once swapped out although all had room."""
    models = {TARGET: target(n_cells=100, context_size=200)}
    scheduler = Stepped(models)
    beginning = tuple(i % V for i in range(60))
    streams = [
        stream(scheduler, models, (*beginning, i % V), seed=i, drafter=NoDrafter(), max_tokens=4)
        for i in range(4)
    ]
    for of in streams:
        of.begin()
    while scheduler.step():
        assert not any(of.is_swapped_out for of in streams)
        for of in streams:
            of.ready()


@pytest.mark.parametrize(("scopes", "n_running"), [("aaaa", 4), ("abcd", 2)])
def test_only_sequences_of_one_scope_have_cells_in_common(scopes: str, n_running: int) -> None:
    """All requests of a sequence have its scope, also those of drafters."""
    models = both(n_cells=300, context_size=400)
    scheduler = Stepped(models)
    beginning = tuple(i % V for i in range(100))
    streams = [stream(scheduler, models, beginning, scope=scope) for scope in scopes]
    for of in streams:
        of.begin()
    scheduler.step()
    assert sum(not of.is_swapped_out for of in streams) == n_running
    run_together(streams)
    for model in models.values():
        asked = {request.scope for step in model.evaluated for request in step.requests}
        assert asked == {scope_of(scope) for scope in scopes}


def test_sequences_that_cannot_share_are_evaluated_one_by_one() -> None:
    """If layers keep states, there is no padding either, also for the last sequence, which is alone."""
    models = {TARGET: target(can_share=False)}
    scheduler = Stepped(models)
    streams = [
        stream(scheduler, models, seed=i, length=Length(2, lambda: 6), drafter=CountingUp(V))
        for i in range(3)
    ]
    run_together(streams)
    assert {len(evaluated.requests) for evaluated in models[TARGET].evaluated} == {1}
    for of in streams:
        assert {round_.width for round_ in of.completion.rounds} <= {1, 2, 3}


def test_a_full_cache_swaps_out_the_newest_which_continues_with_the_same_text() -> None:
    """Three sequences of 42 tokens need more than 64 cells: none is cut short, and the first always runs."""
    models = both(n_cells=64)
    thread = Stepped(models)
    streams = [stream(thread, models, seed=i, length=Length(2), max_tokens=40) for i in range(3)]
    for of in streams:
        of.begin()
    swapped_out = set()
    while thread.step():
        swapped_out |= {i for i, of in enumerate(streams) if of.is_swapped_out}
        for of in streams:
            of.ready()
    assert [of.completion.tokens for of in streams] == [alone(seed=i, max_tokens=40) for i in range(3)]
    assert swapped_out == {1, 2}


def test_a_sequence_that_waits_for_its_reader_gives_its_cells_to_others() -> None:
    models = {TARGET: target(n_cells=48)}
    thread = Stepped(models)
    unread, other = (stream(thread, models, seed=i, drafter=NoDrafter(), max_tokens=36) for i in range(2))
    unread.begin()
    while thread.step():
        pass
    assert other.run().tokens == alone(seed=1, max_tokens=36)
    assert unread.is_swapped_out
    assert unread.run().tokens == alone(seed=0, max_tokens=36)


@pytest.mark.parametrize("number", range(1, 6))
def test_a_length_policy_that_fails_once_is_reported(number: int) -> None:
    """During batching the error was once lost, and the sequence continued."""
    calls = itertools.count(1)

    def fails_once() -> None:
        if next(calls) == number:
            raise RuntimeError("broken on purpose")

    models = {TARGET: target()}
    thread = Stepped(models)
    good = stream(thread, models, seed=1, drafter=CountingUp(V))
    good.begin()
    bad = stream(thread, models, drafter=CountingUp(V), length=Length(2, fails_once), max_tokens=40)
    with pytest.raises(RuntimeError, match="on purpose"):
        bad.run()
    assert good.run().tokens == alone(seed=1)


def test_a_new_prompt_does_not_stop_the_others() -> None:
    models = {TARGET: target(context_size=900, batch_size=8)}
    scheduler = Stepped(models)
    talker = stream(scheduler, models, seed=1, length=Length(1), max_tokens=40)
    next(talker)
    models[TARGET].evaluated.clear()
    prompt = (np.arange(60) % V).tolist()
    newcomer = stream(scheduler, models, prompt, seed=2, max_tokens=3)
    tokens = newcomer.run().tokens
    assert tokens == alone(prompt, seed=2, max_tokens=3)
    kinds = [bool(e.requests[0].n_scored) for e in models[TARGET].evaluated]
    first = kinds.index(False)
    assert kinds[first : first + 15] == [False, True] * 7 + [False]  # a round between any two chunks
    assert max(e.width for e in models[TARGET].evaluated) <= 8
    assert tuple(piece.token for piece in talker)[-1] == alone(seed=1, max_tokens=40)[-1]


def talker_and_newcomer(models: dict[str, FakeModel], clock: Clock, n_prompt: int) -> TextStream:
    """Run a sequence, then start another with a long prompt; return the first one."""
    scheduler = Stepped(models, clock=clock)
    talker = stream(scheduler, models, seed=1, length=Length(1), max_tokens=40)
    next(talker)
    models[TARGET].evaluated.clear()
    prompt = (np.arange(n_prompt) % V).tolist()
    newcomer = stream(scheduler, models, prompt, seed=2, max_tokens=3)
    assert newcomer.run().tokens == alone(prompt, seed=2, max_tokens=3)
    assert talker.run().tokens == alone(seed=1, max_tokens=40)
    return talker


def test_a_prompt_chunk_beside_rounds_has_its_own_seconds() -> None:
    clock = Clock()
    models = both(context_size=900, max_chunked_prefill=16, seconds=1.0, clock=clock)
    talker = talker_and_newcomer(models, clock, 28)
    mixed = [e for e in models[TARGET].evaluated if {bool(r.n_scored) for r in e.requests} == {False, True}]
    assert [e.width for e in mixed] == [16, 15]
    rounds = [r for r in talker.completion.rounds if r.verified_in.n_prefill]
    assert [(r.width, r.verified_in.n_prefill, r.n_sequences) for r in rounds] == [(16, 14, 1), (15, 13, 1)]
    assert [r.verify_seconds for r in rounds] == pytest.approx([2 / 16, 2 / 15])
    assert {r.verify_seconds for r in talker.completion.rounds if not r.verified_in.n_prefill} == {1.0}


@pytest.mark.parametrize("max_chunked_prefill", [0, 12])
def test_prompts_that_are_not_processed_beside_rounds(max_chunked_prefill: int) -> None:
    """Rounds must not get wider, or more than half of the prompt would be left: nothing is gained."""
    models = both(context_size=900, max_chunked_prefill=max_chunked_prefill)
    talker = talker_and_newcomer(models, Clock(), 25)
    assert not [r for r in talker.completion.rounds if r.verified_in.n_prefill]


def test_a_prompt_in_several_evaluations_does_not_show_the_cost_of_a_wide_one() -> None:
    """Their sum was taken for the cost of 512 positions, so long copies looked too expensive."""
    clock, policy, prompt = Clock(), AutoLength(), (np.arange(513) % V).tolist()
    models = both(context_size=2048, batch_size=512, max_chunked_prefill=80, seconds=1.0, clock=clock)
    scheduler = Stepped(models, clock=clock)
    talker = stream(scheduler, models, seed=1, length=Length(1), max_tokens=40)
    next(talker)
    length = Length(reading=policy.start_sequence().reading)
    stream(scheduler, models, prompt, seed=2, length=length, drafter=NoDrafter(), max_tokens=3).run()
    policy.shared.costs.observe_verify(1, 1.0)  # what was learnt before waits for it
    talker.run()
    assert policy.shared.costs.widest_timed() < 64


def test_the_time_to_prepare_a_batch_is_shared() -> None:
    """The automatic length adds up the overhead of all sequences."""
    clock = Clock()

    class Slow(FakeModel):
        def prepare(self, batch: Sequence[tuple[int, ForwardRequest, int]]) -> list[int | ContextFullError]:
            clock.passes(0.3)
            return super().prepare(batch)

    models: dict[str, FakeModel] = {TARGET: Slow(1, vocabulary_size=V, seconds=1.0, clock=clock)}
    scheduler = Stepped(models, clock=clock)
    streams = [stream(scheduler, models, seed=i, drafter=NoDrafter()) for i in range(3)]
    for of in streams:
        assert of.ready() == []
    while scheduler.step():
        for of in streams:
            of.ready()
    rounds = [r for of in streams for r in of.completion.rounds[1:] if r.n_sequences == 3]
    assert len(rounds) > 6
    assert [r.overhead_seconds for r in rounds] == pytest.approx([0.1] * len(rounds))


def test_prompts_of_drafts_do_not_wait_for_prompts_of_the_target() -> None:
    """A sequence generates as soon as its own prompt is processed, before those of others."""
    models = both(context_size=900, batch_size=900, max_chunked_prefill=64)
    scheduler = Stepped(models)
    streams = [stream(scheduler, models, [i % V] * 30, seed=i, length=Length(1)) for i in range(4)]
    for of in streams:
        assert of.ready() == []
    while not streams[3].completion.rounds:
        scheduler.step()
        for of in streams:
            of.ready()
    assert [len(of.completion.rounds) for of in streams] == [
        5,
        3,
        2,
        1,
    ]  # all prompts are processed in the first rounds


@pytest.mark.parametrize(("limits", "most"), [({"batch_size": 6}, 2), ({"max_scored": 9}, 3)])
def test_a_batch_is_limited_and_no_sequence_is_left_out(limits: dict[str, int], most: int) -> None:
    models = {TARGET: target(**limits)}
    scheduler = Stepped(models)
    streams = [
        stream(scheduler, models, seed=i, drafter=CountingUp(V), length=Length(2), max_tokens=30)
        for i in range(5)
    ]
    assert run_together(streams) == [alone(seed=i, max_tokens=30) for i in range(5)]
    together = [evaluated.rows for evaluated in scored(models[TARGET])]
    full = [rows for rows in together[10:25] if len(rows) == most]
    assert full
    for row in range(5):
        turns = [i for i, rows in enumerate(together[10:25]) if row in rows]
        assert max(b - a for a, b in itertools.pairwise(turns)) <= 3  # ceil(5 / 2) evaluations


def test_only_a_round_of_a_sequence_that_is_alone_is_padded() -> None:
    """Its width is timed, and the width of a batch is what its sequences need."""
    models = {TARGET: target()}
    scheduler = Stepped(models)
    streams = [
        stream(scheduler, models, seed=i, drafter=CountingUp(V), length=Length(1, lambda: 6), max_tokens=n)
        for i, n in enumerate((4, 4, 20))
    ]
    assert run_together(streams) == [alone(seed=i, max_tokens=n) for i, n in enumerate((4, 4, 20))]
    found = {(len(e.rows), e.width) for e in scored(models[TARGET])}
    assert {width for n, width in found if n == 1} == {6}
    assert {(3, 6), (3, 5)} & found
    assert all(n <= width <= 2 * n for n, width in found if n > 1)
    assert {round_.width for round_ in streams[2].completion.rounds if round_.n_sequences == 1} == {6}


def test_a_wider_draft_than_the_timed_width_is_not_padded() -> None:
    models = {TARGET: target()}
    done = stream(Stepped(models), models, drafter=CountingUp(V), length=Length(4, lambda: 3), max_tokens=20)
    assert done.run().tokens == alone(max_tokens=20)
    assert {e.n_padding for e in scored(models[TARGET]) if e.n_new > 2} == {0}


@pytest.mark.parametrize("limits", [{"batch_size": 5}, {"context_size": 24}])
def test_padding_has_room(limits: dict[str, int]) -> None:
    models = {TARGET: target(**limits)}
    done = stream(Stepped(models), models, drafter=CountingUp(V), length=Length(1, lambda: 9), max_tokens=99)
    assert done.run().tokens == alone(max_tokens=limits.get("context_size", 64) - 2)
    widths = [e.width for e in scored(models[TARGET])]
    assert max(widths) == limits.get("batch_size", 9)


def test_a_sequence_without_a_reader_stops() -> None:
    models = {TARGET: target(context_size=300)}
    scheduler = Stepped(models)
    waiting = stream(scheduler, models, seed=1, drafter=NoDrafter(), max_tokens=200)
    next(waiting)
    stream(scheduler, models, seed=2, drafter=NoDrafter(), max_tokens=150).run()
    n_evaluated = sum(0 in evaluated.rows for evaluated in models[TARGET].evaluated)
    assert n_evaluated < MAX_UNREAD + 4  # the prompt, and the events that were read
    assert tuple(piece.token for piece in waiting)[-1] == alone(seed=1, max_tokens=200)[-1]


def test_a_measurement_beside_a_sequence() -> None:
    models = {TARGET: target()}
    scheduler = Stepped(models)
    of = stream(scheduler, models, seed=1, max_tokens=6)
    next(of)
    request = ForwardRequest(TARGET, tokens(1, 2, 3), n_logits=2, draft=tokens(4))
    answer = scheduler.run(scores(request))
    rest = tuple(piece.token for piece in of)
    assert np.array_equal(answer, models[TARGET].logits(request))
    assert rest == alone(seed=1, max_tokens=6)[1:]
    assert models[TARGET].released == [1, 0]


class Thinks(CountingUp):
    """A slow drafter of plain functions."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(V)
        self.clock, self.seconds = clock, seconds

    def propose(self, context: TokenArray, length: SequenceLength) -> Draft:
        self.clock.passes(self.seconds)
        return super().propose(context, length)


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [(None, (2 * 3.0, 100.0, 0.5)), (lambda clock: Thinks(clock, 20.0), (0.0, 100.0, 20.5))],
)
def test_the_seconds_of_a_round_are_complete(
    drafter: Callable[[Clock], Thinks] | None, expected: tuple[float, ...]
) -> None:
    """Two draft steps of 3 s, an evaluation of 100 s, 0.5 s of learning, or 20 s in a drafter itself."""
    clock = Clock()

    class Learns(Length):
        def observe(self, round_: Round) -> Round:
            clock.passes(0.5)
            return replace(round_, stalled_seconds=7.0)

    models = {
        TARGET: target(clock=clock, seconds=100.0, context_size=99),
        DRAFT: draft(clock=clock, seconds=3.0, context_size=99),
    }
    own = drafter(clock) if drafter else None
    of = stream(Stepped(models, clock=clock), models, (1, 2, 3), drafter=own, length=Learns(2), max_tokens=30)
    done = of.run()
    spent = [(r.draft_seconds, r.verify_seconds, r.overhead_seconds) for r in done.rounds]
    assert spent[0] == (expected[0], expected[1], expected[2] - 0.5)  # no learning before the first round
    assert set(spent[1:-2]) == {expected}
    assert [r.n_draft_steps for r in done.rounds[:-2]] == [0 if drafter else 2] * (len(done.rounds) - 2)
    assert {r.stalled_seconds for r in done.rounds} == {7.0}, "as the policy judges them"
    assert done.prefill_seconds == (100.0 if drafter else 103.0)
    assert clock.now == sum(r.seconds for r in done.rounds) + done.prefill_seconds + 0.5


def test_the_seconds_of_reading_a_round_belong_to_the_next() -> None:
    clock = Clock()

    class Slow(Letters):
        def piece(self, token: int) -> bytes:
            clock.passes(0.25)
            return super().piece(token)

    models = {TARGET: target(clock=clock, seconds=100.0)}
    of = stream(Stepped(models, clock=clock), models, drafter=NoDrafter(), vocabulary=Slow(), max_tokens=4)
    assert [round_.overhead_seconds for round_ in of.run().rounds] == [0.0, 0.25, 0.25, 0.25]
