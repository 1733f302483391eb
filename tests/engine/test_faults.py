"""Faults in the middle: each ends what it concerns, the text so far is kept, everybody else goes on."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from fakes import CountingUp, FakeModel, Length, tokens
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.generation import StopReason
from llamaspec.engine.stream import TextStream
from llamaspec.errors import EvaluationAbortedError, EvaluationError, MemoryFullError, ScoresError
from llamaspec.protocols import SequenceLength
from llamaspec.values import DRAFT, TARGET, Draft, Forward, ForwardRequest, TokenArray
from stepped import Stepped
from texts import V, alone, draft, stream, target

Asking = Generator[ForwardRequest, Forward, Draft]


def rest(of: TextStream) -> tuple[int, ...]:
    for _ in of:
        pass
    return of.completion.tokens


def test_a_full_context_ends_one_row_alone() -> None:
    models = {TARGET: target(is_full=lambda row, request: row == 0 and request.n_tokens > 8)}
    scheduler = Stepped(models)
    full, other = (stream(scheduler, models, seed=i, drafter=NoDrafter()) for i in range(2))
    next(full), next(other)
    done = full.run()
    assert done.stop_reason is StopReason.CONTEXT
    assert done.tokens == alone(seed=0)[:7]
    assert rest(other) == alone(seed=1)
    assert other.completion.stop_reason is StopReason.LIMIT


def test_a_full_context_of_the_draft_only_stops_drafting() -> None:
    """The request for the target that follows has been prepared like any other."""
    models = {TARGET: target(), DRAFT: draft(is_full=lambda row, request: request.n_tokens > 6)}
    scheduler = Stepped(models)
    streams = [stream(scheduler, models, seed=i) for i in range(3)]
    for of in streams:
        next(of)
    assert [rest(of) for of in streams] == [alone(seed=i) for i in range(3)]
    rounds = streams[0].completion.rounds
    assert len(rounds[0].draft) == 2
    assert len(rounds[-2].draft) == 0


@pytest.mark.parametrize("number", range(1, 10))
def test_a_draft_that_never_has_room_for_the_prompt(number: int) -> None:
    models = {TARGET: target(), DRAFT: draft(is_full=lambda row, request: True)}
    prompt = [1] * number
    assert stream(Stepped(models), models, prompt).run().tokens == alone(prompt)


@pytest.mark.parametrize("number", range(1, 8))
def test_an_evaluation_that_fails_is_told_and_the_next_text_is_right(number: int) -> None:
    def fail(n: int) -> None:
        if n == number:
            raise EvaluationError("llama.cpp failed")

    models = {TARGET: target(), DRAFT: draft()}
    models[TARGET].before = fail
    scheduler = Stepped(models)
    of = stream(scheduler, models, (1, 2, 3))
    with pytest.raises(EvaluationError):
        of.run()
    kept = of.completion
    assert kept.tokens == alone((1, 2, 3))[: len(kept.tokens)]
    assert kept.stop_reason is StopReason.INTERRUPT
    assert list(of) == []
    assert stream(scheduler, models, (1, 2, 3)).run().tokens == alone((1, 2, 3))
    assert models[TARGET].released == models[DRAFT].released == [0, 1]


FAULTS = {
    "fails": EvaluationError("llama.cpp failed"),
    "is full": MemoryFullError("the KV cache is full"),
    "is damaged": ScoresError("scores that are not numbers"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("number", range(1, 9))
def test_a_fault_among_several_texts(number: int, fault: str) -> None:
    """In a prompt, in a draft or in a verification: who was evaluated is told, all keep what they have."""

    def fail(n: int) -> None:
        if n == number:
            raise FAULTS[fault]

    models = {TARGET: target(), DRAFT: draft()}
    scheduler = Stepped(models)
    streams = [stream(scheduler, models, (1, 2, 3), seed=i) for i in range(3)]
    for of in streams[:2]:
        of.begin()
    models[TARGET].before = fail
    n_told = 0
    for i, of in enumerate(streams):
        try:
            rest(of)
        except type(FAULTS[fault]):
            n_told += 1
        kept = of.completion
        assert kept.tokens == alone((1, 2, 3), seed=i)[: len(kept.tokens)]
        assert (len(kept.tokens) == 12) or (kept.stop_reason is StopReason.INTERRUPT)
    assert n_told >= 1
    assert stream(scheduler, models, (1, 2, 3)).run().tokens == alone((1, 2, 3))
    assert sorted(models[TARGET].released) == sorted(models[DRAFT].released) == [0, 1, 2, 3]


@pytest.mark.parametrize("n_texts", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("number", range(1, 9))
def test_a_draft_that_fails_is_not_asked_again(number: int, fault: str, n_texts: int) -> None:
    """In a prompt or in a draft. It ended the texts that it drafted for, though it is needed for none."""

    def fail(n: int) -> None:
        if n >= number:
            raise FAULTS[fault]

    models = {TARGET: target(), DRAFT: draft()}
    models[DRAFT].before = fail
    scheduler = Stepped(models)
    streams = [stream(scheduler, models, (1, 2, 3), seed=i) for i in range(n_texts)]
    for of in streams:
        of.begin()
    assert [rest(of) for of in streams] == [alone((1, 2, 3), seed=i) for i in range(n_texts)]
    assert {of.completion.draft_fault for of in streams} == {str(FAULTS[fault])}
    assert {of.completion.stop_reason for of in streams} == {StopReason.LIMIT}
    assert models[DRAFT].n_attempts < number + n_texts


@pytest.mark.parametrize("n_texts", [1, 3])
@pytest.mark.parametrize("name", [TARGET, DRAFT])
@pytest.mark.parametrize("number", range(1, 9))
def test_an_evaluation_that_was_aborted_costs_no_text(name: str, number: int, n_texts: int) -> None:
    def abort(n: int) -> None:
        if n == number:
            raise EvaluationAbortedError("somebody else asked for it")

    models = {TARGET: target(), DRAFT: draft()}
    models[name].before = abort
    scheduler = Stepped(models)
    streams = [stream(scheduler, models, (1, 2, 3), seed=i) for i in range(n_texts)]
    for of in streams:
        of.begin()
    assert [rest(of) for of in streams] == [alone((1, 2, 3), seed=i) for i in range(n_texts)]
    assert {of.completion.draft_fault for of in streams} == {None}
    assert models[name].n_attempts == len(models[name].evaluated) + 1


class Fails(CountingUp):
    """A drafter of a user's own that breaks once the text is long, in some way."""

    def __init__(self, how: str) -> None:
        super().__init__(V)
        self.how = how

    def propose(  # type: ignore[override]
        self, context: TokenArray, length: SequenceLength
    ) -> Draft | Asking:
        if len(context) < 6:
            return super().propose(context, length)
        if self.how == "raises":
            raise ZeroDivisionError
        if self.how == "unknown token":
            return Draft.certain([V + 5])
        return self.asks()

    def asks(self) -> Asking:
        yield ForwardRequest("nobody", tokens(1))
        return Draft()


