"""Every kind of draft in the commands: the text is the target's own, and the pair can be measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from command import PROMPT, invoke, said
from model_store import ModelStore
from tiny_hidden import DraftRecipe, write_draft
from tiny_models import Recipe
from tiny_vocabulary import sentencepiece_vocabulary

FLAT = Recipe(spread=0.02)  # scores that matter little, so that noise decides and drafts are accepted
OTHER = "another vocabulary"
Options = list[str | Path]

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def pair(request: pytest.FixtureRequest, store: ModelStore, target_file: Path, tmp_path: Path) -> Options:
    """Return the options that name a target with a kind of draft."""
    target, draft = target_file, str(request.param)
    if draft == OTHER:
        draft = str(store.path("llama", Recipe(vocabulary=sentencepiece_vocabulary())))
    elif draft in ("mtp", "auto"):
        target = store.path("step35-one", Recipe(dtype="q8_0"))
    else:
        target = store.path("llama", FLAT)
        draft = str(write_draft(tmp_path / "draft.gguf", DraftRecipe(FLAT, draft)))
    return ["--target", target, "--draft", draft, "--threads", "1"]


@pytest.mark.parametrize("pair", ["mtp", "auto", "eagle3", "dflash", OTHER], indirect=True)
def test_the_text_is_the_targets_own(pair: Options) -> None:
    wanted = ("-n", "40", "--seed", "5", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--json", PROMPT)
    plain = invoke("generate", *pair, "--no-draft", *wanted).json
    answer = invoke("generate", *pair, "--draft-length", "3", *wanted)
    assert answer.json["tokens"] == plain["tokens"]
    assert answer.json["statistics"]["accepted"] > 0
    assert (answer.json["draft"], plain["draft"]) == ("mtp" if pair[3] == "auto" else pair[3], None)


@pytest.mark.parametrize("pair", [OTHER], indirect=True)
def test_a_draft_with_another_vocabulary_is_told(pair: Options) -> None:
    assert "different vocabulary, covering about " in invoke("generate", *pair, "-n", "1", "x").stderr


def test_a_draft_without_the_target_s_start_token(store: ModelStore, target_file: Path) -> None:
    """The draft step was timed after the start token alone, which such a draft skips."""
    draft = store.path("llama", Recipe(vocabulary=replace(sentencepiece_vocabulary(), adds_bos=False)))
    answer = invoke("generate", "--target", target_file, "--draft", draft, "--threads", "1", "-n", "5", "x")
    assert answer.code == 0, answer.stderr


@pytest.mark.parametrize(("pair", "draft_alone"), [("mtp", []), (OTHER, ["draft alone"])], indirect=["pair"])
def test_compare_audit_and_probe(pair: Options, draft_alone: list[str]) -> None:
    measured = ("-n", "24", "--draft-length", "2", "-t", "0", "-p", PROMPT)
    compared = invoke("compare", *pair, *measured, "-r", "1", "--json").json
    assert [arm["method"] for arm in compared["arms"]] == ["target alone", *draft_alone, "speculative"]
    assert compared["same_text"]
    assert compared["drafted"] > 0
    assert invoke("audit", *pair, *measured, "--json").json["first_difference"] is None
    probed = invoke("probe", *pair, "--quick", "--json")
    assert probed.json["draft_step"] is not None
    assert "--show" not in probed.stderr
    assert invoke("probe", *pair, "--show", "--json").json == probed.json
    assert invoke("probe", *pair[:3], "none", *pair[4:], "--show").code == 1, (
        "kept apart from the target's own"
    )


@pytest.mark.parametrize("pair", ["dspark"], indirect=True)
def test_doctor_names_the_kind(pair: Options) -> None:
    found = {finding["topic"]: finding for finding in invoke("doctor", *pair, "--json").json["findings"]}
    assert "is a DSpark draft that reads the target's hidden rows" in found["draft"]["text"]


def test_a_draft_for_another_target_is_refused_in_one_line(store: ModelStore, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "wide.gguf", DraftRecipe(replace(FLAT, width=128)))
    says = said(invoke("generate", "--target", store.path("llama", FLAT), "--draft", draft, "x"))
    assert "was made for a target with hidden rows of 128 numbers" in says
