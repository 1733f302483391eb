"""Why the automatic length chose what it chose, for people to read.

A policy knows no clock: the same rounds give the same decisions. So nothing is counted while a text is made;
its rounds are played again. tests/measure/test_reasons.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from llamaspec.length.acceptance import verified_tokens
from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_model import CostModel
from llamaspec.length.shared import FREE, Shared
from llamaspec.measure.saturation import break_even
from llamaspec.values import Round, Source

SURE = 1.64  # standard deviations of cost within which a verdict must hold
APART = {Source.NGRAM: -1, Source.STORE: -1, Source.GRAMMAR: -2}  # whose confidences are not a draft model's
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
    n_tries: int  # rounds that drafted, but found nothing worth verifying
    explored_seconds: float  # lost by these

    @property
    def predicted_tokens_per_second(self) -> float | None:
        """Tokens of the predicted rounds divided by their predicted time."""
        return self.n_predicted_tokens / self.predicted_seconds if self.predicted_seconds > 0 else None

    @property
    def measured_tokens_per_second(self) -> float | None:
        """Tokens of the same rounds divided by their measured time."""
        return self.n_predicted_tokens / self.measured_seconds if self.measured_seconds > 0 else None


@dataclass(slots=True)
class _Tally:
    """Counts rounds as they are played again."""

    gain_before: float  # plain tokens
    lengths: Counter[int] = field(default_factory=Counter)
    verified: Counter[int] = field(default_factory=Counter)  # by confidence bin; or one of APART
    accepted: Counter[int] = field(default_factory=Counter)
    n_tokens: int = 0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    n_tries: int = 0
    explored_seconds: float = 0.0

    def expect(self, round_: Round, costs: CostModel, n_unread: int) -> None:
        """Compare a round with what it should cost, before it teaches anything."""
        self.n_tokens += round_.n_accepted + 1
        self.measured_seconds += round_.seconds
        self.predicted_seconds += costs.seconds(round_.width) + costs.overhead_seconds
        if round_.n_draft_steps:
            n_steps = costs.narrow_steps(round_.n_priced_steps, round_.n_draft_scored)
            self.predicted_seconds += costs.drafting_seconds(n_steps, n_unread)

    def count(self, round_: Round) -> None:
        """Count the draft and what came of it."""
        self.lengths[len(round_.draft)] += 1
        if round_.shadow is not None and not len(round_.draft):
            self.n_tries += 1
            self.explored_seconds += round_.draft_seconds
        for confidence, is_accepted in verified_tokens(round_):
            bin_ = sum(confidence > edge for edge in EDGES[1:-1])
            i = APART.get(round_.source, bin_)
            self.verified[i] += 1
            self.accepted[i] += is_accepted


def explain(policy: AutoLength, rounds: Iterable[Round], trials: Iterable[tuple[int, float]] = ()) -> Reasons:
    """Costs, acceptance and choices of a policy in the text whose rounds these are.

    Parameters
    ----------
    policy : AutoLength
        A copy made before the text. It plays the rounds again.
    rounds : iterable of Round
        All rounds of a text that ran alone.
    trials : iterable of (width, seconds)
        What was timed before the text, if the policy knew nothing.
    """
    shared, row, tally = policy.shared, policy.start_row(), _Tally(policy.shared.budget.gain)
    for trial in [*trials][len(shared.trials) :]:
        if row.trial_width():
            row.observe_trial(*trial)
    for round_ in rounds:
        if shared.knows_plain:
            tally.expect(round_, shared.costs, row.n_unread)
        row.observe(round_)
        tally.count(round_)
    return _reasons(policy, tally)


def _reasons(policy: AutoLength, tally: _Tally) -> Reasons:
    shared, costs = policy.shared, policy.shared.costs
    calibration, plain_seconds = shared.calibrations[shared.drafting], 1 / shared.plain_rate(1)
    needed, *bounds = (break_even(_round_seconds(shared, z)) for z in (0.0, -SURE, SURE))
    return Reasons(
        lengths=tuple(LengthCount(n, count) for n, count in sorted(tally.lengths.items())),
        widths=tuple(
            WidthCost(w, costs.seconds(w), costs.n_timed.get(w, 0), costs.cheapest_width(w) or w)
            for w in range(1, shared.longest + 2)
        ),
        draft_step_seconds=costs.draft_step_seconds(),
        overhead_seconds=costs.overhead_seconds,
        bins=tuple(
            ConfidenceBin(a, b, tally.verified[i], tally.accepted[i], calibration.probability((a + b) / 2))
            for i, (a, b) in enumerate(pairwise(EDGES))
        ),
        acceptance=shared.usual[shared.drafting].probability() if shared.sources - FREE else None,
        n_ngram_verified=tally.verified[-1],
        n_ngram_accepted=tally.accepted[-1],
        break_even_acceptance=needed,
        break_even_is_known={bound is None for bound in bounds} == {needed is None},
        n_predicted_tokens=tally.n_tokens,
        predicted_seconds=tally.predicted_seconds,
        measured_seconds=tally.measured_seconds,
        gained_seconds=(shared.budget.gain - tally.gain_before) * plain_seconds,
        n_tries=tally.n_tries,
        explored_seconds=tally.explored_seconds,
    )


def _round_seconds(shared: Shared, z: float) -> list[float]:
    """[K] of one row with K draft tokens, `z` standard deviations dearer than believed."""
    costs = shared.costs
    batch = costs.batch_seconds(range(1, shared.longest + 2), z)
    step = costs.draft_step_seconds(z)
    return [seconds + n * step + costs.overhead_seconds for n, seconds in enumerate(batch)]
