"""The automatic length on machines and texts whose best policy is known: never slower, as fast as can be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llamaspec.length.auto_length import AutoLength
from llamaspec.length.fixed_length import FixedLength
from llamaspec.length.row_length import AutoRow
from llamaspec.values import Round
from simulated import CURVES, FIXED, LEVELS, PAYS, SEEDS, TEXTS, N, auto, fixed, machine, mean, run, text
from simulator import Machine, Passage, optimal_rate, passage, play, table


@pytest.mark.parametrize("prior", ["none", "honest", "flat", "steep"])
@pytest.mark.parametrize(("curve", "draft_ms"), [("q4_0", 3.0), ("q8_0", 0.6), ("flat", 0.6), ("m4", 3.0)])
def test_never_slower_than_plain_decoding(curve: str, draft_ms: float, prior: str) -> None:
    """From 96 tokens on 0.97 of its speed, whatever the prior; at the worst moment of the worst text 0.94."""
    ran = [run(curve, draft_ms, prior, name, seed=0) for name in TEXTS]
    assert mean([each.worst_to_plain(96) for each in ran]) <= 1 / 0.97
    assert max(each.worst_to_plain(96) for each in ran) <= 1 / 0.94
    assert max(each.to_plain for each in ran) <= 1.025


@pytest.mark.parametrize("name", ["constant 0.0", "constant 0.95", "useless"])
def test_a_draft_as_dear_as_the_target_is_asked_once(name: str) -> None:
    """One plain token: that is the price of not having probed."""
    for curve in ("q4_0", "q8_0"):
        step_ms = CURVES[curve][1]
        unprobed, probed = (run(curve, step_ms, prior, name, 0) for prior in ("none", "honest"))
        assert (sum(unprobed.n_steps), sum(probed.n_steps)) == (1, 0)
        assert unprobed.worst_to_plain(64) <= 1.04
        assert unprobed.worst_to_plain(96) <= 1.03


@pytest.mark.parametrize("prior", ["none", "honest"])
@pytest.mark.parametrize("curve", ["f16", "flat"])
def test_against_the_fixed_length_that_hindsight_would_choose(curve: str, prior: str) -> None:
    """The best length for each text, which nobody knows beforehand; and one length for all texts."""
    autos = {(name, seed): run(curve, 0.6, prior, name, seed) for name in PAYS for seed in SEEDS[:2]}
    fixeds = {(name, seed): [fixed(curve, 0.6, n, name, seed) for n in (0, *FIXED)] for name, seed in autos}
    hindsight = [min(r.seconds[-1] for r in fixeds[key]) / autos[key].seconds[-1] for key in autos]
    assert mean(hindsight) >= 0.97
    for i in range(len(FIXED) + 1):
        assert mean([fixeds[key][i].seconds[-1] / autos[key].seconds[-1] for key in autos]) >= 1.03


@pytest.mark.parametrize("growth", [1.0, 2.0])
def test_stretches_are_followed_while_costs_grow(growth: float) -> None:
    """No single length is as good as following easy and hard stretches."""
    for n in (0, *FIXED):
        ratios = [
            fixed("f16", 0.6, n, "stretches", seed, growth).seconds[-1]
            / run("f16", 0.6, "honest", "stretches", seed, growth).seconds[-1]
            for seed in SEEDS
        ]
        assert mean(ratios) >= 1.01, n


@pytest.mark.parametrize("prior", ["none", "honest"])
def test_against_the_best_policy_there_is(prior: str) -> None:
    """Once warm. The optimum knows costs and chances; the policy knows what a run tells."""
    ratios = []
    for curve in ("f16", "flat"):
        on = machine(curve, 0.6)
        for name in PAYS[:-1]:
            values, weights = LEVELS.get(name) or ((float(name.split()[1]),), (1.0,))
            seconds_per_token = 1 / optimal_rate(on, values, weights)
            took = sum(run(curve, 0.6, prior, name, seed).seconds_from(64) for seed in SEEDS)
            ratios.append(seconds_per_token * (N - 64) * len(SEEDS) / took)
    assert mean(ratios) >= 0.94
    assert min(ratios) >= 0.85


def test_the_optimum_of_a_constant_chance_is_the_best_fixed_length() -> None:
    """The dynamic programme against the closed formula for a constant acceptance."""
    on = machine("f16", 3.0)
    for chance in (0.3, 0.6, 0.9):
        speeds = [
            sum(chance**i for i in range(n + 1))
            / (n * on.draft_seconds + float(on.verify_seconds[n]) + on.rest_seconds)
            for n in range(17)
        ]
        assert optimal_rate(on, [chance], [1.0]) == pytest.approx(max(speeds), rel=1e-3)


@pytest.mark.parametrize("after_draft", [1.0, 1.07])
def test_never_slower_where_drafts_disturb_plain_decoding_and_need_time_besides(after_draft: float) -> None:
    """A small mixture of experts as measured: 5 ms a token, and 1.7 times that for two positions."""
    curve = table({1: 0.0053, 2: 0.0092, 3: 0.012, 4: 0.0148, 5: 0.017, 8: 0.024, 16: 0.04})
    on = Machine(curve, 0.0008, rest_seconds=0.00042, draft_rest_seconds=0.0004, jitter=0.1, spikes=0.02)
    on = replace(on, after_draft=after_draft)
    ran: list[float] = []
    for chance in (0.3, 0.5, 0.7):
        for seed in range(12):
            policy, rng = AutoLength(), np.random.default_rng(seed)
            for i in range(3):
                odds = np.log(chance / (1 - chance)) + 1.2 * rng.standard_normal(96)
                chances = np.clip(1 / (1 + np.exp(-odds)), 0.01, 0.99)
                ran.append(play(policy, on, passage(chances, chances, seed + 100 * i), seed + i).to_plain)
    assert mean(ran) <= 1.02
    assert max(ran) <= 1.13


@pytest.mark.parametrize("held_up", [1.5, 3.0])
@pytest.mark.parametrize("curve", ["q4_0", "m4"])
def test_a_first_plain_evaluation_that_was_held_up_is_found_out(curve: str, held_up: float) -> None:
    """Drafts that do not pay seemed to, for as long as plain decoding was not timed again."""

    class HeldUp(AutoLength):
        def start_row(self, *, drops: bool = False) -> AutoRow:
            row, n_seen = super().start_row(drops=drops), 0
            observe = row.observe

            def misled(round_: Round) -> None:
                nonlocal n_seen
                n_seen += 1
                factor = held_up if n_seen == 1 else 1.0
                observe(replace(round_, verify_seconds=factor * round_.verify_seconds))

            row.observe = misled  # type: ignore[method-assign]
            return row

    ran = []
    for seed in range(8):
        on, useless = machine(curve, 0.6), text("constant 0.3", seed)
        short = Passage(useless.chances[:96], useless.stands[:96], useless.confidences[:96])
        ran.append(play(HeldUp(), on, short, seed).to_plain)
    assert mean(ran) <= 1.1
    assert max(ran) <= 1.2


def test_without_noise_the_dip_is_found() -> None:
    """Three guesses cost less than two: width 4 is cheaper than width 3."""
    on = machine("q4_0", 0.6, jitter=0.0)
    lengths = play(AutoLength(on.curve()), on, text("constant 0.85", 0)).lengths
    assert max(set(lengths[40:]), key=lengths[40:].count) == 3


def test_an_unlucky_beginning_is_not_the_end() -> None:
    """Four misses in a row where five of six will be right: most texts recover, and none loses much."""
    ran: list[float] = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        stands = np.concatenate([np.zeros(4, bool), rng.random(92) < 0.85])
        confidences = np.where(stands, rng.uniform(0.7, 0.95, 96), rng.uniform(0.1, 0.6, 96))
        unlucky = Passage(stands.astype(float), stands, confidences)
        ran.append(play(AutoLength(), machine("f16", 0.6), unlucky, seed).to_plain)
    assert sum(to_plain < 0.75 for to_plain in ran) >= 4
    assert max(ran) <= 1 / 0.97


@pytest.mark.parametrize("seed", range(4))
def test_a_dip_behind_dear_widths_is_found(seed: int) -> None:
    """One and two draft tokens lose on this machine, three win: the policy once fell silent after the two."""
    on, hard = machine("q4_0", 0.6), text("constant 0.85", seed)
    best = play(FixedLength(3), on, hard, seed).to_plain
    assert play(AutoLength(), on, hard, seed).to_plain < 1.05 * best


@pytest.mark.parametrize(
    ("curve", "drafted", "faster"),
    [
        ("q4_0", [1.7, 2.5, 2.9, 3.5], [1.26, 1.44, 1.78, 2.07]),
        ("m4", [0.0, 0.1, 1.0, 2.0], [1.00, 1.00, 1.18, 1.47]),
    ],
)
def test_more_is_drafted_the_farther_away_the_target_computes(
    curve: str, drafted: list[float], faster: list[float]
) -> None:
    """A round trip is added to each evaluation, whatever its width. The table of docs/hardware.md."""
    lengths, ratios = [], []
    near = machine(curve, 0.6)
    for round_trip_ms in (0.0, 4.0, 20.0, 60.0):
        far = replace(near, verify_seconds=near.verify_seconds + round_trip_ms / 1e3)
        runs = [play(auto("none", far), far, text("constant 0.7", seed), seed) for seed in range(24)]
        lengths.append(float(np.mean([n for run in runs for n in run.lengths])))
        ratios.append(mean([run.to_plain for run in runs]))
    assert lengths == sorted(lengths)
    assert np.diff(ratios).max() < 0.01
    assert lengths == pytest.approx(drafted, rel=0.1, abs=0.1)
    assert [1.0 / ratio for ratio in ratios] == pytest.approx(faster, rel=0.03)


@pytest.mark.parametrize("first", [0, 100, 200])
def test_texts_whose_first_tokens_are_hard_say_nothing_against_drafts(first: int) -> None:
    """Three draft tokens always are 1.25 times as fast here; but who tries drafts only at once gives up."""
    costs = {1: 23.0, 2: 49.0, 3: 49.0, 4: 50.0, 5: 57.0, 6: 57.0, 8: 78.0, 12: 92.0, 16: 117.0}
    on = Machine(table({width: ms / 1000 for width, ms in costs.items()}), 0.0008, jitter=0.07, spikes=0.01)
    chances = np.array([0.3, 0.5] + [0.8] * 62)
    policy, ran = AutoLength(), list[float]()
    for seed in range(first, first + 40):
        confidences = np.random.default_rng(seed).uniform(0.5, 0.9, len(chances))
        ran.append(play(policy, on, passage(chances, confidences, seed), seed).to_plain)
    assert mean(ran) <= 1 / 1.15


@pytest.mark.parametrize("seed", range(3))
def test_a_cold_start_feels_its_way_to_wide_evaluations(seed: int) -> None:
    """Width 4 is cheap here, 16 thrice as dear: who believed that of width 4 drafted 16 tokens at once."""
    on, easy = machine("dip", 0.6, jitter=0.0), passage(np.full(256, 0.9), np.full(256, 0.9), seed)
    ran = play(AutoLength(), on, easy)
    assert 3 < max(ran.lengths[:6]) <= 8
    assert ran.to_plain <= 1.08 * play(FixedLength(3), on, easy).to_plain


def test_a_text_that_wins_finds_out_that_wide_evaluations_are_cheap() -> None:
    """Three draft tokens win 1.4, fifteen 1.9, where all are accepted; by widths up to 4, fifteen lose."""
    costs = {1: 10.2, 2: 20.2, 3: 26.3, 4: 27.3, 5: 35.4, 8: 51.6, 9: 59.5, 12: 71.4, 16: 80.0}
    on = Machine(table({width: ms / 1000 for width, ms in costs.items()}), 0.0006)
    sure = passage(np.full(256, 1.0), np.full(256, 0.9), 0)
    ran = play(AutoLength(), on, sure)
    assert ran.lengths[-3:-1] == (15, 15)
    assert ran.to_plain < 0.92 * play(FixedLength(3), on, sure).to_plain


def test_plain_decoding_is_seldom_timed_where_drafts_gain_much() -> None:
    """It was every sixth, twelfth, eighteenth round and so on; each cost as much as 1.5 tokens."""
    on = machine("dip", 0.6)
    for seed in range(3):
        lengths = play(AutoLength(), on, text("informed", seed)).lengths
        assert 2 <= lengths[:-2].count(0) <= 6


@pytest.mark.parametrize(("curve", "chance", "first"), [("dip", 0.85, 3), ("q4_0", 0.3, 0), ("m4", 0.7, 0)])
def test_a_text_begins_with_a_draft_where_those_before_it_paid(curve: str, chance: float, first: int) -> None:
    on = machine(curve, 0.6, jitter=0.0)
    policy, easy = AutoLength(on.curve()), text(f"constant {chance}", 0)
    assert play(policy, on, easy).lengths[0] == 0  # plain decoding is timed
    assert play(policy, on, easy).lengths[0] == first
