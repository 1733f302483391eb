"""How a server opens an embedding model or a reranker, and what that needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from llamaspec.catalog import locate_model
from llamaspec.cli.model_options import ALMOST, ModelChoice, fetched_model
from llamaspec.cli.output import SlowProgress
from llamaspec.embedder import Embedder, open_embedder
from llamaspec.errors import MemoryFullError, ModelFileError
from llamaspec.llama import runtime
from llamaspec.llama.embedding_model import embedder_bytes
from llamaspec.llama.gguf_file import check_gguf
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.trial import ensure_tried
from llamaspec.llama.weights import LoadProgress


@dataclass(frozen=True)
class ServedEmbedder:
    """A model to serve. `stays`: it is loaded when the server starts."""

    choice: ModelChoice
    ctx_per_request: int | None = None
    stays: bool = False

    @property
    def _options(self) -> ModelOptions:
        options = self.choice.target_options
        return replace(options, n_ctx=self.ctx_per_request or options.n_ctx)

    def _path(self) -> Path:
        find: Callable[[str], Path] = fetched_model if self.stays else locate_model
        return find(self.choice.target)

    def needed_bytes(self) -> int:
        """Return an estimate of the memory that it takes; ModelFileError if it cannot be used."""
        path = self._path()
        runtime.start()
        check_gguf(path)
        with suppress(MemoryFullError):  # until others have been unloaded
            ensure_tried(path, self._options.n_ctx)
        try:
            return embedder_bytes(path, self._options)
        except OSError as error:
            raise ModelFileError(f"cannot read {error.filename}: {error.strerror}; check the path") from error

    @contextmanager
    def open(self, on_load: LoadProgress, _: bool = False) -> Iterator[Embedder]:
        """Load it."""
        if not self.stays:
            with open_embedder(self._path(), options=self._options, on_load=on_load) as embedder:
                yield embedder
            return
        with SlowProgress("loading") as progress:
            embedder = open_embedder(
                self._path(), options=self._options, on_load=lambda done: progress(min(done, ALMOST))
            )
        with embedder:
            yield embedder
