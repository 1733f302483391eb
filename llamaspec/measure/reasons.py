"""Explain whether drafting is faster: by measured costs, for any acceptance, and in the rounds of one text.

Costs are a `CostCurve`, from a probe or from a length policy. Nothing is measured here.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from llamaspec.length.costs import DENSE, CostCurve
from llamaspec.measure.probe import Probe
from llamaspec.values import COPIES, Round, Source

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
CONCLUSIVE_WIDTH = (
    9  # kernels change at 2, 4, 5, 8 and 9: a wider batch may be worth it even if narrow ones are not
)
EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # of the confidence bins
_COPIED, _FORCED = -1, -2  # in place of a bin


@dataclass(frozen=True, slots=True)
class BestFixedLength:
    """The best fixed draft length and its predicted speed-up."""

    n_guesses: int  # 0: plain decoding is faster
    speed_up: float  # predicted tokens per second, divided by those of plain decoding


def best_length(seconds: Sequence[float], acceptance: float, least: int = 0) -> BestFixedLength:
    """Return the fixed draft length with the highest predicted speed.

    Section 3 of Leviathan et al., arXiv 2211.17192, with a measured cost for every width.

    Parameters
    ----------
    seconds : [longest + 1]
        Of a round with 0, 1, ... draft tokens.
    acceptance : float
        Probability that a draft token is accepted given that those before it are, in [0, 1].
    least : int
        The smallest number to consider.

    Examples
    --------
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


def _widest_drafted(curve: CostCurve) -> int:
    """Return the largest timed width that a draft model reaches; prompt chunks are wider."""
    return max(width for width in curve.widths if width <= DENSE)


def round_seconds(curve: CostCurve) -> list[float]:
    """Return the seconds of a round by draft length, as far as a draft model drafts.

    Interpolates between measured widths, and assumes padding if a wider batch is cheaper.
    """
    widths = np.arange(1, _widest_drafted(curve) + 1)
    padded = np.minimum.accumulate(np.interp(widths, curve.widths, curve.verify_seconds)[::-1])[::-1]
    rounds: list[float] = (padded + (widths - 1) * curve.draft_step_seconds).tolist()
    return rounds


def break_even_seconds(curve: CostCurve) -> list[float]:
    """Return for each measured width the seconds that break even if all draft tokens are accepted."""
    single, step = curve.verify_seconds[0], curve.draft_step_seconds
    return [width * single - (width - 1) * step for width in curve.widths]


def dips(curve: CostCurve) -> dict[int, int]:
    """Map each width to the cheapest wider one, if that is at least 3 % cheaper."""
    found = {}
    for i, (width, seconds) in enumerate(zip(curve.widths, curve.verify_seconds, strict=True)):
        least, wider = min(zip(curve.verify_seconds[i:], curve.widths[i:], strict=True))
        if least < 0.97 * seconds:
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


def is_conclusive(curve: CostCurve) -> bool:
    """Whether enough widths were timed to say that drafting is slower at any acceptance."""
    return _widest_drafted(curve) >= CONCLUSIVE_WIDTH


def verdict(curve: CostCurve) -> str:
    """Say in one sentence when drafting is faster, as far as was measured."""
    needed = break_even(round_seconds(curve))
    if needed is not None:
        return f"on this machine, drafting with this pair is faster above an acceptance of {needed:.0%}"
    if not is_conclusive(curve):
        n_timed = sum(width <= DENSE for width in curve.widths)
        return (
            f"break-even acceptance unknown: only {n_timed} batch sizes timed, up to {_widest_drafted(curve)}"
        )
    return "on this machine, drafting with this pair is slower at any acceptance"


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


@dataclass(frozen=True, slots=True)
class WidthCost:
    """Cost of one evaluation of the target."""

    width: int  # positions
    seconds: float  # mean of this text's evaluations; if there was none, the policy's estimate
    n_timed: int  # rounds of this text


@dataclass(frozen=True, slots=True)
class ConfidenceBin:
    """Draft tokens whose confidence lies in (low, high]; the first bin includes 0."""

    low: float
    high: float
    n_judged: int  # accepted, or the first that was rejected in a round
    n_accepted: int


