"""Loads and unloads the models of a server: which one is loaded next, and which ones make room for it.

Waiting is first come, first served, across models. The first model in the queue has its turn: it chooses the
models that must go, idle ones first, the least recently used of them first. A chosen model that is in use is
*leaving*: its running requests finish, and new ones wait for its next turn, so a model that is used all the
time keeps no other one out. A model that need not go after all continues at once. Models load one at a time;
each is closed as soon as nobody needs it, also while another one waits or loads. All decisions are made in
the event loop; models are opened and closed in threads. tests/serve/test_loader.py.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from llamaspec.errors import LlamaspecError, MemoryFullError, ModelFileError
from llamaspec.llama.resources import give_back_memory
from llamaspec.llama.weights import LoadProgress
from llamaspec.serve import ServeSettings
from llamaspec.serve.http_errors import RequestError, as_request_error
from llamaspec.serve.log import ServerLog
from llamaspec.serve.request_queue import server_stopping
from llamaspec.serve.served_model import FOREVER, AnyService, ServedModel, State, Use

T = TypeVar("T")
# Opens a model as `ModelSource.open` does; what must be closed later is in its `resources` afterwards.
Open = Callable[[ServedModel, LoadProgress, bool], AnyService]


class LoadCancelledError(Exception):
    """Nobody waits for the model any more."""


class Loader:
    """Decides which models are loaded. Belongs to one asyncio event loop, except `open_now` and `close`."""

    def __init__(
        self,
        settings: ServeSettings,
        log: ServerLog,
        open_model: Open,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._log, self._open_model, self._clock = settings, log, open_model, clock
        self._present: list[ServedModel] = []  # models that take memory, the longest loaded first
        self._queue: list[ServedModel] = []  # models that requests wait for, in the order of their turns
        self._turn: asyncio.Task[None] | None = None  # makes room for the first of them, and loads it
        self._first: ServedModel | None = None  # whose turn it is, unless nobody waits for it any more
        self._changed = asyncio.Event()  # set when there may be more room than before
        self._is_stopping = False
        self._opening = ThreadPoolExecutor(1, thread_name_prefix="llamaspec-load")
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="llamaspec-unload")

    @property
    def loaded(self) -> list[ServedModel]:
        """The loaded models, the most recently used first."""
        found = [model for model in self._present if model.service is not None]
        return sorted(found, key=lambda model: -model.last_used)

    @property
    def usual_seconds(self) -> float:
        """For how long a model that nobody uses stays loaded if no request says otherwise."""
        return FOREVER if self._settings.idle_seconds is None else self._settings.idle_seconds

    # Using a model.

    @contextmanager
    def using(self, model: ServedModel, idle_seconds: float | None = None) -> Iterator[Use]:
        """Load a model if necessary, and keep it from being unloaded during the block; see `Use.service`.

        Afterwards it stays loaded for `idle_seconds`; None = as long as before.
        """
        use = Use(model, idle_seconds)
        if model.state is State.LOADED:
            self._admit(use)
        elif self._is_stopping:
            use.refuse(server_stopping())
        else:
            self._enqueue(use)
        try:
            yield use
        finally:
            if use.is_admitted:
                model.n_users -= 1
                model.last_used = self._clock()
                self._start_clock(model)
                self._changed.set()
            else:
                self._give_up(use)

    def _enqueue(self, use: Use) -> None:
        """Let a request wait until its model is loaded."""
        use.model.waiting.append(use)
        if use.model not in self._queue:
            self._queue.append(use.model)
        self._start_turn()

    def _admit(self, use: Use) -> None:
        """Let a request use its model, which is loaded."""
        model = use.model
        use.is_admitted = True
        model.n_users += 1
        if use.idle_seconds is not None:
            model.idle_seconds = use.idle_seconds
        _stop_clock(model)
        use.answered.set()

    def _give_up(self, use: Use) -> None:
        """Let a request wait no longer. If it was the only one, its model does not need its turn."""
        model = use.model
        if use in model.waiting:  # otherwise it has its answer
            model.waiting.remove(use)
            if not model.waiting:
                self._queue.remove(model)
                self._cancel_turn(model)

    # Unloading.

    async def unload(self, model: ServedModel) -> None:
        """Unload a model now; if requests use it or wait for it, after them."""
        if model.n_users or model.waiting:
            model.idle_seconds = 0.0
        elif model.service is not None and not model.source.stays:
            self._close(model)
        if model.closing is not None:
            await asyncio.wait({model.closing})

    def start_clocks(self) -> None:
        """Let the time of models run that were opened before the event loop."""
        for model in self._present:
            self._start_clock(model)

    def _start_clock(self, model: ServedModel) -> None:
        """If nobody uses a model, unload it after its time."""
        if not model.n_users and model.idle_seconds < FOREVER and not model.source.stays:
            loop = asyncio.get_running_loop()
            model.expiry = loop.call_later(model.idle_seconds, self._close, model)

    def _close(self, model: ServedModel) -> None:
        """Begin to unload a model that no request uses."""
        _stop_clock(model)
        model.state, model.service, model.idle_seconds = State.CLOSING, None, self.usual_seconds
        model.closing = asyncio.ensure_future(self._closed(model))

    async def _closed(self, model: ServedModel) -> None:
        try:
            await _in(self._closing, lambda: _free(model.resources))
        except Exception as error:  # noqa: BLE001  # the request that needs its memory is not at fault
            self._log.fault(error)
        self._log.line(f"unloaded {model.name}")
        model.state, model.closing = State.UNLOADED, None
        self._present.remove(model)
        self._changed.set()

    # The turn of a model.

    def _start_turn(self) -> None:
        if self._turn is None and self._queue:
            self._first = self._queue[0]
            self._turn = asyncio.ensure_future(self._take_turn(self._first))
            self._turn.add_done_callback(self._end_turn)

    def _end_turn(self, _: asyncio.Task[None]) -> None:
        self._turn = self._first = None
        self._choose(())
        self._start_turn()

    def _cancel_turn(self, model: ServedModel) -> None:
        """End the turn of a model, if it has it. The next one begins when nothing of this one is left."""
        if self._turn is not None and self._first is model:
            self._turn.cancel()
            self._first = None

    async def _take_turn(self, model: ServedModel) -> None:
        """Make room for a model and load it; answer the requests that wait for it."""
        try:
            await self._load(model)
        except LlamaspecError as error:
            self._log.line(f"cannot load {model.name}: {error}")
            # The reason names files of this machine, which are not for clients.
            is_file, told = isinstance(error, ModelFileError), as_request_error(error).message
            message = f"{model.name} cannot be loaded: {told}"
            self._answer(model, RequestError(400 if is_file else 500, message, code="model_not_loaded"))
        except Exception as error:  # noqa: BLE001  # its requests get the error; others have their turn
            self._answer(model, error)
        else:
            self._answer(model)

    def _answer(self, model: ServedModel, error: Exception | None = None) -> None:
        """End the waiting of a model's requests: it is loaded, or there is an error."""
        if model in self._queue:
            self._queue.remove(model)
        for use in model.waiting:
            if error is None:
                self._admit(use)
            else:
                use.refuse(error)
        model.waiting.clear()

    def _choose(self, to_go: Sequence[ServedModel]) -> None:
        """Let these models leave. Others that were leaving stay, and take the requests that wait for them."""
        for model in self._present:
            if model.state is State.LOADED and model in to_go:
                model.state = State.LEAVING
            elif model.state is State.LEAVING and model not in to_go:
                model.state = State.LOADED
                self._answer(model)

    async def _load(self, model: ServedModel) -> None:
        if model.closing is not None:
            await asyncio.wait({model.closing})
        model.n_bytes = await _in(self._opening, model.source.needed_bytes)
        await self._make_room(model)
        begin = self._clock()
        self._log.line(f"loading {model.name}")
        model.state = State.LOADING
        self._present.append(model)
        try:
            model.service = await self._opened(model)
        except BaseException:
            self._present.remove(model)
            model.state, model.idle_seconds = State.UNLOADED, self.usual_seconds
            raise
        model.state = State.LOADED
        self._log.line(f"loaded {model.name} in {self._clock() - begin:.1f} s")

    async def _make_room(self, model: ServedModel) -> None:
        """Unload models until there is room for another one, after the requests that use them."""
        is_told = False
        while True:
            self._changed.clear()
            to_go = models_to_go(model, self._present, self._settings)
            self._choose(to_go)
            if not to_go:
                return
            in_use = [each.name for each in to_go if each.n_users]
            if not in_use:
                for each in to_go:
                    if each.closing is None:
                        self._close(each)
            elif not is_told:
                is_told = True
                self._log.line(f"{model.name} waits until {', '.join(in_use)} can be unloaded")
            await self._changed.wait()

    async def _opened(self, model: ServedModel) -> AnyService:
        """Open a model. Without memory, unload idle ones first; only then may a default draft be left out."""
        while True:
            keeps_draft = bool(self._idle())
            try:
                return await self._open(model, keeps_draft=keeps_draft)
            except MemoryFullError:
                if not keeps_draft:
                    raise
            for idle in self._idle()[:1]:
                if idle.closing is None:
                    self._close(idle)
                assert idle.closing is not None
                await asyncio.wait({idle.closing})

    def _idle(self) -> list[ServedModel]:
        """Return the models that are being closed, and those that may be, the least recently used first."""
        idle = (each for each in self._present if each.state is not State.LOADING and not each.n_users)
        return sorted((each for each in idle if not each.source.stays), key=_reluctance)

    async def _open(self, model: ServedModel, *, keeps_draft: bool) -> AnyService:
        """Open a model in the thread. If this coroutine is cancelled, end the loading and free its memory."""
        is_cancelled = threading.Event()

        def on_load(_: float) -> None:
            if is_cancelled.is_set():
                raise LoadCancelledError

        def open_model() -> AnyService:
            return self._open_model(model, on_load, keeps_draft)

        opening = _in(self._opening, open_model)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            is_cancelled.set()
            self._log.line(f"nobody waits for {model.name} any more")
            with suppress(LoadCancelledError, LlamaspecError):
                await opening
                await _in(self._opening, lambda: _free(model.resources))
            raise

    # The start and the end of the server.

    def open_now(self, model: ServedModel) -> AnyService:
        """Open a model before the server starts, in this thread; raises what opening it raises."""
        model.last_used = self._clock()
        model.service = self._open_model(model, lambda _: None, False)
        model.state = State.LOADED
        self._present.append(model)
        return model.service

    def stop(self) -> None:
        """Refuse the requests that wait for a model, and new ones for models that are not loaded."""
        self._is_stopping = True
        for model in self._queue.copy():
            self._cancel_turn(model)
            self._answer(model, server_stopping())

    def close(self) -> None:
        """Free all models, also if one of them fails to close. Call it when the event loop has ended."""
        self._opening.shutdown()
        self._closing.shutdown()
        with ExitStack() as closing:
            for model in self._present:
                model.service = None
                closing.callback(model.resources.close)
            self._present.clear()


