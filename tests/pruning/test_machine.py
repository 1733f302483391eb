"""What things cost: shares of the target's time and speed-ups, with times that are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamaspec import LlamaModel, ModelOptions
from llamaspec.engine.events import Completion
from llamaspec.measure.compare import Spread
from llamaspec.measure.probe import Probe, Timing, WidthTiming
from llamaspec.measure.task import Task
from llamaspec.pruning.machine import ThisMachine, draft_options
from llamaspec.sampling.filters import Sampling
from rounds import taking

OPTIONS = ModelOptions(threads=1, n_ctx=64)
PROBE = Probe(
    depths=(64,),
    left_out_depths=(),
    widths=(
        WidthTiming(1, (Timing(0.010, 0.008, 0.020),), 0.0, 1),
        WidthTiming(3, (Timing(0.014, 0.012, 0.015),), 0.0, 1),
    ),
    draft_step=Timing(0.003, 0.002, 0.005),
    catch_ups=(),
    sampling_seconds=0.0,
)


def test_costs_of_a_target_and_its_draft(target_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The low quartiles: 2 ms next to 8 ms."""
    monkeypatch.setattr("llamaspec.pruning.machine.measure", lambda *_: PROBE)
    with LlamaModel(target_file, OPTIONS) as model:
        assert ThisMachine().step_ratio(model, model) == pytest.approx(0.25)
        alone = ThisMachine().round_seconds(model)
    assert alone == pytest.approx([0.010, 0.012 + 0.003, 0.014 + 0.006])


def test_a_speed_up_is_that_of_each_text_run_against_run(
    target_file: Path, draft_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 tokens in 3 and 6 s without a draft and in 2 s with it; the runs that warm up take much longer."""
    tasks = [Task(np.zeros(1, dtype=np.int32), Sampling(), seed, 4, "coupled") for seed in (1, 2)]
    n_runs = {"plain": 0, "drafted": 0}

    def took(kind: str, seconds: float) -> Completion:
        n_runs[kind] += 1
        return taking(seconds * (1.0 if n_runs[kind] > 2 else 100.0 if kind == "plain" else 1.0))

    monkeypatch.setattr(Task, "run_plain", lambda self, pair: took("plain", 3.0 * self.seed))
    monkeypatch.setattr(Task, "run", lambda self, pair: took("drafted", 2.0))
    with LlamaModel(target_file, OPTIONS) as model:
        found = ThisMachine().speed_up(model, draft_file, tasks)
    assert found == Spread(1.5, 2.25, 3.0)
    assert n_runs == {"plain": 6, "drafted": 6}


def test_a_draft_is_loaded_as_its_target_is(target_file: Path) -> None:
    with LlamaModel(target_file, ModelOptions(n_ctx=96, gpu_layers=0, threads=1)) as model:
        found = draft_options(model)
    assert (found.n_ctx, found.gpu_layers, found.threads) == (96, 0, 1)
    assert found.max_scored < ModelOptions().max_scored
