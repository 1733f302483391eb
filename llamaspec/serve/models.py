"""The models of a server: which there are, which are loaded, and which of them make room for others.

A model is loaded when a request names it. It is unloaded when nobody has used it for a while, or when another
one needs its memory: the least recently used first, never one that a request uses. Models are loaded and
closed one at a time, in a thread of their own, so that requests to other models continue. All of this class
runs in the event loop. tests/serve/test_models.py.
"""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from llamaspec.errors import LlamaspecError, MemoryFullError, ModelFileError
from llamaspec.llama.resources import give_back_memory
from llamaspec.llama.weights import LoadProgress
from llamaspec.serve import ServeSettings
from llamaspec.serve.http_errors import RequestError, as_request_error
from llamaspec.serve.log import ServerLog, Write
from llamaspec.serve.metrics import Metrics, ModelMetrics
from llamaspec.serve.model_names import choices, matching
from llamaspec.serve.request_queue import RequestQueue, server_stopping
from llamaspec.serve.served_model import FOREVER, ModelSource, ServedModel, Status
from llamaspec.serve.service import Service

T = TypeVar("T")
OnPull = Callable[[str, int, int], object]  # receives a file, its bytes that have arrived, and all of them
Pull = Callable[[str, OnPull], None]  # downloads the model of a name
SCAN_SECONDS = 1.0  # between two looks for new models


class LoadCancelledError(Exception):
    """Nobody waits for the model any more."""


