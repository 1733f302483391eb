"""Whether drafting is faster: by measured costs, for a pair on this machine, and in one completion.

Costs are a `CostCurve`, from a probe or from a length policy. Every sentence about a curve or a pair is made
here, so all commands say the same. Nothing is measured here.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from llamaspec.engine.generation import Completion
from llamaspec.length.acceptance import Acceptance, LearnedPrior, verified_tokens
from llamaspec.length.costs import CALIBRATED, DENSE, PAD, CostCurve, Costs
from llamaspec.measure.probe import Probe
from llamaspec.measure.store import BenchGains, Models, stored
from llamaspec.plan import DraftPlan, ModelFile
from llamaspec.values import COPIES, Source

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Kernels change at 2, 4, 5, 8 and 9: a wider batch may be worth it even if narrow ones are not.
CONCLUSIVE_WIDTH = 9
LIKELY = 0.8  # acceptance with which quantizations are compared
TELLING = 32  # draft tokens after which an observed acceptance is mentioned
NOISE = 0.07  # costs relative to plain decoding, measured twice, differ by up to twice as much
SAME = 0.03  # smaller speed-ups are noise
QUANTIZATIONS = ("Q4_0", "Q8_0", "F16")  # with these, wide batches are often cheap
EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # of the confidence bins
_QUANTIZATION = re.compile(r"(?<![a-z0-9])(i?q[1-8](_[a-z0-9]+)*|b?f16|f32)(?![a-z0-9])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class BestFixedLength:
    """The best fixed draft length and its predicted speed-up."""

    n_guesses: int  # 0: plain decoding is faster
    speed_up: float  # predicted tokens per second, divided by those of plain decoding


def best_length(seconds: Sequence[float], acceptance: float, least: int = 0) -> BestFixedLength:
    """Return the fixed draft length, at least `least`, with the highest predicted speed.

    `seconds` are those of a round with 0, 1, ... draft tokens; `acceptance` is the probability that a draft
    token is accepted given that those before it are. Section 3 of Leviathan et al., arXiv 2211.17192, with a
    measured cost for every width.

    >>> best_length([1.0, 1.25], acceptance=0.5)
    BestFixedLength(n_guesses=1, speed_up=1.2)
    """
    n_tokens = np.cumsum(float(acceptance) ** np.arange(len(seconds)))
    speeds = n_tokens * seconds[0] / np.asarray(seconds)
    best = least + int(np.argmax(speeds[least:]))
    return BestFixedLength(best, float(speeds[best]))


def break_even(seconds: Sequence[float]) -> float | None:
    """Return the acceptance above which drafting beats plain decoding; None if none does."""
    if best_length(seconds, 1.0).n_guesses == 0:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):  # bisection, because more acceptance never makes a round worth less
        middle = (low + high) / 2
        low, high = (low, middle) if best_length(seconds, middle).n_guesses else (middle, high)
    return high


def break_even_range(seconds: Sequence[float]) -> str:
    """Return the acceptance from which drafting is faster, as a range: costs are known only up to `NOISE`.

    Drafting must be faster at some acceptance.
    """
    plain, *drafted = seconds
    low, high = (
        break_even([plain, *(each * factor for each in drafted)]) for factor in (1 - NOISE, 1 + NOISE)
    )
    bounds = [round(100 * (1.0 if each is None else each)) for each in (low, high)]
    return " to ".join(str(each) for each in dict.fromkeys(bounds)) + "%"


def round_seconds(curve: CostCurve) -> list[float]:
    """Return the seconds of a round by draft length, up to the widest batch that was timed for drafts."""
    widest = max(width for width in curve.widths if width <= DENSE)  # wider ones are chunks of prompts
    padded = Costs(curve).padded_seconds(1, widest)
    rounds: list[float] = (padded + np.arange(widest) * curve.draft_step_seconds).tolist()
    return rounds


def break_even_seconds(curve: CostCurve) -> list[float]:
    """Return for each measured width the seconds that break even if all draft tokens are accepted."""
    single, step = curve.verify_seconds[0], curve.draft_step_seconds
    return [width * single - (width - 1) * step for width in curve.widths]


def dips(curve: CostCurve) -> dict[int, int]:
    """Map each width to the cheapest wider one, if the length policy would pad to it."""
    found = {}
    for i, (width, seconds) in enumerate(zip(curve.widths, curve.verify_seconds, strict=True)):
        least, wider = min(zip(curve.verify_seconds[i:], curve.widths[i:], strict=True))
        if least < PAD * seconds:
            found[width] = wider
    return found


def saturation_width(curve: CostCurve) -> int:
    """Return the largest width at which extra positions cost, on average, under half a single-token step."""
    first, widest = curve.verify_seconds[0], 1
    for width, seconds in zip(curve.widths[1:], curve.verify_seconds[1:], strict=True):
        if seconds - first > 0.5 * first * (width - 1):
            break
        widest = width
    return widest


def verdict(curve: CostCurve) -> str:
    """Say in one sentence when drafting is faster, as far as was measured."""
    seconds = round_seconds(curve)
    if break_even(seconds) is not None:
        needed = break_even_range(seconds)
        return f"on this machine, drafting with this pair is faster above an acceptance of {needed}"
    if len(seconds) < CONCLUSIVE_WIDTH:
        n_timed = sum(width <= DENSE for width in curve.widths)
        return f"break-even acceptance unknown: only {n_timed} batch sizes timed, up to {len(seconds)}"
    return (
        "on this machine, drafting with this pair is slower at any acceptance: plain decoding and copies are "
        "used"
    )


def in_words(curve: CostCurve) -> list[str]:
    """Return the properties of a curve, one sentence each."""
    said = []
    if curve.draft_step_seconds:
        said.append(f"time per draft token: {1e3 * curve.draft_step_seconds:.2f} ms")
    first, *seconds = curve.verify_seconds
    extra = [
        f"{(each / first - 1) / (width - 1):.0%} at batch size {width}"
        for width, each in zip(curve.widths[1:], seconds, strict=True)
        if width in CALIBRATED
    ]
    if extra:
        said.append(f"cost of an extra position, in single-token steps: {', '.join(extra)}")
    for cheaper, group in groupby(dips(curve).items(), key=itemgetter(1)):
        widths = [width for width, _ in group]
        sizes = f"{widths[0]}" if len(widths) == 1 else f"{widths[0]}–{widths[-1]}"
        said.append(f"batches of {sizes} are padded to {cheaper}, which is faster here")
    return said


# A pair, from kept measurements


def pair_verdict(pair: Models, prior: LearnedPrior | None = None) -> str | None:
    """Return in one sentence what drafts gain for a pair, and how that is known; None if too little is known.

    The latest benchmark counts, else the costs and the acceptance of `prior`; default: the one that is kept.
    """
    if (gains := stored(pair, BenchGains)) is not None:
        return (
            f"on this machine this pair is {_gains_in_words(gains.speed_ups)} "
            "(measured by llamaspec bench at temperature 0)"
        )
    prior = prior or stored(pair, LearnedPrior)
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
    gain = f"about {best.speed_up:.1f} times as fast as without a draft"
    gain = "no faster" if best.speed_up < 1 + SAME else gain
    return f"{said}; with {acceptance:.0%}, as observed, it is {gain} (computed from measured times)"


def _gains_in_words(speed_ups: Mapping[str, float]) -> str:
    parts = []
    for group, speed_up in speed_ups.items():
        if abs(speed_up - 1) < SAME:
            parts.append(f"as fast as without drafts for {group}")
        elif speed_up > 1:
            parts.append(f"about {speed_up:.1f} times as fast for {group}")
        else:
            parts.append(f"{1 - speed_up:.0%} slower for {group}")
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last


def _other_quantization(pair: Models, curve: CostCurve) -> str:
    """Name a file of the same target, in the same folder, that was measured and is faster with drafts."""
    target, *drafts = (ModelFile(model.path, model.options) for model in pair.models)
    name = target.path.name
    for kind in (each for upper in QUANTIZATIONS for each in (upper, upper.lower())):
        other = target.path.with_name(_QUANTIZATION.sub(kind, name))
        if other == target.path or not other.is_file():
            continue
        prior = stored(DraftPlan(ModelFile(other, target.options), tuple(drafts)), LearnedPrior)
        if prior is None or prior.curve is None or not prior.curve.draft_step_seconds:
            continue
        best = best_length(round_seconds(prior.curve), LIKELY)
        speed_up = best.speed_up * curve.verify_seconds[0] / prior.curve.verify_seconds[0]
        if best.n_guesses and speed_up > 1 + SAME:
            return f"; {other.name} with drafts is {speed_up:.1f} times as fast at {LIKELY:.0%} acceptance"
    return ""


# A probe


def attention_verdicts(found: Probe) -> list[str]:
    """Say for each depth whether decoding is faster without flash attention."""
    return [
        f"with {timing.depth} tokens in the KV cache, --flash-attn off "
        + (f"decodes {timing.off_speed_up:.2f} times as fast" if timing.is_off_faster else "is no faster")
        for timing in found.attention
    ]


def conclusions(found: Probe) -> dict[str, Any]:
    """Return a probe and its conclusions, for JSON."""
    curve, seconds = found.curve, round_seconds(found.curve)
    return {
        **asdict(found),
        "identical_widths": sorted(found.identical_widths),
        "saturation_width": saturation_width(curve),
        "dips": dips(curve),
        "best_fixed_length": {str(each): asdict(best_length(seconds, each)) for each in ACCEPTANCES},
        "break_even_acceptance": break_even(seconds),
        "verdict": verdict(curve),
        "flash_attn_off_speed_up": {timing.depth: timing.off_speed_up for timing in found.attention},
        "flash_attn_off_pays": [timing.depth for timing in found.attention if timing.is_off_faster],
    }


# One completion


@dataclass(frozen=True, slots=True)
class Reasons:
    """Costs and gain of drafting in one completion.

    Outcomes say of each draft token whether it was accepted, up to the first rejected one of a round.
    """

    lengths: dict[int, int]  # verified draft tokens -> rounds, ascending
    widths: dict[int, tuple[float, int]]  # width -> mean seconds, or the policy's estimate, and rounds timed
    bins: dict[tuple[float, float], list[bool]]  # confidence in (low, high] -> outcomes of the draft model
    copies: list[bool]  # outcomes of tokens copied from earlier text
    curve: CostCurve | None  # the policy's; None: nothing is known of costs
    overhead_seconds: float  # of a round
    gained_seconds: float | None  # against plain decoding, estimated; < 0: lost

    @property
    def acceptance(self) -> float | None:
        """Share of the draft model's outcomes that are acceptances; None if there are none."""
        outcomes = [*chain(*self.bins.values())]
        return statistics.fmean(outcomes) if outcomes else None

    @property
    def outcome(self) -> str:
        """Whether drafting was faster in this completion."""
        if self.acceptance is None and not self.copies:
            return "no draft token was verified, so drafting gained nothing"
        if self.gained_seconds is None:
            return "gain unknown: the completion is too short, or no round without draft tokens was timed"
        compared = "faster" if self.gained_seconds > 0 else "slower"
        if self.acceptance is None:
            return f"copying from earlier text was {compared} than plain decoding"
        return f"drafting was {compared} than plain decoding; observed acceptance: {self.acceptance:.0%}"


