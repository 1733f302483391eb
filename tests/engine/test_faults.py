"""Faults during generation: each ends what it concerns; completions keep their text, others continue."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Generator
from typing import Any, TypeVar

import pytest

from fake_constraint import Steps
from fakes import CountingUp, FakeModel, Length, tokens
from llamaspec.drafters.fallback import FallbackDrafter, ForcedDrafter, NoDrafter
from llamaspec.engine.completion import StopReason
from llamaspec.engine.detokenizer import Detokenizer
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.speculate import Speculation
from llamaspec.engine.stream import TextStream
from llamaspec.engine.thread import ComputeThread
from llamaspec.errors import EvaluationAbortedError, EvaluationError, MemoryFullError, ScoresError
from llamaspec.protocols import SequenceLength
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import DRAFT, TARGET, Draft, Forward, ForwardRequest, TokenArray
from stepped import Stepped
from texts import PLAIN, Letters, V, alone, draft, model_drafter, stream, target

Asking = Generator[ForwardRequest, Forward, Draft]


def rest(of: TextStream) -> tuple[int, ...]:
    for _ in of:
        pass
    return of.completion.tokens


def test_a_full_context_ends_one_sequence_alone() -> None:
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
    """The next request to the target is prepared like any other."""
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


FAULTS = {
    "fails": EvaluationError("llama.cpp failed"),
    "is full": MemoryFullError("the KV cache is full"),
    "is damaged": ScoresError("scores that are not numbers"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("number", range(1, 9))
def test_a_fault_among_several_sequences(number: int, fault: str) -> None:
    """In a prompt, draft or verification: if several shared the evaluation, it is repeated for each."""

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
    assert n_told <= 1
    assert stream(scheduler, models, (1, 2, 3)).run().tokens == alone((1, 2, 3))
    assert sorted(models[TARGET].released) == sorted(models[DRAFT].released) == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_sequence_ends_only_this_one(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, it ended all sequences that shared the evaluation."""
    models = {TARGET: target(), DRAFT: draft()}
    evaluate = models[TARGET].evaluate

    def fail(batch: Any, *more: Any) -> Any:
        if any(number == 1 and request.n_tokens > 6 for number, request in batch):
            models[TARGET].forget()
            raise FAULTS[fault]
        return evaluate(batch, *more)

    monkeypatch.setattr(models[TARGET], "evaluate", fail)
    scheduler = Stepped(models)
    streams = [stream(scheduler, models, (1, 2, 3), seed=i) for i in range(3)]
    for of in streams:
        of.begin()
    for i, of in enumerate(streams):
        if i == 1:
            with pytest.raises(type(FAULTS[fault])):
                rest(of)
        else:
            assert rest(of) == alone((1, 2, 3), seed=i)
    assert 0 < len(streams[1].completion.tokens) < 12


@pytest.mark.parametrize("n_texts", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("number", range(1, 9))
def test_a_draft_that_fails_is_not_used_again(number: int, fault: str, n_texts: int) -> None:
    """In a prompt or in a draft. It once ended the completions, although none needs a draft."""

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
    assert models[DRAFT].n_attempts <= number + n_texts  # together once, then each alone


@pytest.mark.parametrize("n_texts", [1, 3])
@pytest.mark.parametrize("name", [TARGET, DRAFT])
@pytest.mark.parametrize("number", range(1, 9))
def test_an_aborted_evaluation_ends_no_other_sequence(name: str, number: int, n_texts: int) -> None:
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
    """A user's drafter that fails in some way once the sequence is long."""

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
        yield ForwardRequest("nobody" if self.how == "unknown model" else TARGET, tokens(1))
        return Draft() if self.how == "unknown model" else [1, 2]  # type: ignore[return-value]


ERRORS = {
    "raises": ZeroDivisionError,
    "unknown token": ValueError,
    "unknown model": ValueError,
}


@pytest.mark.parametrize("how", list(ERRORS))
def test_a_drafter_that_fails_ends_its_own_sequence(how: str) -> None:
    models = {TARGET: target()}
    scheduler = Stepped(models)
    other = stream(scheduler, models, seed=1)
    bad = stream(scheduler, models, seed=2, drafter=Fails(how), length=Length(1))
    next(bad)
    next(other)
    assert rest(other) == alone(seed=1)  # its steps also run the faulty sequence
    with pytest.raises(ERRORS[how]):
        rest(bad)
    n = len(bad.completion.tokens)
    assert n >= 4  # the last round before the fault is not lost
    assert bad.completion.tokens == alone(seed=2)[:n]


@pytest.mark.parametrize("name", [TARGET, DRAFT])
def test_a_sequence_ends_even_if_a_model_fails_to_release_it(name: str) -> None:
    """Its reader once waited forever, and the other model kept its cells."""
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
    assert sorted(models[TARGET].released + models[DRAFT].released) == [0, 1, 1]


def test_a_drafter_that_refuses_to_be_closed() -> None:
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


# Fault injection: every call of a sequence or a model may raise a BaseException that is no Exception.

Seam = TypeVar("Seam")
RAISED = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]


