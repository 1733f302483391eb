"""A server with several tiny models, and what happens to each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamaspec import FixedLength, ModelOptions, open_pair
from llamaspec.chat.template import ChatTemplate
from llamaspec.llama.weights import LoadProgress
from llamaspec.serve import ServeSettings
from llamaspec.serve.app import open_socket
from llamaspec.serve.models import Models
from llamaspec.serve.served_model import ModelSource
from llamaspec.serve.service import OpenModel
from model_store import ModelStore
from serving import TEMPLATE, Served, serve
from tiny_models import Recipe

NAMES = ("alpha-Q8_0", "beta", "gamma", "delta")
OPTIONS = ModelOptions(n_ctx=256, n_cells=1024, threads=1, cache_type_v="bf16")


@dataclass
class Shelf:
    """Tiny models, and what happened to them. Each takes one byte of the limit."""

    files: dict[str, tuple[Path, Path | None]]
    opened: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    faults: dict[str, Exception] = field(default_factory=dict)
    gates: dict[str, threading.Event] = field(default_factory=dict)  # loading waits for them
    before: Callable[[str], None] = lambda _: None  # called with the name before a model is opened

    def sources(self) -> Sequence[ModelSource]:
        return [self._source(name) for name in self.files]

    def _source(self, name: str) -> ModelSource:
        target, draft = self.files[name]

        @contextmanager
        def opening(on_load: LoadProgress, _: bool) -> Iterator[OpenModel]:
            self.before(name)
            while name in self.gates and not self.gates[name].wait(0.01):
                on_load(0.5)
            if name in self.faults:
                raise self.faults[name]
            with open_pair(target, draft, target_options=OPTIONS, draft_options=OPTIONS) as pair:
                self.opened.append(name)
                yield OpenModel(pair, FixedLength(3), ChatTemplate.of(pair.target, TEMPLATE))
            self.closed.append(name)

        return ModelSource(name, target, opening, lambda: 1, (f"org/{name}",))


def make_shelf(store: ModelStore) -> Shelf:
    """Return a shelf with four models, of which one has a draft."""
    recipes = [Recipe(seed=seed, dtype="q8_0") for seed in range(len(NAMES))]
    drafts = {NAMES[1]: store.path("llama", recipes[1].draft())}
    return Shelf({name: (store.path("llama", recipe), drafts.get(name))
                  for name, recipe in zip(NAMES, recipes, strict=True)})  # fmt: skip


@contextmanager
def several(shelf: Shelf, **settings: Any) -> Iterator[Served]:
    """Serve the models of a shelf."""
    log: list[str] = []
    config = ServeSettings(port=0, **{"memory_bytes": 2, **settings})
    models = Models(shelf.sources, config, log.append)
    try:
        with serve(models, open_socket(config), log) as server:
            yield server
    finally:
        models.close()
