"""How many tokens to draft for one text, and how many of them to verify.

A draft that should pay is begun, as far as the regret budget allows, and goes on while its next tokens are
worth their time. What is made need not be verified: where the draft turned out to be unsure of it, only the
first so many tokens are, or none. So a draft that does not seem to pay can be *tried* for the price of a
draft step. The first token that is not verified is a *shadow*: it shows whether it would have been accepted.
All depends only on earlier rounds and on what was drafted. tests/length/test_auto_length.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from operator import mul
from typing import TypeVar

import numpy as np

from llamaspec.length.acceptance import FREE_DRIFT, TEXT_DRIFT
from llamaspec.length.arithmetic import expected_accepted, speed_up
from llamaspec.length.shared import COPIES, FREE, Pledge, Shared
from llamaspec.length.tree import WIDEST, TreePlan, tree_speed_up
from llamaspec.values import Draft, Round, Source

TRIES, TRYING, MOST_TRIES = (
    0.6,
    0.008,
    2.0,
)  # plain tokens that tries may take: at first; for each token; at once
SURE = 0.92  # acceptance: where not even that would pay, nothing is tried
CHECK_AFTER = 6  # evaluations until plain decoding is timed again; longer each time, the more drafts gain
CHECK_SHARE, MOST_GAIN = 0.01, 2.0  # of the time, what that may cost; drafts that gain more count as this
TRIAL = 4  # positions: few enough to cost little, and no fewer than what some machines pad to
COPYING = 1.3  # so many times as fast as plain decoding a text is that is copied, more or less
COPY_WAIT, LUCK = 16, 1.2  # tokens until copies are tried that might be worth more; standard deviations
ALIKE = 0.7  # log-odds by which texts differ before that also says something of tokens that are drafted
EDGE = 1.02  # what a tree must promise, next to the best chain

Grown = TypeVar("Grown")


class AutoRow:
    """One row's share of `AutoLength`."""

    def __init__(self, shared: Shared, *, drops: bool) -> None:
        self._shared, self._pledge, self._drops = shared, Pledge(), drops
        shared.start_row(self._pledge)
        self._beliefs = {
            source: usual.of_text(FREE_DRIFT if source in FREE else TEXT_DRIFT)
            for source, usual in shared.usual.items()
        }
        self._limits: dict[Source, int] = {}  # draft tokens of the open round, at most
        self._tries: Source | None = None  # whose draft is only tried in it
        self._plain_rate = 0.0  # tokens per second without drafts, in it
        self._rate = 0.0  # tokens per second that time is worth in it; 0 where nothing may be drafted
        self._hope = 0.0  # tokens that a draft which is tried may be worth, with luck
        self._alone: list[float] = []  # prices of the open round, if no other row has a part in them
        self._confidences: tuple[float, ...] = ()  # of the draft whose expectations these are:
        self._expected = [(1.0, 0.0)]  # [n] that its first n tokens are all accepted; how many of them are
        self._branches = False  # whoever drafts asks for trees
        self._trying = TRIES  # plain tokens that tries may take now
        self._n_since_copy = 0  # tokens
        self.n_unread = 0  # tokens that the draft has not read, besides the last

    def wants_more(self, draft: Draft) -> bool:
        """Whether the next tokens are worth their time, or the first is worth a try."""
        self._begin()
        pledge, n, source = self._pledge, len(draft), draft.source
        pledge.n_draft, pledge.is_drafting = n, True
        if source in FREE and source not in self._limits:
            self._limits[source] = self._plan_free(source, draft.ahead)
        wants = n < self._limits.get(source, 0) and (not n or source in FREE or self._pays(draft))
        pledge.n_draft, pledge.is_drafting = n + wants, wants
        pledge.has_drafted |= wants and source not in FREE
        return wants

    def n_verified(self, draft: Draft) -> int:
        """As many as are worth most."""
        n, source = len(draft), draft.source
        if source is self._tries and (source in FREE or not self._drops):
            n = 0
        elif n and self._drops and source is self._shared.drafting and draft.parents is None:
            n, _ = self._most_valuable(draft)
        self._pledge.n_draft, self._pledge.is_drafting = n, False
        return n

    def tree(self, grow: Callable[[TreePlan], Grown]) -> Grown | None:
        """How a tree grows in the coming round; None where a chain is as good, or nothing is known."""
        self._begin()
        self._branches, self._pledge.n_draft = True, 0  # whoever was asked before has no draft
        plan = self._plan_tree()
        if plan is None:
            return None
        self._pledge.is_drafting = self._pledge.has_drafted = True
        return grow(plan)

    def trial_width(self) -> int:
        """One width, twice, where nothing is known of any, nor forbidden; one row finds it out for all."""
        shared, costs = self._shared, self._shared.costs
        is_first, is_new = shared.pledges[:1] == [self._pledge], costs.n_timed in ({}, {TRIAL: 1})
        return TRIAL if is_first and shared.sources and costs.is_blank and is_new else 0

    def observe_trial(self, width: int, seconds: float) -> None:
        """Learn what it took."""
        self._shared.trials.append((width, seconds))
        self._shared.costs.observe_verify(width, seconds)

    def width(self, n_positions: int) -> int | None:
        """The cheapest allowed width of at least `n_positions`, of all rows together."""
        return self._shared.costs.cheapest_width(n_positions)

    def observe(self, round_: Round) -> None:
        """Learn acceptance and costs."""
        self._begin()  # rounds may be played again, and nobody asks then
        shared, n_made, has_read = self._shared, round_.n_accepted + 1, round_.n_draft_steps > 0
        _, worth = self._most_valuable(round_.draft) if self._tries is shared.drafting else (0, 0.0)
        shared.learn_acceptance(round_, self._beliefs[round_.source])
        shared.observe(round_, self.n_unread)
        if has_read and self._tries is shared.drafting:
            self._trying += worth - self._rate * round_.draft_seconds / shared.n_drafted
        self._trying = min(self._trying + TRYING * n_made, MOST_TRIES)
        for source in shared.sources:
            self._beliefs[source].pass_tokens(n_made)
        is_copied = round_.source in COPIES and len(round_.draft) > 0
        self._n_since_copy = 0 if is_copied else self._n_since_copy + n_made
        n_drafted = len(round_.draft) + round_.n_dropped
        self.n_unread = int(n_made > n_drafted) if has_read else self.n_unread + n_made
        self._confidences, self._expected = (), [(1.0, 0.0)]
        self._pledge.is_asking, self._pledge.last_evaluation = False, round_.evaluation
        self._pledge.is_drafting = len(round_.draft) > 0

    def close(self) -> None:
        """The row has ended."""
        if self._pledge in self._shared.pledges:
            self._shared.pledges.remove(self._pledge)

    def _begin(self) -> None:
        """Plan the round, once."""
        shared, costs, pledge = self._shared, self._shared.costs, self._pledge
        if pledge.is_asking:
            return
        pledge.is_asking, pledge.n_draft, pledge.has_drafted = True, 0, False
        self._limits, self._tries, self._rate, self._alone = {}, None, 0.0, []
        n_rows = shared.n_rows
        self._plain_rate = shared.plain_rate(n_rows)  # 0: as many positions may not be evaluated
        if shared.wants_plain or not shared.knows_plain or not costs.knows(n_rows):
            return
        faster = self._plan_model() if self._plain_rate and shared.drafting in shared.sources else 1.0
        self._rate = self._plain_rate * faster
        faster = faster if faster > 1.0 else COPYING
        n_timed = costs.n_timed.get(costs.cheapest_width(n_rows) or n_rows, 1)
        at_first, at_last = CHECK_AFTER * n_timed ** min(faster, MOST_GAIN), (faster - 1.0) / CHECK_SHARE
        if shared.n_since_plain >= min(at_first, CHECK_AFTER + at_last):
            shared.wants_plain, self._limits, self._tries, self._rate = True, {}, None, 0.0

    def _plan_model(self) -> float:
        """A draft that should pay, or a try; returns how much faster than plain decoding the row gets."""
        rate = self._plain_rate
        costs, source, step = self._shared.costs, self._shared.drafting, self._step_seconds()
        seconds = [price + n * step for n, price in enumerate(self._prices())]
        limit = self._affordable(seconds)
        gains = expected_accepted(self._beliefs[source].probability(), limit)
        faster = speed_up(seconds, gains, rate) if costs.knows_step else 1.0
        if faster > 1.0:
            self._limits[source] = limit
            return faster
        price = rate * costs.drafting_seconds(1, self.n_unread) / self._shared.n_rows
        could_pay = not costs.knows_step or speed_up(seconds, expected_accepted(SURE, limit), rate) > 1.0
        if could_pay and limit and price <= self._trying:
            self._tries = source
            self._limits[source] = limit if costs.knows_step and self._drops else 1
            hoped = expected_accepted(self._beliefs[source].probability(z=LUCK), limit)
            self._hope = speed_up(seconds, hoped, rate) - 1.0 if costs.knows_step else inf
        return 1.0

    def _plan_free(self, source: Source, ahead: Sequence[float]) -> int:
        """How many tokens to take that cost no draft step: they must be worth more than a draft.

        Where nothing is drafted, one as a shadow. `ahead`: the confidences of what could be copied.
        """
        shared = self._shared
        if not self._rate or (source in COPIES and source not in shared.sources):
            return 0
        plan = self._plan_tree() if self._branches else None
        rate, prices, longest = plan.rate if plan else self._rate, self._prices(), shared.longest
        if source is Source.GRAMMAR:
            return _best([*range(longest + 1)], prices, rate)[0]
        is_tried = self._tries is shared.drafting
        draft_worth = self._hope if is_tried else rate / self._plain_rate - 1.0  # what a copy must beat
        believed, limit = shared.calibrations[source].probability, self._affordable(prices)
        for luck in (0.0, LUCK) if self._n_since_copy >= COPY_WAIT else (0.0,):
            chances = [believed(confidence, luck) for confidence in ahead[:longest] or (0.5,) * longest]
            n, worth = _best([0.0, *accumulate(accumulate(chances, mul))], prices[: limit + 1], rate)
            if worth > draft_worth:
                return n
        if draft_worth or is_tried:
            return 0
        self._tries = source
        return 1

    def _plan_tree(self) -> TreePlan | None:
        """A tree instead of the chain that is planned, where that promises more."""
        shared, source = self._shared, self._shared.drafting
        limit = self._limits.get(source, 0)
        if limit < 2 or self._tries is not None or not shared.branches:
            return None
        prices = np.array(self._prices()[: limit + 1])
        usual = shared.trees.usual(self._beliefs[source].probability())
        if self._rate * prices[-1] > limit * usual[1]:
            return None  # second candidates are not worth their positions
        plain, steps = self._plain_rate, self._step_seconds() * np.array(shared.costs.wide_steps(WIDEST))
        rate = plain * tree_speed_up(usual, plain * prices, plain * steps)
        if rate < EDGE * self._rate:
            return None
        return TreePlan(shared.trees, usual, rate * prices, rate * steps, rate)

    def _prices(self) -> list[float]:
        """[n] this row's share of what n verified tokens cost, in seconds."""
        if not self._alone or len(self._shared.pledges) > 1:
            self._alone = self._shared.level_seconds(self._pledge)
        return self._alone

    def _step_seconds(self) -> float:
        """What the next draft step costs this row, which may share it."""
        return self._shared.costs.draft_step_seconds() / self._shared.n_drafting(self._pledge)

    def _affordable(self, seconds: Sequence[float]) -> int:
        """The most draft tokens that may all be rejected without losing more than may be lost.

        `seconds`: [n] what n tokens cost.
        """
        left, rate = self._shared.budget.left, self._plain_rate
        return max((n for n, each in enumerate(seconds) if rate * each <= left), default=0)

    def _expect(self, draft: Draft) -> list[tuple[float, float]]:
        """[n] how likely the first n tokens of a draft are all accepted, and how many are, on average."""
        n = len(self._confidences)
        if draft.confidences[:n] != self._confidences:
            n, self._expected = 0, [(1.0, 0.0)]
        calibration = self._shared.calibrations[draft.source]
        differs = self._beliefs[draft.source].level - self._shared.usual[draft.source].level
        shift = differs - max(-ALIKE, min(differs, ALIKE))
        for confidence in draft.confidences[n:]:
            stands, expected = self._expected[-1]
            stands *= calibration.probability(confidence, shift=shift)
            self._expected.append((stands, expected + stands))
        self._confidences = draft.confidences
        return self._expected

    def _most_valuable(self, draft: Draft) -> tuple[int, float]:
        """How many of its tokens to verify, and what that is worth, in tokens."""
        prices = self._prices()
        within = self._expect(draft)[: self._affordable(prices) + 1]
        return _best([n for _, n in within], prices, self._rate)

    def _pays(self, draft: Draft) -> bool:
        """Whether the next tokens of a draft are worth more than to stop here."""
        n, rate, prices = len(draft), self._rate, self._prices()
        stands, expected = self._expect(draft)[-1]
        now = (
            self._most_valuable(draft)[1]
            if self._drops
            else expected - rate * prices[min(n, len(prices) - 1)]
        )
        gains = expected_accepted(self._beliefs[draft.source].probability(), self._limits[draft.source] - n)
        step = rate * self._step_seconds()
        return any(
            expected + stands * gain - rate * price - m * step > now
            for m, (gain, price) in enumerate(zip(gains[1:], prices[n + 1 :], strict=False), 1)
        )


def _best(gains: Sequence[float], prices: Sequence[float], rate: float) -> tuple[int, float]:
    """The number of tokens that is worth most, and its worth: tokens, less what they cost at this rate."""
    worth = [gain - rate * price for gain, price in zip(gains, prices, strict=False)]
    best = max(worth)
    return worth.index(best), best
