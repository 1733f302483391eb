"""A draft with another vocabulary in the commands: no option is needed, and the text is the target's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import PROMPT, invoke
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import sentencepiece_vocabulary

DRAFTS = {
    "shuffled": (Recipe(dtype="q8_0").draft(0.01, shuffled=4), "it drafts with these"),
    "another family": (Recipe(vocabulary=sentencepiece_vocabulary()), "its text is tokenized anew"),
}


@pytest.fixture(params=DRAFTS)
def pair(
    request: pytest.FixtureRequest, store: ModelStore, target_file: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str | Path], str]:
    """The options that name a pair, and what is said of it."""
    recipe, says = DRAFTS[request.param]
    if request.param == "another family":  # their bytes are much of what these have
        monkeypatch.setattr("llamaspec.drafters.foreign.MOSTLY", 1.1)
    return ["--target", target_file, "--draft", store.path("llama", recipe), "--threads", "1"], says


@pytest.mark.usefixtures("own_cache")
def test_the_text_is_the_targets_own(pair: tuple[list[str | Path], str]) -> None:
    options, says = pair
    wanted = ("-n", "30", "--seed", "5", "--json")
    plain = invoke("generate", *options, *wanted, "--no-draft", PROMPT).json
    answer = invoke("generate", *options, *wanted, "--draft-length", "3", PROMPT)
    assert answer.json["tokens"] == plain["tokens"]
    assert answer.json["statistics"]["drafted"] > 0
    assert "another vocabulary, with " in answer.stderr
    assert says in answer.stderr


@pytest.mark.usefixtures("own_cache")
def test_compare_audit_and_probe(pair: tuple[list[str | Path], str]) -> None:
    options, _ = pair
    measured = ("-n", "24", "--draft-length", "2", "-t", "0", "-p", PROMPT)
    compared = invoke("compare", *options, *measured, "-r", "1", "--json").json
    assert [arm["method"] for arm in compared["arms"]] == ["target alone", "draft alone", "speculative"]
    assert compared["same_text"]
    assert compared["drafted"] > 0
    assert invoke("audit", *options, *measured, "--json").json["first_difference"] is None
    assert invoke("probe", *options, "--quick", "--json").json["draft_step"] is not None
