"""A pair starts from what earlier runs have learnt, and keeps what it learns, however it is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaspec import AutoLength, FixedLength, ModelOptions, Pair, open_pair
from llamaspec.length.costs import CostCurve
from llamaspec.length.policy import SETTLED, LearnedPrior
from llamaspec.measure.compare import Spread
from llamaspec.measure.probe import Probe, WidthTiming
from llamaspec.measure.store import keep, keep_probe, stored
from llamaspec.opening import WORTH_KEEPING, Drafting, open_plan
from llamaspec.plan import DraftPlan, make_plan

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
        assert length_of(pair).costs.seconds(1) == pytest.approx(
            learnt.curve and learnt.curve.verify_seconds[0]
        )


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


def test_before_the_first_run_a_pair_starts_from_the_probe(plan: DraftPlan) -> None:
    """What an earlier run has learnt is newer than the probe."""
    one, four, step = (Spread(seconds, seconds, seconds) for seconds in (3.0, 4.5, 0.6))
    widths = WidthTiming(1, (one,), 0.0), WidthTiming(4, (four,), 0.0)
    keep_probe(plan, Probe((64,), (), widths, step))
    with open_plan(plan) as pair:
        costs = length_of(pair).costs
        assert [costs.seconds(1), costs.seconds(4)] == pytest.approx([3.0, 4.5])
        assert costs.step_seconds == pytest.approx(0.6)
    keep(plan, LearnedPrior(CostCurve((1, 4), (2.0, 2.5), 0.5)))
    with open_plan(plan) as pair:
        costs = length_of(pair).costs
        assert [costs.seconds(1), costs.seconds(4)] == pytest.approx([2.0, 2.5])


def test_a_draft_step_is_timed_in_the_first_runs_of_a_pair(
    plan: DraftPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Pair] = []

    def noted(pair: Pair) -> float:
        timed.append(pair)
        return 0.001

    monkeypatch.setattr("llamaspec.opening.time_draft_step", noted)
    for n in range(SETTLED + 2):
        keep(plan, LearnedPrior(CostCurve((1, 2), (0.02, 0.03), 0.01), n_runs=n))
        open_plan(plan).close()
    assert len(timed) == SETTLED
    keep(plan, LearnedPrior(CostCurve((1, 2), (0.02, 0.03), 0.0)))
    open_plan(plan).close()
    assert len(timed) == SETTLED + 1, "no run has learnt a step"


def test_a_fixed_length_neither_uses_nor_keeps_anything(plan: DraftPlan) -> None:
    with open_plan(plan, Drafting(draft_length=2)) as pair:
        assert isinstance(pair.length, FixedLength)
        run(pair)
    assert stored(plan, LearnedPrior) is None
