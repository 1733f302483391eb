"""Whether drafting is faster: by measured costs, and for a pair on this machine.

Costs are a `CostCurve`, from a probe or from a length policy. Gains are `Summary.speed_up` (one completion),
`Gain` (all requests) or `BenchGains`. This module makes every sentence about a curve, a gain or a pair, so
all commands say the same. It measures nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llamaspec.engine.completion import MIN_PLAIN_SECONDS
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.costs import CALIBRATED, DENSE, Costs
from llamaspec.length.estimates import Acceptance
from llamaspec.length.prior import Gain, LearnedPrior
from llamaspec.measure.store import BenchGains, Models, stored
from llamaspec.plan import DraftPlan, ModelFile

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Kernels change at 2, 4, 5, 8 and 9, so a wide batch may be cheap even if narrow ones are not.
CONCLUSIVE_WIDTH = 9
LIKELY = 0.8  # acceptance at which quantizations are compared
TELLING = 32  # draft tokens from which an observed acceptance is mentioned
ENOUGH = 2000  # tokens of real requests from which their gain is mentioned
SAME = 0.03  # smaller speed-ups are noise
FEW = 1.1  # smaller speed-ups are told in percent
NOISE = 0.07  # two measurements of costs relative to plain decoding differ by up to twice this
QUANTIZATIONS = ("Q4_0", "Q8_0", "F16")  # wide batches are often cheap with these
_QUANTIZATION = re.compile(r"(?<![a-z0-9])(i?q[1-8](_[a-z0-9]+)*|b?f16|f32)(?![a-z0-9])", re.IGNORECASE)


def gain_in_words(gain: float, digits: int = 1) -> str:
    """Compare the estimated speed of a completion with that of decoding without drafts.

    The page of the server says the same (`speed.js`).
    """
    if abs(gain - 1) < SAME:
        compared = "about as fast as"
    elif gain < FEW:
        compared = f"{abs(gain - 1):.0%} {'slower' if gain < 1 else 'faster'} than"
    else:
        compared = f"{gain:.{digits}f} times as fast as"
    return f"{compared} without drafts (estimate)"


def gains_in_words(speed_ups: Mapping[str, float]) -> str:
    """Return speed-ups as a clause; by group of tasks, or of everything if the name is empty."""
    parts = []
    for group, speed_up in speed_ups.items():
        if abs(speed_up - 1) < SAME:
            gain = "as fast as without drafts"
        elif speed_up > 1:
            gain = f"about {speed_up:.1f} times as fast{'' if group else ' as without drafts'}"
        else:
            gain = f"{1 - speed_up:.0%} slower{'' if group else ' than without drafts'}"
        parts.append(f"{gain} for {group}" if group else gain)
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last


@dataclass(frozen=True, slots=True)
class BestFixedLength:
    """The best fixed draft length and its predicted speed-up."""

    n_guesses: int  # 0: plain decoding is faster
    speed_up: float  # predicted tokens per second, divided by those of plain decoding


def best_length(seconds: Sequence[float], acceptance: float) -> BestFixedLength:
    """Return the fixed draft length with the highest predicted speed.

    `seconds` lists the seconds of a round with 0, 1, ... draft tokens. `acceptance` is the probability that a
    draft token is accepted if those before it are. This is section 3 of Leviathan et al., arXiv 2211.17192,
    with a measured cost for every width.

    >>> best_length([1.0, 1.25], acceptance=0.5)
    BestFixedLength(n_guesses=1, speed_up=1.2)
    """
    n_tokens = np.cumsum(float(acceptance) ** np.arange(len(seconds)))
    speeds = n_tokens * seconds[0] / np.asarray(seconds)
    best = int(np.argmax(speeds))
    return BestFixedLength(best, float(speeds[best]))


def break_even(seconds: Sequence[float]) -> float | None:
    """Return the acceptance above which drafting beats plain decoding; None if none does."""
    if best_length(seconds, 1.0).n_guesses == 0:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):  # bisection: drafting that is faster at some acceptance is faster above it, too
        middle = (low + high) / 2
        low, high = (low, middle) if best_length(seconds, middle).n_guesses else (middle, high)
    return high


def break_even_range(seconds: Sequence[float]) -> str:
    """Return the break-even acceptance as a range, because costs are known only up to `NOISE`.

    There must be a break-even acceptance.
    """
    plain, *drafted = seconds
    low, high = (
        break_even([plain, *(each * factor for each in drafted)]) for factor in (1 - NOISE, 1 + NOISE)
    )
    bounds = [round(100 * (1.0 if each is None else each)) for each in (low, high)]
    return " to ".join(str(each) for each in dict.fromkeys(bounds)) + "%"


def round_seconds(curve: CostCurve) -> list[float]:
    """Return the seconds of a round by draft length, up to the widest timed batch of a round."""
    widest = max(width for width in curve.widths if width <= DENSE)  # wider ones are chunks of prompts
    verifying = Costs(curve).seconds_of(1, widest)
    rounds: list[float] = (verifying + np.arange(widest) * curve.draft_step_seconds).tolist()
    return rounds


def saturation_width(curve: CostCurve) -> int:
    """Return the largest width whose extra positions cost less than half a single token each, on average."""
    first, widest = curve.verify_seconds[0], 1
    for width, seconds in zip(curve.widths[1:], curve.verify_seconds[1:], strict=True):
        if seconds - first > 0.5 * first * (width - 1):
            break
        widest = width
    return widest


def verdict(curve: CostCurve) -> str:
    """Return in one sentence when drafting is faster, or that too few widths were measured."""
    seconds = round_seconds(curve)
    if break_even(seconds) is not None:
        needed = break_even_range(seconds)
        return f"on this machine, drafting with this pair is faster above an acceptance of {needed}"
    if len(seconds) < CONCLUSIVE_WIDTH:
        return f"break-even acceptance unknown: batch sizes were timed only up to {len(seconds)}"
    return (
        "on this machine, drafting with this pair is slower at any acceptance, so plain decoding and copies "
        "are used"
    )


def in_words(curve: CostCurve) -> list[str]:
    """Return the properties of a curve, one sentence each."""
    first, *seconds = curve.verify_seconds
    said = [f"a token takes {1e3 * first:.2f} ms in the target"]
    if curve.draft_step_seconds:
        said[0] += f", {1e3 * curve.draft_step_seconds:.2f} ms in the draft"
    extra = [
        f"{max(0.0, each / first - 1) / (width - 1):.0%} at batch size {width}"
        for width, each in zip(curve.widths[1:], seconds, strict=True)
        if width in CALIBRATED
    ]
    if extra:
        said.append(f"cost of an extra position, relative to a single token: {', '.join(extra)}")
    return said


# A pair, judged by kept measurements


def pair_verdict(pair: Models, prior: LearnedPrior | None = None) -> str | None:
    """Return in one sentence what a pair gains from drafts, and how that is known; None if it is not.

    Real requests decide, if there were enough since the latest benchmark, and otherwise the benchmark.
    Without one, the costs and the acceptance of `prior` do, by default those that are kept.
    """
    prior = prior or stored(pair, LearnedPrior)
    if prior is not None and (found := _gain_in_requests(prior.gain)) is not None:
        return found
    if (gains := stored(pair, BenchGains)) is not None:
        return (
            f"on this machine this pair is {gains_in_words(gains.speed_ups)} "
            "(measured by llamaspec bench at temperature 0)"
        )
    if prior is None or prior.curve is None or not prior.curve.draft_step_seconds:
        return None
    seconds, said = round_seconds(prior.curve), verdict(prior.curve)
    if break_even(seconds) is None:
        if len(seconds) < CONCLUSIVE_WIDTH:
            return None
        return f"{said} (computed from measured times){_other_quantization(pair, prior.curve)}"
    if not prior.log_odds or prior.n_learnt < TELLING:
        return None
    acceptance = Acceptance(prior.log_odds).probability()
    best = best_length(seconds, acceptance)
    gain = f"about {best.speed_up:.1f} times as fast as without drafts"
    gain = "no faster" if best.speed_up < 1 + SAME else gain
    return f"{said}; at {acceptance:.0%}, as in all runs so far, it is {gain} (computed from measured times)"


def _gain_in_requests(gain: Gain) -> str | None:
    """Return what drafts have gained in real requests; None if those tell too little."""
    if gain.n_tokens < ENOUGH or gain.plain_seconds < MIN_PLAIN_SECONDS * gain.n_tokens:
        return None
    return (
        f"on this machine this pair was {gains_in_words({'': gain.speed_up})} in its latest requests "
        f"(estimate for {gain.n_tokens:,.0f} tokens)"
    )


def _other_quantization(pair: Models, curve: CostCurve) -> str:
    """Return a clause that names a quantization of the target that is measured and faster with drafts.

    It must be in the same folder. Empty if there is none.
    """
    target, draft = ModelFile(pair.target.path, pair.target.options), None
    if pair.draft is not None:
        draft = ModelFile(pair.draft.path, pair.draft.options)
    name = target.path.name
    for kind in (each for upper in QUANTIZATIONS for each in (upper, upper.lower())):
        other = target.path.with_name(_QUANTIZATION.sub(kind, name))
        if other == target.path or not other.is_file():
            continue
        prior = stored(DraftPlan(ModelFile(other, target.options), draft), LearnedPrior)
        if prior is None or prior.curve is None or not prior.curve.draft_step_seconds:
            continue
        best = best_length(round_seconds(prior.curve), LIKELY)
        speed_up = best.speed_up * curve.verify_seconds[0] / prior.curve.verify_seconds[0]
        if best.n_guesses and speed_up > 1 + SAME:
            return f"; {other.name} with drafts is {speed_up:.1f} times as fast at {LIKELY:.0%} acceptance"
    return ""
