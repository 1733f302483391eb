"""A pair starts from what earlier runs have learnt, and keeps what it learns, however it is opened."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamaspec import AutoLength, FixedLength, ModelOptions, NoDrafter, Pair, open_pair
from llamaspec.errors import ModelFileError
from llamaspec.files import file_identity
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.prior import LearnedPrior
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.weights import Weights
from llamaspec.measure.probe import Probe, WidthTiming
from llamaspec.measure.store import BenchGains, keep, keep_probe, stored
from llamaspec.measure.turns import Spread
from llamaspec.opening import WORTH_KEEPING, Drafting, open_plan
from llamaspec.plan import DraftPlan, make_plan
from llamaspec.values import Source
from tiny_models import truncated

PROMPT = "Once upon a time"
ONE_THREAD = ModelOptions(threads=1)
LONG, SHORT = 80, WORTH_KEEPING - 1  # tokens; an evaluation gives at least one

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def plan(models: list[Path]) -> DraftPlan:
    return make_plan(*models, target_options=ONE_THREAD)


def length_of(pair: Pair) -> AutoLength:
    assert isinstance(pair.length, AutoLength)
    return pair.length


def run(pair: Pair, n: int = LONG) -> None:
    """Generate exactly `n` tokens, most of them by plain decoding."""
    completion = pair.stream(PROMPT, seed=5, max_tokens=n).run()
    assert len(completion.tokens) == n


def test_a_pair_keeps_what_it_learns_and_the_next_one_starts_from_it(
    models: list[Path], plan: DraftPlan
) -> None:
    with open_pair(*models, target_options=ONE_THREAD) as pair:
        run(pair)
        assert stored(plan, LearnedPrior) is None
        learnt = length_of(pair).experience()
    assert stored(plan, LearnedPrior) == learnt
    with open_plan(plan) as pair:
        assert length_of(pair).experience().log_odds == learnt.log_odds
        assert length_of(pair).shared.costs.seconds(1) == pytest.approx(
            learnt.curve and learnt.curve.verify_seconds[0]
        )


def test_what_is_learnt_belongs_to_the_file_that_was_opened(plan: DraftPlan, tmp_path: Path) -> None:
    """A new version of a model replaced the file while it was served, and began with the costs of the old."""
    path = tmp_path / "served.gguf"
    shutil.copy(plan.target.path, path)
    served = replace(plan, target=replace(plan.target, path=path))
    with open_plan(served) as pair:
        opened = pair.target.identity
        shutil.copy(plan.models[1].path, tmp_path / "new.gguf")
        (tmp_path / "new.gguf").replace(path)
        run(pair)
        keep(pair, BenchGains({"all": 2.0}))
    assert file_identity(path) != opened
    assert [stored(served, kind) for kind in (LearnedPrior, BenchGains)] == [None, None]
    assert stored(plan, LearnedPrior) is not None, "the old file is elsewhere, too"
    assert stored(plan, BenchGains) is not None


def test_a_file_that_changes_while_it_is_opened_is_refused(
    plan: DraftPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its key would be that of a file which was never loaded."""
    path = Path(shutil.copy(plan.target.path, tmp_path / "served.gguf"))
    load = Weights._load

    def changing(self: Weights, *options: Any, **more: Any) -> Any:
        os.utime(path, ns=(1, 1))
        return load(self, *options, **more)

    monkeypatch.setattr(Weights, "_load", changing)
    with pytest.raises(ModelFileError, match="changed while it was opened; open it again"):
        LlamaModel(path, ONE_THREAD)


def test_a_few_tokens_teach_nothing(plan: DraftPlan) -> None:
    with open_plan(plan) as pair:
        run(pair, SHORT)
    assert stored(plan, LearnedPrior) is None


