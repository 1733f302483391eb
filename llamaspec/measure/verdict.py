"""Say in one sentence what drafts gain for a pair on this machine.

The sentence comes from what is kept of the pair: the latest benchmark if there was one, else the costs and
the acceptance of earlier runs. It says which of them. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp

from llamaspec.length.acceptance import UNDRAWN, LearnedPrior
from llamaspec.length.costs import CostCurve
from llamaspec.measure.reasons import best_length, break_even, is_conclusive, round_seconds
from llamaspec.measure.store import PairOnDisk, stored_gains, stored_prior

_HERE = "on this machine this pair"
_SAME = 0.03  # a speed-up below this cannot be told from noise


def pair_verdict(pair: PairOnDisk) -> str | None:
    """Return what is known of a pair, as one sentence; None if too little was measured."""
    gains, prior = stored_gains(pair).value, stored_prior(pair).value
    if gains is not None:
        return f"{_HERE} is {_in_words(gains.speed_ups)} (measured by llamaspec bench)"
    if prior is None or prior.curve is None or not prior.curve.draft_step_seconds:
        return None
    return _estimate(prior, prior.curve)


def _in_words(speed_ups: Mapping[str, float]) -> str:
    parts = []
    for group, speed_up in speed_ups.items():
        if abs(speed_up - 1) < _SAME:
            parts.append(f"as fast as without drafts for {group}")
        elif speed_up > 1:
            parts.append(f"about {speed_up:.1f} times as fast for {group}")
        else:
            parts.append(f"{1 - speed_up:.0%} slower for {group}")
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last


def _estimate(prior: LearnedPrior, curve: CostCurve) -> str | None:
    """The same from costs and acceptance."""
    seconds = round_seconds(curve)
    needed = break_even(seconds)
    if needed is None:
        if not is_conclusive(curve):
            return None
        return (
            "on this machine the draft model cannot win at any acceptance: plain decoding and copies are "
            "used (computed from measured times)"
        )
    if not prior.log_odds or prior.log_odds[-1] == UNDRAWN:  # no draft token was verified
        return None
    acceptance = 1 / (1 + exp(-prior.log_odds[-1]))
    best = best_length(seconds, acceptance)
    known = f"computed from measured times and {acceptance:.0%} acceptance"
    if best.speed_up < 1 + _SAME:
        return f"{_HERE} gains nothing from drafts: it needs {needed:.0%} acceptance ({known})"
    return f"{_HERE} is about {best.speed_up:.1f} times as fast as without a draft ({known})"
