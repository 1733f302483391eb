"""`llamaspec compare`: three arms on one prompt, and a model that drafts for itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command import Answer, invoke, naming
from llamaspec import FixedLength, Pair, Sampling, open_pair
from llamaspec.measure.compare import SpeedUp, Task, run_compare
from model_store import ModelStore
from tiny_models import Recipe

ARMS = ["target alone", "draft alone", "speculative"]


def compare(models: list[Path], *arguments: str) -> Answer:
    return invoke("compare", *naming(models), "-n", "24", "-r", "2", "--seed", "1", *arguments)


def test_the_table(models: list[Path]) -> None:
    answer = compare(models, "-k", "4")
    assert answer.code == 0
    assert [line[:12].strip() for line in answer.stdout.splitlines()[1:4]] == ARMS
    assert "every run produced the target's own text" in answer.stderr
    assert "the same file" not in answer.stderr


def test_a_single_run_has_no_spread(models: list[Path]) -> None:
    answer = compare(models, "-k", "4", "-r", "1")
    assert "±" not in answer.stdout
    assert "19 of 20" not in answer.stderr


def test_a_temperature_that_looks_like_threads(models: list[Path]) -> None:
    assert "use --threads" in compare(models, "--temp", "4", "-k", "1").stderr
    assert "--threads" not in compare(models, "-t", "1.5", "-k", "1").stderr


def test_a_model_that_drafts_for_itself_is_never_rejected(models: list[Path], tmp_path: Path) -> None:
    link = tmp_path / "other-name.gguf"
    link.symlink_to(models[0])
    for draft in (models[0], link):
        answer = compare([models[0], draft], "-k", "4", "--rule", "block", "--top-k", "0")
        assert "target and draft are the same file" in answer.stderr
        assert "acceptance: 100.0%" in answer.stdout


def test_without_draft_tokens_a_difference_is_noise(models: list[Path]) -> None:
    """Its speed used to be called a speed-up."""
    found = compare(models, "-k", "0", "--json").json
    assert (found["acceptance_rate"], found["drafted"], found["arms"][2]["speed_up"]) == (None, 0, None)
    assert found["arms"][0]["speed_up"] == 1


def test_a_target_alone_cannot_be_compared(models: list[Path]) -> None:
    answer = invoke("compare", *naming(models[:1]), "--no-ngram")
    assert answer.code == 1
    assert answer.complaints == ["llamaspec: compare needs a draft; name it with --draft, or drop --no-ngram"]


def test_ngram_drafts_are_compared_without_a_draft(models: list[Path]) -> None:
    options = ("--draft", "ngram", "-p", "the end of the end of the end", "-n", "24", "-r", "2", "--json")
    found = invoke("compare", *naming(models[:1]), *options).json
    assert [arm["method"] for arm in found["arms"]] == ["target alone", "speculative"]
    assert found["same_text"]
    assert not found["same_file"]


def test_texts_that_end_early(store: ModelStore) -> None:
    """Arms may have different lengths, and an empty completion has a speed, too."""
    target = store.path("llama", Recipe(dtype="q8_0", end_score=9.0))
    found: dict[str, Any] = compare([target, target], "-k", "4", "--seed", "3", "--json").json
    assert found["same_text"] is True
    assert min(run["tokens"] for run in found["arms"][0]["runs"]) < 24


def test_a_range_around_one_shows_no_difference() -> None:
    found = [SpeedUp(1.2, *limits) for limits in ((0.9, 1.5), (1.1, 1.3), (0.7, 0.9), (None, None))]
    assert [each.shows_nothing for each in found] == [True, False, False, False]


def test_progress_goes_in_even_steps_and_each_seed_runs_twice(models: list[Path]) -> None:
    told: list[float] = []
    with open_pair(*models) as pair:
        task = Task(pair.target.vocabulary.tokenize(b"the end"), Sampling(temperature=2.0), 5, 8, "coupled")
        found = run_compare(pair, [task], 4, FixedLength(2), told.append)
        alone = [replace(task, seed=seed).run_plain(pair).tokens for seed in (5, 6)]
    assert told == pytest.approx([n / 15 for n in range(1, 16)])  # three arms, and a warm-up run each
    assert [run.tokens for run in found.target.runs] == [*alone, *alone]
    assert alone[0] != alone[1]
    assert found.same_text
    assert {run.n_cached for arm in found.arms for run in arm.runs} == {0}, "each reads the whole prompt"


def test_the_draft_stays_the_pairs_and_what_runs_it_alone_is_closed(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Pair] = []
    close = Pair.close

    def noted(pair: Pair) -> None:
        closed.append(pair)
        close(pair)

    monkeypatch.setattr(Pair, "close", noted)
    with open_pair(*models) as pair:
        task = Task(pair.target.vocabulary.tokenize(b"the end"), Sampling(), 5, 8, "coupled")
        run_compare(pair, [task], 1, FixedLength(2))
        assert [alone.target for alone in closed] == [pair.draft]
        assert task.run(pair, FixedLength(2)).summary.n_drafted


@pytest.mark.parametrize(("command", "default"), [("compare", "0"), ("audit", "0"), ("generate", "random")])
def test_the_help_tells_the_seed_that_is_used(command: str, default: str) -> None:
    assert f"same text. Default: {default}" in " ".join(invoke(command, "-h").stdout.split())
