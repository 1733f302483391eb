"""A hub on this machine with tiny models, and the environment of a person who uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_server import BIG, LARGE, OWN_LIST, SMALL, Hub, serving
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
