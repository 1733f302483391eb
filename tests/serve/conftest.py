"""One server for each module, for tests that do not need their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llamaspec import Pair
from model_store import ModelStore
from serve_soak import TEMPLATE as TALKER
from serving import Served, open_demo, served
from shelf import Shelf, make_shelf


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> Iterator[None]:
    """Keep clients from using a proxy for this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="module")
def demo(demo_files: tuple[Path, Path]) -> Iterator[Pair]:
    with open_demo(demo_files) as pair:
        yield pair


@pytest.fixture(scope="module")
def alone(demo_files: tuple[Path, Path]) -> Iterator[Pair]:
    """The same pair, which no server uses."""
    with open_demo(demo_files) as pair:
        yield pair


@pytest.fixture(scope="module")
def server(demo: Pair) -> Iterator[Served]:
    with served(demo) as running:
        yield running


@pytest.fixture(scope="module")
def talker(demo: Pair) -> Iterator[Served]:
    """A server whose chat template supports tools and reasoning."""
    with served(demo, template=TALKER) as running:
        yield running


@pytest.fixture
def shelf(store: ModelStore) -> Shelf:
    """Four tiny models that can be served together."""
    return make_shelf(store)
