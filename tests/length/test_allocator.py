"""Who gets the next position: by hand, and with many rows on simulated machines."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.cost_model import CostModel
from llamaspec.length.shared import Pledge
from llamaspec.values import Draft, Round
from simulated import machine, mean, text
from simulator import Machine, passage, play, play_rows, table

DIPS = {
    1: 13.3,
    2: 23,
    3: 33,
    4: 31.5,
    5: 42,
    6: 48,
    7: 60,
    8: 61,
    9: 66,
    12: 74,
    15: 95,
    16: 86,
    20: 110,
}  # ms
STEPS = CostCurve((1, 2, 3, 4, 5, 6, 7, 8), (1.0, 1.1, 1.2, 1.3, 2.3, 2.4, 2.5, 2.6), 0.2)


def allocator(*pledges: Pledge, longest: int = 2) -> Allocator:
    return Allocator(CostModel(LearnedPrior.of_probe(STEPS)), longest, list(pledges), latest=1)


def pledge(n_draft: int, is_drafting: bool = False) -> Pledge:
    return Pledge(n_draft, is_drafting, is_asking=True, last_evaluation=1)


def test_one_row_pays_for_its_own_positions() -> None:
    own = pledge(0)
    assert allocator(own).level_seconds(own, 0.2) == pytest.approx([0.0, 0.3, 0.6])


def test_a_position_is_priced_behind_those_that_are_pledged() -> None:
    """Two rows with one position each, one with a token more: the next position is the fifth."""
    own = pledge(0)
    among = allocator(own, pledge(0), pledge(1))
    assert among.level_seconds(own, 0.2) == pytest.approx([0.0, 0.2 + 1.0, 0.4 + 1.1])


def test_rows_that_are_level_share_a_step_of_the_curve_and_the_draft_steps() -> None:
    """Three rows from 3 positions on to 6 and 9; two of them and this one are drafting."""
    own = pledge(0, is_drafting=True)
    among = allocator(own, pledge(0, True), pledge(0, True))
    seconds = among.level_seconds(own, 0.2)
    assert seconds[1] == pytest.approx(0.2 / 3 + (2.4 - 1.2) / 3)


def test_plain_decoding_of_as_many_rows_is_timed_first() -> None:
    """Nobody had seen width 4, which is a dip; drafts seemed to gain, and lost a tenth of the speed."""
    policy = AutoLength(CostCurve((1, 2, 3), (1.0, 1.75, 2.5), 0.06))
    rows = [policy.start_row() for _ in range(4)]

    def observe(n_rows: int, width: int, evaluation: int, seconds: float) -> None:
        for row in rows[:n_rows]:
            row.observe(
                Round(
                    Draft(), (), 0, width=width, n_rows=n_rows, evaluation=evaluation, verify_seconds=seconds
                )
            )

    observe(1, 1, 1, 1.0)
    observe(4, 5, 2, 2.6)  # three have joined while one drafted
    assert not any(row.wants_more(Draft()) for row in rows)
    observe(4, 4, 3, 1.75)
    assert policy.shared.costs.knows(4)
    assert policy.shared.costs.knows(5)
    assert not policy.shared.costs.knows(6)


def test_no_further_than_twice_the_known_widths() -> None:
    """A position more may always be tried; rows that are level go there together."""
    known = CostCurve((1, 2, 4), (1.0, 1.1, 1.3), 0.2)
    own, other = pledge(0, is_drafting=True), pledge(0, is_drafting=True)
    alone = Allocator(CostModel(LearnedPrior.of_probe(known)), 15, [own], latest=1)
    both = Allocator(alone.costs, 15, [own, other], latest=1)
    assert alone.costs.reach == 8
    assert (len(alone.level_seconds(own, 0.2)), len(both.level_seconds(own, 0.2))) == (8, 4)
    many = [pledge(1) for _ in range(6)]
    assert len(Allocator(alone.costs, 15, [own, *many], latest=1).level_seconds(own, 0.2)) == 2
    assert CostModel(LearnedPrior()).reach == 2


def test_a_row_that_paused_is_not_expected() -> None:
    own, paused = pledge(0), Pledge(last_evaluation=4)
    among = Allocator(CostModel(LearnedPrior.of_probe(STEPS)), 2, [own, paused], latest=9)
    assert among.present() == [own]


def test_the_rate_of_plain_decoding_counts_all_rows() -> None:
    assert allocator(pledge(0), pledge(0)).plain_rate(2) == pytest.approx(2 / 1.1)


def test_rows_are_expected_that_took_part_in_one_of_the_last_two_evaluations() -> None:
    rows = [Pledge(last_evaluation=n) for n in (-1, 6, 7, 8, 9)]
    asking = Pledge(is_asking=True)
    among = Allocator(CostModel(LearnedPrior.of_probe(STEPS)), 2, [*rows, asking], latest=9)
    assert among.present() == [rows[3], rows[4], asking]
    assert among.n_rows == 3
    fresh = Allocator(CostModel(LearnedPrior.of_probe(STEPS)), 2, [Pledge(), Pledge(last_evaluation=0)])
    assert fresh.present() == fresh.pledges[1:]
    assert Allocator(fresh.costs, 2).n_rows == 1


def test_an_evaluation_begins_new_rounds() -> None:
    among = allocator(pledge(2, True), pledge(0))
    among.start_evaluation(5)
    assert (among.latest, [p.n_draft for p in among.pledges]) == (5, [0, 0])


def test_what_has_no_room_costs_nothing_and_doubt_makes_dearer() -> None:
    own = pledge(1)
    assert allocator(own).level_seconds(own, 0.2) == pytest.approx([0.0, 0.3])
    assert allocator(own, longest=1).level_seconds(own, 0.2) == [0.0]
    assert allocator(own, longest=0).level_seconds(own, 0.2) == [0.0]
    doubtful = allocator(own).level_seconds(own, 0.2, z=1.0)
    factor = np.exp(np.sqrt(2 * 0.006))  # of two widths, each known to that next to width 1
    assert doubtful == pytest.approx([0.0, 0.2 + 1.2 * factor - 1.1])


def test_rows_behind_are_level_and_those_ahead_are_not() -> None:
    """Of three others that are drafting, two have no more tokens than this one."""
    own = pledge(1, is_drafting=True)
    among = allocator(own, pledge(0, True), pledge(1, True), pledge(2, True), longest=2)
    base, more = among.costs.batch_seconds([8, 11])  # 4 rows, 4 tokens; then one for each of 3 rows
    assert among.level_seconds(own, 0.2) == pytest.approx([0.0, 0.2 / 4 + (more - base) / 3])


def test_what_rows_need_besides_the_models_counts() -> None:
    among = allocator(pledge(0))
    among.costs.observe_overhead(0.05, drafted=False)
    assert among.plain_rate(2) == pytest.approx(2 / (1.1 + 2 * 0.05))


def test_the_best_number_of_draft_tokens() -> None:
    costs, gains = [0.0, 1.0, 1.5, 9.0], [0.0, 0.5, 0.75, 0.9]
    assert speed_up(costs, gains, 0.2) == 1.75 / 1.3
    assert speed_up(costs, gains, 1.0) == 1.0
    assert speed_up(costs[:2], gains, 0.2) == 1.5 / 1.2


def test_an_evaluation_of_several_rows_is_learnt_once() -> None:
    policy = AutoLength()
    rows = [policy.start_row() for _ in range(3)]
    for evaluation in (1, 2):
        for row in rows:
            row.observe(Round(Draft(), (), 0, width=3, n_rows=3, evaluation=evaluation, verify_seconds=0.02))
    assert policy.shared.costs.n_timed == {3: 2}
    assert policy.shared.n_tokens == 6


def test_a_row_books_its_share() -> None:
    """Two rows draft in vain: the evaluation takes 0.05 s in place of 0.03 s, the drafting 0.01 s."""
    policy = AutoLength(CostCurve((1, 2, 4), (0.02, 0.03, 0.05), 0.01))
    rows = [policy.start_row() for _ in range(2)]
    for row in rows:
        row.observe(Round(Draft(), (), 0, width=2, n_rows=2, evaluation=1, verify_seconds=0.03))
    before = policy.shared.budget.gain
    draft = Draft(np.zeros(1, dtype=np.int32), (), (0.5,))
    for row in rows:
        row.observe(
            Round(draft, (), 0, width=4, n_rows=2, evaluation=2, n_draft_steps=1, draft_seconds=0.01,
                  verify_seconds=0.05)
        )  # fmt: skip
    lost = before - policy.shared.budget.gain
    assert lost == pytest.approx((0.06 - 0.03) / 0.03 * 2, rel=0.1)


def test_expected_accepted_is_a_geometric_sum() -> None:
    assert expected_accepted(0.5, 3) == [0.0, 0.5, 0.75, 0.875]
    assert expected_accepted(1.0, 2) == [0.0, 1.0, 2.0]
    assert expected_accepted(0.0, 2) == [0.0, 0.0, 0.0]


def test_the_threshold_looks_past_a_step() -> None:
    """One more token costs 1.1 and gains 0.5; two more cost 1.4 and gain 0.75."""
    assert stopping_threshold([0.0, 1.1, 1.4], [0.0, 0.5, 0.75], rate=1.0) == pytest.approx(1.4 / 0.75)
    assert stopping_threshold([0.0, 1.1, 1.4], [0.0, 0.5, 0.75], rate=2.0) == pytest.approx(2.8 / 0.75)
    assert stopping_threshold([0.0, 0.3], [0.0, 0.5], rate=1.0) == pytest.approx(0.3 / 0.5)
    assert stopping_threshold([0.0], [0.0], rate=1.0) == float("inf")


@pytest.mark.parametrize("n_rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["useless", "constant 0.3", "constant 0.7", "informed"])
@pytest.mark.parametrize("curve", ["q4_0", "f16", "flat", "m4"])
def test_never_slower_than_plain_decoding_at_any_load(curve: str, name: str, n_rows: int) -> None:
    on, ran = machine(curve, 0.6), list[float]()
    for seed in range(3):
        passages = [text(name, 100 * seed + row) for row in range(n_rows)]
        for prior in (None, on.curve()):
            ran.append(play_rows(AutoLength(prior), on, passages, seed).worst_to_plain(96 * n_rows))
    assert mean(ran) <= 1 / 0.97
    assert max(ran) <= 1 / 0.95


def test_one_row_of_a_batch_is_a_single_text() -> None:
    on, passage = machine("f16", 0.6), text("informed", 0)
    assert play_rows(AutoLength(), on, [passage], seed=3) == play(AutoLength(), on, passage, seed=3)


def test_drafts_vanish_as_rows_fill_the_batch() -> None:
    """From 8 positions on a position of this machine costs what it costs alone."""
    on, mean_lengths = machine("filling", 0.6), list[float]()
    for n_rows in (1, 4, 16):
        run = play_rows(AutoLength(on.curve()), on, [text("constant 0.7", seed) for seed in range(n_rows)])
        mean_lengths.append(float(np.mean(run.lengths[5:-20])) / n_rows)
    assert mean_lengths[0] > 1.5
    assert mean_lengths[0] > mean_lengths[1] > 0.2
    assert mean_lengths[2] < 0.1


def test_positions_go_to_the_rows_where_they_buy_most() -> None:
    on = machine("filling", 0.6)
    policy = AutoLength(on.curve())
    rows = {name: policy.start_row() for name in ("good", "bad")}
    evaluation, drafted = 0, dict.fromkeys(rows, 0)
    while evaluation < 60:
        evaluation += 1
        drafts = {}
        for name, row in rows.items():
            n = 0
            while row.wants_more(Draft(np.zeros(n, dtype=np.int32), (), (0.6,) * n)):
                n += 1
            drafts[name] = Draft(np.zeros(n, dtype=np.int32), (), (0.6,) * n)
            drafted[name] += n
        width = sum(map(len, drafts.values())) + 2
        for name, row in rows.items():
            n = len(drafts[name])
            path = tuple(range(n if name == "good" else 0))
            row.observe(
                Round(drafts[name], path, 0, width, n_rows=2, evaluation=evaluation, n_draft_steps=n,
                      draft_seconds=0.0006 * n, verify_seconds=float(on.verify_seconds[width - 1]))
            )  # fmt: skip
    assert drafted["good"] > 4 * drafted["bad"]


def test_rows_that_no_allowed_width_holds_do_not_draft() -> None:
    policy = AutoLength(widths={1})
    rows = [policy.start_row() for _ in range(2)]
    for evaluation in (1, 2):
        for row in rows:
            assert not row.wants_more(Draft())
        for row in rows:
            row.observe(Round(Draft(), (), 0, width=2, n_rows=2, evaluation=evaluation, verify_seconds=0.02))


@pytest.mark.parametrize("seed", [25, 56, 72, 80])
def test_texts_that_come_and_go_where_something_holds_evaluations_up(seed: int) -> None:
    """32 of 48 tokens, four at once: width 4 is held up when it is timed for the first time."""
    on = Machine(table(DIPS) / 1e3, 0.0016, rest_seconds=0.0006, jitter=0.07, spikes=0.02)
    passages = [passage(np.full(48, 0.3), np.full(48, 0.5), 1000 * seed + i) for i in range(32)]
    assert play_rows(AutoLength(), on, passages, seed, n_rows=4).to_plain <= 1.03
