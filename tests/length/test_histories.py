"""What a pair has learnt in runs of other depths and loads does not slow later ones down.

The yardstick is the same policy that knows the true costs from the start. A run starts with what the one
before it has learnt. tests/simulator.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from llamaspec.length.automatic import AutoLength
from llamaspec.length.prior import LearnedPrior
from simulator import Machine, Passage, passage, play, play_together, table

F16 = {1: 34.0, 2: 38.0, 4: 41.0, 8: 60.0, 16: 93.0, 512: 1900.0}  # milliseconds: docs/hardware.md
Q4_K_M = {1: 18.0, 2: 29.0, 4: 50.0, 8: 89.0, 16: 165.0, 512: 1700.0}  # with llama.cpp's kernels
N = 256


def machine(curve: dict[int, float] = F16, **more: float) -> Machine:
    verify = table({width: ms / 1000 for width, ms in curve.items()})
    usual: dict[str, Any] = {
        "jitter": 0.05,
        "spikes": 0.01,
        "attention": 1 / 30_000,
        "draft_attention": 1 / 30_000,
    }
    return Machine(verify, 0.003, **usual | more)


def busy(on: Machine) -> Machine:
    """Another program takes a core: what computes takes twice as long, what reads memory a half more."""
    widths = np.arange(1, len(on.verify_seconds) + 1)
    slower = np.interp(widths, (1, 4, 16), (1.5, 1.9, 2.0))
    verify = on.verify_seconds * slower
    return Machine(verify, on.draft_seconds * 1.8, jitter=0.15, spikes=0.05, attention=on.attention)


def text(seed: int, chance: float = 0.8) -> Passage:
    chances = np.full(N, chance)
    shown = np.clip(chances + 0.05 * np.random.default_rng(seed).standard_normal(N), 0.02, 0.99)
    return passage(chances, shown, seed)


@dataclass(frozen=True)
class Past:
    """A run, or a request to a server."""

    on: Machine
    depth: int = 0
    is_disturbed: bool = False


def after(runs: Sequence[Past], prior: LearnedPrior | None = None) -> LearnedPrior:
    """Return what is known after some runs of one pair."""
    prior = prior or LearnedPrior()
    for seed, each in enumerate(runs):
        policy = AutoLength(prior)
        play(policy, each.on, text(seed), seed, depths=[each.depth], is_disturbed=each.is_disturbed)
        prior = policy.experience()
    return prior


def compared(
    prior: LearnedPrior, on: Machine, depth: int = 0, n_runs: int = 8, first: int = 0
) -> list[float]:
    """Return the speed of each of the next runs, relative to a policy that knows the costs of the machine."""
    ratios = []
    for seed in range(100 + first, 100 + first + n_runs):
        policy = AutoLength(prior)
        took = play(policy, on, text(seed), seed, depths=[depth]).seconds[-1]
        knowing = AutoLength(LearnedPrior(on.curve(), prior.log_odds, copy_log_odds=prior.copy_log_odds))
        ratios.append(play(knowing, on, text(seed), seed, depths=[depth]).seconds[-1] / took)
        prior = policy.experience()
    return ratios


NORMAL = Past(machine())
DEEP = Past(machine(), 30_000)
BUSY = Past(busy(machine()), is_disturbed=True)
UNNOTICED = Past(busy(machine()))  # the thread governor saw nothing
HISTORIES = {
    "three deep runs": [DEEP] * 3,
    "five normal, one deep": [NORMAL] * 5 + [DEEP],
    "five normal, two busy": [NORMAL] * 5 + [BUSY] * 2,
    "five normal, two busy that nobody noticed": [NORMAL] * 5 + [UNNOTICED] * 2,
    "three busy that nobody noticed": [UNNOTICED] * 3,
    "another quantization": [Past(machine(Q4_K_M))] * 5,
    "deep and short in turns": [NORMAL, DEEP] * 3,
}


@pytest.mark.parametrize("depth", [0, 30_000])
@pytest.mark.parametrize("history", HISTORIES)
def test_from_the_third_normal_run_on_the_past_does_not_matter(history: str, depth: int) -> None:
    ratios = compared(after(HISTORIES[history]), machine(), depth)
    assert np.mean(ratios[2:]) >= 0.97


def test_a_share_of_attention_that_has_reached_1_is_corrected() -> None:
    """It stayed at 1 in all later runs, however fast their evaluations were."""
    prior = after([NORMAL] * 5 + [DEEP])
    assert prior.curve is not None
    spoilt = replace(prior, curve=replace(prior.curve, attention_share=1.0))
    corrected = after([DEEP] * 4, spoilt).curve
    assert corrected is not None
    assert corrected.attention_share == pytest.approx(machine().share, abs=0.1)


def test_requests_of_different_depths_to_one_server() -> None:
    on, policy = machine(), AutoLength()
    ratios = []
    for seed in range(12):
        depth = 30_000 * (seed % 2)
        took = play(policy, on, text(seed), seed, depths=[depth]).seconds[-1]
        knowing = AutoLength(LearnedPrior(on.curve(), policy.experience().log_odds))
        ratios.append(play(knowing, on, text(seed), seed, depths=[depth]).seconds[-1] / took)
    assert np.mean(ratios[4:]) >= 0.97


def test_sequences_of_different_depths_in_one_evaluation() -> None:
    on = machine()
    texts = [text(seed) for seed in range(4)]
    depths = [0, 2_000, 10_000, 30_000]
    policy = AutoLength(after([NORMAL] * 3))
    for _ in range(2):
        play_together(policy, on, texts, depths=depths)
    took = play_together(policy, on, texts, depths=depths).seconds[-1]
    knowing = AutoLength(LearnedPrior(on.curve(), policy.experience().log_odds))
    assert play_together(knowing, on, texts, depths=depths).seconds[-1] / took >= 0.97


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_server_heals_after_a_busy_time(is_noticed: bool) -> None:
    on, policy = machine(), AutoLength()
    for seed in range(3):
        play(policy, busy(on), text(seed), seed, is_disturbed=is_noticed)
    ratios, n_rounds, seed = list[float](), 0, 10
    while len(ratios) < 6:
        run = play(policy, on, text(seed), seed)
        n_rounds += len(run.lengths)
        if n_rounds > 300:
            knowing = AutoLength(LearnedPrior(on.curve(), policy.experience().log_odds))
            ratios.append(play(knowing, on, text(seed), seed).seconds[-1] / run.seconds[-1])
        seed += 1
    assert np.mean(ratios) >= 0.97
