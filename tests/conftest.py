"""Fixtures that several folders of tests share: tiny model files, and models opened from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from llama_cpp import llama_cpp as lib

from asks import Count
from llamaspec import LlamaModel, ModelOptions
from llamaspec.llama.batch import Batch
from llamaspec.llama.trie import Node
from model_store import ModelStore, OpenModel, demo_pair
from tiny_models import Recipe


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    """Tiny models, written when first asked for."""
    return ModelStore(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def target_file(store: ModelStore) -> Path:
    """A tiny target whose scores are the same at every batch width."""
    return store.path("llama", Recipe(dtype="q8_0"))


@pytest.fixture(scope="session")
def draft_file(store: ModelStore) -> Path:
    """A draft that guesses about three of four of the target's tokens."""
    return store.path("llama", Recipe(dtype="q8_0").draft())


@pytest.fixture(scope="session")
def demo_files() -> tuple[Path, Path]:
    """The embedded target and draft."""
    paths = demo_pair()
    if paths is None:
        pytest.skip("the embedded pair has not been trained; scripts/train_demo_pair.py makes it")
    return paths


@pytest.fixture
def opened(store: ModelStore) -> Iterator[OpenModel]:
    """Open tiny models that are closed after the test: opened("mamba", n_lanes=3)."""
    with ExitStack() as stack:

        def open_model(kind: str = "llama", recipe: Recipe | None = None, **options: object) -> LlamaModel:
            path = store.path(kind, recipe)
            return stack.enter_context(LlamaModel(path, ModelOptions(threads=1, **options)))  # type: ignore[arg-type]

        yield open_model


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Count:
    """What llama.cpp is given to evaluate during a test."""
    count = Count([])
    fill = Batch.fill

    def counted(self: Batch, nodes: Sequence[Node]) -> lib.llama_batch:
        count.nodes.extend(nodes)
        return fill(self, nodes)

    monkeypatch.setattr(Batch, "fill", counted)
    return count
