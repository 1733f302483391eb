"""What all rows of a policy know together: costs, acceptance of each source, the regret budget, who drafts.

A position costs what the evaluation of all rows becomes dearer by it, at what they have pledged so far; it
pays where the probability that its token is accepted exceeds that cost times the tokens per second of the
whole batch. As rows fill the batch, everybody's drafts vanish by themselves. tests/length/test_shared.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from llamaspec.length.acceptance import Acceptance, verified_tokens
from llamaspec.length.cost_model import CostModel
from llamaspec.length.prior import FREE_LOG_ODDS
from llamaspec.length.regret_budget import RegretBudget
from llamaspec.length.tree import TreeAcceptance
from llamaspec.values import Round, Source

COPIES = (Source.NGRAM, Source.STORE)
FREE = frozenset({*COPIES, Source.GRAMMAR})  # sources that cost no draft step
HOPE = 1.0  # standard deviations by which widths may be cheaper, for a text that any draft's loss cannot harm
HICCUP = 1.3  # an evaluation is booked with at most this multiple of the time it should have taken


@dataclass(eq=False, slots=True)
class Pledge:
    """One row's part of the coming evaluation."""

    n_draft: int = 0  # draft tokens so far, or the one being made
    is_drafting: bool = False  # has not had enough yet
    is_asking: bool = False  # its round has begun
    has_drafted: bool = False  # it has a part in the draft steps
    last_evaluation: int = -1  # that it took part in


