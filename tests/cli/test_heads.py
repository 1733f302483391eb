"""`--draft mtp`: a target whose own prediction heads draft, in the commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from command import invoke, said
from hub_server import Hub
from llamaspec.errors import MemoryFullError
from model_store import ModelStore
from tiny_models import Recipe


@pytest.fixture
def target(store: ModelStore) -> Path:
    return store.path("step35-one", Recipe(dtype="q8_0"))


def options(target: Path, draft: str) -> list[str | Path]:
    return ["--target", target, "--draft", draft, "--threads", "1"]


@pytest.mark.parametrize("command", ["generate", "doctor"])
@pytest.mark.usefixtures("own_cache")
def test_a_file_without_heads(target_file: Path, command: str) -> None:
    says = said(invoke(command, *options(target_file, "mtp"), *(["x"] if command == "generate" else [])))
    assert f"{target_file} has no prediction heads; name a draft model" in says
    assert says.endswith("(--draft)")


@pytest.mark.usefixtures("own_cache")
def test_heads_are_used_by_default(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("--threads", "1", "-n", "2", "x")
    used = "llamaspec: no --draft given, using the target's own prediction heads (--draft none: no heads)"
    assert invoke("generate", "--target", target, *short).stderr.startswith(used)
    assert "--draft" not in invoke("generate", *options(target, "none"), *short[2:]).stderr
    monkeypatch.setattr("llamaspec.plan.available_bytes", lambda: 1000)
    left_out = invoke("generate", "--target", target, *short).stderr
    assert "only copied from earlier text; --draft auto would use its heads" in left_out


@pytest.mark.usefixtures("own_cache")
def test_a_draft_that_nobody_asked_for_may_fail(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryFullError("no room for the heads; use a smaller context")

    monkeypatch.setattr("llamaspec.hidden_drafts.PredictionHeads", fail)
    short = ("--threads", "1", "-n", "8", "--seed", "1", "--json", "x")
    answer = invoke("generate", "--target", target, *short)
    assert "continuing without the draft: no room for the heads" in answer.stderr
    assert answer.json["draft"] is None
    assert "no room for the heads" in said(invoke("generate", *options(target, "mtp"), *short[2:]))


@pytest.mark.parametrize(("draft", "says"), [("mtp", "used as the draft"), ("ngram", "can be used")])
def test_doctor_counts_heads(target: Path, draft: str, says: str) -> None:
    found = {f["topic"]: f for f in invoke("doctor", *options(target, draft), "--json").json["findings"]}
    assert found["target heads"]["text"].startswith(f"1 in the file, {says}")
    assert ("--draft mtp" in found["target heads"]["text"]) == (draft == "ngram")
    if draft == "mtp":
        assert re.match(r"about \d.* of weights; a prompt takes \d+% longer", found["heads cost"]["text"])


def test_the_list_names_heads(own_list: Path, target: Path, target_file: Path) -> None:
    invoke("models", "add", "own", target)
    invoke("models", "add", "none", target_file)
    rows = {row.split()[0]: row for row in invoke("models", "list").stdout.splitlines()}
    assert "mtp" in rows["own"]
    assert "mtp" not in rows["none"]
    listed = {entry["name"]: entry for entry in json.loads(invoke("models", "list", "--json").stdout)}
    assert (listed["own"]["has_heads"], listed["none"]["has_heads"]) == (True, False)
    assert rows["qwen3.8-27b"].split().index("mtp") == 5  # known from the list alone
    assert "mtp" not in rows["gpt-oss-20b"]


@pytest.mark.usefixtures("cache")
def test_a_model_that_is_known_to_have_neither_is_not_fetched(hub: Hub) -> None:
    assert "no draft is known for gpt-oss-20b" in said(invoke("generate", "--pair", "gpt-oss-20b", "x"))
    assert hub.n_requests == 0
    invoke("generate", "--pair", "qwen3.5-9b", "x")  # has heads
    assert hub.n_requests > 0
