"""Which models of a folder draft for which others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llamaspec.folder import fitting_drafts
from llamaspec.llama.file_facts import file_facts
from model_store import ModelStore
from tiny_models import Recipe, truncated
from tiny_vocabulary import BYTES

TARGET = Recipe(width=128, n_heads=4, n_kv_heads=4, n_layers=4, n_ffn=384)
SMALL = Recipe(width=32, n_ffn=48)  # most of it is the vocabulary
OTHER = replace(SMALL, vocabulary=BYTES.renamed(5, "another"))


@pytest.fixture
def paired(tmp_path: Path, store: ModelStore) -> dict[str, str]:
    """The pairs of a folder, by name."""
    files = {
        "big": TARGET,
        "other-tokens": OTHER,
        "small": SMALL,
        "small-F16": replace(SMALL, dtype="f16"),
        "too-large": replace(TARGET, n_layers=2),
    }
    for name, recipe in files.items():
        (tmp_path / f"{name}.gguf").symlink_to(store.path("llama", recipe))
    truncated(store.path("llama", SMALL), tmp_path / "cut.gguf")
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nowhere")
    return {one.stem: draft.stem for one, draft in fitting_drafts(tmp_path.glob("*.gguf")).items()}


def test_the_fastest_draft_of_those_that_fit(paired: dict[str, str]) -> None:
    """The one whose size is nearest to a twentieth, even if it is not the largest."""
    assert paired == {"big": "small", "too-large": "small-F16"}


def test_a_longer_vocabulary_of_the_same_tokens(tmp_path: Path, store: ModelStore) -> None:
    """Qwen 2.5 has 151,936 tokens as 0.5B and 152,064 as 7B."""
    for n_more, fits in ((100, True), (400, False)):
        longer = store.path("llama", replace(TARGET, vocabulary=BYTES.longer(n_more)))
        assert bool(fitting_drafts([longer, store.path("llama", SMALL)])) == fits


def test_a_mixture_of_experts_reads_a_part_of_its_bytes(store: ModelStore) -> None:
    facts = file_facts(store.path("mixtral", TARGET))
    dense = file_facts(store.path("llama", TARGET))
    assert dense.token_bytes == dense.n_bytes
    assert facts.n_bytes / 2 < facts.token_bytes < facts.n_bytes
