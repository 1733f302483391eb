"""Policies by hand: what is guessed, verified and evaluated, round by round."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.rules.auto_length import AutoLength
from llamaspec.rules.lengths import AtMost, FixedLength
from llamaspec.values import Draft, Round
from simulated import machine, text
from simulator import Machine, play


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
