"""Which models are loaded and unloaded, in which order: without models, threads and real time.

Requests are coroutines that use a model for some seconds of a clock that jumps to the next event.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from llamaspec.errors import LlamaspecError, MemoryFullError, ModelFileError
from llamaspec.llama.weights import LoadProgress
from llamaspec.serve import ServeSettings
from llamaspec.serve.http_errors import RequestError
from llamaspec.serve.loader import Loader, models_to_go
from llamaspec.serve.log import ServerLog
from llamaspec.serve.served_model import ModelSource, ServedModel, State
from llamaspec.serve.service import Service


@pytest.fixture(autouse=True)
def _no_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for garbage takes half a second."""
    monkeypatch.setattr("llamaspec.serve.loader._free", ExitStack.close)


LOADING = 10.0  # seconds that opening a model takes
CLOSING = 3.0


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else can happen."""

    now = 0.0
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:
            next_at = min((timer.when() for timer in self._scheduled if not timer.cancelled()), default=None)
            assert next_at is not None, "nothing can happen any more"
            self.now = max(self.now, next_at)
        super()._run_once()  # type: ignore[misc]


class Timed(Executor):
    """Calls one function after another; each takes the seconds that its caller has said meanwhile."""

    def __init__(self, world: World) -> None:
        self._world, self._free_at = world, 0.0

    def submit(self, function: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        future, loop = Future[Any](), asyncio.get_running_loop()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            self._world.seconds, answer, fault = 0.0, None, None
            try:
                answer = function(*args)
            except (LlamaspecError, OSError) as error:
                fault = error
            self._free_at = loop.time() + self._world.seconds
            loop.call_at(self._free_at, end, future, answer, fault)

        def end(future: Future[Any], answer: Any, fault: Exception | None) -> None:
            if fault is None:
                future.set_result(answer)
            else:
                future.set_exception(fault)

        loop.call_at(max(loop.time(), self._free_at), run)
        return future


@dataclass
class World:
    """Models that take memory, and what happens to them."""

    sizes: dict[str, int]
    settings: ServeSettings
    faults: dict[str, LlamaspecError] = field(default_factory=dict)
    drafts: list[str] = field(default_factory=list)  # models whose draft needs all memory
    events: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    most: int = 0  # bytes taken at once
    seconds: float = 0.0  # that the function takes which is called now

    def __post_init__(self) -> None:
        log = ServerLog(self.log.append, "text")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("llamaspec.serve.loader.ThreadPoolExecutor", lambda *_, **__: Timed(self))
            self.loader = Loader(self.settings, log, self._open, self.now)
        sources = {name: self._source(name, n) for name, n in self.sizes.items()}
        self.models = {
            name: ServedModel(source, 0, self.loader.usual_seconds) for name, source in sources.items()
        }

    def _source(self, name: str, n_bytes: int) -> ModelSource:
        def unused(*_: object) -> Any:
            raise AssertionError

        return ModelSource(name, Path(name), unused, lambda: n_bytes, stays=name == "stays")

    @staticmethod
    def now() -> float:
        """Return the seconds that have passed."""
        return asyncio.get_running_loop().time()

    def taken(self) -> list[str]:
        """Return the models that take memory."""
        return [name for name, model in self.models.items() if model.state is not State.UNLOADED]

    def _open(self, model: ServedModel, on_load: LoadProgress, keeps_draft: bool) -> Service:
        self.seconds = LOADING
        assert model.closing is None
        self.events.append(f"open {model.name}")
        self.most = max(self.most, sum(self.sizes[name] for name in self.taken()))
        others = [each for each in self.taken() if each != model.name]
        if model.name in self.drafts and others and keeps_draft:
            raise MemoryFullError("no room for the draft")
        if model.name in self.faults:
            raise self.faults[model.name]
        model.resources = ExitStack()
        model.resources.callback(self._close, model)
        return cast(Service, f"{model.name} without draft" if model.name in self.drafts and others else model)

    def _close(self, model: ServedModel) -> None:
        self.seconds = CLOSING
        assert not model.n_users
        self.events.append(f"close {model.name}")

    async def ask(self, name: str, seconds: float = 1.0, idle_seconds: float | None = None) -> object:
        """Use a model for some seconds."""
        with self.loader.using(self.models[name], idle_seconds) as use:
            service = await use.service()
            self.events.append(f"ask {name}")
            await asyncio.sleep(seconds)
            assert self.models[name].service is service
        return service

    async def at(self, second: float, name: str, seconds: float = 1.0) -> object:
        """Use a model at a time."""
        await asyncio.sleep(second)
        return await self.ask(name, seconds)


def run(story: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run a coroutine with a clock that jumps."""
    loop = JumpingLoop()
    try:
        loop.run_until_complete(story())
    finally:
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.wait(left)) if left else None
        loop.close()


