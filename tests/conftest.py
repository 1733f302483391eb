"""Fixtures that several folders of tests share: tiny models, a hub on this machine, pairs."""

from __future__ import annotations

import llamaspec.llama  # noqa: F401  # it loads our kernels, which is too late after llama_cpp

# isort: split
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from llama_cpp import llama_cpp as lib

from chat_models import TALKER, write_chat_model
from forward_requests import Count
from hub_server import BIG, LARGE, OWN_LIST, SMALL, Hub, serving
from llamaspec import LlamaModel, ModelOptions, Pair, open_pair
from llamaspec.cli import output
from llamaspec.engine import scheduler
from llamaspec.kernels import VARIABLE
from llamaspec.llama.batch import Batch, Segment
from llamaspec.llama.cells import CachedSequence, CellTable
from model_store import ModelStore, OpenModel, demo_pair
from patience import PATIENCE
from tiny_models import Recipe

CPU = ModelOptions(threads=1, gpu_layers=0)


def pytest_configure(config: pytest.Config) -> None:
    """Make the tests independent of the user's environment and of time limits.

    Only `LLAMASPEC_KERNELS=off make test` tests something else.
    """
    for name in [name for name in os.environ if name.startswith(("HF_", "LLAMASPEC_"))]:
        if name != VARIABLE:
            del os.environ[name]
    for name in ("http_proxy", "https_proxy", "all_proxy"):  # the tests' hub is on this machine
        os.environ.pop(name, None)
        os.environ.pop(name.upper(), None)
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        os.environ[name] = str(int(PATIENCE))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # pytest runs in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    slow = [HealthCheck.too_slow]
    settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=slow)
    settings.register_profile("fresh", database=None, deadline=None, suppress_health_check=slow)
    settings.load_profile(config.getoption("--hypothesis-profile") or "repeatable")


