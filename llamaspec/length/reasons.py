"""Why the automatic length chose what it chose: values for people to read, and the counts behind them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from llamaspec.values import Source

EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # of the confidence bins


@dataclass(frozen=True, slots=True)
class LengthCount:
    """How often a number of draft tokens was made."""

    n_draft: int
    n_rounds: int


@dataclass(frozen=True, slots=True)
class WidthCost:
    """What an evaluation of the target is believed to cost."""

    width: int
    seconds: float
    n_timed: int  # rounds that measured it; 0 = from the prior or the neighbours
    padded_to: int  # the width evaluated in its place


@dataclass(frozen=True, slots=True)
class ConfidenceBin:
    """Verified draft tokens whose confidence lies in (low, high]; the first bin includes 0."""

    low: float
    high: float
    n_judged: int
    n_accepted: int
    believed: float  # acceptance in the middle of the bin, as calibrated now

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted divided by verified; None where nothing was verified."""
        return self.n_accepted / self.n_judged if self.n_judged else None


@dataclass(frozen=True, slots=True)
class Reasons:
    """The beliefs of the automatic length, and what came of them."""

    lengths: tuple[LengthCount, ...]  # ascending
    widths: tuple[WidthCost, ...]  # ascending
    draft_step_seconds: float
    overhead_seconds: float
    bins: tuple[ConfidenceBin, ...]
    acceptance: float | None  # of the draft model's next token; None: no model drafts
    n_ngram_verified: int  # n-gram draft tokens that were verified
    n_ngram_accepted: int
    break_even_acceptance: float | None  # above which drafting pays at these costs; None = never
    break_even_is_known: bool  # the same holds at the bounds of what the costs may be: None is sure
    n_predicted_tokens: int  # tokens of the rounds whose time was predicted: all but the first ones
    predicted_seconds: float  # what these rounds should have cost, each predicted before it happened
    measured_seconds: float  # what they cost
    gained_seconds: float  # against plain decoding, by its believed cost; < 0 = lost
    n_tries: int  # rounds that drafted only to explore
    explored_seconds: float  # lost by these

    @property
    def predicted_tokens_per_second(self) -> float | None:
        """Tokens of the predicted rounds divided by their predicted time."""
        return self.n_predicted_tokens / self.predicted_seconds if self.predicted_seconds > 0 else None

    @property
    def measured_tokens_per_second(self) -> float | None:
        """Tokens of the same rounds divided by their measured time."""
        return self.n_predicted_tokens / self.measured_seconds if self.measured_seconds > 0 else None


_APART = {Source.NGRAM: -1, Source.GRAMMAR: -2}  # whose confidences are not a draft model's


@dataclass(slots=True)
class Tally:
    """Counts rounds as they come."""

    lengths: Counter[int] = field(default_factory=Counter)
    verified: Counter[int] = field(default_factory=Counter)  # by confidence bin; or one of _APART
    accepted: Counter[int] = field(default_factory=Counter)
    n_tokens: int = 0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    n_tries: int = 0
    explored_seconds: float = 0.0

    def verify(self, source: Source, confidence: float, is_accepted: bool) -> None:
        """Count a verified draft token."""
        i = _APART[source] if source in _APART else sum(confidence > edge for edge in EDGES[1:-1])
        self.verified[i] += 1
        self.accepted[i] += is_accepted
