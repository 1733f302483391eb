"""What a measured cost curve says: where wider batches get expensive, and what draft length pays at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llamaspec.length.arithmetic import expected_accepted
from llamaspec.length.cost_curve import CostCurve
from llamaspec.measure.probe import Probe

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
CONCLUSIVE_WIDTH = 9  # kernels change at 2, 4, 5, 8 and 9; what a narrower curve denies, a wider may allow


@dataclass(frozen=True, slots=True)
class BestFixedLength:
    """The best constant number of draft tokens, and what it is worth."""

    n_guesses: int  # 0 where drafting does not pay
    speed_up: float  # predicted tokens per second, divided by those of plain decoding


@dataclass(frozen=True, slots=True)
class Dip:
    """A wider batch that costs less than a narrower one."""

    width: int
    cheaper_width: int


def best_length(seconds: Sequence[float], acceptance: float) -> tuple[int, float]:
    """The best constant number of draft tokens, and its predicted speed divided by that of plain decoding.

    `seconds`: [longest + 1] of a round with 0, 1, ... draft tokens. Section 3 of Leviathan et al., arXiv
    2211.17192, with a measured cost for every width.
    """
    best, n_best = 1.0, 0
    for n, accepted in enumerate(expected_accepted(acceptance, len(seconds) - 1)):
        if (1.0 + accepted) * seconds[0] > best * seconds[n]:
            best, n_best = (1.0 + accepted) * seconds[0] / seconds[n], n
    return n_best, best


def break_even(seconds: Sequence[float]) -> float | None:
    """The smallest constant acceptance above which drafting beats plain decoding; None if none does."""
    if best_length(seconds, 1.0)[0] == 0:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):  # bisection, because more acceptance never makes a round worth less
        middle = (low + high) / 2
        low, high = (low, middle) if best_length(seconds, middle)[0] else (middle, high)
    return high


def round_seconds(curve: CostCurve) -> list[float]:
    """[K] a round with K draft tokens: straight lines between widths, padded where a wider one is cheaper."""
    widths = np.arange(1, curve.widths[-1] + 1)
    seconds = np.interp(widths, curve.widths, curve.verify_seconds)
    padded = np.minimum.accumulate(seconds[::-1])[::-1]
    rounds: list[float] = (padded + (widths - 1) * curve.draft_step_seconds).tolist()
    return rounds


def best_fixed_length(curve: CostCurve, acceptance: float) -> BestFixedLength:
    """The constant number of draft tokens with the highest predicted speed.

    Parameters
    ----------
    curve : CostCurve
        At most its widest width less one are considered.
    acceptance : float
        Probability that a draft token is accepted given that those before it are, in [0, 1].

    Examples
    --------
    >>> best_fixed_length(CostCurve((1, 2), (1.0, 1.0), 0.25), acceptance=0.5)
    BestFixedLength(n_guesses=1, speed_up=1.2)

    Raises
    ------
    ValueError
        The acceptance is no probability.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must be in [0, 1], got {acceptance}")
    return BestFixedLength(*best_length(round_seconds(curve), acceptance))


def break_even_acceptance(curve: CostCurve) -> float | None:
    """The smallest constant acceptance above which drafting beats plain decoding; None if none does."""
    return break_even(round_seconds(curve))


def break_even_seconds(curve: CostCurve) -> list[float]:
    """[n] what evaluating each measured width may cost, drafting aside, to be as fast as single tokens.

    If all draft tokens are accepted; where fewer are, a batch must cost less.

    Examples
    --------
    >>> break_even_seconds(CostCurve((1, 2), (1.0, 1.0), 0.25))
    [1.0, 1.75]
    """
    single, step = curve.verify_seconds[0], curve.draft_step_seconds
    return [width * single - (width - 1) * step for width in curve.widths]


def dips(curve: CostCurve) -> list[Dip]:
    """Widths for which a wider batch is at least 3 % cheaper: the cheapest of these."""
    found = []
    for i, (width, seconds) in enumerate(zip(curve.widths, curve.verify_seconds, strict=True)):
        wider = [(s, w) for w, s in zip(curve.widths[i + 1 :], curve.verify_seconds[i + 1 :], strict=True)]
        if wider and min(wider)[0] < 0.97 * seconds:
            found.append(Dip(width, min(wider)[1]))
    return found


def knees(curve: CostCurve) -> list[int]:
    """Widths after which a position more costs more than twice as much as the one before.

    Padding to a cheaper width is reckoned in; a rise below a tenth of a single position is none.
    """
    costs = np.minimum.accumulate(curve.verify_seconds[::-1])[::-1] / curve.verify_seconds[0]
    rises = np.diff(costs) / np.diff(curve.widths)
    before = np.concatenate([[0.0], rises[:-1]])
    return [
        width
        for width, is_knee in zip(curve.widths, rises > np.maximum(2 * before, 0.1), strict=False)
        if is_knee
    ]


def saturation_width(curve: CostCurve) -> int:
    """The width up to which a position more costs less than half of a single one, as seen from width 1."""
    first, last = curve.verify_seconds[0], 1
    for width, seconds in zip(curve.widths[1:], curve.verify_seconds[1:], strict=True):
        if seconds - first > 0.5 * first * (width - 1):
            break
        last = width
    return last


def verdict(curve: CostCurve) -> str:
    """One plain sentence: does drafting pay, as far as was measured?"""
    needed = break_even_acceptance(curve)
    if needed is not None:
        return f"drafting does not pay on this machine for this pair below an acceptance of {needed:.2f}"
    if curve.widths[-1] < CONCLUSIVE_WIDTH:
        return (
            f"whether drafting pays on this machine for this pair is not known yet: only {len(curve.widths)} "
            f"widths timed, up to {curve.widths[-1]}"
        )
    return "drafting does not pay on this machine for this pair, at any acceptance"


def conclusions(found: Probe) -> dict[str, Any]:
    """A probe and what follows from it, for JSON."""
    return {
        **asdict(found),
        "identical_widths": sorted(found.identical_widths),
        "saturation_width": saturation_width(found.curve),
        "knees": knees(found.curve),
        "dips": [asdict(dip) for dip in dips(found.curve)],
        "best_fixed_length": {
            str(acceptance): asdict(best_fixed_length(found.curve, acceptance)) for acceptance in ACCEPTANCES
        },
        "break_even_acceptance": break_even_acceptance(found.curve),
        "verdict": verdict(found.curve),
    }
