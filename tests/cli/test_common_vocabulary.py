"""A draft with another vocabulary needs no option, and the text is the target's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from command import PROMPT, invoke
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import sentencepiece_vocabulary


@pytest.fixture
def pair(store: ModelStore, target_file: Path) -> list[str | Path]:
    """Return the options that name a pair."""
    draft = store.path("llama", Recipe(vocabulary=sentencepiece_vocabulary()))
    return ["--target", target_file, "--draft", draft, "--threads", "1"]


@pytest.mark.usefixtures("own_cache")
def test_the_text_is_the_targets_own(pair: list[str | Path]) -> None:
    wanted = ("-n", "30", "--seed", "5", "--json")
    plain = invoke("generate", *pair, *wanted, "--no-draft", PROMPT).json
    answer = invoke("generate", *pair, *wanted, "--draft-length", "3", PROMPT)
    assert answer.json["tokens"] == plain["tokens"]
    assert answer.json["statistics"]["drafted"] > 0
    assert "different vocabulary, covering about " in answer.stderr


@pytest.mark.usefixtures("own_cache")
def test_a_draft_without_the_target_s_start_token(store: ModelStore, target_file: Path) -> None:
    """The draft step was timed after the start token alone, which such a draft skips."""
    draft = store.path("llama", Recipe(vocabulary=replace(sentencepiece_vocabulary(), adds_bos=False)))
    answer = invoke("generate", "--target", target_file, "--draft", draft, "--threads", "1", "-n", "5", "x")
    assert answer.code == 0, answer.stderr


@pytest.mark.usefixtures("own_cache")
def test_compare_audit_and_probe(pair: list[str | Path]) -> None:
    measured = ("-n", "24", "--draft-length", "2", "-t", "0", "-p", PROMPT)
    compared = invoke("compare", *pair, *measured, "-r", "1", "--json").json
    assert [arm["method"] for arm in compared["arms"]] == ["target alone", "draft alone", "speculative"]
    assert compared["same_text"]
    assert compared["drafted"] > 0
    assert invoke("audit", *pair, *measured, "--json").json["first_difference"] is None
    assert invoke("probe", *pair, "--quick", "--json").json["draft_step"] is not None
