"""The compute thread with several threads, tasks and processes, and Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Generator, Mapping

import pytest

from fakes import CountingUp, FakeModel, tokens
from forward_requests import scores
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.completion import StopReason
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.stream import TextStream
from llamaspec.engine.thread import ComputeThread
from llamaspec.errors import ClosedError
from llamaspec.protocols import SequenceLength
from llamaspec.values import DRAFT, TARGET, Draft, Forward, ForwardRequest, TokenArray
from patience import PATIENCE, until
from texts import V, alone, draft, stream, target


def computing(models: Mapping[str, FakeModel]) -> ComputeThread:
    return ComputeThread(Scheduler(models))


class Gate:
    """Blocks an evaluation until it is opened or aborted."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, n: int) -> None:
        if n == self.number:
            self.reached.set()
            assert self.opened.wait(PATIENCE)

    def open_when_aborted(self, model: FakeModel) -> threading.Thread:
        def wait() -> None:
            if self.reached.wait(PATIENCE) and model.aborted.wait(PATIENCE):
                self.opened.set()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


def test_tasks_of_asyncio() -> None:
    models = {TARGET: target(), DRAFT: draft()}
    thread = computing(models)

    async def read(seed: int) -> tuple[int, ...]:
        of = stream(thread, models, seed=seed)
        pieces = [piece.token async for piece in of]
        assert tuple(pieces) == of.completion.tokens
        return of.completion.tokens

    async def read_all() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(read(seed) for seed in range(5)))

    assert asyncio.run(read_all()) == [alone(seed=seed) for seed in range(5)]


def test_a_cancelled_task_ends_its_own_sequence_only() -> None:
    """The event loop never waits for the running evaluation."""
    gate = Gate(4)
    models = {TARGET: target(before=gate)}
    thread = computing(models)
    doomed, other = (stream(thread, models, seed=i, drafter=NoDrafter()) for i in range(2))

    async def read(of: TextStream) -> None:
        async for _ in of:
            pass

    async def both() -> float:
        task = asyncio.create_task(read(doomed))
        await asyncio.to_thread(gate.reached.wait, PATIENCE)
        begin = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seconds = time.monotonic() - begin
        gate.opened.set()
        await read(other)
        return seconds

    assert asyncio.run(both()) < PATIENCE / 2
    assert doomed.completion.stop_reason is StopReason.INTERRUPT
    thread.call(lambda: None)  # a sequence that was read to its end is released soon
    assert models[TARGET].released[:2] == [0, 1]
    assert other.completion.tokens == alone(seed=1)


def test_control_c_ends_the_sequence_of_the_main_thread_only() -> None:
    gate = Gate(5)
    models = {TARGET: target(before=gate)}
    thread = computing(models)
    other = stream(thread, models, seed=1, drafter=NoDrafter())
    of = stream(thread, models, drafter=NoDrafter())

    def press() -> None:
        assert gate.reached.wait(PATIENCE)
        time.sleep(0.2)  # until the reader has taken all events, and waits
        os.kill(os.getpid(), signal.SIGINT)

    helpers = [threading.Thread(target=press), gate.open_when_aborted(models[TARGET])]
    helpers[0].start()
    with pytest.raises(KeyboardInterrupt):
        of.run()
    assert gate.opened.is_set()  # by the abort
    for helper in helpers:
        helper.join(PATIENCE)
    kept = of.completion
    assert kept.stop_reason is StopReason.INTERRUPT
    assert kept.tokens == alone()[: len(kept.tokens)]
    assert other.run().tokens == alone(seed=1)


def test_an_unreferenced_stream_ends() -> None:
    models = {TARGET: target()}
    thread = computing(models)
    forgotten, other = (stream(thread, models, seed=i) for i in range(2))
    next(forgotten)
    del forgotten
    gc.collect()
    assert other.run().tokens == alone(seed=1)
    thread.call(lambda: None)
    assert sorted(models[TARGET].released)[:2] == [0, 1]


def test_an_unreferenced_compute_thread_ends_after_its_streams() -> None:
    models = {TARGET: target()}
    scheduler = Scheduler(models)
    thread, forgotten = ComputeThread(scheduler), weakref.ref(scheduler)
    of = stream(thread, models)
    next(of)
    del thread, scheduler
    gc.collect()
    assert of.run().tokens == alone()
    del of
    gc.collect()
    until(lambda: forgotten() is None)


def test_closing_during_an_evaluation() -> None:
    gate = Gate(4)
    models = {TARGET: target(before=gate)}
    thread = computing(models)
    of = stream(thread, models, drafter=NoDrafter())
    reader, opener = threading.Thread(target=of.run), gate.open_when_aborted(models[TARGET])
    reader.start()
    assert gate.reached.wait(PATIENCE)
    thread.close()
    for each in (reader, opener):
        each.join(PATIENCE)
    kept = of.completion
    assert kept.stop_reason is StopReason.INTERRUPT
    assert kept.tokens == alone()[: len(kept.tokens)]
    with pytest.raises(ClosedError, match="open it again"):
        stream(thread, models).run()
    with pytest.raises(ClosedError):
        thread.run(scores(ForwardRequest(TARGET, tokens(1))))
    with pytest.raises(ClosedError):
        thread.call(lambda: None)
    thread.close()


RAISED = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]


class Clings(CountingUp):
    """A drafter that is asked for ever, and raises an error when it is closed."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(V)
        self.raised, self.asks = raised, threading.Event()

    def propose(  # type: ignore[override]
        self, context: TokenArray, length: SequenceLength
    ) -> Generator[ForwardRequest, Forward, Draft]:
        try:
            while True:
                self.asks.set()
                yield ForwardRequest(TARGET, context)
        finally:
            raise self.raised


@pytest.mark.parametrize("raised", RAISED, ids=repr)
def test_a_base_exception_outside_of_a_round_ends_its_own_sequence_only(raised: BaseException) -> None:
    """When a drafter is closed, or a reader is notified. It once ended the thread, and readers waited.

    tests/engine/test_faults.py raises such exceptions everywhere else.
    """

    def notified() -> None:
        raise raised

    models = {TARGET: target()}
    thread = computing(models)
    other = stream(thread, models, seed=1)
    next(other)
    clings = Clings(raised)
    closed, told = stream(thread, models, drafter=clings), stream(thread, models, drafter=CountingUp(V))
    closed.begin()
    assert clings.asks.wait(PATIENCE)
    closed.close()
    told.begin(notified)
    with pytest.raises(RuntimeError, match=type(raised).__name__):
        told.run()
    assert other.run().tokens == alone(seed=1)
    assert stream(thread, models, seed=2).run().tokens == alone(seed=2)
    thread.close()


@pytest.mark.parametrize("raised", [*RAISED, RuntimeError("broken on purpose")], ids=repr)
def test_an_error_of_a_call_is_raised_to_its_caller_only(raised: BaseException) -> None:
    models = {TARGET: target()}
    thread = computing(models)
    of = stream(thread, models, seed=2)
    next(of)

    def fail() -> None:
        raise raised

    with pytest.raises((type(raised), RuntimeError)):
        thread.call(fail)
    assert of.run().tokens == alone(seed=2)
    thread.close()