def models_to_go(
    model: ServedModel, present: Sequence[ServedModel], settings: ServeSettings
) -> list[ServedModel]:
    """Return the models that must be unloaded before another one is loaded. If it never fits, all must.

    First come those that are being closed; then idle ones, the least recently used first; then those that are
    leaving already; then others, the longest loaded first. None of them is needless.
    """
    most, limit = settings.max_models, settings.memory_bytes

    def fits(without: Sequence[ServedModel]) -> bool:
        left = [each for each in present if each not in without]
        return (most is None or len(left) < most) and (
            limit is None or not left or model.n_bytes + sum(each.n_bytes for each in left) <= limit
        )

    to_go: list[ServedModel] = []
    candidates = sorted((each for each in present if not each.source.stays), key=_reluctance)
    for each in candidates:
        if fits(to_go):
            break
        to_go.append(each)
    for each in to_go.copy():  # a later one may be so large that an earlier one can stay
        if fits(others := [other for other in to_go if other is not each]):
            to_go = others
    return to_go


def _reluctance(model: ServedModel) -> tuple[int, float]:
    if model.state is State.CLOSING:
        return 0, 0.0
    if not model.n_users:
        return 1, model.last_used
    return (2 if model.state is State.LEAVING else 3), 0.0


def _in(thread: ThreadPoolExecutor, function: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(thread, function)


def _free(resources: ExitStack) -> None:
    """Close a model, and give its memory back to the system."""
    resources.close()
    gc.collect()
    give_back_memory()


def _stop_clock(model: ServedModel) -> None:
    """Let the time of a model no longer run."""
    if model.expiry is not None:
        model.expiry.cancel()
        model.expiry = None