@pytest.fixture(scope="session", autouse=True)
def _no_caches_of_the_person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's caches out of the tests, and the tests' files out of the user's caches.

    The tests' models are opened without a trial; tests/llama/test_trial.py tests the trials.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMASPEC_TRUST_FILES", "1")
        patch.setattr(output, "PATIENCE_SECONDS", PATIENCE)  # no progress, however slow the machine
        for kind in ("CACHE", "CONFIG", "STATE"):
            patch.setenv(f"XDG_{kind}_HOME", str(tmp_path_factory.mktemp("person")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_broken_caches() -> Iterator[None]:
    """Raise what is only logged otherwise: a broken cache is an error of the completion that ends then."""

    def fail(message: str, *values: object) -> None:
        raise AssertionError(message % values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.logger, "error", fail)
        yield


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The broken caches that are logged during a test, which need not fail because of them."""
    lines: list[str] = []
    monkeypatch.setattr(scheduler.logger, "error", lambda message, *values: lines.append(message % values))
    return lines


@pytest.fixture(scope="session")
def is_fresh(request: pytest.FixtureRequest) -> bool:
    """Whether `make test-fresh` runs, which has time for more cases."""
    return bool(request.config.getoption("--hypothesis-profile") == "fresh")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    """Tiny models, written at their first use."""
    return ModelStore(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def target_file(store: ModelStore) -> Path:
    """A tiny target whose logits are the same at every batch width."""
    return store.path("llama", Recipe(dtype="q8_0"))


@pytest.fixture(scope="session")
def draft_file(store: ModelStore) -> Path:
    """A draft whose tokens the target accepts about three times in four."""
    return store.path("llama", Recipe(dtype="q8_0").draft())


@pytest.fixture(scope="session")
def demo_files() -> tuple[Path, Path]:
    """The embedded target and draft."""
    paths = demo_pair()
    if paths is None:
        pytest.skip("the embedded pair has not been trained; scripts/train_demo_pair.py makes it")
    return paths


@pytest.fixture
def tiny(target_file: Path, draft_file: Path) -> Iterator[Pair]:
    """An open pair of tiny models, for tests that close it or break it."""
    with open_pair(target_file, draft_file, target_options=CPU, draft_options=CPU) as pair:
        yield pair


@pytest.fixture(scope="module")
def demo(demo_files: tuple[Path, Path]) -> Iterator[Pair]:
    """The embedded pair on one thread of the CPU, where its logits are the same at every batch width."""
    with open_pair(*demo_files, target_options=CPU, draft_options=CPU) as pair:
        yield pair


@pytest.fixture
def opened(store: ModelStore) -> Iterator[OpenModel]:
    """Opens tiny models and closes them after the test: opened("mamba", n_ctx=256)."""
    with ExitStack() as stack:

        def open_model(kind: str = "llama", recipe: Recipe | None = None, **options: object) -> LlamaModel:
            path = store.path(kind, recipe)
            wanted = ModelOptions(**{"threads": 1, **options})  # type: ignore[arg-type]
            return stack.enter_context(LlamaModel(path, wanted))

        yield open_model


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Count:
    """The positions that llama.cpp evaluates during a test."""
    count = Count()
    fill = Batch.fill

    def counted(self: Batch, segments: Sequence[Segment]) -> lib.llama_batch:
        count.segments.extend(segments)
        return fill(self, segments)

    monkeypatch.setattr(Batch, "fill", counted)
    return count


@pytest.fixture
def compactions(monkeypatch: pytest.MonkeyPatch) -> list[CellTable]:
    """The caches whose cells are moved during a test, one entry per move."""
    moved, compact = list[CellTable](), CellTable.compact

    def counted(self: CellTable, sequences: Sequence[CachedSequence]) -> None:
        moved.append(self)
        compact(self, sequences)

    monkeypatch.setattr(CellTable, "compact", counted)
    return moved


@pytest.fixture
def split_files(store: ModelStore) -> list[Path]:
    """The target, split into several files."""
    first = store.path("llama", Recipe(dtype="q8_0", tensors_per_file=8))
    return sorted(first.parent.glob(first.name.replace("-00001-", "-*-")))


@pytest.fixture
def hub(target_file: Path, draft_file: Path, split_files: list[Path]) -> Iterator[Hub]:
    files = {
        BIG: target_file.read_bytes(),
        SMALL: draft_file.read_bytes(),
        LARGE: target_file.read_bytes() + bytes(24 << 20),
        **{f"acme/split-GGUF/{part.name}": part.read_bytes() for part in split_files},
    }
    with serving(Hub(files)) as server:
        yield server


@pytest.fixture
def env(hub: Hub, tmp_path: Path) -> dict[str, str]:
    config = tmp_path / "config"
    config.mkdir()
    (config / "models.yaml").write_text(OWN_LIST)
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hub"),
        "LLAMASPEC_CONFIG": str(config),
        "LLAMASPEC_CACHE": str(tmp_path / "cache"),
    }


@pytest.fixture
def own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's list of models, for commands in this process."""
    for name in ("LLAMASPEC_TARGET", "LLAMASPEC_DRAFT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LLAMASPEC_CONFIG", str(tmp_path))
    path = tmp_path / "models.yaml"
    path.write_text(OWN_LIST)
    return path


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat")


@pytest.fixture(scope="module")
def talker(chat_folder: Path) -> list[Path]:
    """A target that talks without end, and its draft."""
    target = write_chat_model(chat_folder / "talker.gguf", TALKER)
    return [target, write_chat_model(chat_folder / "draft.gguf", TALKER.draft(), template=None)]


@pytest.fixture(scope="module")
def pair(talker: list[Path]) -> Iterator[Pair]:
    options = ModelOptions(n_ctx=1024, threads=1)
    with open_pair(*talker, target_options=options, draft_options=options) as opened:
        yield opened


@pytest.fixture(scope="session")
def models(target_file: Path, draft_file: Path) -> list[Path]:
    """A target and its draft."""
    return [target_file, draft_file]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder for commands in this process."""
    monkeypatch.setenv("LLAMASPEC_CACHE", str(tmp_path))


@pytest.fixture
def cache(hub: Hub, own_list: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the hub, for commands in this process; the list has `big` and `small`."""
    from huggingface_hub import constants  # it reads the environment, which pytest_configure changes

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}{''.join(template[1:])}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own_list.parent / "deep" / "hub"))
    monkeypatch.setenv("LLAMASPEC_CACHE", str(own_list.parent / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return own_list.parent / "deep" / "hub"
