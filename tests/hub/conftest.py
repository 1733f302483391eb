"""The cache folder of this process, and a local hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from hub_server import Hub


@pytest.fixture
def cache(hub: Hub, own_list: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder; the list of models has `big` and `small`."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}{''.join(template[1:])}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own_list.parent / "deep" / "hub"))
    monkeypatch.setenv("LLAMASPEC_CACHE", str(own_list.parent / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return own_list.parent / "deep" / "hub"