def world(limit: int | None = 2, idle: float | None = None, **sizes: int) -> World:
    sizes = sizes or dict.fromkeys("abcd", 1)
    return World(sizes, ServeSettings(memory_bytes=limit, idle_seconds=idle))


def changes(on: World) -> list[str]:
    """Return which models were opened and closed."""
    return [event for event in on.events if not event.startswith("ask")]


async def ignoring(asking: Coroutine[Any, Any, Any]) -> None:
    with suppress(RequestError, asyncio.CancelledError):
        await asking


def test_a_model_that_is_used_all_the_time_keeps_no_other_one_out() -> None:
    """Three loops on one model kept a request for another one out for ever."""
    on = world(limit=1)

    async def story() -> None:
        async def loop(delay: float) -> None:
            await asyncio.sleep(delay)
            for _ in range(20):
                await on.ask("a", 3.0)

        loops = [asyncio.ensure_future(loop(delay)) for delay in (0.0, 1.0, 2.0)]
        await on.at(30.0, "b")
        assert sum(event == "ask a" for event in on.events) < 30
        await asyncio.gather(*loops)

    run(story)
    assert changes(on) == [
        *("open a", "close a"),
        *("open b", "close b"),
        "open a",
    ]
    assert any("b waits until a can be unloaded" in line for line in on.log)


def test_models_get_their_turns_in_the_order_of_the_first_requests() -> None:
    """Requests that come later wait for the next turn, also if the model is still loaded."""
    on = world(limit=1)

    async def story() -> None:
        asked = enumerate(("a", "b", "a", "c", "b", "a"))
        await asyncio.gather(*(on.at(12.0 * (i > 0) + 0.1 * i, name, 5.0) for i, name in asked))

    run(story)
    assert [event for event in on.events if event[:5] != "close"] == [
        *("open a", "ask a"),
        *("open b", "ask b", "ask b"),
        *("open a", "ask a", "ask a"),
        *("open c", "ask c"),
    ]


def test_only_the_models_that_must_go_leave() -> None:
    """Others answer at once, and so does one that need not go after all."""
    on = world(limit=2)
    a, b = on.models["a"], on.models["b"]

    async def story() -> None:
        using = [asyncio.ensure_future(on.ask(*each)) for each in (("a", 99.0), ("b", 9.0), ("b", 30.0))]
        waiting = asyncio.ensure_future(on.at(25.0, "c"))
        await asyncio.sleep(26.0)
        assert (a.state, b.state) == (State.LEAVING, State.LOADED)
        more = [asyncio.ensure_future(on.ask(name, 20.0)) for name in "ab"]
        await asyncio.sleep(1.0)
        assert (a.n_users, b.n_users) == (1, 3)
        await asyncio.gather(*using[1:], more[1])  # now the other one is idle, and goes instead
        await asyncio.sleep(0.1)
        assert (a.state, b.state) == (State.LOADED, State.CLOSING)
        await asyncio.gather(*using, *more, waiting)

    run(story)
    assert changes(on) == ["open a", "open b", "close b", "open c"]


def test_a_model_that_another_one_replaces_does_not_leave_in_vain() -> None:
    """The smaller one has been idle longer, but the larger one makes room alone."""
    on = world(limit=10, small=2, large=7, new=8)

    async def story() -> None:
        for name in ("small", "large", "new"):
            await on.ask(name)

    run(story)
    assert changes(on) == ["open small", "open large", "close large", "open new"]


def test_models_that_leave_are_chosen_again() -> None:
    """Otherwise a model that is idle now and then would let another one go on and leave by turns."""
    on = world(limit=8, x=2, p=2, y=4, new=5)
    x, p, y, new = on.models.values()
    for model in on.models.values():
        model.n_bytes, model.state, model.n_users = on.sizes[model.name], State.LOADED, 1
    p.n_users = 0
    assert models_to_go(new, [x, p, y], on.settings) == [x, y]
    x.state = y.state = State.LEAVING
    p.n_users = 1
    assert models_to_go(new, [x, p, y], on.settings) == [x, y]


