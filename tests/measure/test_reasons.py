"""What a policy says of itself, and what it hands on to the next run."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fakes import Length
from llamaspec.drafters.model import ModelDrafter
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.staged import StagedDrafter
from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.cost_model import CATCH_UP
from llamaspec.length.row_length import AutoRow
from llamaspec.measure.reasons import Reasons, explain
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.random_streams import SeededStreams, StageStreams
from llamaspec.values import DRAFT, TARGET, Distribution, Draft, Round, Source
from simulated import SEEDS, machine, mean, run, text
from simulator import play
from texts import PLAIN, V, draft, stream, target

SMALL = CostCurve((1, 2, 4), (0.020, 0.022, 0.023), 0.002)
ONE_BEHIND = 0.002 * (1 + CATCH_UP)  # a step that reads two tokens
BRANCHED = Draft(np.arange(4, dtype=np.int32), (), (0.6, 0.6, 0.2, 0.2), parents=np.array([-1, 0, 0, -1]))


class Recorded:
    """A policy whose rounds are kept; its own row."""

    def __init__(self, policy: AutoLength) -> None:
        self.policy, self.rounds = policy, list[Round]()

    def start_row(self, *, drops: bool = False) -> Recorded:
        self.row = self.policy.start_row(drops=drops)
        return self

    def wants_more(self, draft: Draft) -> bool:
        return self.row.wants_more(draft)

    def n_verified(self, draft: Draft) -> int:
        return self.row.n_verified(draft)

    def trial_width(self) -> int:
        return self.row.trial_width()

    def observe_trial(self, width: int, seconds: float) -> None:
        self.row.observe_trial(width, seconds)

    def width(self, n_positions: int) -> int | None:
        return self.row.width(n_positions)

    def observe(self, round_: Round) -> None:
        self.rounds.append(round_)
        self.row.observe(round_)

    def close(self) -> None:
        self.row.close()


def reasons() -> Reasons:
    recorded, on = Recorded(AutoLength()), machine("f16", 3.0)
    play(recorded, on, text("informed", 1), seed=1)
    assert len(recorded.policy.shared.trials) == 2
    return explain(AutoLength(), recorded.rounds, recorded.policy.shared.trials)


def learnt(policy: AutoLength) -> dict[str, object]:
    """All that later decisions depend on."""
    shared, costs = policy.shared, policy.shared.costs
    beliefs = [each[source] for each in (shared.usual, shared.calibrations) for source in Source]
    return {
        "experience": policy.experience(),
        "costs": (costs.n_timed, costs.overhead_seconds, costs.is_surprised),
        "budget": shared.budget,
        "plain": (shared.n_tokens, shared.n_since_plain, shared.wants_plain),
        "beliefs": [belief.probability(0.7, z) for belief in beliefs for z in (-1.0, 1.0)],
        "trees": (shared.trees.shares, shared.trees.first.probability(0.7, 1.0)),
    }


@pytest.mark.parametrize("sources", [{Source.MODEL}, {Source.NGRAM}])
def test_rounds_that_are_played_again_teach_the_same(sources: set[Source]) -> None:
    """Also of a policy that has seen other texts, with a copy made in between."""
    recorded, on, passage = Recorded(AutoLength(sources=sources)), machine("q4_0", 0.6), text("stretches", 1)
    copies = passage if Source.NGRAM in sources else None
    play(recorded, on, text("informed", 1), seed=1, copies=text("informed", 1) if copies else None)
    before = copy.deepcopy(recorded.policy)
    recorded.rounds.clear()
    play(recorded, on, passage, seed=2, copies=copies)
    why = explain(before, recorded.rounds, recorded.policy.shared.trials)
    assert learnt(before) == learnt(recorded.policy)
    assert sum(count.n_rounds for count in why.lengths) == len(recorded.rounds)
    assert (
        0
        < why.n_tries
        == sum(round_.shadow is not None and not len(round_.draft) for round_ in recorded.rounds)
    )
    assert (why.acceptance is None) == (sources == {Source.NGRAM})
    assert (why.n_ngram_verified > 0) == (sources == {Source.NGRAM})


def written(row: AutoRow, curve: CostCurve) -> tuple[list[Round], Counter[str]]:
    """A text whose draft is right in seven of ten positions, with trees, copies, and tokens that are dropped.

    Its rounds, and how many there were of each kind.
    """
    rng, rounds, kinds = np.random.default_rng(3), list[Round](), Counter[str]()
    step = curve.draft_step_seconds
    for number in range(1, 250):
        made = Draft(source=Source.NGRAM, ahead=tuple(rng.uniform(0.1, 0.98, 6)))
        while number % 5 == 0 and made.ahead and row.wants_more(made):
            made = made.plus(1, Distribution.certain(1), made.ahead[0])
        plan, n_steps = None, 0
        if not len(made):
            made = Draft()
            plan = row.tree(lambda plan: plan)
            while not plan and row.wants_more(made):
                made = made.plus(1, Distribution.certain(1), float(rng.choice([0.02, 0.6, 0.9])))
            n_steps, made = (2, BRANCHED) if plan else (len(made), made)
        draft, n_right = made.first(row.n_verified(made)), int(rng.geometric(0.3)) - 1
        path = (0, 2)[: min(n_right, 2)] if plan else tuple(range(min(n_right, len(draft))))
        is_shadow = len(made) > len(draft) == len(path)
        shadow = (made.confidences[len(draft)], float(n_right > len(draft))) if is_shadow else None
        width = row.width(len(draft) + 1)
        assert width is not None
        rounds.append(
            Round(draft, path, 0, width, 1, number, n_steps, n_steps * step * rng.uniform(0.9, 1.1),
                  curve.verify_seconds[width - 1] * rng.uniform(0.9, 1.1), 0.0003,
                  n_draft_scored=n_steps, n_dropped=len(made) - len(draft), shadow=shadow)
        )  # fmt: skip
        row.observe(rounds[-1])
        kinds["trees"] += plan is not None
        kinds["copies"] += draft.source is Source.NGRAM and len(draft) > 0
        kinds["tries"] += shadow is not None and not len(draft)
        kinds["dropped"] += len(draft) < len(made)
    return rounds, kinds


@pytest.mark.parametrize(("slope", "step", "n_trees", "n_tries"), [(0.03, 0.002, 50, 0), (0.6, 0.001, 0, 2)])
def test_trees_and_tokens_that_were_dropped_teach_the_same(
    slope: float, step: float, n_trees: int, n_tries: int
) -> None:
    """Nobody asks for trees when rounds are played again, nor which tokens are verified."""
    curve = CostCurve(tuple(range(1, 18)), tuple(0.04 * (1 + slope * i) for i in range(17)), step)
    policy = AutoLength(curve, sources={Source.MODEL, Source.NGRAM})
    before = copy.deepcopy(policy)
    rounds, kinds = written(policy.start_row(drops=True), curve)
    why = explain(before, rounds)
    assert learnt(before) == learnt(policy)
    assert why.n_tries == kinds["tries"] >= n_tries
    assert kinds["trees"] >= n_trees
    assert kinds["dropped"] >= n_tries
    assert kinds["copies"] > 0


def test_a_try_is_counted_with_what_it_lost() -> None:
    """A draft token that was not verified, beside a plain token."""
    plain = Round(Draft(), (), 0, 1, evaluation=1, verify_seconds=0.02)
    tried = replace(plain, evaluation=2, n_draft_steps=1, draft_seconds=ONE_BEHIND, n_dropped=1)
    why = explain(AutoLength(SMALL), [plain, replace(tried, shadow=(0.5, 1.0))])
    assert (why.n_tries, why.explored_seconds) == (1, ONE_BEHIND)
    assert [(count.n_draft, count.n_rounds) for count in why.lengths] == [(0, 2)]
    assert why.gained_seconds == pytest.approx(-ONE_BEHIND)


def test_drafts_that_are_verified_are_no_tries() -> None:
    """Nor is a round that drafted nothing; what is behind the verified ones may be a shadow."""
    plain = Round(Draft(), (), 0, 1, evaluation=1, verify_seconds=0.01)
    whole = Round(Draft.certain([1]), (0,), 0, 2, 1, 2, 1, 0.003, 0.012)
    part = replace(whole, evaluation=3, n_draft_steps=2, draft_seconds=0.006, n_dropped=1, shadow=(0.5, 0.0))
    why = explain(AutoLength(), [plain, whole, part])
    assert (why.n_tries, why.explored_seconds) == (0, 0.0)
    assert sum(bin_.n_judged for bin_ in why.bins) == 2  # of the shadow nothing was verified


def test_what_is_tried_before_a_text_is_played_again() -> None:
    """Once for each time that it is wanted, and not where it was not wanted."""
    knows = AutoLength(CostCurve((1, 4), (0.01, 0.02), 0.001))
    blank = AutoLength()
    for policy in (knows, blank):
        explain(policy, [], [(4, 0.016), (4, 0.018), (4, 9.0)])
    assert knows.shared.costs.n_timed == {}
    assert blank.shared.costs.n_timed == {4: 2}
    assert blank.shared.trials == [(4, 0.016), (4, 0.018)]


def test_what_was_tried_before_another_text_is_not_played_again() -> None:
    """The first text ended behind its first try; the second try is the second text's."""
    policy = AutoLength()
    first = policy.start_row()
    first.observe_trial(4, 0.016)
    first.close()
    before, row = copy.deepcopy(policy), policy.start_row()
    assert row.trial_width() == 4
    row.observe_trial(4, 0.024)
    explain(before, [], policy.shared.trials)
    assert before.shared.costs.seconds(4) == policy.shared.costs.seconds(4)