class Sometimes(CountingUp):
    """A drafter that drafts in about every second round."""

    def propose(self, context: TokenArray, length: SequenceLength) -> Draft:
        return super().propose(context, length) if len(context) % 2 else Draft()


class Injector:
    """Makes a method of an object raise an error in its nth call."""

    def __init__(self, place: str, number: int, raised: BaseException) -> None:
        self.place, self.number, self.raised = place, number, raised
        self.n_calls = 0

    @property
    def is_reached(self) -> bool:
        return self.n_calls >= self.number

    def hit(self) -> None:
        self.n_calls += 1
        if self.n_calls == self.number:
            raise self.raised

    def into(self, name: str, seam: Seam) -> Seam:
        """Return the object, or a copy of it that raises."""
        seam_name, _, method = self.place.partition(".")
        if seam_name != name:
            return seam

        def raising(*args: Any, **options: Any) -> Any:
            self.hit()
            return getattr(seam, method)(*args, **options)

        kind = type(seam)
        broken = copy.copy(seam)
        failing = type(kind.__name__, (kind,), {"__slots__": (), method: lambda _, *a, **k: raising(*a, **k)})
        object.__setattr__(broken, "__class__", failing)
        return broken


def constrained(
    thread: ComputeThread, models: dict[str, FakeModel], seed: int, inject: Injector
) -> TextStream:
    """Return a stream that uses every protocol: a constraint, two drafters, randomness, a rule, a policy."""
    constraint = inject.into("constraint", Steps(V))
    streams = inject.into("streams", SeededStreams(seed))
    rule = inject.into("rule", RULES["coupled"])
    asking = model_drafter(models[DRAFT], seed)
    asking.sampler, asking.streams, asking.rule = Sampler(PLAIN, 2, constraint), streams, rule
    drafters = (ForcedDrafter(constraint, 2), inject.into("drafter", Sometimes(V)), asking)
    length = inject.into("length", Length(2))
    speculation = Speculation(
        tokens(1, 2), 24, 64, rule, PLAIN, streams, constraint, FallbackDrafter(drafters), length
    )
    vocabulary = inject.into("vocabulary", Letters(end=5))
    return TextStream(speculation, Detokenizer(vocabulary), thread)


def all_read(of: TextStream) -> BaseException | None:
    """Read a stream to its end; return the error that ended it."""
    try:
        of.run()
    except BaseException as error:  # noqa: BLE001  # the reader uses the vocabulary, too
        return error
    return None


NOTHING = Injector("", 0, SystemExit())
SEAMS = [
    "drafter.prepare", "drafter.propose",
    "length.begin_round", "length.wants_more", "length.n_verified", "length.timed_width", "length.observe",
    "length.close",
    "rule.draw", "rule.verify", "streams.choose",
    "constraint.allowed", "constraint.forced", "constraint.is_complete",
    "vocabulary.piece", "vocabulary.is_end",
]  # fmt: skip