class Shared:
    """The common state of the rows."""

    def __init__(
        self,
        costs: CostModel,
        longest: int,
        sources: Collection[Source],
        log_odds: tuple[float, float, float],
        *,
        branches: bool = True,
    ) -> None:
        self.costs, self.longest, self.sources = costs, longest, frozenset(sources)
        self.drafting = min(self.sources - FREE, key=list(Source).index, default=Source.MODEL)
        self.budget, self.pledges = RegretBudget(), list[Pledge]()
        self.usual, self.calibrations = dict[Source, Acceptance](), dict[Source, Acceptance]()
        for source in Source:
            usual, level, slope = FREE_LOG_ODDS if source in FREE else log_odds
            self.usual[source], self.calibrations[source] = Acceptance(usual), Acceptance(level, slope)
        self.trees, self.branches = TreeAcceptance(), branches
        self.trials: list[tuple[int, float]] = []  # widths that were timed before any text, and their seconds
        self.knows_plain = False  # an evaluation without drafts has been timed
        self.wants_plain = False  # the next evaluation should be without drafts, of all rows
        self.n_tokens = self.n_since_plain = 0
        self._latest = -1  # evaluation
        self._n_seen = 0  # rounds of it that have come
        self._verify_seconds = 0.0  # as booked
        self.n_drafted = 1  # rows that shared its draft steps
        self._drafting = 0.0  # seconds of these steps, as booked

    def start_row(self, pledge: Pledge) -> None:
        """A text begins; one that begins alone has a budget of its own."""
        self.budget.start_text(is_alone=not self.pledges)
        self.pledges.append(pledge)

    def present(self) -> list[Pledge]:
        """Rows that are expected in the coming evaluation."""
        return [p for p in self.pledges if p.is_asking or p.last_evaluation >= max(self._latest - 1, 0)]

    @property
    def n_rows(self) -> int:
        """How many these are, at least one."""
        return max(len(self.present()), 1)

    def plain_rate(self, n_rows: int) -> float:
        """Tokens per second of rows that do not draft; 0 where they may not be evaluated together."""
        return n_rows / (self.costs.batch_seconds([n_rows])[0] + n_rows * self.costs.overhead_seconds)

    def n_drafting(self, own: Pledge) -> int:
        """Rows that share the next draft step with one that drafts."""
        return 1 + sum(other.is_drafting for other in self.present() if other is not own)

    def level_seconds(self, own: Pledge) -> list[float]:
        """[n] a row's share of what n draft tokens of it cost, and of those level with it.

        Where the curve has steps, one position alone never pays for the step that all would share. A text
        that has won much finds out whether widths not timed yet are cheaper than believed.
        """
        n_level, total = 1, 1
        for other in self.present():
            if other is not own:
                is_level = other.is_drafting and other.n_draft <= own.n_draft
                n_level += is_level
                total += 1 if is_level else 1 + other.n_draft
        dared = int(self.budget.left)  # positions, should each cost as much as one alone
        padded = self.costs.cheapest_width(total + n_level) or 0  # padding is free
        reach = max(self.costs.reach, dared, padded)
        n_more = min(self.longest, max((reach - total) // n_level, 1))
        hope = HOPE * (self.budget.left > self.longest)
        times = self.costs.batch_seconds(range(total, total + n_more * n_level + 1, n_level), -hope)
        return [(seconds - times[0]) / n_level for seconds in times]

    def learn_acceptance(self, round_: Round, of_text: Acceptance) -> None:
        """Learn from one row's round."""
        if round_.draft.parents is not None:
            self._learn_tree(round_, of_text)
            return
        for confidence, is_accepted in verified_tokens(round_):
            self._learn_token(round_.source, confidence, is_accepted)
            of_text.learn(is_accepted)
        if round_.shadow is not None:
            self._learn_token(round_.source, *round_.shadow)
            of_text.learn(round_.shadow[1])

    def observe(self, round_: Round, n_unread: int) -> None:
        """Learn what one row's round cost, and book what it won."""
        costs, n_rows, n_made = self.costs, round_.n_rows, round_.n_accepted + 1
        if round_.evaluation != self._latest or self._n_seen >= n_rows:
            self._start_evaluation(round_)
        self._n_seen += 1
        self.n_tokens += n_made
        n_steps = costs.narrow_steps(round_.n_priced_steps, round_.n_draft_scored)
        drafting, overhead = 0.0, round_.overhead_seconds
        if n_steps:
            drafting = min(round_.draft_seconds, HICCUP * costs.drafting_seconds(n_steps, n_unread))
            if not self._drafting:
                costs.observe_draft(n_steps, n_unread, round_.draft_seconds)
        else:
            overhead += round_.draft_seconds
        overhead = costs.observe_overhead(overhead, drafted=n_steps > 0 or len(round_.draft) > 0)
        new_drafting, self._drafting = max(drafting - self._drafting, 0.0), max(drafting, self._drafting)
        if not self.knows_plain or not self.plain_rate(n_rows):
            return
        is_plain, plain = self._is_plain(round_), n_rows / self.plain_rate(n_rows)  # of one token of each row
        spent = plain if is_plain else self._verify_seconds + n_rows * overhead
        spent += n_rows * new_drafting
        self.budget.book(n_made, spent / plain, n_rows, is_plain=is_plain)

    def _start_evaluation(self, round_: Round) -> None:
        """Learn what rows share; all of them begin a new round, the first before the others know."""
        self._latest, self._n_seen, self._drafting = round_.evaluation, 0, 0.0
        self.n_drafted = max(sum(pledge.has_drafted for pledge in self.pledges), 1)
        for pledge in self.pledges:
            pledge.is_drafting, pledge.n_draft, pledge.has_drafted = pledge.n_draft > 0, 0, False
        self.n_since_plain += 1
        if round_.n_beside:  # what it would have taken without the prompt
            self._verify_seconds = self.costs.seconds(round_.width - round_.n_beside)
            return
        self._verify_seconds = min(round_.verify_seconds, HICCUP * self.costs.seconds(round_.width))
        before = self.costs.seconds(round_.width)
        self.costs.observe_verify(round_.width, round_.verify_seconds)
        if self._is_plain(round_):
            self.knows_plain, self.wants_plain, self.n_since_plain = True, self.costs.is_surprised, 0
            self.budget.correct(self.costs.seconds(round_.width) / before, round_.n_rows)

    def _is_plain(self, round_: Round) -> bool:
        """Whether it was no wider than rounds without drafts are."""
        width = round_.width - round_.n_beside
        return width <= max(round_.n_rows, self.costs.cheapest_width(round_.n_rows) or 0)

    def _learn_token(self, source: Source, confidence: float, accepted: float) -> None:
        for belief, settings in ((self.usual[source], ()), (self.calibrations[source], (confidence,))):
            belief.pass_tokens(1)
            belief.learn(accepted, *settings)

    def _learn_tree(self, round_: Round, of_text: Acceptance) -> None:
        for is_first in self.trees.learn(round_):
            self.usual[round_.source].pass_tokens(1)
            self.usual[round_.source].learn(is_first)
            of_text.learn(is_first)
