"""Why the automatic length chose what it chose: values for people to read.

Filled by rules/auto_length.py while it runs; written out by the app. Knows no rules of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # of the confidence bins


@dataclass(frozen=True, slots=True)
class LengthCount:
    """How often a number of guesses was made."""

    n_guesses: int
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
    """Judged guesses whose confidence lies in (low, high]; the first bin includes 0."""

    low: float
    high: float
    n_judged: int
    n_accepted: int
    believed: float  # chance that a guess in the middle of the bin stands, as believed now

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted guesses divided by judged guesses; None where nothing was judged."""
        return self.n_accepted / self.n_judged if self.n_judged else None


@dataclass(frozen=True, slots=True)
class Reasons:
    """The beliefs of the automatic length, and what came of them."""

    lengths: tuple[LengthCount, ...]  # ascending
    widths: tuple[WidthCost, ...]  # ascending
    draft_step_seconds: float
    rest_seconds: float
    bins: tuple[ConfidenceBin, ...]
    acceptance: float | None  # chance, as believed now, that the draft model's next guess stands
    n_copies_judged: int  # guesses copied from earlier text that were judged
    n_copies_accepted: int
    break_even_acceptance: float | None  # above which guessing pays at these costs; None = never
    n_predicted_tokens: int  # tokens of the rounds whose time was predicted: all but the first ones
    predicted_seconds: float  # what these rounds should have cost, each predicted before it happened
    measured_seconds: float  # what they cost
    gained_seconds: float  # against plain decoding, by its believed cost; negative = lost
    n_tries: int  # rounds that guessed only to learn
    explored_seconds: float  # lost by these

    @property
    def predicted_tokens_per_second(self) -> float | None:
        """Tokens of the predicted rounds divided by their predicted time."""
        return self.n_predicted_tokens / self.predicted_seconds if self.predicted_seconds > 0 else None

    @property
    def measured_tokens_per_second(self) -> float | None:
        """Tokens of the same rounds divided by their measured time."""
        return self.n_predicted_tokens / self.measured_seconds if self.measured_seconds > 0 else None


class Tally:
    """Counts rounds as they come."""

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()
        self.judged = [0] * (len(EDGES) - 1)  # by confidence bin
        self.accepted = [0] * (len(EDGES) - 1)
        self.n_tokens = 0
        self.predicted_seconds = 0.0
        self.measured_seconds = 0.0
        self.n_tries = 0
        self.explored_seconds = 0.0

    def judge(self, confidence: float, stood: bool) -> None:
        """Count a judged guess."""
        i = sum(confidence > edge for edge in EDGES[1:-1])
        self.judged[i] += 1
        self.accepted[i] += stood

    def compare(self, n_tokens: int, predicted: float, measured: float) -> None:
        """Set a round's seconds against what was predicted."""
        self.n_tokens += n_tokens
        self.predicted_seconds += predicted
        self.measured_seconds += measured