def test_unloading_waits_for_no_other_model() -> None:
    """Neither for one that waits for room, nor for one that is loaded; nor does the time of an idle one."""
    on = world(limit=4, idle=24.0, a=1, b=1, c=1, big=4)
    models = on.models

    async def story() -> None:
        await on.ask("c")
        using = asyncio.ensure_future(on.ask("a", 60.0))
        await asyncio.sleep(1.0)
        await on.ask("b", idle_seconds=1000.0)
        waiting = asyncio.ensure_future(on.ask("big"))
        await asyncio.sleep(1.0)
        assert {each.state for each in models.values()} == {State.LEAVING, State.UNLOADED}
        await asyncio.sleep(3.0 + CLOSING)
        assert models["c"].state is State.UNLOADED  # its time has ended
        begin = on.now()
        await on.loader.unload(models["b"])
        assert (on.now() - begin, using.done()) == (CLOSING, False)
        await on.loader.unload(models["a"])  # after the request that uses it
        assert not using.done()
        await asyncio.gather(using, waiting)
        loading = asyncio.ensure_future(on.ask("a"))
        await asyncio.sleep(CLOSING + LOADING / 2)
        assert models["a"].state is State.LOADING
        await on.loader.unload(models["a"])  # after the request that waits for it
        assert not loading.done()
        await loading
        await asyncio.sleep(CLOSING)

    run(story)
    assert changes(on)[-4:] == ["open big", "close big", "open a", "close a"]


def test_a_request_that_gives_up_unloads_nothing() -> None:
    """Models that were to leave stay, and answer the requests that wait for them."""
    on = world(limit=2)
    a = on.models["a"]

    async def story() -> None:
        using = [asyncio.ensure_future(on.ask(name, 50.0)) for name in "ab"]
        giving_up = [asyncio.ensure_future(on.at(25.0 + i, "cd"[i])) for i in range(2)]
        more = asyncio.ensure_future(on.at(28.0, "a"))
        await asyncio.sleep(30.0)
        assert (a.state, a.n_users) == (State.LEAVING, 1)
        for each in reversed(giving_up):
            each.cancel()
        await more
        assert (a.state, a.n_users, using[0].done()) == (State.LOADED, 1, False)
        await asyncio.gather(*using)

    run(story)
    assert changes(on) == ["open a", "open b"]


def test_a_request_that_gives_up_leaves_the_next_one_its_turn() -> None:
    """Once all of the first one has been freed, also if another one gives up meanwhile."""
    on = world()

    async def story() -> None:
        with on.loader.using(on.models["a"]):
            pass
        for second, name in ((LOADING / 2, "a"), (0.1, "b")):
            asking = asyncio.ensure_future(on.ask(name))
            await asyncio.sleep(second)
            asking.cancel()
        await on.at(0.1, "a")

    run(story)
    assert on.events == ["open a", "close a", "open a", "ask a"]


def test_models_load_while_others_are_closed() -> None:
    """A model that is being closed is loaded again afterwards."""
    on = world(limit=None)
    a = on.models["a"]

    async def story() -> None:
        await on.ask("a")
        loading = asyncio.ensure_future(on.ask("b"))
        await asyncio.sleep(1.0)
        begin = on.now()
        await asyncio.gather(on.loader.unload(a), on.loader.unload(a))
        assert (on.now() - begin, loading.done()) == (CLOSING, False)
        await loading
        closing = asyncio.ensure_future(on.loader.unload(on.models["b"]))
        await asyncio.sleep(1.0)
        assert on.taken() == ["b"]
        await asyncio.gather(closing, on.ask("b"))
        assert [model.name for model in on.loader.loaded] == ["b"]

    run(story)
    assert changes(on) == ["open a", "open b", "close a", "close b", "open b"]


def test_a_model_that_fails_leaves_the_next_one_its_turn() -> None:
    on = world(limit=1, idle=1000.0)
    on.faults["b"] = ModelFileError("it is damaged")

    async def story() -> None:
        asked = [asyncio.ensure_future(ignoring(on.at(20.0 + i, "bcb"[i]))) for i in range(3)]
        await on.ask("a", 30.0, idle_seconds=5.0)
        await asyncio.gather(*asked)
        failing = asyncio.ensure_future(on.ask("b"))
        await asyncio.sleep(1.0)
        await on.loader.unload(on.models["b"])
        with pytest.raises(RequestError, match="the server's log says why"):
            await failing
        assert (on.models["b"].state, on.models["b"].idle_seconds) == (State.UNLOADED, 1000.0)

    run(story)
    assert on.events[2:] == ["close a", "open b", "open c", "ask c", "close c", "open b"]


