"""The models of a server: which there are, under which names, and what they share.

A model is loaded when a request names it. It is unloaded when nobody has used it for a while, or when another
one needs its memory; `Loader` decides that. tests/serve/test_models.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from functools import partial

from llamaspec.errors import LlamaspecError
from llamaspec.llama.file_facts import OFFERED, Kind
from llamaspec.llama.weights import LoadProgress
from llamaspec.model_names import choices, matching
from llamaspec.serve import ServeSettings
from llamaspec.serve.embedding_service import EmbeddingService
from llamaspec.serve.http_errors import RequestError
from llamaspec.serve.loader import Loader
from llamaspec.serve.log import ServerLog, Write
from llamaspec.serve.metrics import Metrics, ModelMetrics
from llamaspec.serve.request_queue import RequestQueue
from llamaspec.serve.served_model import AnyService, ModelSource, ServedModel, Status
from llamaspec.serve.service import OpenModel, Service

OnPull = Callable[[str, int, int], object]  # receives a file, its bytes that have arrived, and all of them
Pull = Callable[[str, OnPull], None]  # downloads the model of a name
MAX_NAMES = 8  # in a message
SCAN_SECONDS = 1.0  # between two looks for new models


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
        self.loader = Loader(settings, self.log, self._open)
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
        return self.loader.loaded

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

    async def find(self, name: str | None, kinds: Set[Kind] = OFFERED) -> ServedModel:
        """Return the model of a name; without a name the last used or the only one of some kinds.

        Raises a RequestError: there is no such model (404), or a name is needed (400).
        """
        if name and not self.any_name:
            return await self.named(name)
        model = await self._current(partial(self._last_used, kinds))
        if model is None:
            raise RequestError(
                400, f"is missing; {choices('', self._names(kinds) or self._names(OFFERED))}", field="model"
            )
        return model

    async def named(self, name: str) -> ServedModel:
        """Return the model of a name.

        RequestError: there is none (404), or its file generates no text (400).
        """
        model = await self._current(lambda: self._match(name))
        if model is not None:
            return model
        refused = [source for source in self._sources if source.refusal is not None]
        for i in matching(name, [(source.name, *source.aliases) for source in refused])[:1]:
            message = f"{refused[i].name} {refused[i].refusal}"
            raise RequestError(400, message, field="model", code="model_not_usable")
        message = f"not found; {choices(name, list(self._models))}"
        if several := self._matching(name):
            message = f"means several models: {', '.join(each.name for each in several)}; name one of them"
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

    def check_kind(self, model: ServedModel, kinds: Set[Kind]) -> None:
        """Raise a RequestError (400) unless a model is of one of the kinds that a request needs."""
        if model.kind in kinds:
            return
        wanted = " or ".join(sorted(kind.value for kind in kinds))
        remedy = "this server has none; offer one with --target or --models-dir"
        if names := self._names(kinds):
            remedy = f"use {', '.join(names[:MAX_NAMES])}"
        message = f"{model.name} is {model.kind.value}, but this needs {wanted}: {remedy}"
        raise RequestError(400, message, field="model", code="model_not_usable")

    def _names(self, kinds: Set[Kind]) -> list[str]:
        return [model.name for model in self.all if model.kind in kinds]

    def _last_used(self, kinds: Set[Kind]) -> ServedModel | None:
        """Return the last model of some kinds that was used, or the only one; of any, if none is of them."""
        fitting = [model for model in self.all if model.kind in kinds] or self.all
        used = [model for model in fitting if model.last_used]
        known = used or (fitting if len(fitting) == 1 else [])
        return max(known, key=lambda model: model.last_used, default=None)

    def _match(self, name: str) -> ServedModel | None:
        found = self._matching(name)
        return found[0] if len(found) == 1 else None

    def _matching(self, name: str) -> list[ServedModel]:
        """Return the models that a name may mean."""
        found = matching(name, [(model.name, *model.source.aliases) for model in self.all])
        return [self.all[i] for i in found]

    def _take(self) -> None:
        """Take over what the last look has found: new models, and new sources of those that are not loaded.

        Models that are gone leave the list once they are unloaded.
        """
        sources = {source.name: source for source in self._sources if source.refusal is None}
        for model in self.all:
            if model.status is Status.UNLOADED and model.name not in sources:
                del self._models[model.name]
        for name, source in sources.items():
            known = self._models.get(name)
            if known is None:
                self._models[name] = ServedModel(source, int(time.time()), self.loader.usual_seconds)
            elif known.status is Status.UNLOADED:
                known.source = source

    # Loading.

    def _open(self, model: ServedModel, on_load: LoadProgress, keeps_draft: bool) -> AnyService:
        """Open a model in the current thread."""
        metrics = ModelMetrics(self.metrics, model.name)
        with ExitStack() as resources:
            opened = resources.enter_context(model.source.open(on_load, keeps_draft))
            service: AnyService
            if isinstance(opened, OpenModel):
                service = Service(model.name, opened, self.queue, metrics, self.settings, self.log)
            else:
                service = EmbeddingService(model.name, opened, self.queue, metrics, self.settings)
                resources.callback(service.close)
            model.resources = resources.pop_all()
        return service

    # The start and the end of the server.

    def open_now(self) -> AnyService:
        """Open the only model before the server starts, in this thread; raises what opening it raises."""
        (model,) = self._models.values()
        return self.loader.open_now(model)

    def stop(self) -> None:
        """Refuse new requests, and those that wait to run or for a model; running ones continue."""
        self.queue.stop()
        self.loader.stop()

    def end(self) -> None:
        """Refuse all requests and end running ones."""
        self.stop()
        self.queue.end()

    def close(self) -> None:
        """Free all models. Call it when the event loop has ended."""
        self.queue.end()
        self.loader.close()