class Trying(Length):
    """Lets nothing be verified that was drafted."""

    def n_verified(self, draft: Draft) -> int:
        return 0


def test_tries_of_a_text_are_counted() -> None:
    """Of all 12 rounds but the last one, which has no room for a draft token."""
    models = {TARGET: target(), DRAFT: draft()}
    made = stream(Scheduler(models), models, length=Trying(1), max_tokens=12).run()
    assert explain(AutoLength(), made.rounds).n_tries == 11


def test_tries_of_a_staged_draft_took_its_steps() -> None:
    """A step for each token that was made; else they would cost nothing, and every round would be a try."""
    models, streams = {TARGET: target(), DRAFT: draft(), "draft-2": draft()}, SeededStreams(0)
    own = StageStreams(streams)
    model, helper = (ModelDrafter(V, 64, PLAIN, RULES["coupled"], chance) for chance in (streams, own))
    helper.model = "draft-2"
    drafter = StagedDrafter(model, helper, Length(1), own, lambda: 0.0)
    made = stream(Scheduler(models), models, length=Trying(2), drafter=drafter).run()
    assert [round_.n_draft_steps for round_ in made.rounds[:10]] == [2] * 10


def test_behind_a_try_the_draft_has_nothing_to_catch_up() -> None:
    """It had read the text up to the token that the target has written since: that is read in any step."""
    plain = Round(Draft(), (), 0, 1, evaluation=1, verify_seconds=0.02)
    tried = replace(
        plain, evaluation=2, n_draft_steps=1, draft_seconds=ONE_BEHIND, n_dropped=1, shadow=(0.5, 0.0)
    )
    again = replace(tried, evaluation=3, draft_seconds=0.002)
    why = explain(AutoLength(SMALL), [plain, tried, again])
    assert why.predicted_seconds == pytest.approx(0.04 + ONE_BEHIND + 0.002)


