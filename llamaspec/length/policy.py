"""How many tokens to draft, and how many of them to verify: as many as pay.

A round is planned from the acceptance of tokens that are not drawn yet: the length with the most expected
tokens per second, and this rate, at which all time of the round is priced. Then confidences decide: drafting
stops where the next tokens are worth less than their time, and only as many tokens are verified as are worth
theirs. The first unverified one still shows whether it would have been accepted. What does not seem to pay
is explored now and then. Knows no model and no clock: the same rounds give the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from llamaspec.length.acceptance import Acceptance, TextAcceptance, expected_accepted, verified_tokens
from llamaspec.length.costs import Array, CostCurve, Costs
from llamaspec.length.tree import TreeAcceptance, TreePlan, plan_tree
from llamaspec.values import Draft, Round, Source

FREE = frozenset({Source.NGRAM, Source.STORE, Source.GRAMMAR})  # sources that cost no draft step
REACH = 4  # positions that an evaluation may have where no width is known; else twice the widest known
GAIN, FREE_GAIN = 0.25, 0.8  # how fast the level of a text moves; copied passages begin and end at once
NEAREST, FARTHEST = 4, 512  # rounds between two explorations
SURE = 0.95  # acceptance: where not even that would pay, exploring is rare
SHARE, CREDIT = 0.015, 2.0  # of all time, what exploring may cost; plain tokens at first
CHANGED = 0.1  # part by which plain decoding may differ from what was believed

Grown = TypeVar("Grown")


@dataclass(frozen=True, slots=True)
class LearnedPrior:
    """What a policy begins with: from a probe, or from an earlier run.

    Raises
    ------
    ValueError
        A number is not finite.
    """

    curve: CostCurve | None = None
    log_odds: tuple[float, ...] = ()  # of the draft's acceptance, as `Acceptance`
    distance: int = NEAREST  # rounds between two explorations

    def __post_init__(self) -> None:
        if len(self.log_odds) not in (0, len(Acceptance().log_odds)) or self.distance < 1:
            raise ValueError("a prior of another kind")
        if not all(abs(number) < 50 for number in self.log_odds):
            raise ValueError("a prior must be finite")


@dataclass(slots=True)
class Exploration:
    """When to try what does not seem to pay: at distances that double while it loses."""

    distance: int = NEAREST
    n_since: int = 0  # rounds

    def is_due(self, *, could_pay: bool = True) -> bool:
        """Whether it is time."""
        return self.n_since >= (self.distance if could_pay else FARTHEST)

    def learn(self, *, paid: bool) -> None:
        """It was tried."""
        self.distance = max(NEAREST, self.distance // 2) if paid else min(2 * self.distance, FARTHEST)
        self.n_since = 0


class AutoLength:
    """As many draft tokens as pay, decided token by token; none where drafting does not pay.

    Parameters
    ----------
    prior : CostCurve or LearnedPrior, optional
        From a probe, or from an earlier run.
    widths : collection of int, optional
        The only numbers of positions that may be evaluated at once; 1 must be among them.
    longest : int
        Never more draft tokens in a row's round than this.
    sources : collection of Source
        Who drafts.
    trees : bool
        Draft tokens may branch where that pays.

    Raises
    ------
    ValueError
        Width 1 is not allowed, or `longest` is not positive.
    """

    def __init__(
        self,
        prior: CostCurve | LearnedPrior | None = None,
        widths: Collection[int] | None = None,
        longest: int = 15,
        sources: Collection[Source] = frozenset({Source.MODEL}),
        *,
        trees: bool = False,
    ) -> None:
        if longest < 1:
            raise ValueError(f"the longest draft must be >= 1, got {longest}")
        if widths is not None and 1 not in widths:
            raise ValueError(f"width 1 must be allowed, got {sorted(widths)}")
        if not isinstance(prior, LearnedPrior):
            prior = LearnedPrior(prior)
        self.costs, self.longest, self.sources = Costs(prior.curve, widths), longest, frozenset(sources)
        self.drafting = min(self.sources - FREE, key=list(Source).index, default=Source.MODEL)
        self.acceptance = {source: Acceptance() for source in Source}
        self.acceptance[self.drafting] = Acceptance(prior.log_odds)
        self.trees = TreeAcceptance() if trees else None
        self.drafts, self.plain = Exploration(prior.distance), Exploration()  # explored where the other pays
        self.credit = 0.0  # seconds that exploring may cost
        self.rows: list[AutoRow] = []
        self.n_tokens = 0
        self.latest = -1  # evaluation

    def start_row(self, *, drops: bool = False) -> AutoRow:
        """A text begins."""
        row = AutoRow(self, drops=drops)
        self.rows.append(row)
        return row

    def plain_seconds(self, n_rows: int = 1) -> float | None:
        """What a round of so many texts without drafts is believed to take; None before one was timed."""
        if not self.costs.n_timed:
            return None
        return float(self.costs.padded_seconds(n_rows, n_rows)[0]) + n_rows * self.costs.overhead_seconds

    def experience(self) -> LearnedPrior:
        """What has been learnt up to now."""
        log_odds = tuple(self.acceptance[self.drafting].log_odds)
        return LearnedPrior(self.costs.learned(), log_odds, self.drafts.distance)

    def running(self) -> list[AutoRow]:
        """The texts that are expected in the coming evaluation."""
        return [row for row in self.rows if row.is_open or row.evaluation >= max(self.latest - 1, 0)]

    def observe(self, round_: Round) -> None:
        """Learn what one text's round cost; what texts share is learnt once."""
        self.n_tokens += round_.n_accepted + 1
        self.credit += SHARE * round_.seconds / round_.n_rows
        if not len(round_.draft) and not round_.n_draft_steps:
            self.costs.observe_overhead(round_.overhead_seconds)
        if round_.evaluation == self.latest and round_.n_rows > 1:
            return
        self.latest = round_.evaluation
        self.drafts.n_since += 1
        self.plain.n_since += 1
        for row in self.rows:  # all begin a new round, the first of them before the others know
            row.is_drafting, row.n_draft = row.n_draft > 0, 0
        if round_.n_beside:  # what it would have taken without the prompt is not known
            return
        if not self.costs.n_timed:
            self.credit += CREDIT * round_.verify_seconds
        before = self.costs.seconds(round_.width)
        self.costs.observe_verify(round_.width, round_.verify_seconds)
        if round_.width == round_.n_rows:
            self.plain.learn(paid=abs(self.costs.seconds(round_.width) / before - 1.0) > CHANGED)
        elif self.costs.is_surprised:  # does plain decoding take longer, too?
            self.plain.n_since = FARTHEST


