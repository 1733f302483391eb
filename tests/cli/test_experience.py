"""What a run learns about a pair is kept for the next run; it never changes the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import generate, invoke, naming
from llamaspec import LlamaModel, ModelOptions, Pair, open_pair
from llamaspec.length.costs import CostCurve
from llamaspec.length.policy import SETTLED, LearnedPrior
from llamaspec.measure.compare import Spread
from llamaspec.measure.probe import Probe, WidthTiming
from llamaspec.measure.store import WORTH_KEEPING, auto_length, keep, keep_learnt, keep_probe, stored

PROMPT = "Once upon a time"
ONE_THREAD = ModelOptions(threads=1)
LONG, SHORT = 80, WORTH_KEEPING - 1  # tokens; an evaluation gives at least one

pytestmark = pytest.mark.usefixtures("own_cache")


def text(models: list[Path], n: int = LONG) -> str:
    answer = generate(PROMPT, "--seed", "5", "-n", str(n), "--json", models=models).json
    assert len(answer["tokens"]) == n  # this seed gives a long text
    found: str = answer["text"]
    return found


def kept(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("*.runs.json"))


def test_the_next_run_learns_more_and_says_the_same(models: list[Path], tmp_path: Path) -> None:
    first = text(models)
    (file,) = kept(tmp_path)
    known = json.loads(file.read_text())
    assert text(models) == first
    assert json.loads(file.read_text()) != known


def test_a_few_tokens_teach_nothing(models: list[Path], tmp_path: Path) -> None:
    text(models, SHORT)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{", '{"format": 2}', '{"curve": 3}'])
def test_a_damaged_file_counts_as_none(models: list[Path], tmp_path: Path, content: str) -> None:
    first = text(models)
    kept(tmp_path)[0].write_text(content)
    assert text(models) == first
    assert "curve" in json.loads(kept(tmp_path)[0].read_text())


@pytest.mark.parametrize("option", ["--quick", "--forget"])
def test_a_probe_makes_it_old(models: list[Path], tmp_path: Path, option: str) -> None:
    text(models)
    before = kept(tmp_path)[0].read_text()
    assert invoke("probe", *naming(models), option).code == 0
    found = [path.read_text() for path in kept(tmp_path)]
    assert before not in found
    assert len(found) == (option == "--quick")


def test_a_policy_begins_with_it(models: list[Path]) -> None:
    with LlamaModel(models[0], ONE_THREAD) as target, LlamaModel(models[1], ONE_THREAD) as draft:
        pair = Pair(target, draft)
        assert stored(pair, LearnedPrior) is None
        policy = auto_length(pair)
        pair.stream(PROMPT, seed=5, max_tokens=LONG, policy=policy).run()
        keep_learnt(pair, policy)
        assert stored(pair, LearnedPrior) == policy.experience()
        assert auto_length(pair).experience().log_odds == policy.experience().log_odds


def test_before_the_first_run_a_policy_begins_with_the_probe(models: list[Path]) -> None:
    """What an earlier run has learnt is newer than the probe."""
    one, four, step = (Spread(seconds, seconds, seconds) for seconds in (3.0, 4.5, 0.6))
    widths = WidthTiming(1, (one,), 0.0), WidthTiming(4, (four,), 0.0)
    probe = Probe((64,), (), widths, step)
    with LlamaModel(models[0], ONE_THREAD) as target, LlamaModel(models[1], ONE_THREAD) as draft:
        pair = Pair(target, draft)
        keep_probe(pair, probe)
        costs = auto_length(pair).costs
        assert [costs.seconds(1), costs.seconds(4)] == pytest.approx([3.0, 4.5])
        assert costs.step_seconds == pytest.approx(0.6)
        keep(pair, LearnedPrior(CostCurve((1, 4), (2.0, 2.5), 0.5)))
        costs = auto_length(pair).costs
        assert [costs.seconds(1), costs.seconds(4)] == pytest.approx([2.0, 2.5])


def test_a_draft_step_is_timed_in_the_first_runs_of_a_pair(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Pair] = []

    def noted(pair: Pair) -> float:
        timed.append(pair)
        return 0.001

    monkeypatch.setattr("llamaspec.measure.store.time_draft_step", noted)
    with open_pair(*models) as pair:
        for _ in range(SETTLED + 2):
            keep(pair, auto_length(pair).experience())
    assert len(timed) == SETTLED + 2, "no run has learnt a step"
    timed.clear()
    with open_pair(*models) as pair:
        for n in range(SETTLED + 2):
            keep(pair, LearnedPrior(CostCurve((1, 2), (0.02, 0.03), 0.01), n_runs=n))
            auto_length(pair)
    assert len(timed) == SETTLED


def test_the_first_run_says_that_it_has_measured(models: list[Path]) -> None:
    line = "first run with this pair"
    short = generate("-n", "8", "-t", "0", "hello", models=models)
    assert line not in short.stderr, "it kept nothing"
    silent, first, second = (
        generate("-n", "80", "-t", "0", "hello", *more, models=models) for more in (["--no-stats"], [], [])
    )
    assert line not in silent.stderr
    assert line not in second.stderr
    forgotten = invoke("probe", *naming(models), "--forget")
    assert forgotten.code == 0, forgotten.stderr
    assert line in generate("-n", "80", "-t", "0", "hello", models=models).stderr
    assert first.code == second.code == 0
