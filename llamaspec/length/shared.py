"""What all rows of a policy know together: costs, acceptance of each source, the regret budget, the counts.

An evaluation shared by several rows is learnt once, with its first round, and booked once, with its last.
"""

from __future__ import annotations

from collections.abc import Collection

from llamaspec.length.acceptance import FREE_LEVELS, FREE_START, RunningAverage, SourceBelief, verified_tokens
from llamaspec.length.allocator import Allocator, Pledge
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.cost_model import CostBelief, CostModel
from llamaspec.length.reasons import Tally
from llamaspec.length.regret_budget import RegretBudget
from llamaspec.values import Round, Source

FREE = frozenset({Source.NGRAM, Source.GRAMMAR})  # sources that cost no draft step
OUTLIER = 1.3  # an evaluation is booked with at most this multiple of the time it should have taken
SOFT = 0.5  # part of a draft token that its calibrated confidence counts for, verified or not


class Shared:
    """The common state of the rows."""

    def __init__(
        self,
        prior: CostCurve | CostBelief | None,
        widths: Collection[int] | None,
        longest: int,
        sources: Collection[Source],
        model: SourceBelief,
    ) -> None:
        self.costs = CostModel(prior, widths)
        self.allocator = Allocator(self.costs, longest)
        self.budget = RegretBudget()
        self.tally = Tally()
        self.has_model, self.has_free = bool(set(sources) - FREE), bool(set(sources) & FREE)
        self.beliefs = {
            source: SourceBelief(FREE_START, FREE_LEVELS) if source in FREE else SourceBelief()
            for source in Source
        }
        self.beliefs[Source.MODEL] = model
        self.ahead = model.usual.probability  # of the row that drafted last
        self.knows_plain = False  # an evaluation without drafts has been timed
        self.wants_plain = False  # the next evaluation should be one, of all rows
        self.n_tokens = self.n_since_plain = 0
        # Of the latest evaluation:
        self._n_seen = self._n_made = self._n_drafted = 0  # rounds that have come, and their tokens
        self._likely_verify = self._verify_seconds = self._drafting = self._overhead = 0.0

    def start_row(self, pledge: Pledge) -> None:
        """A text begins; one that begins alone has a budget of its own."""
        if not self.allocator.pledges:
            self.budget.start_text(self.n_tokens)
        self.allocator.pledges.append(pledge)

    def learn_acceptance(self, round_: Round, average: RunningAverage) -> None:
        """Learn from one row's round."""
        belief = self.beliefs[round_.source]
        for confidence in round_.confidences:
            average.learn(belief.calibration.probability(confidence), SOFT)
        for confidence, is_accepted in verified_tokens(round_):
            belief.calibration.learn(confidence, is_accepted)
            belief.usual.learn(is_accepted)
            average.learn(is_accepted, 1.0 - SOFT)
            self.tally.verify(round_.source, confidence, is_accepted)
        if round_.source not in FREE:
            self.ahead = average.probability

    def observe(self, round_: Round, n_unread: int) -> float:
        """Learn from one row's round; returns the seconds of all rows that it should be judged by."""
        costs, n_rows, n_steps = self.costs, round_.n_rows, round_.n_draft_steps
        if round_.evaluation != self.allocator.latest or self._n_seen >= n_rows:
            self._start_evaluation(round_)
        likely = n_steps * costs.draft_step_seconds() + (costs.catch_up_seconds(n_unread) if n_steps else 0.0)
        self.tally.lengths[len(round_.draft)] += 1
        if self.knows_plain and n_rows == 1:
            predicted = self._likely_verify + likely + costs.overhead_seconds
            self.tally.n_tokens += round_.n_accepted + 1
            self.tally.predicted_seconds += predicted
            self.tally.measured_seconds += round_.seconds
        if n_steps and not self._drafting:
            costs.observe_draft(n_steps, n_unread, round_.draft_seconds)
        costs.observe_overhead(round_.overhead_seconds + (0.0 if n_steps else round_.draft_seconds))
        drafting = min(round_.draft_seconds, OUTLIER * likely) if n_steps else round_.draft_seconds
        overhead = min(round_.overhead_seconds, 3 * costs.overhead_seconds)
        self._drafting = max(self._drafting, drafting)
        self._overhead += overhead
        self._n_seen += 1
        self._n_drafted += len(round_.draft)
        self._n_made += round_.n_accepted + 1
        self.n_tokens += round_.n_accepted + 1
        if self._n_seen == n_rows:
            self._end_evaluation(round_)
        return self._verify_seconds + drafting + n_rows * overhead

    def _start_evaluation(self, round_: Round) -> None:
        """Learn what rows share; all of them begin a new round."""
        self.allocator.start_evaluation(round_.evaluation)
        self._likely_verify = self.costs.seconds(round_.width)
        self._verify_seconds = min(round_.verify_seconds, OUTLIER * self._likely_verify)
        self.costs.observe_verify(round_.width, round_.verify_seconds)
        self.n_since_plain += 1
        self._n_seen = self._n_made = self._n_drafted = 0
        self._drafting = self._overhead = 0.0

    def _end_evaluation(self, round_: Round) -> None:
        """Book an evaluation that drafted; remember one that did not, and was too narrow for a prompt."""
        n_rows, plain = round_.n_rows, self.allocator.plain_seconds(1)
        if self._n_drafted and self.knows_plain:
            seconds = self._verify_seconds + self._drafting + self._overhead
            self.budget.book(
                self._n_made, n_rows * seconds / self.allocator.plain_seconds(n_rows) * plain, plain
            )
        if not self._n_drafted and round_.width <= max(n_rows, self.costs.cheapest_width(n_rows) or 0):
            self.knows_plain, self.wants_plain, self.n_since_plain = True, False, 0