def explain(completion: Completion, curve: CostCurve | None) -> Reasons:
    """Compute costs and gain of a completion that ran alone; `curve` is the policy's."""
    rounds, summary = completion.rounds, completion.summary
    timed = defaultdict[int, list[float]](list)
    bins: dict[tuple[float, float], list[bool]] = {edges: [] for edges in pairwise(EDGES)}
    copies: list[bool] = []
    for round_ in rounds:
        timed[round_.width].append(round_.verify_seconds)
        for confidence, is_accepted in verified_tokens(round_):
            if round_.source in COPIES:
                copies.append(is_accepted)
            elif round_.source is not Source.GRAMMAR:  # a constraint forces tokens that are always accepted
                bins[next(edges for edges in bins if confidence <= edges[1])].append(is_accepted)
    widths = {} if curve is None else {
        width: (seconds, 0) for width, seconds in zip(curve.widths, curve.verify_seconds, strict=True)
    }  # fmt: skip
    widths |= {width: (statistics.fmean(each), len(each)) for width, each in timed.items()}
    speed_up = summary.speed_up
    return Reasons(
        lengths=dict(sorted(Counter(round_.n_verified for round_ in rounds).items())),
        widths=dict(sorted(widths.items())),
        bins=bins,
        copies=copies,
        curve=curve,
        overhead_seconds=summary.overhead_seconds / max(1, len(rounds)),
        gained_seconds=None if speed_up is None else summary.decode_seconds * (speed_up - 1),
    )