@dataclass(frozen=True, slots=True)
class Reasons:
    """Costs and gain of drafting in one text."""

    lengths: dict[int, int]  # verified draft tokens -> rounds, ascending
    widths: tuple[WidthCost, ...]  # ascending
    bins: tuple[ConfidenceBin, ...]  # without tokens that were copied, or forced by a constraint
    draft_step_seconds: float | None  # None: nothing was drafted, and no cost is known
    overhead_seconds: float  # of a round
    n_copies_judged: int  # draft tokens that were copied from earlier text
    n_copies_accepted: int
    plain_seconds: float | None  # a round without a draft; None: unknown
    gained_seconds: float | None  # against plain decoding; < 0: lost
    break_even_acceptance: float | None  # None: drafting is slower at any acceptance
    is_conclusive: bool  # whether None above is known: wide evaluations have been timed

    @property
    def n_judged(self) -> int:
        """Number of the draft model's tokens that were accepted, or rejected first in their round."""
        return sum(group.n_judged for group in self.bins)

    @property
    def acceptance(self) -> float | None:
        """Share of the draft model's judged tokens that were accepted; None if there were none."""
        return sum(group.n_accepted for group in self.bins) / self.n_judged if self.n_judged else None


def explain(rounds: Iterable[Round], curve: CostCurve | None) -> Reasons:
    """Compute costs and gain of the rounds of a text that ran alone; `curve` is the policy's."""
    rounds = list(rounds)
    judged, accepted, timed = Counter[int](), Counter[int](), defaultdict[int, list[float]](list)
    for round_ in rounds:
        timed[round_.width].append(round_.verify_seconds)
        for confidence, is_accepted in _judged(round_):
            group = _group(round_.source, confidence)
            judged[group] += 1
            accepted[group] += is_accepted
    overhead = statistics.fmean(round_.overhead_seconds for round_ in rounds) if rounds else 0.0
    steps = [round_.draft_seconds / round_.n_draft_steps for round_ in rounds if round_.n_draft_steps]
    step = statistics.median_low(steps) if steps else None  # a mean would include reading the prompt
    if step is None and curve is not None:
        step = curve.draft_step_seconds
    plain = [r.seconds for r in rounds if r.width == 1 and not r.n_draft_steps]
    plain_seconds = statistics.median(plain) if plain else None
    if plain_seconds is None and curve is not None:
        plain_seconds = curve.verify_seconds[0] + overhead
    n_tokens = sum(round_.n_accepted + 1 for round_ in rounds)
    spent = sum(round_.seconds for round_ in rounds)
    expected = {} if curve is None else dict(zip(curve.widths, curve.verify_seconds, strict=True))
    return Reasons(
        lengths=dict(sorted(Counter(len(round_.draft) for round_ in rounds).items())),
        widths=tuple(
            WidthCost(w, statistics.fmean(timed[w]) if timed[w] else expected[w], len(timed[w]))
            for w in sorted({*timed, *expected})
        ),
        bins=tuple(
            ConfidenceBin(low, high, judged[i], accepted[i]) for i, (low, high) in enumerate(pairwise(EDGES))
        ),
        draft_step_seconds=step,
        overhead_seconds=overhead,
        n_copies_judged=judged[_COPIED],
        n_copies_accepted=accepted[_COPIED],
        plain_seconds=plain_seconds,
        gained_seconds=None if plain_seconds is None else n_tokens * plain_seconds - spent,
        break_even_acceptance=None if curve is None else break_even(round_seconds(curve)),
        is_conclusive=curve is not None and is_conclusive(curve),
    )


def _judged(round_: Round) -> Iterator[tuple[float, bool]]:
    """Yield confidence and acceptance of draft tokens up to the first rejected one; of siblings, the best."""
    for node, drawn in zip((-1, *round_.path), (*round_.path, None), strict=True):
        children = round_.draft.children(node)
        if children:
            yield round_.confidences[children[0]], children[0] == drawn


def _group(source: Source, confidence: float) -> int:
    """Return the bin of a draft token; copied and forced tokens have their own."""
    if source in COPIES:
        return _COPIED
    return _FORCED if source is Source.GRAMMAR else sum(confidence > edge for edge in EDGES[1:-1])
