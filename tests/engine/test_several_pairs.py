"""Several pairs in one process: one compute thread for all, which starts and ends with them.

In a thread each, they had a team of OpenMP threads each, and an evaluation took several times as long.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from command import Answer, python
from fakes import FakeModel, tokens
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.sequence import RunningSequence
from llamaspec.engine.thread import ComputeThread
from llamaspec.errors import ClosedError
from llamaspec.values import TARGET, Forward, ForwardRequest
from patience import PATIENCE, until
from texts import alone, stream, target

Models = dict[str, FakeModel]


def pairs(*befores: Callable[[int], None]) -> list[tuple[ComputeThread, Models]]:
    """Open a pair for each function, which is called with the number of every evaluation."""
    models = [{TARGET: target(before=before)} for before in befores]
    return [(ComputeThread(Scheduler(each)), each) for each in models]


def nothing(n: int) -> None:
    pass


def evaluations(n: int | None = None) -> Generator[ForwardRequest, Forward, None]:
    """Return a measurement of `n` evaluations, or one without end."""
    done = 0
    while done != n:
        yield ForwardRequest(TARGET, tokens(1, 2))
        done += 1


def is_closed(thread: ComputeThread) -> bool:
    """Whether it refuses work."""
    try:
        thread.start(RunningSequence(evaluations(0)))
    except ClosedError:
        return True
    return False


def in_threads(*works: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_pairs_share_a_thread_and_close_separately() -> None:
    seen: set[int] = set()
    opened = pairs(*[lambda n: seen.add(threading.get_ident())] * 3)
    streams = [stream(*pair, seed=i, max_tokens=40) for i, pair in enumerate(opened)]
    for of in streams:
        next(of)
    opened[1][0].close()
    assert streams[0].run().tokens == alone(seed=0, max_tokens=40)
    assert streams[2].run().tokens == alone(seed=2, max_tokens=40)
    assert len(seen) == 1
    assert threading.get_ident() not in seen
    with pytest.raises(ClosedError):
        stream(*opened[1]).run()
    for thread, _ in opened:
        thread.close()


def test_pairs_take_turns_of_one_evaluation() -> None:
    order: list[str] = []
    all_wait = threading.Event()

    def first(n: int) -> None:
        assert all_wait.wait(PATIENCE)
        order.append("a")

    opened = pairs(first, lambda n: order.append("b"), lambda n: order.append("c"))
    streams = [stream(*pair, drafter=NoDrafter()) for pair in opened]
    for of in streams:
        of.begin()
    all_wait.set()
    for of in streams:
        of.run()
    together = order[max(map(order.index, "abc")) :]
    for i in range(20):
        assert sorted(together[i : i + 3]) == ["a", "b", "c"]
    for thread, _ in opened:
        thread.close()


def test_endless_work_of_one_pair_delays_others_by_one_evaluation() -> None:
    """Work that comes during an evaluation of one pair is done after it, and can be ended."""
    n_before: list[int] = []

    def note() -> Generator[ForwardRequest, Forward, None]:
        n_before.append(a_models[TARGET].n_attempts)
        yield from evaluations(1)

    def asks(n: int) -> None:
        if n == 5:
            b.start(RunningSequence(note()))

    (a, a_models), (b, _) = pairs(asks, nothing)
    stopped: list[BaseException] = []

    def work() -> None:
        try:
            a.run(evaluations())
        except ClosedError as error:
            stopped.append(error)

    running = in_threads(work)
    until(lambda: bool(n_before))
    assert n_before[0] <= 6
    b.call(lambda: None)
    b.close()
    a.close()
    join(running)
    assert len(stopped) == 1


def test_a_fault_of_one_pair_does_not_affect_the_others() -> None:
    def fail(n: int) -> None:
        if n == 3:
            raise SystemExit

    broken, sound = pairs(fail, nothing)
    streams = [stream(*pair, drafter=NoDrafter()) for pair in (broken, sound)]
    for of in streams:
        of.begin()
    assert streams[1].run().tokens == alone()
    with pytest.raises(RuntimeError, match="SystemExit"):
        streams[0].run()
    for thread, _ in (broken, sound):
        thread.close()


def test_a_drafter_cannot_wait_for_another_pair() -> None:
    """It would wait for its own thread."""
    (a, a_models), b = pairs(nothing, nothing)
    with pytest.raises(RuntimeError, match="yield a ForwardRequest"):
        a.call(stream(*b).run)
    with pytest.raises(RuntimeError, match="yield a ForwardRequest"):
        a.call(b[0].close)
    assert stream(*b).run().tokens == alone()
    assert stream(a, a_models).run().tokens == alone()


def test_closing_ends_no_evaluation_of_another_pair() -> None:
    (a, a_models), (b, b_models) = pairs(nothing, nothing)
    b.call(lambda: None)
    gate, reached = threading.Event(), threading.Event()

    def held(n: int) -> None:
        reached.set()
        assert gate.wait(PATIENCE)

    a_models[TARGET].before = held
    of = stream(a, a_models)
    of.begin()
    assert reached.wait(PATIENCE)
    closing = in_threads(b.close)
    until(lambda: is_closed(b))
    gate.set()
    join(closing)
    assert of.run().tokens == alone()
    assert a_models[TARGET].n_attempts == len(a_models[TARGET].evaluated)
    assert not b_models[TARGET].aborted.is_set()
    a.close()


def test_pending_work_of_a_closed_pair_is_refused() -> None:
    """Waiting callers get an error, and no freed model is used."""
    gate, reached = threading.Event(), threading.Event()

    def held() -> None:
        reached.set()
        assert gate.wait(PATIENCE)

    ((thread, models),) = pairs(nothing)
    told: list[BaseException] = []
    asks = threading.Event()

    def ask() -> None:
        asks.set()
        try:
            thread.call(lambda: told.append(AssertionError("it was done")))
        except ClosedError as error:
            told.append(error)

    threads = in_threads(lambda: thread.call(held))
    assert reached.wait(PATIENCE)
    of = stream(thread, models)
    of.begin()
    threads += in_threads(ask)
    assert asks.wait(PATIENCE)
    threads += in_threads(*[thread.close] * 3)
    until(lambda: is_closed(thread))
    gate.set()
    join(threads)
    assert list(of) == []
    assert [type(each) for each in told] == [ClosedError]
    assert not models[TARGET].evaluated


@contextmanager
def collecting_in_new_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let only a compute thread collect garbage, before it reports that it has started."""
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def collect(self: threading.Thread) -> None:
        if self.name == "llamaspec-compute":
            gc.collect()
        begin(self)

    gc.collect()
    gc.disable()
    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", collect)
    try:
        yield
    finally:
        monkeypatch.undo()
        gc.enable()