def test_a_killed_process_has_kept_what_it_learnt_until_the_last_minute(
    plan: DraftPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamaspec.opening.KEPT_EVERY", 1e-9)
    with open_plan(plan) as pair:
        run(pair)
        assert stored(plan, LearnedPrior) is not None


def test_pairs_of_two_processes_keep_what_both_have_learnt(plan: DraftPlan) -> None:
    """Beside another process, and alone: then a timing that was not repeated is less certain afterwards."""
    curve = CostCurve((1, 512), (0.02, 0.9), 0.01, deviations=(0.0, 0.05))
    keep(plan, LearnedPrior(curve))
    with open_plan(plan) as first, open_plan(plan) as second:
        run(first)
        length_of(first).shared.acceptance[Source.MODEL].learn(1.0, 0.99)
        first.close()
        alone = stored(plan, LearnedPrior)
        assert alone is not None
        assert alone.curve is not None
        assert alone.curve.deviations[-1] > 0.05
        assert alone.n_learnt > 0
        second.stream(PROMPT, seed=5, max_tokens=LONG, drafter=NoDrafter(), policy=second.length).run()
    both = stored(plan, LearnedPrior)
    assert both is not None
    assert both.curve != alone.curve
    assert (both.log_odds, both.counts) == (alone.log_odds, alone.counts), "the second has drafted nothing"


def test_before_the_first_run_a_pair_starts_from_the_probe(plan: DraftPlan) -> None:
    """What an earlier run has learnt is newer than the probe."""
    one, four, step = (Spread(seconds, seconds, seconds) for seconds in (3.0, 4.5, 0.6))
    widths = WidthTiming(1, (one,), 0.0), WidthTiming(4, (four,), 0.0)
    keep_probe(plan, Probe((64,), (), widths, step))
    with open_plan(plan) as pair:
        costs = length_of(pair).shared.costs
        assert [costs.seconds(1), costs.seconds(4)] == pytest.approx([3.0, 4.5])
        assert costs.drafting_seconds(1) == pytest.approx(0.6)
    keep(plan, LearnedPrior(CostCurve((1, 4), (2.0, 2.5), 0.5)))
    with open_plan(plan) as pair:
        costs = length_of(pair).shared.costs
        assert [costs.seconds(1), costs.seconds(4)] == pytest.approx([2.0, 2.5])


def test_a_draft_step_is_timed_unless_it_is_certain(plan: DraftPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Pair] = []

    def noted(pair: Pair) -> float:
        timed.append(pair)
        return 0.001

    monkeypatch.setattr("llamaspec.opening.time_draft_step", noted)
    certain = CostCurve((1, 2), (0.02, 0.03), 0.01, draft_deviation=0.05)
    for curve, n_timed in (
        (certain, 0),
        (replace(certain, draft_deviation=0.5), 1),
        (replace(certain, draft_step_seconds=0.0), 2),
    ):
        keep(plan, LearnedPrior(curve))
        open_plan(plan).close()
        assert len(timed) == n_timed


def test_a_fixed_length_neither_uses_nor_keeps_anything(plan: DraftPlan) -> None:
    with open_plan(plan, Drafting(draft_length=2)) as pair:
        assert isinstance(pair.length, FixedLength)
        run(pair)
    assert stored(plan, LearnedPrior) is None


def test_a_default_draft_may_be_damaged(models: list[Path], plan: DraftPlan, tmp_path: Path) -> None:
    """It once kept the server from starting, though nobody had asked for it."""
    assert plan.draft is not None
    bad = truncated(models[1], tmp_path / "bad.gguf")
    plan = replace(plan, draft=replace(plan.draft, path=bad), is_default=True)
    told: list[str] = []
    with open_plan(plan, notify=told.append) as pair:
        assert pair.draft is None
    assert [
        line.startswith(f"continuing without the draft: llama.cpp cannot load {bad}") for line in told
    ] == [True]
    with pytest.raises(ModelFileError, match=r"bad\.gguf"):
        open_plan(replace(plan, is_default=False))
