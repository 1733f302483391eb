"""Several threads, tasks and processes at one scheduler."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Sequence

import pytest

from fakes import Batch, FakeModel, Length
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.events import StopReason
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.stream import TextStream
from llamaspec.errors import ClosedError
from llamaspec.values import DRAFT, TARGET, Logits
from patience import PATIENCE
from texts import V, alone, draft, stream, target


def in_threads(streams: Sequence[TextStream]) -> list[tuple[int, ...]]:
    threads = [threading.Thread(target=of.run) for of in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return [of.completion.tokens for of in streams]


@pytest.mark.parametrize("concurrent", [False, True])
def test_threads_get_the_texts_that_they_would_get_alone(concurrent: bool) -> None:
    """The fake model refuses two evaluations at once."""
    models = {TARGET: target(), DRAFT: draft()}
    scheduler = Scheduler(models, concurrent=concurrent)
    streams = [stream(scheduler, models, (1, i), seed=i, max_tokens=40) for i in range(4)]
    assert in_threads(streams) == [alone((1, i), seed=i, max_tokens=40) for i in range(4)]
    scheduler.close()


class Meeting(FakeModel):
    """Evaluates only while another model does, once that is asked for."""

    meeting: threading.Barrier | None = None

    def evaluate(self, batch: Batch, n_padding: int = 0) -> list[Logits]:
        if self.meeting is not None:
            self.meeting.wait(PATIENCE)
            self.meeting = None
        return super().evaluate(batch, n_padding)


def test_models_on_different_devices_compute_at_once() -> None:
    one, other = Meeting(1, vocabulary_size=V), Meeting(2, vocabulary_size=V)
    models: dict[str, FakeModel] = {TARGET: one, DRAFT: other}
    scheduler = Scheduler(models, concurrent=True)
    drafting = stream(scheduler, models, seed=1)
    plain = stream(scheduler, models, seed=2, drafter=NoDrafter())
    next(plain)
    next(drafting)  # both have a request now, of different models
    barrier = threading.Barrier(2)
    one.meeting = other.meeting = barrier
    assert drafting.run().tokens == alone(seed=1)
    assert plain.run().tokens == alone(seed=2)
    assert barrier.n_waiting == 0
    assert not barrier.broken
    scheduler.close()


class Meanwhile:
    """A lock that is free only after another thread has done something."""

    def __init__(self, lock: threading.Lock, done_first: Callable[[], object]) -> None:
        self.lock, self.done_first = lock, [done_first]

    def __enter__(self) -> None:
        if self.done_first:
            thread = threading.Thread(target=self.done_first.pop())
            thread.start()
            thread.join(PATIENCE)
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_who_has_waited_for_another_threads_step_makes_none() -> None:
    models = {TARGET: target()}
    scheduler = Scheduler(models)
    of = stream(scheduler, models, drafter=NoDrafter())
    next(of)
    n_before = len(models[TARGET].evaluated)
    scheduler._lock = Meanwhile(scheduler._lock, scheduler.step)  # type: ignore[assignment,arg-type]
    next(of)
    assert len(models[TARGET].evaluated) == n_before + 1
    assert of.run().tokens == alone()


def test_tasks_of_asyncio() -> None:
    models = {TARGET: target(), DRAFT: draft()}
    scheduler = Scheduler(models)

    async def read(seed: int) -> tuple[int, ...]:
        of = stream(scheduler, models, seed=seed)
        pieces = [piece.token async for piece in of]
        assert tuple(pieces) == of.completion.tokens
        return of.completion.tokens

    async def read_all() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(read(seed) for seed in range(5)))

    assert asyncio.run(read_all()) == [alone(seed=seed) for seed in range(5)]


def test_a_task_that_is_cancelled_ends_its_text_and_no_other() -> None:
    reached, opened = threading.Event(), threading.Event()

    def hold(n: int) -> None:
        if n == 4:
            reached.set()
            assert opened.wait(PATIENCE)

    models = {TARGET: target(before=hold)}
    scheduler = Scheduler(models)
    doomed, other = (stream(scheduler, models, seed=i, drafter=NoDrafter()) for i in range(2))

    async def read(of: TextStream) -> None:
        async for _ in of:
            pass

    def open_when_aborted() -> None:
        if models[TARGET].aborted.wait(PATIENCE):
            opened.set()

    async def both() -> None:
        task = asyncio.create_task(read(doomed))
        await asyncio.to_thread(reached.wait, 20)
        threading.Thread(target=open_when_aborted).start()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await read(other)

    asyncio.run(both())
    assert doomed.completion.stop_reason is StopReason.INTERRUPT
    assert models[TARGET].released == [0, 1]
    assert other.completion.tokens == alone(seed=1)


def test_a_forgotten_stream_ends_at_the_next_step() -> None:
    models = {TARGET: target()}
    scheduler = Scheduler(models)
    forgotten, other = (stream(scheduler, models, seed=i) for i in range(2))
    next(forgotten)
    del forgotten
    gc.collect()
    assert other.run().tokens == alone(seed=1)
    assert models[TARGET].released == [0, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork with several threads
@pytest.mark.parametrize("is_held", [False, True])
def test_after_a_fork_a_clear_error_and_no_hanging(is_held: bool) -> None:
    """Also where a thread that the child does not have holds the lock."""
    models = {TARGET: target()}
    scheduler = Scheduler(models)
    of = stream(scheduler, models)
    next(of)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with scheduler._lock:
            held.set()
            release.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    if is_held:
        thread.start()
        assert held.wait(PATIENCE)
    child = os.fork()
    if not child:
        os._exit(_in_child(scheduler, of, stream(scheduler, models)))
    watch = threading.Timer(PATIENCE, os.kill, (child, 9))  # where it hangs
    watch.start()
    status = os.waitpid(child, 0)[1]
    watch.cancel()
    release.set()
    if is_held:
        thread.join(PATIENCE)
    assert os.waitstatus_to_exitcode(status) == 0
    assert of.run().tokens == alone()


def _in_child(scheduler: Scheduler, *streams: TextStream) -> int:
    """The number of things that do not raise ClosedError; 99 for anything else."""
    try:
        n_wrong = 0
        for of in streams:
            of._pieces.clear()
            try:
                next(of)
                n_wrong += 1
            except ClosedError:
                of.close()
        scheduler.close()
        return n_wrong
    except BaseException:  # noqa: BLE001  # the child must not go on with the tests
        return 99


def test_a_thread_says_when_it_leaves_evaluating_to_others() -> None:
    """Where another thread has a row, and where its own has ended; not beside rows of its own."""
    left: list[int] = []
    models = {TARGET: target()}
    scheduler = Scheduler(models, leave=lambda: left.append(threading.get_ident()))
    one, two, other = (stream(scheduler, models, seed=i, length=Length()) for i in range(3))
    for of in (one, two, one, two):
        next(of)
    assert not left
    thread = threading.Thread(target=next, args=(other,))
    thread.start()
    thread.join()
    for _ in range(6):
        next(one)
    assert threading.get_ident() in left
    for of in (one, two, other):
        of.run()
    left.clear()
    stream(scheduler, models, length=Length()).run()
    assert left == [threading.get_ident()]