def test_a_finalizer_in_the_starting_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It once waited for a lock whose owner waited for the thread to start: a deadlock."""
    ((used, _), (unused, _), pair) = pairs(nothing, nothing, nothing)
    used.call(lambda: None)
    used.close()
    until_no_thread_computes()
    forgotten = [weakref.ref(used), weakref.ref(unused)]
    for each in (used, unused):
        each.circle = each  # type: ignore[attr-defined]
    with collecting_in_new_threads(monkeypatch):
        del used, unused, each
        of = stream(*pair)
        join(in_threads(of.run))
    assert [each() for each in forgotten] == [None, None]
    assert of.completion.tokens == alone()
    pair[0].close()


@pytest.mark.parametrize("has_started", [True, False])
def test_a_start_that_is_interrupted(monkeypatch: pytest.MonkeyPatch, *, has_started: bool) -> None:
    """By Ctrl-C, or for lack of threads: the sequence is cancelled, and the next one is right."""
    usual = threading.Thread.start

    def start(self: threading.Thread) -> None:
        monkeypatch.undo()
        if has_started:
            usual(self)
        raise KeyboardInterrupt if has_started else RuntimeError("can't start new thread")

    ((thread, models),) = pairs(nothing)
    until_no_thread_computes()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt if has_started else RuntimeError):
        stream(thread, models).run()
    assert stream(thread, models, seed=1).run().tokens == alone(seed=1)
    assert sorted(models[TARGET].released) == [0, 1]
    thread.close()


def until_no_thread_computes() -> None:
    """Wait for the end of the thread; objects of other tests may keep it for a while."""

    def has_ended() -> bool:
        gc.collect()
        return "llamaspec-compute" not in {thread.name for thread in threading.enumerate()}

    until(has_ended)


def test_the_thread_ends_with_the_last_pair() -> None:
    """An idle team of OpenMP threads would slow down those of the program."""
    opened = pairs(nothing, nothing)
    for pair in opened:
        stream(*pair).run()
    opened[0][0].close()
    assert "llamaspec-compute" in {thread.name for thread in threading.enumerate()}
    opened.clear()
    del pair
    until_no_thread_computes()


def test_pairs_that_are_opened_closed_and_dropped_in_several_threads() -> None:
    """Each completion is right, and nothing hangs, whenever garbage is collected."""
    wrong: list[object] = []
    expected = [alone(seed=seed) for seed in range(4)]

    def work(number: int) -> None:
        chance = random.Random(number)
        kept: list[object] = []
        try:
            for _ in range(40):
                (pair,) = pairs(nothing)
                seed = chance.randrange(4)
                of = stream(*pair, seed=seed)
                kind = chance.choice(["run", "close", "forget", "call", "unused"])
                if kind == "run":
                    assert of.run().tokens == expected[seed]
                elif kind == "call":
                    assert pair[0].call(lambda: 7) == 7
                elif kind != "unused":
                    next(of)
                if kind == "close":
                    join(in_threads(pair[0].close, pair[0].close))
                    assert of.completion.tokens == expected[seed][: len(of.completion.tokens)]
                circle: list[object] = [pair, of]
                circle.append(circle)
                kept = chance.choice([kept, circle])
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)

    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        join(in_threads(*(partial(work, i) for i in range(4))))
    finally:
        gc.set_threshold(*before)
    assert wrong == []
    until_no_thread_computes()


LEFT = """
import threading
from contextlib import suppress
from llamaspec.errors import ClosedError
from test_several_pairs import evaluations, nothing, pairs
from texts import stream
def told(n):
    computes.set()
computes = threading.Event()
(a, a_models), (b, _), (c, _) = pairs(told, nothing, nothing)
c.call(lambda: None)
of = stream(a, a_models, max_tokens=60)
next(of)
def work():
    with suppress(ClosedError):  # raised at the end
        b.run(evaluations())
threading.Thread(target=work, daemon=True).start()
assert computes.wait(300)
print("left")
"""


def test_a_program_may_end_while_the_thread_computes() -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *sys.path])
    assert python(LEFT, env={"PYTHONPATH": path}) == Answer(0, "left\n", "")
