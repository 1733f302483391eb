"""Policies by hand, and the automatic one against machines and texts whose best policy is known.

Nothing here is statistical: texts and noise come from seeds, so every figure is exact, and the thresholds
have been left some air. Ratios are times: 1.03 is three percent slower than plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import exp, log

import numpy as np
import pytest

from llamaspec.rules.auto_length import AutoLength
from llamaspec.rules.lengths import AtMost, FixedLength
from llamaspec.rules.reasons import Reasons
from llamaspec.values import CostCurve, Draft, Round
from simulator import Machine, Passage, Run, optimal_rate, passage, play, table

N = 512
SEEDS = range(3)
FIXED = (1, 2, 3, 4, 6, 8)

# Milliseconds by width, measured or reported: see ALGORITHMS, section 3.
CURVES = {
    "q4_0": {1: 16.4, 2: 26.4, 3: 36.5, 4: 29.2, 5: 42.3, 6: 52.5, 8: 54.0, 12: 79.0, 16: 89.0},
    "q8_0": {1: 28.5, 2: 66.5, 3: 82.2, 4: 92.1, 5: 117.0, 6: 125.0, 8: 118.0, 12: 137.0, 16: 178.0},
    "q4_k": {1: 16.4, 2: 26.4, 3: 35.8, 4: 45.7, 5: 60.1, 6: 69.1, 8: 80.2, 12: 111.0, 16: 108.0},
    "f16": {1: 42.5, 2: 58.0, 3: 62.5, 4: 69.2, 5: 75.5, 6: 78.0, 8: 94.3, 12: 117.0, 16: 137.0},
    "flat": {1: 10.0, 2: 10.3, 4: 10.7, 8: 12.0, 12: 13.5, 16: 15.0},  # bound by memory, like a GPU
    "m4": {1: 20.0, 2: 36.0, 4: 77.0, 8: 149.0, 16: 290.0},  # guessing does not pay
}
LEVELS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "informed": ((0.15, 0.6, 0.95), (0.3, 0.3, 0.4)),
    "upside down": ((0.2, 0.9), (0.5, 0.5)),
}
Text = Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]


def machine(curve: str, draft_ms: float, growth: float = 1.0, jitter: float = 0.07) -> Machine:
    seconds = {width: ms / 1000 for width, ms in CURVES[curve].items()}
    return Machine(table(seconds), draft_ms / 1000, growth=growth, jitter=jitter, spikes=0.01)


def constant(chance: float) -> Text:
    """The same chance everywhere; the confidence is noise."""
    return lambda rng: (np.full(N, chance), rng.uniform(0.1, 0.95, N))


def levels(name: str, turn: bool = False) -> Text:
    """Easy and hard tokens mixed; the confidence tells them apart, or says the opposite."""

    def text(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        values, weights = LEVELS[name]
        chances = rng.choice(values, p=weights, size=N)
        told = 1 - chances if turn else chances
        return chances, np.clip(told + 0.05 * rng.standard_normal(N), 0.02, 0.99)

    return text


def stretches(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """64 hard tokens, 64 easy ones, and so on; the confidence tells a little."""
    is_hard = (np.arange(N) // 64) % 2 == 0
    chances = np.where(is_hard, rng.choice([0.1, 0.4], size=N), rng.choice([0.75, 0.97], size=N))
    return chances, np.clip(chances + 0.08 * rng.standard_normal(N), 0.02, 0.99)


def useless(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random weights: never right, and without confidence."""
    return np.full(N, 0.003), rng.uniform(0.01, 0.1, N)