def test_draft_tokens_that_were_dropped_are_predicted_too() -> None:
    """Four steps, of whose tokens one was verified, and accepted; the first round was not predicted."""
    plain = Round(Draft(), (), 0, 1, evaluation=1, verify_seconds=0.02, overhead_seconds=0.0003)
    draft = replace(
        plain, draft=Draft.certain([1]), path=(0,), width=2, evaluation=2, n_draft_steps=4, n_draft_scored=4,
        draft_seconds=0.007, verify_seconds=0.025, n_dropped=3,
    )  # fmt: skip
    why = explain(AutoLength(SMALL), [plain, draft])
    assert why.predicted_seconds == pytest.approx(0.022 + 0.006 + ONE_BEHIND + 0.0003)
    assert why.measured_seconds == pytest.approx(0.0323)
    assert why.n_predicted_tokens == 2
    assert why.predicted_tokens_per_second == pytest.approx(2 / why.predicted_seconds)
    assert why.measured_tokens_per_second == pytest.approx(2 / 0.0323)


def test_what_was_gained_is_that_of_the_text() -> None:
    """Not of those before it."""
    policy, n = AutoLength(SMALL), 0
    for _ in range(2):
        before, row = copy.deepcopy(policy), policy.start_row()
        rounds = [Round(Draft(), (), 0, 1, evaluation=n + 1, verify_seconds=0.02)]
        rounds += [replace(timed(2, 0.022), path=(0,), evaluation=n + i) for i in (2, 3)]
        for round_ in rounds:
            row.observe(round_)
        row.close()
        n += 3
    gained = (policy.shared.budget.gain - before.shared.budget.gain) / policy.shared.plain_rate(1)
    assert explain(before, rounds).gained_seconds == pytest.approx(gained)