def test_a_server_that_stops_refuses_those_that_wait() -> None:
    on = world(limit=1)

    async def story() -> None:
        running = asyncio.ensure_future(on.ask("a", 30.0))
        waiting = [asyncio.ensure_future(on.at(15.0 + i, "bca"[i])) for i in range(3)]
        await asyncio.sleep(20.0)
        on.loader.stop()
        answers = await asyncio.gather(*waiting, on.ask("c"), return_exceptions=True)
        assert [each.status for each in answers if isinstance(each, RequestError)] == [503] * 4
        await running
        assert on.loader._turn is None

    run(story)
    assert on.events == ["open a", "ask a"]


def test_models_that_stay_and_one_that_never_fits() -> None:
    """It is loaded after all others have left."""
    on = world(limit=4, stays=1, a=1, b=1, huge=9)

    async def story() -> None:
        for name in ("stays", "a", "b", "huge"):
            await on.ask(name)
        await on.loader.unload(on.models["stays"])
        assert on.models["stays"].state is State.LOADED

    run(story)
    assert sorted(event for event in on.events if event[:5] == "close") == ["close a", "close b"]


def test_idle_models_are_unloaded_before_a_draft_is_dropped() -> None:
    """A model in use keeps its memory. The draft is tried again at the next load."""
    on = world(limit=None)
    on.drafts.append("d")
    whole, without = on.models["d"], "d without draft"

    async def story() -> None:
        await on.ask("a")
        assert await on.ask("d") is whole
        await on.loader.unload(on.models["d"])
        using = asyncio.ensure_future(on.ask("a", 100.0))
        await on.at(1.0, "b")
        assert await on.ask("d") == without
        await on.loader.unload(on.models["d"])
        await using
        assert await on.ask("d") is whole

    run(story)
    assert changes(on) == [
        *("open a", "open d", "close a", "open d", "close d"),
        *("open a", "open b", "open d", "close b", "open d", "close d"),
        *("open d", "close a", "open d"),
    ]


def test_all_models_are_closed_although_one_fails() -> None:
    on = world(limit=None)

    async def story() -> None:
        for name in "abc":
            await on.ask(name)

    run(story)

    def fail() -> None:
        raise OSError("the disk is full")

    on.models["b"].resources.callback(fail)
    with pytest.raises(OSError, match="the disk is full"):
        on.loader.close()
    assert sorted(on.events[-3:]) == ["close a", "close b", "close c"]
    on.loader.close()  # nothing is left


@pytest.mark.parametrize("seed", range(25))
def test_random_requests(seed: int) -> None:
    """All end. Memory is never exceeded, no model in use is closed, and nothing is left behind."""
    chance = random.Random(seed)
    sizes = {name: chance.randint(1, 4) for name in "abcdef"}
    on = world(limit=chance.choice((4, 6, 9)), idle=chance.choice((None, 0.0, 7.0)), **sizes)
    on.faults |= {"f": ModelFileError("it is damaged")} if chance.random() < 0.3 else {}

    async def client(name: str) -> None:
        for _ in range(8):
            await asyncio.sleep(chance.choice((0.0, 0.0, 1.0, 20.0)))
            asking = asyncio.ensure_future(
                on.ask(name, chance.choice((0.0, 1.0, 9.0)), chance.choice((None, 0.0, 3.0)))
            )
            if chance.random() < 0.2:
                await asyncio.sleep(chance.choice((0.0, 1.0, LOADING, 30.0)))
                asking.cancel()
            if chance.random() < 0.1:
                await on.loader.unload(on.models[chance.choice("abcdef")])
            begin = on.now()
            await ignoring(cast(Any, asking))
            assert on.now() - begin < 300.0

    async def story() -> None:
        await asyncio.gather(*(client(chance.choice("aabcdef")) for _ in range(12)))
        await asyncio.sleep(100.0)
        assert on.loader._turn is None
        assert on.loader._queue == []
        assert [model.n_users for model in on.models.values()] == [0] * 6

    run(story)
    assert on.most <= cast(int, on.settings.memory_bytes)
