"""What all rows of a policy know together: costs, acceptance of each source, the regret budget.

An evaluation shared by several rows is learnt once, with its first round, and booked once, with its last.
"""

from __future__ import annotations

from collections.abc import Collection

from llamaspec.length.acceptance import Acceptance, verified_tokens
from llamaspec.length.allocator import Allocator, Pledge
from llamaspec.length.cost_model import CostModel
from llamaspec.length.prior import FREE_LOG_ODDS
from llamaspec.length.regret_budget import RegretBudget
from llamaspec.length.tree_growth import TreeAcceptance
from llamaspec.values import Round, Source

COPIES = (Source.NGRAM, Source.STORE)
FREE = frozenset({*COPIES, Source.GRAMMAR})  # sources that cost no draft step
SOFT = 0.5  # part of a draft token that its calibrated confidence counts for, verified or not
OUTLIER = 1.3  # an evaluation is booked with at most this multiple of the time it should have taken


class Shared:
    """The common state of the rows."""

    def __init__(
        self,
        costs: CostModel,
        longest: int,
        sources: Collection[Source],
        log_odds: tuple[float, float, float],
    ) -> None:
        self.costs, self.sources = costs, frozenset(sources)
        self.drafting = min(self.sources - FREE, key=list(Source).index, default=Source.MODEL)
        self.allocator, self.budget = Allocator(costs, longest), RegretBudget()
        self.usual, self.calibrations = dict[Source, Acceptance](), dict[Source, Acceptance]()
        for source in Source:
            usual, level, slope = FREE_LOG_ODDS if source in FREE else log_odds
            self.usual[source], self.calibrations[source] = Acceptance(usual), Acceptance(level, slope)
        self.trees, self.grows_trees = TreeAcceptance(), True
        self.trial: tuple[int, float] | None = None  # a width that was timed before any text, and its seconds
        self.knows_plain = False  # an evaluation without drafts has been timed
        self.wants_plain = False  # the next evaluation should be one, of all rows
        self.n_tokens = self.n_since_plain = 0
        # Of the latest evaluation:
        self._n_seen = self._n_made = self._n_drafted = 0  # rounds that have come, and their tokens
        self._verify_seconds = self._drafting = self._overhead = 0.0  # as booked

    def start_row(self, pledge: Pledge) -> None:
        """A text begins; one that begins alone has a budget of its own."""
        if not self.allocator.pledges:
            self.budget.start_text(self.n_tokens)
        self.allocator.pledges.append(pledge)

    def learn_acceptance(self, round_: Round, of_text: Acceptance) -> None:
        """Learn from one row's round."""
        if round_.draft.parents is not None:
            self._learn_tree(round_, of_text)
            return
        usual, calibration = self.usual[round_.source], self.calibrations[round_.source]
        for confidence in round_.confidences:
            of_text.learn(calibration.probability(confidence), count=SOFT)
        for confidence, is_accepted in verified_tokens(round_):
            usual.pass_tokens(1)
            calibration.pass_tokens(1)
            usual.learn(is_accepted)
            calibration.learn(is_accepted, confidence)
            of_text.learn(is_accepted, count=1.0 - SOFT)

    def _learn_tree(self, round_: Round, of_text: Acceptance) -> None:
        for is_first in self.trees.learn(round_):
            self.usual[round_.source].pass_tokens(1)
            self.usual[round_.source].learn(is_first)
            of_text.learn(is_first)

    def observe(self, round_: Round, n_unread: int) -> float:
        """Learn from one row's round; returns the seconds of all rows that it should be judged by."""
        costs, n_rows = self.costs, round_.n_rows
        n_steps = costs.narrow_steps(round_.n_priced_steps, round_.n_draft_scored)
        if round_.evaluation != self.allocator.latest or self._n_seen >= n_rows:
            self._start_evaluation(round_)
        drafting, overhead = 0.0, round_.overhead_seconds
        if n_steps:
            drafting = min(round_.draft_seconds, OUTLIER * costs.drafting_seconds(n_steps, n_unread))
            if not self._drafting:
                costs.observe_draft(n_steps, n_unread, round_.draft_seconds)
        else:
            overhead += round_.draft_seconds
        overhead = costs.observe_overhead(overhead, drafted=len(round_.draft) > 0)
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
        if round_.n_beside:  # what it would have taken without the prompt
            self._verify_seconds = self.costs.seconds(round_.width - round_.n_beside)
        else:
            self._verify_seconds = min(round_.verify_seconds, OUTLIER * self.costs.seconds(round_.width))
            self.costs.observe_verify(round_.width, round_.verify_seconds)
        self.n_since_plain += 1
        self._n_seen = self._n_made = self._n_drafted = 0
        self._drafting = self._overhead = 0.0

    def _end_evaluation(self, round_: Round) -> None:
        """Book an evaluation that drafted; remember one that did not, and was too narrow for a prompt."""
        n_rows = round_.n_rows
        if self._n_drafted and self.knows_plain:
            seconds = self._verify_seconds + self._drafting + self._overhead
            plain = 1.0 / self.allocator.plain_rate(1)
            self.budget.book(self._n_made, seconds * self.allocator.plain_rate(n_rows) * plain, plain)
        is_plain = not self._n_drafted and not round_.n_beside
        if is_plain and round_.width <= max(n_rows, self.costs.cheapest_width(n_rows) or 0):
            is_sure = not self.costs.is_surprised  # else it is timed again at once
            self.knows_plain = not self.costs.looks_foreign(1) and (self.knows_plain or is_sure)
            self.wants_plain, self.n_since_plain = not is_sure, 0
