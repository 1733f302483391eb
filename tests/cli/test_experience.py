"""What a run learns about a pair is kept for the next run, and never changes the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import generate, invoke, naming
from llamaspec import LlamaModel, ModelOptions, Pair
from llamaspec.measure.learned_length import WORTH_KEEPING, auto_length, keep_prior
from llamaspec.measure.store import stored_prior

PROMPT = "Once upon a time"
ONE_THREAD = ModelOptions(threads=1)
LONG, SHORT = WORTH_KEEPING + 16, WORTH_KEEPING - 1

pytestmark = pytest.mark.usefixtures("own_cache")


def text(models: list[Path], n: int = LONG) -> str:
    answer = generate(PROMPT, "--seed", "5", "-n", str(n), "--json", models=models).json
    assert len(answer["tokens"]) == n  # the seed is one of a long text
    found: str = answer["text"]
    return found


def kept(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("*.runs.json"))


def test_the_next_run_learns_more_and_says_the_same(models: list[Path], tmp_path: Path) -> None:
    first = text(models)
    (file,) = kept(tmp_path)
    known = json.loads(file.read_text())["experience"]
    assert text(models) == first
    assert json.loads(file.read_text())["experience"] != known


def test_a_few_tokens_teach_nothing(models: list[Path], tmp_path: Path) -> None:
    text(models, SHORT)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{", '{"format": 2}', '{"format": 2, "experience": {"costs": 3}}'])
def test_a_damaged_file_counts_as_none(models: list[Path], tmp_path: Path, content: str) -> None:
    first = text(models)
    kept(tmp_path)[0].write_text(content)
    assert text(models) == first
    assert "experience" in json.loads(kept(tmp_path)[0].read_text())


@pytest.mark.parametrize("option", ["--quick", "--forget"])
def test_a_probe_makes_it_old(models: list[Path], tmp_path: Path, option: str) -> None:
    text(models)
    assert invoke("probe", *naming(models), option).code == 0
    assert kept(tmp_path) == []


def test_a_policy_begins_with_it(models: list[Path]) -> None:
    with LlamaModel(models[0], ONE_THREAD) as target, LlamaModel(models[1], ONE_THREAD) as draft:
        pair = Pair(target, draft, 0.0)
        assert stored_prior(pair).value is None
        policy = auto_length(pair)
        pair.stream(PROMPT, seed=5, max_tokens=LONG, policy=policy).run()
        keep_prior(pair, policy)
        assert stored_prior(pair).value == policy.experience()
        assert auto_length(pair).experience().log_odds == policy.experience().log_odds