def boasting(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return np.full(N, 0.2), rng.uniform(0.8, 0.99, N)


TEXTS: dict[str, Text] = {
    "useless": useless,
    "boasting": boasting,
    **{f"constant {chance}": constant(chance) for chance in (0.0, 0.3, 0.5, 0.7, 0.85, 0.95)},
    "informed": levels("informed"),
    "upside down": levels("upside down", turn=True),
    "stretches": stretches,
}


@cache
def text(name: str, seed: int) -> Passage:
    chances, confidences = TEXTS[name](np.random.default_rng(1000 + seed))
    return passage(chances, confidences, seed)


def foreign(kind: str) -> CostCurve:
    """Priors of another machine: slower and wider is free, or faster and wider is hopeless."""
    widths = tuple(range(1, 18))
    if kind == "flat":
        return CostCurve(widths, tuple(0.2 * (1 + 0.02 * w) for w in widths), 0.001)
    return CostCurve(widths, tuple(0.005 * (1 + 0.9 * w) for w in widths), 0.02)


def auto(prior: str, on: Machine) -> AutoLength:
    if prior == "none":
        return AutoLength()
    return AutoLength(on.curve() if prior == "honest" else foreign(prior))


@cache
def run(curve: str, draft_ms: float, prior: str, name: str, seed: int, growth: float = 1.0) -> Run:
    on = machine(curve, draft_ms, growth)
    return play(auto(prior, on), on, text(name, seed), seed)


def mean(ratios: list[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios))


# -- by hand ---------------------------------------------------------------------------------------------


def draft_of(n: int, confidence: float = 0.9) -> Draft:
    return Draft(np.zeros(n, dtype=np.int32), (), (confidence,) * n)


def round_of(n: int, n_accepted: int, verify_seconds: float, step_seconds: float = 0.001) -> Round:
    return Round(
        drafted=np.zeros(n, dtype=np.int32),
        confidences=(0.9,) * n,
        n_verified=n,
        n_accepted=n_accepted,
        next_token=0,
        draft_seconds=n * step_seconds,
        verify_seconds=verify_seconds,
        rest_seconds=0.0001,
    )


def test_fixed_length() -> None:
    assert [FixedLength(2).wants_more(draft_of(n)) for n in range(4)] == [True, True, False, False]
    assert not FixedLength(0).wants_more(Draft())
    assert [FixedLength(2).width(n) for n in range(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="draft length must be >= 0, got -1"):
        FixedLength(-1)


@pytest.mark.parametrize(("limit", "n_guesses"), [(5, 3), (2, 2), (0, 0), (-1, 0)])
def test_at_most(limit: int, n_guesses: int) -> None:
    policy, n = AtMost(FixedLength(3), limit), 0
    while policy.wants_more(draft_of(n)):
        n += 1
    assert n == n_guesses


def test_at_most_leaves_width_and_learning_to_the_other() -> None:
    class Spy(FixedLength):
        seen: list[Round] = []  # noqa: RUF012

        def width(self, n_guesses: int) -> int:
            return 7

        def observe(self, round_: Round) -> None:
            self.seen.append(round_)

    policy, round_ = AtMost(Spy(3), 1), round_of(1, 0, 0.02)
    policy.observe(round_)
    assert policy.width(1) == 7
    assert Spy.seen == [round_]


def test_auto_length_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match=r"width 1 must be allowed, got \[2, 4\]"):
        AutoLength(widths=(4, 2))
    with pytest.raises(ValueError, match="the longest draft must be >= 1, got 0"):
        AutoLength(longest=0)


def test_without_a_prior_the_first_round_makes_one_guess_and_the_second_none() -> None:
    policy = AutoLength()
    assert policy.wants_more(Draft())
    assert not policy.wants_more(draft_of(1))
    policy.observe(round_of(1, 1, 0.02))
    assert not policy.wants_more(Draft())


def test_with_a_prior_the_first_round_checks_the_cost_of_a_plain_one() -> None:
    policy = AutoLength(machine("flat", 0.6).curve())
    assert not policy.wants_more(Draft())
    policy.observe(round_of(0, 0, 0.01))
    assert policy.wants_more(Draft())


def test_asking_twice_changes_nothing() -> None:
    policy = AutoLength(machine("flat", 0.6).curve())
    for n_accepted in (0, 0, 1, 1, 1, 3, 3):
        n = 0
        while policy.wants_more(draft_of(n)):
            assert policy.wants_more(draft_of(n))
            n += 1
        policy.observe(round_of(n, min(n, n_accepted), 0.0103))


@pytest.mark.parametrize("widths", [{1}, {1, 2}, {1, 4}, {1, 2, 3, 4, 5, 12}])
def test_only_allowed_widths_are_evaluated(widths: set[int]) -> None:
    class Watch(AutoLength):
        seen: set[int]

        def width(self, n_guesses: int) -> int:
            self.seen.add(super().width(n_guesses))
            return super().width(n_guesses)

    policy = Watch(widths=widths)
    policy.seen = set()
    play(policy, machine("flat", 0.6), text("constant 0.95", 0))
    assert policy.seen <= widths
    assert max(policy.seen) == max(widths)


def test_never_longer_than_the_longest() -> None:
    result = play(AutoLength(longest=5), machine("flat", 0.6), text("constant 0.95", 0))
    assert max(result.lengths) == 5


def test_guesses_that_never_come_do_no_harm() -> None:
    """A drafter may have nothing to guess, as one that looks for repetitions."""
    policy = AutoLength()
    for _ in range(50):
        policy.wants_more(Draft())
        policy.observe(round_of(0, 0, 0.02))
    assert policy.explain().lengths[0].n_rounds == 50


def test_the_same_rounds_give_the_same_decisions() -> None:
    on = machine("f16", 3.0)
    first, second = (play(AutoLength(), on, text("informed", 0), seed=5) for _ in range(2))
    assert first == second


# -- never slower ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["none", "honest", "flat", "steep"])
@pytest.mark.parametrize(("curve", "draft_ms"), [("q4_0", 3.0), ("q8_0", 0.6), ("flat", 0.6), ("m4", 3.0)])
def test_never_slower_than_plain_decoding(curve: str, draft_ms: float, prior: str) -> None:
    """At every moment from 64 tokens on 0.97 of its speed, whatever the text and the prior."""
    for name in TEXTS:
        result = run(curve, draft_ms, prior, name, seed=0)
        assert result.worst_to_plain(64) <= 1 / 0.97, name
        assert result.to_plain <= 1.02, name


@pytest.mark.parametrize("name", ["constant 0.0", "constant 0.95", "useless"])
def test_a_draft_as_dear_as_the_target_is_asked_once(name: str) -> None:
    """Its first guess alone may cost two plain tokens: that is the price of not having probed."""
    for curve in ("q4_0", "q8_0"):
        step_ms = CURVES[curve][1]
        unprobed, probed = (run(curve, step_ms, prior, name, 0) for prior in ("none", "honest"))
        assert sum(n > 0 for n in unprobed.lengths) == 1
        assert unprobed.worst_to_plain(64) <= 1.04
        assert unprobed.worst_to_plain(96) <= 1.03
        assert set(probed.lengths) == {0}


# -- as fast as can be --------------------------------------------------------------------------------------

PAYS = [
    "constant 0.5",
    "constant 0.7",
    "constant 0.85",
    "constant 0.95",
    "informed",
    "upside down",
    "stretches",
]


@cache
def fixed(curve: str, draft_ms: float, n_guesses: int, name: str, seed: int, growth: float = 1.0) -> Run:
    return play(FixedLength(n_guesses), machine(curve, draft_ms, growth), text(name, seed))


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
    """The dynamic programme against the formula of ALGORITHMS, section 2."""
    on = machine("f16", 3.0)
    for chance in (0.3, 0.6, 0.9):
        speeds = [
            sum(chance**i for i in range(n + 1))
            / (n * on.draft_seconds + float(on.verify_seconds[n]) + on.rest_seconds)
            for n in range(17)
        ]
        assert optimal_rate(on, [chance], [1.0]) == pytest.approx(max(speeds), rel=1e-3)


def test_without_noise_the_dip_is_found() -> None:
    """Three guesses cost less than two: width 4 is cheaper than width 3."""
    on = machine("q4_0", 0.6, jitter=0.0)
    lengths = play(AutoLength(on.curve()), on, text("constant 0.85", 0)).lengths
    assert max(set(lengths[40:]), key=lengths[40:].count) == 3


def test_an_unlucky_beginning_is_not_the_end() -> None:
    """Three early misses use up the room; a guess that is sure is judged all the same."""
    rng = np.random.default_rng(3)
    stands = np.concatenate([np.zeros(8, bool), rng.random(88) < 0.85])
    confidences = np.where(stands, rng.uniform(0.7, 0.95, 96), rng.uniform(0.1, 0.6, 96))
    unlucky = Passage(stands.astype(float), stands, confidences)
    on = machine("f16", 0.6)
    result = play(AutoLength(), on, unlucky)
    first = next(n for n, made in zip(result.n_tokens[6:], result.lengths[6:], strict=True) if made)
    assert first < 32
    assert result.to_plain < 0.75


# -- reasons -------------------------------------------------------------------------------------------------


def reasons() -> Reasons:
    policy, on = AutoLength(), machine("f16", 3.0)
    play(policy, on, text("informed", 1), seed=1)
    return policy.explain()


def test_reasons_add_up() -> None:
    why = reasons()
    played = run("f16", 3.0, "none", "informed", 1)
    assert {count.n_guesses: count.n_rounds for count in why.lengths} == {
        n: played.lengths.count(n) for n in set(played.lengths)
    }
    assert sum(b.n_judged for b in why.bins) <= sum(played.lengths)
    assert all(0 <= b.n_accepted <= b.n_judged and 0 <= b.believed <= 1 for b in why.bins)
    assert [cost.width for cost in why.widths] == list(range(1, 18))
    assert sum(cost.n_timed for cost in why.widths) == len(played.lengths)


def test_reasons_predict_the_time_that_was_measured() -> None:
    why = reasons()
    assert why.predicted_tokens_per_second == pytest.approx(why.measured_tokens_per_second, rel=0.1)
    assert why.draft_step_seconds == pytest.approx(0.003, rel=0.1)
    assert why.widths[0].seconds == pytest.approx(0.0425, rel=0.1)
    assert why.explored_seconds < 0.03 * why.measured_seconds
    assert why.break_even_acceptance is not None


def test_reasons_before_the_first_round() -> None:
    why = AutoLength().explain()
    assert why.lengths == ()
    assert why.predicted_tokens_per_second is None
    assert why.measured_tokens_per_second is None
    assert {b.acceptance_rate for b in why.bins} == {None}


# -- experience ----------------------------------------------------------------------------------------------


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
    assert mean(gains) >= 1.01


def test_experience_of_another_machine_does_no_harm() -> None:
    slow = AutoLength()
    play(slow, machine("flat", 0.6), text("constant 0.95", 0))
    for curve in ("m4", "q8_0"):
        on = machine(curve, 3.0)
        result = play(AutoLength(slow.experience()), on, text("constant 0.5", 0))
        assert result.worst_to_plain(64) <= 1 / 0.97


def test_damaged_experience_is_refused() -> None:
    known = AutoLength().experience()
    with pytest.raises(ValueError, match="not what a policy learns"):
        replace(known, acceptance=1.5)
    with pytest.raises(ValueError, match="not what a policy learns"):
        replace(known, confidence_levels=(0.0,))
    with pytest.raises(ValueError, match="do not belong together"):
        replace(known.costs, log_seconds=(0.0, 1.0))
    with pytest.raises(ValueError, match="must be finite"):
        replace(known.costs, catch_up=(0.4, float("nan")))


def test_unlikely_guesses_are_dropped_where_their_evaluation_is_dear() -> None:
    """Width 2 costs a third more than width 1: only guesses with a better chance are worth it."""
    on = machine("f16", 0.6)
    policy = AutoLength(on.curve())
    for confidence, n_accepted in ((0.9, 1), (0.05, 0)) * 40:
        if policy.wants_more(Draft()):
            n = policy.n_to_verify(draft_of(1, confidence))
            policy.observe(verified_round(confidence, n, min(n, n_accepted), on))
        else:
            policy.observe(round_of(0, 0, float(on.verify_seconds[0])))
    assert policy.n_to_verify(draft_of(1, 0.05)) == 0


def verified_round(confidence: float, n_verified: int, n_accepted: int, on: Machine) -> Round:
    """A round with one guess, which may have been dropped."""
    return Round(
        drafted=np.zeros(1, dtype=np.int32),
        confidences=(confidence,),
        n_verified=n_verified,
        n_accepted=n_accepted,
        next_token=0,
        draft_seconds=on.draft_seconds,
        verify_seconds=float(on.verify_seconds[n_verified]),
        rest_seconds=0.0001,
    )