@pytest.mark.parametrize("raised", RAISED, ids=repr)
@pytest.mark.parametrize("place", SEAMS)
def test_such_a_fault_ends_only_its_own_sequence(place: str, raised: BaseException) -> None:
    models = {TARGET: target(), DRAFT: draft()}
    thread = ComputeThread(Scheduler(models))
    usual = constrained(thread, models, 0, NOTHING).run()
    n_reached = 0
    for number in (1, 2, 5):
        inject = Injector(place, number, raised)
        other = stream(thread, models, seed=1)
        other.begin()
        bad = constrained(thread, models, 0, inject)
        error = all_read(bad)
        assert rest(other) == alone(seed=1)
        n_reached += inject.is_reached
        if error is None:  # it is called less often, or only after the end
            assert bad.completion.tokens == usual.tokens
            assert place.endswith("close") or not inject.is_reached
        else:
            assert type(raised).__name__ in repr(error)
            assert bad.completion.tokens == usual.tokens[: len(bad.completion.tokens)]
    assert n_reached
    thread.close()


@pytest.mark.parametrize("raised", RAISED, ids=repr)
@pytest.mark.parametrize("method", ["prepare", "evaluate", "release"])
@pytest.mark.parametrize("name", [TARGET, DRAFT])
def test_such_a_fault_of_a_model_does_not_end_the_thread(
    name: str, method: str, raised: BaseException
) -> None:
    """Every reader gets its completion or an error, and later sequences work."""
    for number in (1, 2, 5):
        models = {TARGET: target(), DRAFT: draft()}
        inject = Injector(f"{name}.{method}", number, raised)
        models[name] = inject.into(name, models[name])
        thread = ComputeThread(Scheduler(models))
        streams = [stream(thread, models, (1, i), seed=i) for i in range(3)]
        for of in streams:
            of.begin()
        for i, of in enumerate(streams):
            error = all_read(of)
            n, expected = len(of.completion.tokens), alone((1, i), seed=i)
            assert of.completion.tokens == expected[:n]
            assert isinstance(error, RuntimeError) if n < len(expected) else error is None
            assert error is None or error.__cause__ is raised
        assert inject.is_reached or method == "release"
        assert stream(thread, models, seed=7).run().tokens == alone(seed=7)
        thread.close()


@pytest.mark.parametrize("raised", RAISED, ids=repr)
def test_such_a_fault_of_an_evaluation_ends_only_its_sequences(raised: BaseException) -> None:
    """It once ended all sequences of the pair."""
    models = {TARGET: target(batch_size=2), DRAFT: draft()}
    models[TARGET] = Injector("target.evaluate", 9, raised).into("target", models[TARGET])
    scheduler = Stepped(models)
    streams = [stream(scheduler, models, seed=i, drafter=NoDrafter()) for i in range(4)]
    for of in streams:
        of.begin()
    errors = [all_read(of) for of in streams]
    assert sorted(error is None for error in errors) == [False, False, True, True]
    for i, of in enumerate(streams):
        assert of.completion.tokens == alone(seed=i)[: len(of.completion.tokens)]


@pytest.mark.parametrize("method", ["propose", "prepare"])
@pytest.mark.parametrize("proposed", [[1, 2], iter([1, 2]), "wrong result"])
def test_a_drafter_with_an_answer_of_the_wrong_type(method: str, proposed: Any) -> None:
    """Once, the text was empty, and the reason of its end was an interrupt."""

    def answer(*_: Any) -> Any:
        if proposed != "wrong result":
            return proposed

        def drafting() -> Any:
            yield from ()
            return [1, 2]

        return drafting() if method == "propose" else 3

    drafter = NoDrafter()
    drafter_: Any = type(
        "Wrong", (), {"prepare": drafter.prepare, "propose": drafter.propose, method: answer}
    )
    models = {TARGET: target(), DRAFT: draft()}
    of = stream(Stepped(models), models, (1, 2, 3), drafter=drafter_())
    with pytest.raises(TypeError, match=method):
        rest(of)