def test_reasons_add_up() -> None:
    why = reasons()
    played = run("f16", 3.0, "none", "informed", 1)
    assert {count.n_draft: count.n_rounds for count in why.lengths} == {
        n: played.lengths.count(n) for n in set(played.lengths)
    }
    assert sum(b.n_judged for b in why.bins) <= sum(played.lengths)
    assert all(0 <= b.n_accepted <= b.n_judged and 0 <= b.believed <= 1 for b in why.bins)
    assert [cost.width for cost in why.widths] == list(range(1, 17))
    assert sum(cost.n_timed for cost in why.widths) == 2 + len(played.lengths)


def test_reasons_predict_the_time_that_was_measured() -> None:
    why = reasons()
    assert why.predicted_tokens_per_second == pytest.approx(why.measured_tokens_per_second, rel=0.1)
    assert why.draft_step_seconds == pytest.approx(0.003, rel=0.1)
    assert why.widths[0].seconds == pytest.approx(0.0425, rel=0.1)
    assert why.explored_seconds < 0.03 * why.measured_seconds
    assert why.break_even_acceptance is not None


def test_reasons_before_the_first_round() -> None:
    why = explain(AutoLength(), [])
    assert why.lengths == ()
    assert why.predicted_tokens_per_second is None
    assert why.measured_tokens_per_second is None
    assert {b.acceptance_rate for b in why.bins} == {None}
    edges = [b.low for b in why.bins], [b.high for b in why.bins]
    assert edges == ([0.0, 0.1, 0.3, 0.5, 0.7, 0.9], [0.1, 0.3, 0.5, 0.7, 0.9, 1.0])


def test_verified_tokens_are_counted_by_their_confidence() -> None:
    """Up to the first that was rejected; a bin includes its upper end."""
    draft = Draft(np.zeros(5, np.int32), (), (0.95, 0.9, 0.8, 0.3, 0.6))
    why = explain(AutoLength(), [Round(draft, (0, 1, 2), 0, 6)])
    assert [(b.n_judged, b.n_accepted) for b in why.bins] == [(0, 0), (1, 0), (0, 0), (0, 0), (2, 2), (1, 1)]
    assert [b.acceptance_rate for b in why.bins] == [None, 0.0, None, None, 1.0, 1.0]


def test_experience_saves_the_next_run_what_this_one_had_to_learn() -> None:
    """Without a probe; over many texts, for one text can always begin unluckily."""
    gains = []
    for curve in ("q4_0", "f16", "flat"):
        on = machine(curve, 0.6)
        for name in ("constant 0.7", "constant 0.85", "informed", "stretches"):
            for seed in SEEDS:
                first = AutoLength()
                cold = play(first, on, text(name, seed), seed)
                warm = play(AutoLength(first.experience()), on, text(name, seed), seed + 1)
                gains.append(cold.seconds[-1] / warm.seconds[-1])
    assert mean(gains) >= 1.003


def test_experience_of_another_machine_does_no_harm() -> None:
    slow = AutoLength()
    play(slow, machine("flat", 0.6), text("constant 0.95", 0))
    for curve in ("m4", "q8_0"):
        on = machine(curve, 3.0)
        result = play(AutoLength(slow.experience()), on, text("constant 0.5", 0))
        assert result.worst_to_plain(96) <= 1 / 0.96


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -50.0])
def test_damaged_experience_is_refused(number: float) -> None:
    known = AutoLength().experience()
    for log_odds in ((number, 0.2, 0.6), (0.4, number, 0.6), (0.4, 0.2, number)):
        with pytest.raises(ValueError, match="must be finite"):
            replace(known, log_odds=log_odds)
    assert replace(known, log_odds=(-49.0, 49.0, 0.0)).log_odds == (-49.0, 49.0, 0.0)


