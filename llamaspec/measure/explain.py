"""What was drafted in one completion, and what it gained: `--explain`. tests/measure/test_explain.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from llamaspec.engine.completion import Completion
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.estimates import verified_tokens
from llamaspec.values import COPIES, Source

EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # of the confidence bins
_ORIGINS = {
    Source.MODEL: "from the draft model",
    Source.MTP: "from the prediction heads",
    Source.EAGLE3: "from the EAGLE-3 draft",
    Source.BLOCK: "from the draft's blocks",
    Source.NGRAM: "copied from earlier text",
    Source.PREDICTION: "copied from the prediction",
    Source.EARLIER: "copied from earlier answers",
    Source.GRAMMAR: "forced by the grammar",
}


@dataclass(frozen=True, slots=True)
class Reasons:
    """How much was drafted in one completion, with what result, and at what costs."""

    lengths: dict[int, int]  # verified draft tokens -> rounds, ascending
    accepted: dict[str, tuple[int, int]]  # origin of draft tokens -> how many were accepted, and verified
    bins: dict[tuple[float, float], list[bool]]  # confidence in (low, high] -> whether a token was accepted
    curve: CostCurve | None  # the length policy's, this completion included; None if nothing was timed
    gained_seconds: float | None  # estimate against plain decoding; negative if time was lost

    @property
    def outcome(self) -> str:
        """Time that this completion gained or lost."""
        if not self.accepted:
            return "no draft token was verified, so nothing was gained"
        if self.gained_seconds is None:
            return "gain unknown: the completion is too short, or the estimate is too uncertain"
        more = "less" if self.gained_seconds > 0 else "more"
        return f"the completion took {abs(self.gained_seconds):.2f} s {more} than without drafts (estimate)"


def explain(completion: Completion, curve: CostCurve | None) -> Reasons:
    """Explain a completion that ran alone; `curve` is the length policy's.

    Confidences are counted for draft models and prediction heads only, and up to the first rejected token of
    a round: the target's answer to later tokens is unknown.
    """
    accepted: dict[str, tuple[int, int]] = {}
    bins: dict[tuple[float, float], list[bool]] = {edges: [] for edges in pairwise(EDGES)}
    for round_ in (each for each in completion.rounds if each.n_verified):
        n_accepted, n_verified = accepted.get(origin := _ORIGINS[round_.source], (0, 0))
        accepted[origin] = n_accepted + round_.n_accepted, n_verified + round_.n_verified
        if round_.source not in {*COPIES, Source.GRAMMAR}:
            for confidence, is_accepted in verified_tokens(round_):
                bins[next(edges for edges in bins if confidence <= edges[1])].append(is_accepted)
    summary = completion.summary
    speed_up = summary.speed_up
    return Reasons(
        lengths=dict(sorted(Counter(each.n_verified for each in completion.rounds).items())),
        accepted=accepted,
        bins=bins,
        curve=curve,
        gained_seconds=None if speed_up is None else summary.decode_seconds * (speed_up - 1),
    )
