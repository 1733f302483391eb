"""The models of a server: which there are, under which names, and what they share.

A model is loaded when a request names it. It is unloaded when nobody has used it for a while, or when another
one needs its memory; `Loader` decides that. tests/serve/test_models.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from llamaspec.errors import LlamaspecError
from llamaspec.llama.weights import LoadProgress
from llamaspec.serve import ServeSettings
from llamaspec.serve.http_errors import RequestError
from llamaspec.serve.loader import Loader
from llamaspec.serve.log import ServerLog, Write
from llamaspec.serve.metrics import Metrics, ModelMetrics
from llamaspec.serve.model_names import matching
from llamaspec.serve.request_queue import RequestQueue
from llamaspec.serve.served_model import ModelSource, ServedModel, Status
from llamaspec.serve.service import Service

OnPull = Callable[[str, int, int], object]  # receives a file, its bytes that have arrived, and all of them
Pull = Callable[[str, OnPull], None]  # downloads the model of a name
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
        self._scanned_at = -math.inf
        self.loader = Loader(settings, self.log, self._open)
        self._take(find_sources())

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
        """Look for new models, and return all."""
        if time.monotonic() - self._scanned_at >= SCAN_SECONDS:
            self._scanned_at = time.monotonic()
            try:
                self._take(await asyncio.to_thread(self._find_sources))
            except LlamaspecError as error:
                self.log.line(f"cannot look for new models: {error}")
        return self.all

    async def find(self, name: str | None) -> ServedModel:
        """Return the model of a name; without a name the last used or the only one.

        Raises a RequestError: there is no such model (404), or a name is needed (400).
        """
        if name and not self.any_name:
            return await self.named(name)
        known = [model for model in self.all if model.last_used] or self.all or await self.listed()
        if known and (len(known) == 1 or known[0].last_used):
            return max(known, key=lambda model: model.last_used)
        raise RequestError(400, f"is missing; {self._choices}", field="model")

    async def named(self, name: str) -> ServedModel:
        """Return the model of a name; RequestError (404) if there is none."""
        model = self._match(name)
        if model is None:
            await self.listed()
            model = self._match(name)
        if model is None:
            raise RequestError(404, f"not found; {self._choices}", field="model", code="model_not_found")
        return model

    @property
    def _choices(self) -> str:
        return f"this server has {', '.join(self._models) or 'no models'}"

    def _match(self, name: str) -> ServedModel | None:
        found = matching(name, [(model.name, *model.source.aliases) for model in self._models.values()])
        return None if found is None else self.all[found]

    def _take(self, sources: Sequence[ModelSource]) -> None:
        """Add new models. Those that are gone leave the list once they are unloaded."""
        names = {source.name for source in sources}
        for model in self.all:
            if model.name not in names and model.status is Status.UNLOADED:
                del self._models[model.name]
        for source in sources:
            if source.name not in self._models:
                self._models[source.name] = ServedModel(source, int(time.time()), self.loader.usual_seconds)

    # Loading.

    def _open(self, model: ServedModel, on_load: LoadProgress, keeps_draft: bool) -> Service:
        """Open a model in the current thread."""
        metrics = ModelMetrics(self.metrics, model.name)
        with ExitStack() as resources:
            opened = resources.enter_context(model.source.open(on_load, keeps_draft))
            service = Service(model.name, opened, self.queue, metrics, self.settings, self.log)
            model.resources = resources.pop_all()
        return service

    # The start and the end of the server.

    def open_now(self) -> Service:
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