def test_draft_tokens_that_were_looked_up_are_counted_together() -> None:
    """Of this text and of earlier ones; not what a constraint forced, nor what a model drafted."""
    rounds = [
        Round(Draft.certain([1] * n, source=source), tuple(range(k)), 0, n + 1)
        for source, n, k in (
            (Source.NGRAM, 3, 1),
            (Source.STORE, 5, 2),
            (Source.GRAMMAR, 7, 7),
            (Source.MODEL, 2, 1),
        )
    ]
    why = explain(AutoLength(sources={Source.MODEL, Source.NGRAM, Source.STORE}), rounds)
    assert (why.n_ngram_verified, why.n_ngram_accepted) == (2 + 3, 1 + 2)  # up to the first rejected one
    assert sum(bin_.n_judged for bin_ in why.bins) == 2
    assert [(count.n_draft, count.n_rounds) for count in why.lengths] == [(2, 1), (3, 1), (5, 1), (7, 1)]


def test_acceptance_is_believed_of_the_middle_of_a_bin() -> None:
    policy = AutoLength()
    calibration = policy.shared.calibrations[policy.shared.drafting]
    believed = {(b.low, b.high): b.believed for b in explain(policy, []).bins}
    assert believed[0.7, 0.9] == calibration.probability(0.8)
    assert believed[0.1, 0.3] == calibration.probability(0.2)
    assert believed[0.1, 0.3] < believed[0.7, 0.9] < calibration.probability(0.9)


def test_the_verdict_knows_the_longest_drafts() -> None:
    """All widths cost as much as 14 single positions: only 16 tokens at once, the most, are worth it."""
    policy = AutoLength(CostCurve((1, 2, 17), (0.01, 0.14, 0.14), 1e-9))
    assert policy.shared.longest == 15
    needed = explain(policy, []).break_even_acceptance
    assert needed is not None
    assert sum(needed**n for n in range(16)) == pytest.approx(14, rel=0.02)


def test_the_verdict_knows_what_rounds_need_besides_the_models() -> None:
    """2 ms: one draft token makes 12 ms 19."""
    policy = AutoLength(CostCurve((1, 2), (0.010, 0.016), 0.001), longest=1)
    policy.shared.costs.observe_overhead(0.002, drafted=False)
    assert explain(policy, []).break_even_acceptance == pytest.approx(0.019 / 0.012 - 1)


def test_widths_are_shown_with_what_is_evaluated_in_their_place() -> None:
    why = explain(AutoLength(SMALL, widths={1, 4}, longest=4), [])
    assert [(cost.width, cost.padded_to) for cost in why.widths] == [(1, 1), (2, 4), (3, 4), (4, 4), (5, 5)]


def timed(width: int, seconds: float) -> Round:
    draft = Draft(np.zeros(width - 1, dtype=np.int32), (), (0.5,) * (width - 1))
    return Round(draft, (), 0, width, n_draft_steps=width - 1, draft_seconds=0.003 * (width - 1),
                 verify_seconds=seconds)  # fmt: skip


def verdict_after(
    rounds: list[tuple[int, float]], prior: CostCurve | None = None
) -> tuple[float | None, bool]:
    """Break-even acceptance, and whether it is known, after timings of widths; a draft step costs 3 ms."""
    why = explain(AutoLength(prior), [timed(width, seconds) for width, seconds in rounds])
    return why.break_even_acceptance, why.break_even_is_known


def test_one_round_of_width_2_is_no_verdict() -> None:
    assert not verdict_after([(1, 0.010), (2, 0.030)])[1]


def test_a_verdict_needs_several_timings_of_several_widths() -> None:
    steep = [(width, 0.010 * width) for width in range(1, 18)]
    assert verdict_after(steep * 4) == (None, True)
    flat = [(width, 0.010 + 0.0001 * width) for width in (1, 2, 4, 8)]
    found, is_known = verdict_after(flat * 3)
    assert is_known
    assert found is not None


def test_doubt_outlives_the_run() -> None:
    """What one round of width 2 said is not believed by the next run."""
    policy = AutoLength()
    assert not explain(policy, [timed(1, 0.010), timed(2, 0.030)]).break_even_is_known
    policy = AutoLength(policy.experience())
    assert not explain(policy, [timed(1, 0.010)]).break_even_is_known
