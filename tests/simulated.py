"""Machines and texts for the simulator, and policies at work on them.

Nothing here is statistical: texts and noise come from seeds, so every figure is exact, and the thresholds of
the tests have been left some air. Ratios are times: 1.03 is three percent slower than plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import exp, log

import numpy as np

from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.fixed_length import FixedLength
from simulator import Machine, Passage, Run, passage, play, table

N = 512
SEEDS = range(3)
FIXED = (1, 2, 3, 4, 6, 8)
# Milliseconds by width, measured or reported: docs/hardware.md says how curves differ.
CURVES = {
    "q4_0": {1: 16.4, 2: 26.4, 3: 36.5, 4: 29.2, 5: 42.3, 6: 52.5, 8: 54.0, 12: 79.0, 16: 89.0},
    "q8_0": {1: 28.5, 2: 66.5, 3: 82.2, 4: 92.1, 5: 117.0, 6: 125.0, 8: 118.0, 12: 137.0, 16: 178.0},
    "q4_k": {1: 16.4, 2: 26.4, 3: 35.8, 4: 45.7, 5: 60.1, 6: 69.1, 8: 80.2, 12: 111.0, 16: 108.0},
    "f16": {1: 42.5, 2: 58.0, 3: 62.5, 4: 69.2, 5: 75.5, 6: 78.0, 8: 94.3, 12: 117.0, 16: 137.0},
    "dip": {1: 34.9, 2: 37.1, 3: 45.0, 4: 29.9, 5: 41.6, 6: 48.5, 8: 53.0, 9: 61.9, 12: 76.0, 16: 79.5},
    "flat": {1: 10.0, 2: 10.3, 4: 10.7, 8: 12.0, 12: 13.5, 16: 15.0},  # bound by memory, like a GPU
    "filling": {1: 10.0, 8: 11.0, 16: 22.0, 32: 44.0, 512: 704.0},  # dear from 8 positions on
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
def fixed(curve: str, draft_ms: float, n_draft: int, name: str, seed: int, growth: float = 1.0) -> Run:
    return play(FixedLength(n_draft), machine(curve, draft_ms, growth), text(name, seed))