class AutoRow:
    """One text's share of `AutoLength`."""

    def __init__(self, policy: AutoLength, *, drops: bool) -> None:
        self._policy, self._drops = policy, drops
        self._acceptance = {
            source: TextAcceptance(shared, FREE_GAIN if source in FREE else GAIN)
            for source, shared in policy.acceptance.items()
        }
        self.is_open = False  # its round has begun
        self.is_drafting, self.n_draft = False, 0  # has not had enough yet; draft tokens of its round so far
        self.evaluation = -1  # that it took part in last
        self._plain = 1.0  # seconds of a token without drafts
        self._rate = 1.0  # tokens per second that time is worth in this round
        self._limits: dict[Source, int] = {}  # draft tokens of this round, at most
        self._explored: Source | None = None  # whose draft is not expected to pay in it
        self._checks = False  # it times plain decoding again
        self._prices_alone: Array | None = None  # of this round, if no other text has a part in them
        self.n_unread = 0  # tokens that the draft has not read, besides the last

    def wants_more(self, draft: Draft) -> bool:
        """Whether the next tokens are worth their time, or are to be explored."""
        self._begin()
        n, source = len(draft), draft.source
        self.n_draft, self.is_drafting = n, True
        if source in FREE and source not in self._limits:
            self._limits[source] = self._plan_free(source, draft.ahead)
        wants = n < self._limits.get(source, 0) and (not n or source in FREE or self._pays(draft))
        self.n_draft, self.is_drafting = n + wants, wants
        return wants

    def n_verified(self, draft: Draft) -> int:
        """As many as are worth most."""
        n, source = len(draft), draft.source
        if source is self._explored and (source in FREE or not self._drops):
            n = 0
        elif n and self._drops and source is self._policy.drafting and draft.parents is None:
            n = int(self._worth(draft).argmax())
        self.n_draft, self.is_drafting = n, False
        return n

    def tree(self, grow: Callable[[TreePlan], Grown]) -> Grown | None:
        """How a tree grows in the coming round; None where a chain is as good, or nothing is known."""
        self._begin()
        policy, limit = self._policy, self._limits.get(self._policy.drafting, 0)
        if policy.trees is None or self._explored is not None:
            return None
        usual = self._acceptance[policy.drafting].probability()
        prices = self._prices()[: limit + 1]
        plan = plan_tree(
            policy.trees, usual, prices, self._step_seconds(), policy.costs, self._rate, self._plain
        )
        self.is_drafting = plan is not None
        return grow(plan) if plan else None

    def width(self, n_positions: int) -> int | None:
        """The cheapest allowed width of at least `n_positions`, of all texts together."""
        if self._checks and n_positions <= len(self._policy.running()):
            return n_positions  # not padded, to be timed
        return self._policy.costs.padded_width(n_positions)

    def observe(self, round_: Round) -> None:
        """Learn acceptance and costs."""
        self._begin()  # rounds may be played again, and nobody asks then
        policy, n_made, n_steps = self._policy, round_.n_accepted + 1, round_.n_priced_steps
        found = [*verified_tokens(round_), *((round_.shadow,) if round_.shadow else ())]
        if round_.draft.parents is not None and policy.trees is not None:
            policy.trees.learn(round_)
        for confidence, outcome in found:
            self._acceptance[round_.source].learn(outcome, confidence)
        if n_steps:
            n_steps = policy.costs.narrow_steps(n_steps, round_.n_draft_scored)
            policy.costs.observe_draft(n_steps, self.n_unread, round_.draft_seconds)
        policy.observe(round_)
        if n_steps and self._explored is policy.drafting:
            policy.drafts.learn(paid=any(outcome > 0.5 for _, outcome in found))
            policy.credit -= max(round_.seconds / round_.n_rows - n_made * self._plain, 0.0)
        self.n_unread = (
            int(n_made > len(round_.draft) + round_.n_dropped) if n_steps else self.n_unread + n_made
        )
        self.is_open, self.evaluation, self.is_drafting = False, round_.evaluation, len(round_.draft) > 0

    def close(self) -> None:
        """The text has ended."""
        if self in self._policy.rows:
            self._policy.rows.remove(self)

    def _begin(self) -> None:
        """Plan the round, once."""
        if self.is_open:
            return
        policy, costs = self._policy, self._policy.costs
        self.is_open, self.n_draft = True, 0
        self._limits, self._explored, self._checks, self._prices_alone = {}, None, False, None
        n_rows = max(len(policy.running()), 1)
        self._plain = float(costs.padded_seconds(n_rows, n_rows)[0]) / n_rows + costs.overhead_seconds
        self._rate = 1.0 / self._plain
        if costs.averages[1].n < 2 or policy.drafting not in policy.sources:
            return
        source, prices, step = policy.drafting, self._prices(), self._step_seconds()
        gains = expected_accepted(self._acceptance[source].probability(), len(prices) - 1)
        rates = (1.0 + gains) / (self._plain + prices + step * np.arange(len(prices)))
        best = int(rates.argmax())
        limit = len(prices) - 1 if costs.knows_step else 1
        if best:
            policy.drafts.distance = NEAREST
            self._rate = float(rates[best])
            self._checks = policy.plain.is_due() and costs.allows(n_rows)
            if self._checks:
                costs.forget_hiccups()
                return
            self._limits[source] = limit
        elif (
            policy.drafts.is_due(could_pay=self._could_pay(prices, step))
            and costs.drafting_seconds(1, self.n_unread) <= policy.credit
        ):
            costs.forget_hiccups()
            self._explored = source
            self._limits[source] = limit if self._drops else min(limit, 1)

    def _could_pay(self, prices: Array, step: float) -> bool:
        n = np.arange(1, len(prices))
        gains = expected_accepted(SURE, len(n))[1:]
        return bool((gains > self._rate * (prices[1:] + step * n)).any())

    def _plan_free(self, source: Source, ahead: Sequence[float]) -> int:
        """How many tokens to take that cost no draft step: they must be worth more than a draft.

        Where nothing is drafted, one that is not verified. `ahead`: the confidences of what could be copied.
        """
        policy, prices = self._policy, self._prices()
        if policy.costs.averages[1].n < 2 or (source is not Source.GRAMMAR and source not in policy.sources):
            return 0
        if source is Source.GRAMMAR:
            chances = np.ones(len(prices) - 1)
        else:
            believed = self._acceptance[source].probability
            chances = np.array([believed(confidence) for confidence in ahead[: len(prices) - 1]])
        gains = np.concatenate(([0.0], chances.cumprod().cumsum()))
        worth = gains - self._rate * prices[: len(gains)]
        n = int(worth.argmax())
        if source is Source.GRAMMAR or worth[n] > self._rate * self._plain - 1.0:
            return n
        if self._limits.get(policy.drafting):
            return 0
        self._explored = source
        return 1

    def _prices(self) -> Array:
        """[n] this text's share of what n verified tokens cost, in seconds.

        Texts that draft level with it take as many: where the curve has steps, one position alone never pays
        for the step that all would share.
        """
        if self._prices_alone is not None:
            return self._prices_alone
        policy, costs = self._policy, self._policy.costs
        n_level, total = 1, 1
        for other in policy.running():
            if other is not self:
                is_level = other.is_drafting and other.n_draft <= self.n_draft
                n_level += is_level
                total += 1 if is_level else 1 + other.n_draft
        reach = max(REACH, costs.widest * 3 // 2)
        n_more = min(policy.longest, max((reach - total) // n_level, 1))
        times = costs.padded_seconds(total, total + n_more * n_level, n_level)
        prices: Array = (times - times[0]) / n_level
        if len(policy.rows) == 1:
            self._prices_alone = prices
        return prices

    def _step_seconds(self) -> float:
        """What the next draft step costs this text, which may share it."""
        n = 1 + sum(other.is_drafting for other in self._policy.running() if other is not self)
        return self._policy.costs.step_seconds / n

    def _worth(self, draft: Draft) -> Array:
        """[n] what verifying the first n tokens of a draft is worth, in tokens."""
        return self._expected(draft) - self._rate * self._prices()[: len(draft) + 1]

    def _expected(self, draft: Draft) -> Array:
        """[n] how many of the first n tokens of a draft are accepted, on average."""
        believed = self._acceptance[draft.source].probability
        chances = np.array([believed(confidence) for confidence in draft.confidences])
        return np.concatenate(([0.0], chances.cumprod().cumsum()))

    def _pays(self, draft: Draft) -> bool:
        """Whether the next tokens of a draft are worth more than to stop here."""
        n, prices, expected = len(draft), self._prices(), self._expected(draft)
        worth = expected - self._rate * prices[: n + 1]
        now = worth.max() if self._drops else worth[n]
        ahead = prices[n + 1 :]
        reached = expected[n] - expected[n - 1]
        gains = expected_accepted(self._acceptance[draft.source].probability(), len(ahead))[1:]
        later = expected[n] + reached * gains - self._rate * ahead
        later -= self._rate * self._step_seconds() * np.arange(1, len(ahead) + 1)
        return bool((later > now).any())