class Models:
    """The models of a server. Belongs to one asyncio event loop, except `open_now` and `close`.

    `find_sources` returns the models at hand. With `any_name`, there is one model, and it answers requests
    that name another one, too. Without `pull`, clients cannot download models.
    """

    def __init__(
        self,
        find_sources: Callable[[], Sequence[ModelSource]],
        settings: ServeSettings,
        write: Write,
        *,
        any_name: bool = False,
        pull: Pull | None = None,
    ) -> None:
        self.settings, self.log = settings, ServerLog(write, settings.log_format)
        self.queue = RequestQueue(settings.parallel, settings.max_queue)
        self.metrics = Metrics()
        self._find_sources, self.any_name, self.pull = find_sources, any_name, pull
        self._models: dict[str, ServedModel] = {}
        self._sources: Sequence[ModelSource] = ()  # those of the last look
        self._scan: asyncio.Task[None] | None = None
        self._scanned_at = -math.inf
        self._lock = asyncio.Lock()  # held while a model is loaded or unloaded
        self._released = asyncio.Event()  # set when a request has ended
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llamaspec-load")
        self._tasks: set[asyncio.Task[Any]] = set()  # unloading; a reference keeps a task alive
        self._sources = find_sources()
        self._take()

    # Which models there are.

    @property
    def all(self) -> list[ServedModel]:
        """All models that are known."""
        return list(self._models.values())

    @property
    def loaded(self) -> list[ServedModel]:
        """The loaded models, the most recently used first."""
        found = [model for model in self._models.values() if model.service is not None]
        return sorted(found, key=lambda model: -model.last_used)

    async def listed(self) -> list[ServedModel]:
        """Look for new models, and return all. Requests at the same time wait for the same look."""
        if self._scan is None and time.monotonic() - self._scanned_at >= SCAN_SECONDS:
            self._scan = asyncio.ensure_future(self._look())
        if self._scan is not None:
            await asyncio.shield(self._scan)
        self._take()  # a model may have been unloaded since the last look
        return self.all

    async def _look(self) -> None:
        try:
            self._sources = await asyncio.to_thread(self._find_sources)
        except LlamaspecError as error:
            self.log.line(f"cannot look for new models: {error}")
        finally:
            self._scanned_at, self._scan = time.monotonic(), None

    async def find(self, name: str | None) -> ServedModel:
        """Return the model of a name; without a name the last used or the only one.

        Raises a RequestError: there is no such model (404), or a name is needed (400).
        """
        if name and not self.any_name:
            return await self.named(name)
        model = await self._current(self._last_used)
        if model is None:
            raise RequestError(400, f"is missing; {choices('', list(self._models))}", field="model")
        return model

    async def named(self, name: str) -> ServedModel:
        """Return the model of a name.

        RequestError: there is none (404), or its file generates no text (400).
        """
        model = await self._current(lambda: self._match(name))
        if model is not None:
            return model
        refused = [source for source in self._sources if source.refusal is not None]
        found = matching(name, [(source.name, *source.aliases) for source in refused])
        if found is not None:
            message = f"{refused[found].name} {refused[found].refusal}"
            raise RequestError(400, message, field="model", code="model_not_usable")
        message = f"not found; {choices(name, list(self._models))}"
        raise RequestError(404, message, field="model", code="model_not_found")

    async def _current(self, chosen: Callable[[], ServedModel | None]) -> ServedModel | None:
        """Return the model that is chosen; look for new ones first if there is none, or if it is not loaded.

        The file of a model that is not loaded may have moved, or its draft may have arrived.
        """
        model = chosen()
        if model is None or model.status is Status.UNLOADED:
            await self.listed()
            model = chosen()
        return model

    def _last_used(self) -> ServedModel | None:
        """Return the last model that was used, or the only one."""
        used = [model for model in self.all if model.last_used]
        known = used or (self.all if len(self.all) == 1 else [])
        return max(known, key=lambda model: model.last_used, default=None)

    def _match(self, name: str) -> ServedModel | None:
        found = matching(name, [(model.name, *model.source.aliases) for model in self._models.values()])
        return None if found is None else self.all[found]

    def _take(self) -> None:
        """Take over what the last look has found: new models, and new sources of those that are not loaded.

        Models that are gone leave the list once they are unloaded.
        """
        sources = {source.name: source for source in self._sources if source.refusal is None}
        for model in self.all:
            if model.status is Status.UNLOADED and model.name not in sources and not model.n_users:
                del self._models[model.name]
        for name, source in sources.items():
            known = self._models.get(name)
            if known is None:
                self._models[name] = ServedModel(source, int(time.time()), self._usual_seconds)
            elif known.status is Status.UNLOADED:
                known.source = source

    @property
    def _usual_seconds(self) -> float:
        return FOREVER if self.settings.idle_seconds is None else self.settings.idle_seconds

    # Using a model.

    @contextmanager
    def using(self, model: ServedModel, idle_seconds: float | None = None) -> Iterator[None]:
        """Keep a model from being unloaded during the block.

        If it is loaded afterwards, it stays so for `idle_seconds`; None = as long as before.
        """
        model.n_users += 1
        if idle_seconds is not None:
            model.idle_seconds = idle_seconds
        _stop_clock(model)
        try:
            yield
        finally:
            model.n_users -= 1
            model.last_used = time.monotonic()
            if not model.n_users:
                self._rest(model)

    def _rest(self, model: ServedModel) -> None:
        """Nobody uses a model now: end its loading, or let its time run."""
        self._released.set()
        if model.loading is not None:
            model.loading.cancel()
            model.loading = None
        elif model.service is not None and model.idle_seconds < FOREVER and not model.source.stays:
            loop = asyncio.get_running_loop()
            model.expiry = loop.call_later(model.idle_seconds, self._expire, model)

    def _expire(self, model: ServedModel) -> None:
        task = asyncio.ensure_future(self._unload_idle(model, model.expiry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def load(self, model: ServedModel) -> Service:
        """Return the service of a model, which is loaded first if necessary. Call it while using the model.

        Raises a RequestError: the model's file cannot be used (400), the model cannot be loaded (500), or the
        server is stopping (503).
        """
        if model.service is not None:
            return model.service
        if self.queue.is_stopping:
            raise server_stopping()
        if model.loading is None:
            model.loading = asyncio.ensure_future(self._load(model))
        loading = model.loading
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if loading.cancelled() and self.queue.is_stopping:
                raise server_stopping() from None
            raise

    async def unload(self, model: ServedModel) -> bool:
        """Unload a model, after the requests that use it; return whether it is unloaded now."""
        if model.n_users:
            model.idle_seconds = 0.0  # as soon as they have ended
        return await self._unload_idle(model)

    async def _unload_idle(self, model: ServedModel, expiry: asyncio.TimerHandle | None = None) -> bool:
        """Unload a model that nobody uses. If its time has expired, it must not have been used since then."""
        async with self._lock:
            is_used_again = expiry is not None and model.expiry is not expiry
            if model.n_users or model.source.stays or is_used_again:
                return False
            await self._close(model)
            return True

    async def _load(self, model: ServedModel) -> Service:
        try:
            async with self._lock:
                begin = time.monotonic()
                model.service = await self._open(model)
                self.log.line(f"loaded {model.name} in {time.monotonic() - begin:.1f} s")
                return model.service
        except LlamaspecError as error:
            self.log.line(f"cannot load {model.name}: {error}")
            # The reason names files of this machine, which are not for clients.
            is_file, told = isinstance(error, ModelFileError), as_request_error(error).message
            message = f"{model.name} cannot be loaded: {told}"
            raise RequestError(400 if is_file else 500, message, code="model_not_loaded") from error
        finally:
            if model.loading is asyncio.current_task():
                model.loading = None

    async def _open(self, model: ServedModel) -> Service:
        """Make room for a model and open it; raises what opening it raises."""
        model.n_bytes = await self._in_thread(model.source.needed_bytes)
        await self._make_room(model)
        self.log.line(f"loading {model.name}")
        while True:
            try:
                return await self._opened(model)
            except MemoryFullError:  # noqa: PERF203  # a loop of attempts
                if (oldest := self._oldest_idle()) is None:
                    raise
                await self._close(oldest)

    async def _opened(self, model: ServedModel) -> Service:
        """Open a model in the thread. If this coroutine is cancelled, end the loading and free its memory."""
        is_cancelled = threading.Event()

        def on_load(_: float) -> None:
            if is_cancelled.is_set():
                raise LoadCancelledError

        opening = asyncio.ensure_future(self._in_thread(lambda: self._open_here(model, on_load)))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            is_cancelled.set()
            self.log.line(f"nobody waits for {model.name} any more")
            with suppress(LoadCancelledError, LlamaspecError):
                await opening
                await self._in_thread(lambda: _free(model.resources))
            raise

    async def _make_room(self, model: ServedModel) -> None:
        """Unload models until there is room for another one; if requests use all of them, wait."""
        most, limit = self.settings.max_models, self.settings.memory_bytes
        while self.loaded and (
            (most is not None and len(self.loaded) >= most)
            or (limit is not None and model.n_bytes + sum(each.n_bytes for each in self.loaded) > limit)
        ):
            self._released.clear()
            if (oldest := self._oldest_idle()) is not None:
                await self._close(oldest)
            elif all(each.source.stays for each in self.loaded):
                return
            else:
                self.log.line(f"{model.name} waits until another model can be unloaded")
                await self._released.wait()

    def _oldest_idle(self) -> ServedModel | None:
        """Return the least recently used model that may be unloaded."""
        idle = [model for model in self.loaded if not (model.n_users or model.source.stays)]
        return idle[-1] if idle else None

    async def _close(self, model: ServedModel) -> None:
        """Unload a model that no request uses."""
        _stop_clock(model)
        if model.service is None:
            return
        model.service, model.idle_seconds = None, self._usual_seconds
        # Shielded: a model must not be half closed because the request that needs its memory has ended.
        try:
            await asyncio.shield(asyncio.ensure_future(self._in_thread(lambda: _free(model.resources))))
        except Exception as error:  # noqa: BLE001  # the request that needs its memory is not at fault
            self.log.fault(error)
        self.log.line(f"unloaded {model.name}")

    def _open_here(self, model: ServedModel, on_load: LoadProgress) -> Service:
        """Open a model in the current thread."""
        metrics = ModelMetrics(self.metrics, model.name)
        with ExitStack() as resources:
            opened = resources.enter_context(model.source.open(on_load))
            service = Service(model.name, opened, self.queue, metrics, self.settings, self.log)
            model.resources = resources.pop_all()
        return service

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    # The start and the end of the server.

    def open_now(self) -> Service:
        """Open the only model before the server starts, in this thread; raises what opening it raises."""
        (model,) = self._models.values()
        model.last_used = time.monotonic()
        model.service = self._open_here(model, lambda _: None)
        return model.service

    def stop(self) -> None:
        """Refuse new requests, and those that wait to run or for a model; running ones continue."""
        self.queue.stop()
        for model in self._models.values():
            if model.loading is not None:
                model.loading.cancel()

    def end(self) -> None:
        """Refuse all requests and end running ones."""
        self.stop()
        self.queue.end()

    def close(self) -> None:
        """Free all models. Call it when the event loop has ended."""
        self.queue.end()
        self._thread.shutdown()
        for model in self.loaded:
            model.service = None
            model.resources.close()


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
