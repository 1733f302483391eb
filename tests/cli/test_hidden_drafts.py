"""`--draft FILE` with a draft that reads hidden rows: recognised and used by the commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from command import PROMPT, invoke, said
from model_store import ModelStore
from tiny_hidden import DraftRecipe, write_draft
from tiny_models import Recipe

FLAT = Recipe(spread=0.02)  # scores that matter little, so that noise decides and drafts are accepted


def options(store: ModelStore, tmp_path: Path, kind: str) -> list[str | Path]:
    draft = write_draft(tmp_path / "draft.gguf", DraftRecipe(FLAT, kind))
    return ["--target", store.path("llama", FLAT), "--draft", draft, "--threads", "1"]


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.usefixtures("own_cache")
def test_the_text_is_the_targets_own(store: ModelStore, tmp_path: Path, kind: str) -> None:
    given = options(store, tmp_path, kind)
    wanted = ("-n", "40", "--seed", "5", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--json")
    plain = invoke("generate", *given, *wanted, "--no-draft", PROMPT).json
    found = invoke("generate", *given, *wanted, "--draft-length", "3", PROMPT)
    assert found.json["tokens"] == plain["tokens"]
    assert found.json["statistics"]["accepted"] > 0
    assert found.json["draft"] == str(given[3])


@pytest.mark.usefixtures("own_cache")
def test_doctor_names_the_kind(store: ModelStore, tmp_path: Path) -> None:
    answer = invoke("doctor", *options(store, tmp_path, "dspark"), "--json")
    found = {finding["topic"]: finding for finding in answer.json["findings"]}
    assert "is a DSpark draft that reads the target's hidden rows" in found["draft"]["text"]


@pytest.mark.usefixtures("own_cache")
def test_a_draft_for_another_target_is_refused_in_one_line(store: ModelStore, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "wide.gguf", DraftRecipe(replace(FLAT, width=128)))
    says = said(invoke("generate", "--target", store.path("llama", FLAT), "--draft", draft, "x"))
    assert "was made for a target with hidden rows of 128 numbers" in says
