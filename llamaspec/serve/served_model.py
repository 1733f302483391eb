"""A model that a server offers: where it comes from, and its state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from llamaspec.chat.template import ChatTemplate
from llamaspec.embedder import Embedder
from llamaspec.llama.file_facts import Kind
from llamaspec.llama.weights import LoadProgress
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.serve.embedding_service import EmbeddingService
from llamaspec.serve.service import OpenModel, Service

AnyService: TypeAlias = Service | EmbeddingService
# As Ollama names what a model can do.
KIND_NAMES = {Kind.TEXT: "completion", Kind.EMBEDDING: "embedding", Kind.RANKING: "rerank"}
FOREVER = math.inf  # seconds for which a model stays loaded


@dataclass(frozen=True, slots=True, eq=False)
class ModelSource:
    """A model that a server offers, and how to load it. Its functions are called outside the event loop."""

    name: str
    path: Path  # of the target's file
    # With `keeps_draft`, MemoryFullError if there is no room for a draft that nobody asked for.
    open: Callable[[LoadProgress, bool], AbstractContextManager[OpenModel | Embedder]]
    needed_bytes: Callable[[], int] = lambda: 0  # an estimate of the memory that it takes once loaded
    aliases: tuple[str, ...] = ()  # other names that requests may use
    stays: bool = False  # loaded when the server starts, and never unloaded
    beside: Path | None = None  # a file that drafts for it by default if no draft is known
    refusal: str | None = None  # why its file cannot be offered, as a predicate
    kind: Kind = Kind.TEXT


def open_source(
    pair: Pair, policy: LengthPolicy, template: ChatTemplate | None, name: str | None = None
) -> ModelSource:
    """Return a model that is loaded already; its caller closes it. Its default name is that of its file."""
    opened = OpenModel(pair, policy, template)
    path = pair.target.path
    return ModelSource(name or path.stem, path, lambda *_: nullcontext(opened), stays=True)


class Status(Enum):
    """What lists say about a model; the values are those of llama-server."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"


class State(Enum):
    """The state of a model, which only the `Loader` changes. In all but the first, it takes memory."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"  # loaded; running requests finish, new ones wait, because another needs its memory
    CLOSING = "closing"


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model of the server, loaded or not."""

    source: ModelSource
    created: int  # Unix seconds: when the server found it
    idle_seconds: float  # after which it is unloaded
    state: State = State.UNLOADED
    service: AnyService | None = None  # None while it is not loaded
    waiting: list[Use] = field(default_factory=list)  # for it to be loaded
    n_users: int = 0  # requests that use it
    last_used: float = 0.0  # seconds of the loader's clock
    n_bytes: int = 0  # of memory that it takes while loaded
    expiry: asyncio.TimerHandle | None = None
    closing: asyncio.Task[None] | None = None
    resources: ExitStack = field(default_factory=ExitStack)  # what is closed when it is unloaded

    @property
    def name(self) -> str:
        """Its name in lists and responses."""
        return self.source.name

    @property
    def kind(self) -> Kind:
        """What it is for."""
        return self.source.kind

    @property
    def status(self) -> Status:
        """Whether it is loaded."""
        if self.service is not None:
            return Status.LOADED
        return Status.LOADING if self.waiting or self.state is State.LOADING else Status.UNLOADED

    @property
    def seconds_left(self) -> float:
        """Seconds until it is unloaded if nobody uses it meanwhile; may be infinite."""
        if self.source.stays or self.n_users or self.expiry is None:
            return FOREVER if self.source.stays else self.idle_seconds
        return self.expiry.when() - asyncio.get_running_loop().time()


@dataclass(slots=True, eq=False)
class Use:
    """A request that uses a model, or waits until it is loaded."""

    model: ServedModel
    idle_seconds: float | None  # for which the model stays loaded afterwards; None = as long as before
    is_admitted: bool = False  # whether it uses the model
    error: Exception | None = None  # why it cannot
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # set when one of these is known

    def refuse(self, error: Exception) -> None:
        """Let the request fail."""
        self.error = error
        self.answered.set()

    async def service(self) -> AnyService:
        """Return the service of the model once it is loaded. Call it in the block that uses the model.

        Raises a RequestError: the model cannot be loaded (500), or the server is stopping (503).
        """
        await self.answered.wait()
        if self.error is not None:
            raise self.error
        assert self.model.service is not None
        return self.model.service