ERRORS = {"raises": ZeroDivisionError, "unknown token": ValueError, "unknown model": ValueError}


@pytest.mark.parametrize("how", list(ERRORS))
def test_a_drafter_that_fails_ends_its_own_row(how: str) -> None:
    models = {TARGET: target()}
    scheduler = Stepped(models)
    other = stream(scheduler, models, seed=1)
    bad = stream(scheduler, models, seed=2, drafter=Fails(how), length=Length(1))
    next(bad)
    next(other)
    assert rest(other) == alone(seed=1)  # whose steps run the bad row
    with pytest.raises(ERRORS[how]):
        rest(bad)
    n = len(bad.completion.tokens)
    assert n >= 4  # the last round before the fault is not lost
    assert bad.completion.tokens == alone(seed=2)[:n]


@pytest.mark.parametrize("name", [TARGET, DRAFT])
def test_a_model_that_fails_to_release_a_text_loses_no_end(name: str) -> None:
    """The reader of such a text waited for ever, and the other model kept what it held of the text."""
    models = {TARGET: target(), DRAFT: draft()}
    scheduler = Stepped(models)

    def fail(row: int) -> None:
        if row == 0:
            raise OSError("broken on purpose")
        FakeModel.release(models[name], row)

    models[name].release = fail  # type: ignore[method-assign]
    of, other = (stream(scheduler, models, seed=i) for i in range(2))
    assert rest(of) == alone()
    assert rest(other) == alone(seed=1)
    sequence = of._begun()
    assert isinstance(sequence.error, OSError)
    assert scheduler.next_event(other._begun()) is None
    assert sorted(models[TARGET].released + models[DRAFT].released) == [0, 1, 1]


def test_a_drafter_that_will_not_be_closed() -> None:
    models = {TARGET: target(), DRAFT: draft()}
    scheduler = Stepped(models)

    class Clings(CountingUp):
        def propose(self, context: TokenArray, length: SequenceLength) -> Asking:  # type: ignore[override]
            try:
                yield ForwardRequest(DRAFT, context)
            finally:
                yield ForwardRequest(DRAFT, context)
            return Draft()

    other, clinging = stream(scheduler, models, seed=1), stream(scheduler, models, drafter=Clings(V))
    next(other)
    next(clinging)
    clinging.close()
    assert rest(other) == alone(seed=1)
    assert models[TARGET].released == [1, 0]
