"""Measurements of a draft model: agreement with its target, cost of a step, and speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from llamaspec import LlamaModel, ModelOptions, Pair
from llamaspec.draft_making.measuring import (
    Machine,
    TargetSequence,
    Trial,
    TrialSettings,
    acceptance,
    draft_options,
)
from llamaspec.engine.completion import Completion
from llamaspec.errors import LlamaspecError
from llamaspec.measure.compare import Task
from llamaspec.measure.probe import Probe, WidthTiming, sample_tokens
from llamaspec.measure.turns import Spread
from llamaspec.sampling.filters import Sampling
from rounds import taking
from tiny_models import Recipe, write_llama

OPTIONS = ModelOptions(threads=1, n_ctx=256)
PROBE = Probe(
    depths=(64,),
    left_out_depths=(),
    widths=(
        WidthTiming(1, (Spread(0.008, 0.010, 0.020),), 0.0),
        WidthTiming(3, (Spread(0.012, 0.014, 0.015),), 0.0),
    ),
    draft_step=Spread(0.002, 0.003, 0.005),
)


def test_costs_of_a_target_and_its_draft(target_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The low quartiles: 2 ms next to 8 ms."""
    monkeypatch.setattr("llamaspec.draft_making.measuring.measure", lambda *_: PROBE)
    with LlamaModel(target_file, OPTIONS) as model:
        assert Machine().step_ratio(model, model) == pytest.approx(0.25)
        assert Machine().token_seconds(model) == 0.010


def test_a_speed_up_compares_the_runs_of_each_prompt(
    target_file: Path, draft_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 tokens take 3 and 6 s without a draft, 2 s with it; the first run takes much longer."""
    tasks = [Task(np.zeros(1, dtype=np.int32), Sampling(), seed, 4, "coupled") for seed in (1, 2)]
    n_runs = {"plain": 0, "drafted": 0}

    def took(kind: str, seconds: float) -> Completion:
        n_runs[kind] += 1
        return taking(seconds * (1.0 if n_runs[kind] > 1 else 100.0 if kind == "plain" else 1.0))

    monkeypatch.setattr(Task, "run_plain", lambda self, pair: took("plain", 3.0 * self.seed))
    monkeypatch.setattr(Task, "run", lambda self, pair: took("drafted", 2.0))
    with LlamaModel(target_file, OPTIONS) as model:
        found = Machine().speed_up(model, draft_file, tasks)
    assert found == Spread(1.5, 2.25, 3.0)
    assert n_runs == {"plain": 5, "drafted": 5}


def test_a_draft_is_loaded_like_its_target(target_file: Path) -> None:
    with LlamaModel(target_file, ModelOptions(n_ctx=96, gpu_layers=0, threads=1)) as model:
        found = draft_options(model)
    assert (found.n_ctx, found.gpu_layers, found.threads) == (96, 0, 1)
    assert found.max_scored < ModelOptions().max_scored


def test_a_target_agrees_with_itself_at_every_position(target_file: Path) -> None:
    with LlamaModel(target_file, OPTIONS) as model:
        task = Task(sample_tokens(model.vocabulary, 20), Sampling(), 5, 40, "coupled")
        tokens = Pair(model).stream(task.prompt, seed=5, max_tokens=40).run().tokens
        text = TargetSequence(np.concatenate([task.prompt, np.array(tokens, dtype=np.int32)]), 20)
        assert acceptance(model, [text], TrialSettings(seed=5)) == 1.0
        assert acceptance(model, [text, text], TrialSettings(seed=6)) < 1.0


class KnownCosts(Machine):
    """A machine without a clock."""

    def token_seconds(self, target: LlamaModel) -> float:
        return 1.0

    def step_ratio(self, target: LlamaModel, draft: LlamaModel) -> float:
        return 0.125

    def speed_up(self, target: LlamaModel, draft_file: Path, tasks: Sequence[Task]) -> Spread:
        return Spread(1.0, 1.25, 1.75)


def test_all_tokens_of_a_model_that_drafts_for_itself_are_accepted(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target.gguf", Recipe(seed=4, dtype="f32", end_score=None))
    with LlamaModel(target, OPTIONS) as model:
        trial = Trial(model, TrialSettings(), KnownCosts())
        assert trial.cost_and_acceptance(target) == (0.125, 1.0)
        assert trial.speed_up(target).median == 1.25


def test_a_target_that_generates_nothing(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target.gguf", Recipe(end_score=99.0))
    nothing = pytest.raises(LlamaspecError, match="generates nothing after these texts")
    with LlamaModel(target, OPTIONS) as model, nothing:
        Trial(model, TrialSettings(), KnownCosts()).cost_and_acceptance(target)


def test_texts_that_are_too_short(target_file: Path) -> None:
    short = pytest.raises(LlamaspecError, match="the texts are too short")
    with LlamaModel(target_file, OPTIONS) as model, short:
        Trial(model, TrialSettings((b"", b"a")), KnownCosts())
