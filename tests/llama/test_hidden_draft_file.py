"""Files of drafts with hidden rows: what would make llama.cpp abort the process gets one line instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tiny_hidden
from llamaspec import ModelOptions, open_pair
from llamaspec.errors import PairError
from llamaspec.llama import hidden_rows
from llamaspec.llama.hidden_draft_file import check_target, hidden_draft
from model_store import ModelStore
from tiny_hidden import DraftRecipe, write_draft
from tiny_models import Recipe

KINDS = ("eagle3", "dflash", "dspark", "dflash2")
THREADS = ModelOptions(threads=1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_is_recognised_by_the_metadata(tmp_path: Path, kind: str) -> None:
    found = hidden_draft(write_draft(tmp_path / "draft.gguf", DraftRecipe(kind=kind)))
    assert found is not None
    assert (found.kind, found.layers, found.hidden_size) == (kind, (0, 1, 1), 64)
    assert found.block == (1 if kind == "eagle3" else 5)
    assert found.longest == {"eagle3": 0, "dspark": 5}.get(kind, 4)
    assert found.has_confidence == (kind == "dspark")
    assert found.n_candidates == (4 if kind == "dflash2" else None)


def test_a_bonus_anchor_predicts_nothing(tmp_path: Path) -> None:
    recipe = DraftRecipe(kind="dspark", from_anchor=False)
    found = hidden_draft(write_draft(tmp_path / "draft.gguf", recipe))
    assert found is not None
    assert found.longest == 4


def test_other_files_are_no_such_drafts(store: ModelStore, tmp_path: Path) -> None:
    assert hidden_draft(store.path("llama")) is None
    assert hidden_draft(tmp_path / "missing.gguf") is None


HOSTILE = [
    ("eagle3", {"target_layers": [0, 1]}, "reads 2 layers"),
    ("eagle3", {"target_layers": [0, 1, -1]}, "reads the layers"),
    ("dflash", {"target_layers": [0] * 40}, "reads the layers"),
    ("dflash", {"target_layers": 3}, "does not say which layers"),
    ("eagle3", {"block_count": 2}, "has 2 layers, not 1"),
    ("dflash", {"hyper_connection_count": 4}, "DeepSeek 4"),
    ("dflash", {"attention.head_count": 0}, "0 heads"),
    ("eagle3", {"attention.head_count_kv": 0}, "over 0 heads"),
    ("dspark", {"attention.head_count_kv": 3}, "2 heads over 3"),
    ("dflash", {"attention.value_length": 16}, "values 16"),
    ("dflash", {"rope.dimension_count": 31}, "31 numbers"),
    ("dflash", {"rope.dimension_count": 64}, "64 numbers"),
    ("dflash", {"block_size": 1}, "block of 1"),
    ("dspark", {"block_size": 0}, "block of 0"),
    ("dspark", {"block_size": 100_000}, "block of 100000"),
    ("dflash2", {"selector_top_k": 0}, "selects among 0"),
]


@pytest.mark.parametrize(("kind", "changed", "reason"), HOSTILE)
def test_impossible_metadata(
    tmp_path: Path, kind: str, changed: dict[str, int | list[int]], reason: str
) -> None:
    path = write_draft(tmp_path / "draft.gguf", DraftRecipe(kind=kind), **changed)
    with pytest.raises(PairError, match=rf"is no usable .* draft: .*{reason}"):
        hidden_draft(path)


@pytest.mark.parametrize("token", [-1, 288, 1 << 40])
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_map_beyond_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, token: int
) -> None:
    recipe = DraftRecipe(kind=kind, n_tokens=50)
    tensors = tiny_hidden.tensors_of(recipe)
    tensors["d2t"] = np.where(np.arange(50) == 33, token, tensors["d2t"]).astype(np.int64)
    monkeypatch.setattr(tiny_hidden, "tensors_of", lambda draft: tensors)
    path = write_draft(tmp_path / "draft.gguf", recipe)
    with pytest.raises(PairError, match="d2t names tokens beyond the vocabulary of 288"):
        hidden_draft(path)


def test_a_mask_beyond_the_vocabulary(store: ModelStore, tmp_path: Path) -> None:
    changed = {"tokenizer.ggml.mask_token_id": 288}
    path = write_draft(tmp_path / "draft.gguf", DraftRecipe(), **changed)
    with pytest.raises(PairError, match="a token beyond the 288 that it can read"):
        open_pair(store.path("llama"), path, target_options=THREADS)


@pytest.mark.parametrize("kind", ["gemma3", "mamba", "deepseek2"])
def test_a_target_that_does_not_return_its_rows(store: ModelStore, tmp_path: Path, kind: str) -> None:
    path = write_draft(tmp_path / "draft.gguf", DraftRecipe())
    with pytest.raises(PairError, match=f"does not return the hidden rows of '{kind}'"):
        open_pair(store.path(kind), path, target_options=THREADS)


@pytest.mark.parametrize("kind", KINDS)
def test_another_target(store: ModelStore, tmp_path: Path, kind: str) -> None:
    path = write_draft(tmp_path / "draft.gguf", DraftRecipe(kind=kind))
    with pytest.raises(PairError, match="hidden rows of 64 numbers, but"):
        open_pair(store.path("llama", Recipe(width=128)), path, target_options=THREADS)
    deep = write_draft(tmp_path / "deep.gguf", replace(DraftRecipe(kind=kind), layers=(0, 1, 2)))
    with pytest.raises(PairError, match=r"reads layer 2 of its target, but .* has 2 layers"):
        open_pair(store.path("llama"), deep, target_options=THREADS)


def test_only_eagle_reads_the_last_output_and_only_of_some_targets(store: ModelStore, tmp_path: Path) -> None:
    target = store.path("qwen35")
    deep = {kind: replace(DraftRecipe(kind=kind), layers=(0, 1, 2)) for kind in ("eagle3", "dflash")}
    files = {kind: hidden_draft(write_draft(tmp_path / f"{kind}.gguf", each)) for kind, each in deep.items()}
    assert files["eagle3"] is not None
    assert files["dflash"] is not None
    check_target(files["eagle3"], target)
    with pytest.raises(PairError, match="reads layer 2"):
        check_target(files["dflash"], target)


def test_a_build_that_lacks_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_draft(tmp_path / "draft.gguf", DraftRecipe())
    monkeypatch.setattr(hidden_rows, "_keep_layer", None)
    with pytest.raises(PairError, match=r"this build of llama.cpp lacks functions; update llama-cpp-python"):
        hidden_draft(path)
