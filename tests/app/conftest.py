"""A hub on this machine with tiny models, a person who uses it, and a pair that converses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chat_models import TALKER, write_chat_model
from hub_server import BIG, LARGE, OWN_LIST, SMALL, Hub, serving
from llamaspec import ModelOptions, Pair, open_pair
from model_store import ModelStore
from tiny_models import Recipe


@pytest.fixture
def split_files(store: ModelStore) -> list[Path]:
    """The target in parts."""
    first = store.path("llama", Recipe(dtype="q8_0", tensors_per_file=8))
    return sorted(first.parent.glob(first.name.replace("-00001-", "-*-")))


@pytest.fixture
def hub(target_file: Path, draft_file: Path, split_files: list[Path]) -> Iterator[Hub]:
    files = {
        BIG: target_file.read_bytes(),
        SMALL: draft_file.read_bytes(),
        LARGE: b"GGUF" + bytes(24 << 20),
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
    """The person's own list, for commands in this process."""
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
