"""What a file is, by its metadata: a model that generates text, another kind of file, or a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaspec.llama import file_facts as module
from llamaspec.llama.file_facts import Kind, file_facts
from model_store import ModelStore
from odd_files import CUT, write_odd_files
from tiny_models import EMBEDDER_WRITERS, HEAD_WRITERS, WRITERS, Recipe


def test_models_that_generate_text(store: ModelStore) -> None:
    for kind in {*WRITERS, *HEAD_WRITERS} - {"gemma4-assistant"}:
        assert file_facts(store.path(kind)).refusal is None


def test_models_that_make_vectors_or_scores(store: ModelStore) -> None:
    for kind in EMBEDDER_WRITERS:
        facts = file_facts(store.path(kind))
        assert facts.kind is (Kind.RANKING if "rank" in kind else Kind.EMBEDDING)
        assert facts.offer_refusal is None
        assert f"is {facts.kind.value}; name a model that generates text" in str(facts.refusal)


def test_files_that_generate_no_text(store: ModelStore, tmp_path: Path) -> None:
    for name, kind in write_odd_files(tmp_path, store).items():
        if isinstance(kind, Kind):
            facts = file_facts(tmp_path / f"{name}.gguf")
            assert (name, facts.kind, facts.fault) == (name, kind, "")
            assert facts.refusal is not None
            assert facts.offer_refusal is not None
        elif kind == CUT:
            assert CUT in str(file_facts(tmp_path / f"{name}.gguf").refusal)


def test_a_model_in_parts_needs_them_all(tmp_path: Path) -> None:
    WRITERS["llama"](tmp_path / "big.gguf", Recipe(tensors_per_file=12))
    parts = sorted(tmp_path.glob("big-*.gguf"))
    assert len(parts) == 2
    assert file_facts(parts[0]).refusal is None
    content = parts[1].read_bytes()
    parts[1].write_bytes(content[:-1])
    assert CUT in str(file_facts(parts[0]).refusal)
    parts[1].unlink()
    assert "has 1 of 2 parts" in str(file_facts(parts[0]).refusal)


def test_the_head_of_a_file_is_read_again_only_if_it_changed(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 256 files, each list of the models read all of them."""
    content = store.path().read_bytes()
    paths = [tmp_path / f"{i}.gguf" for i in range(300)]
    for path in paths:
        path.hardlink_to(store.path())
    reads = 0

    def counted(*of: object) -> object:
        nonlocal reads
        reads += 1
        return read(*of)  # type: ignore[arg-type]

    read = module._read_facts
    monkeypatch.setattr(module, "_read_facts", counted)
    for _ in range(2):
        assert all(file_facts(path).kind is Kind.TEXT for path in paths)
    assert reads == len(paths)
    paths[0].unlink()
    paths[0].write_bytes(content[:-1])
    assert CUT in file_facts(paths[0]).fault
    assert reads == len(paths) + 1
