"""How many tokens to draft for one text, decided token by token.

Three questions before the first token: how many tokens can be lost within the regret budget; does drafting
pay with what is believed; if not, could it with some luck, and is it time to explore. Before every further
token: is it worth its position. Under any rule the answers depend only on earlier rounds and on the tokens
and confidences drafted so far. tests/length/test_auto_length.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul

import numpy as np

from llamaspec.length.acceptance import FREE_DRIFT, TEXT_DRIFT, Acceptance
from llamaspec.length.allocator import Pledge, expected_accepted, speed_up, stopping_threshold
from llamaspec.length.shared import COPIES, FREE, Shared
from llamaspec.length.tree_growth import EDGE, WIDEST, TreeGrowth, tree_speed_up
from llamaspec.values import Draft, Round, Source

BAD_LUCK, LUCK = 0.5, 1.2  # standard deviations: that a round must survive; worth exploring for
WORST = 1.0  # plain tokens that a round may lose at worst, besides what may be lost anyway
SETTLED = 8.0  # tokens of a text before a draft is tried that does not seem to pay
CHECK_AFTER = 6  # evaluations until plain decoding is timed again; longer each time, the more drafts gain
CHECK_SHARE, MOST_GAIN = 0.01, 2.0  # of the time, what that may cost; drafts that gain more count as this
TRIAL = 4  # positions: few enough to cost little, and no fewer than what some machines pad to
CALM = 0.012  # explorations that fail become rarer until they cost this part of the time
COPYING = 1.3  # so many times as fast as plain decoding a text is that is copied, more or less
FREE_WAIT = 16.0  # tokens before a free source that seems to lose is tried all the same


@dataclass(slots=True)
class View:
    """What a row knows of one source."""

    acceptance: Acceptance
    is_free: bool
    wait: float = 0.0  # tokens until the next exploration
    n_since: int = 0  # tokens since the last one; of a free source since its last draft

    def learn(self, explores: bool, gain: float) -> None:
        """Let explorations that fail become rarer. `gain`: plain tokens."""
        if explores or self.is_free:
            self.n_since = 0
        if gain > 0:
            self.wait = FREE_WAIT if self.is_free else 0.0
        elif explores:
            self.wait = min(2 * self.wait + 1, max(-gain / CALM, 1.0))


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coming round of a row may do with one source."""

    limit: int = 0  # draft tokens at most
    explores: bool = False
    rate: float = 0.0  # tokens per second of all rows together, if this source drafts


NOTHING = Plan()


class AutoRow:
    """One row's share of `AutoLength`."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._pledge = Pledge()
        shared.start_row(self._pledge)
        self._views = {
            source: View(
                usual.of_text(FREE_DRIFT if source in FREE else TEXT_DRIFT),
                source in FREE,
                FREE_WAIT if source in FREE else SETTLED,
            )
            for source, usual in shared.usual.items()
        }
        self._plans: dict[Source, Plan] = {}  # of the open round
        self._rate = 0.0  # tokens per second that time is worth in it; 0 where nothing may be drafted
        self._standing: tuple[tuple[float, ...], float] = ((), 1.0)  # confidences; that all are accepted
        self._left = 0.0  # plain tokens that it may lose
        self._branches = False  # whoever drafts asks for trees
        self._n_made = 0  # tokens
        self.n_unread = 0  # tokens that the draft has not read, besides the last

    def wants_more(self, draft: Draft) -> bool:
        """Whether one more token is worth its position, or is drafted to explore."""
        self._begin()
        pledge, n = self._pledge, len(draft)
        pledge.n_draft = n
        if draft.source in COPIES and draft.source not in self._plans:
            self._plans[draft.source] = self._plan_free(draft.source, draft.ahead)
        plan = self._plans.get(draft.source, NOTHING)
        pledge.is_drafting = True
        if draft.source is Source.GRAMMAR:
            wants = self._pays_sure()
        else:
            is_planned = not n or draft.source in COPIES
            wants = n < plan.limit and (is_planned or self._pays(draft))
        pledge.n_draft, pledge.is_drafting = n + wants, wants
        return wants

    def tree(self) -> TreeGrowth | None:
        """How a tree grows in the coming round; None where a chain is as good, or nothing is known."""
        self._begin()
        self._branches, self._pledge.n_draft = True, 0  # whoever was asked before has no draft
        return self._tree()

    def _tree(self) -> TreeGrowth | None:
        shared, allocator = self._shared, self._shared.allocator
        plan = self._plans.get(shared.drafting, NOTHING)
        if plan.limit < 2 or plan.explores or not shared.grows_trees:
            return None
        prices = np.array(allocator.level_seconds(self._pledge, 0.0)[: plan.limit + 1])
        usual = shared.trees.usual(self._views[shared.drafting].acceptance.probability())
        if self._rate * prices[-1] > plan.limit * usual[1]:
            return None  # second candidates are not worth their positions
        plain_rate = allocator.plain_rate(allocator.n_rows)
        steps = shared.costs.wide_step_seconds(WIDEST) / max(sum(p.is_drafting for p in allocator.pledges), 1)
        faster = tree_speed_up(usual, plain_rate * prices, plain_rate * steps)
        if plain_rate * faster < EDGE * plan.rate:
            return None
        rate = plain_rate * faster
        return TreeGrowth(shared.trees, usual, rate * prices, rate * steps, self._pledge, rate)

    def trial_width(self) -> int:
        """One width, where nothing is known of any and nothing forbids it; one row finds it out for all."""
        shared = self._shared
        is_first = shared.allocator.pledges[:1] == [self._pledge]
        return TRIAL if is_first and shared.sources and shared.costs.is_blank else 0

    def observe_trial(self, width: int, seconds: float) -> None:
        """Learn what it took."""
        self._shared.trial = width, seconds
        self._shared.costs.observe_verify(width, seconds)

    def width(self, n_positions: int) -> int | None:
        """The cheapest allowed width of at least `n_positions`, of all rows together."""
        return self._shared.costs.cheapest_width(n_positions)

    def explores(self, draft: Draft) -> bool:
        """Whether a draft in the open round only explores."""
        self._begin()
        if draft.source in COPIES and draft.source not in self._plans:  # the round is played again
            return self._plan_free(draft.source, draft.confidences).explores
        return self._plans.get(draft.source, NOTHING).explores

    def observe(self, round_: Round) -> None:
        """Learn acceptance and costs, and what exploring showed."""
        shared, view, explores = self._shared, self._views[round_.source], self.explores(round_.draft)
        n_drafted, n_made = len(round_.draft), round_.n_accepted + 1
        shared.learn_acceptance(round_, view.acceptance)
        seconds = shared.observe(round_, self.n_unread)
        for source in shared.sources:
            self._views[source].acceptance.pass_tokens(n_made)
            self._views[source].n_since += n_made
        if n_drafted:
            rate = max(self._rate, shared.allocator.plain_rate(round_.n_rows)) / round_.n_rows
            view.learn(explores, n_made - seconds * rate)
        self._n_made += n_made
        has_read = round_.n_draft_steps > 0
        self.n_unread = int(n_made > n_drafted) if has_read else self.n_unread + n_made
        self._standing = ((), 1.0)
        self._pledge.is_asking, self._pledge.is_drafting = False, n_drafted > 0
        self._pledge.last_evaluation = round_.evaluation

    def close(self) -> None:
        """The row has ended."""
        if self._pledge in self._shared.allocator.pledges:
            self._shared.allocator.pledges.remove(self._pledge)

    def _begin(self) -> None:
        """Plan the round, once."""
        shared, allocator = self._shared, self._shared.allocator
        if self._pledge.is_asking:
            return
        self._pledge.is_asking, self._pledge.n_draft = True, 0
        self._plans, self._rate = {}, 0.0
        n_rows = allocator.n_rows
        if not shared.knows_plain or shared.wants_plain or not shared.costs.knows(n_rows):
            return
        self._rate = plain_rate = allocator.plain_rate(n_rows)
        if not plain_rate:  # as many positions may not be evaluated
            return
        self._left = left = shared.budget.left(shared.n_tokens, n_rows) / n_rows
        faster = COPYING
        if shared.drafting in shared.sources:
            plan = self._plan_model(plain_rate, left)
            self._plans[shared.drafting], self._rate = plan, max(plan.rate, plain_rate)
            faster = self._rate / plain_rate if plan.limit else COPYING
        n_timed = shared.costs.n_timed.get(shared.costs.cheapest_width(n_rows) or n_rows, 1)
        at_first, at_last = CHECK_AFTER * n_timed ** min(faster, MOST_GAIN), (faster - 1.0) / CHECK_SHARE
        if shared.n_since_plain >= min(at_first, CHECK_AFTER + at_last):
            shared.wants_plain, self._plans, self._rate = True, {}, 0.0

    def _plan_model(self, rate: float, left: float) -> Plan:
        shared, costs, view = self._shared, self._shared.costs, self._views[self._shared.drafting]
        if not costs.knows_step and costs.cheapest_width(shared.allocator.n_rows + 1):
            return Plan(1, explores=True)  # nothing is known but what one token shows
        if not self._n_made:  # behind a prompt the next tokens are the hardest to foresee
            gains, prices = self._outlook(shared.drafting, -LUCK)
            limit = min(self._affordable(shared.drafting, rate, left), TRIAL - 1)
            faster = speed_up(prices[: limit + 1], gains, rate)
            return Plan(limit, rate=rate * faster) if faster > 1.0 else NOTHING
        gains, prices = self._outlook(shared.drafting)
        could_pay = speed_up(prices, gains, rate) > 1.0
        left -= rate * costs.drafting_seconds(0, self.n_unread)
        is_due = view.n_since >= view.wait and rate * prices[1] - gains[1] <= left / 2
        if not could_pay and not is_due:  # nearly always, where drafting does not pay
            return NOTHING
        limit = self._affordable(shared.drafting, rate, left)
        faster = speed_up(prices, gains[: limit + 1], rate)
        if faster > 1.0:
            return Plan(limit, rate=rate * faster)
        if limit and is_due:
            gains, prices = self._outlook(shared.drafting, LUCK)
            if speed_up(prices, gains, rate) > 1.0:
                return Plan(limit, explores=True)
        return NOTHING

    def _plan_free(self, source: Source, ahead: Sequence[float]) -> Plan:
        """Copies stand in the place of a draft: these must be worth more than that, or be explored.

        `ahead`: the confidences of what could be copied.
        """
        shared, view = self._shared, self._views[source]
        if not self._rate or source not in shared.sources or self._is_finding_out():
            return NOTHING
        growth = self._tree() if self._branches else None
        rate = growth.rate if growth else self._rate
        plain_rate = shared.allocator.plain_rate(shared.allocator.n_rows)
        limit = self._affordable(source, plain_rate, self._left)
        worth, n = _most_valuable(*self._copies(source, ahead), limit, rate)
        draft_worth = rate / plain_rate - 1.0  # of the best draft of others, at this rate
        if worth > draft_worth:
            return Plan(n)
        if not limit or view.n_since < view.wait:
            return Plan(explores=True)
        _, n = _most_valuable(*self._copies(source, ahead, LUCK), limit, rate)
        return Plan(max(n, 1), explores=True)

    def _is_finding_out(self) -> bool:
        """Whether this round is to show what drafts of others are worth, unless they leave it unused."""
        plan, view = self._plans.get(self._shared.drafting, NOTHING), self._views[self._shared.drafting]
        return plan.explores and view.n_since < view.wait + FREE_WAIT

    def _copies(
        self, source: Source, ahead: Sequence[float], luck: float = 0.0
    ) -> tuple[list[float], list[float]]:
        """[m] tokens that 0, 1, ... copied tokens gain, and cost in seconds, with so much luck."""
        believed, longest = self._shared.calibrations[source].probability, self._shared.allocator.longest
        chances = [believed(confidence, luck) for confidence in ahead[:longest] or (0.5,) * longest]
        gains = [*accumulate(accumulate(chances, mul), initial=0.0)]
        return gains, self._shared.allocator.level_seconds(self._pledge, 0.0, -luck)[: len(gains)]

    def _affordable(self, source: Source, rate: float, left: float) -> int:
        """The most draft tokens that lose `left` plain tokens with bad luck, and `WORST` more at worst."""
        limit = 0
        for n, (gain, price) in enumerate(zip(*self._outlook(source, -BAD_LUCK), strict=True)):
            if rate * price - min(gain, WORST) <= left:
                limit = n
        return limit

    def _outlook(self, source: Source, luck: float = 0.0) -> tuple[list[float], list[float]]:
        """[m] tokens that 0, 1, ... draft tokens gain, and a row's share of what they cost, in seconds.

        `luck`: standard deviations by which both are better than believed.
        """
        shared, chance = self._shared, self._views[source].acceptance.probability(z=luck)
        step = 0.0 if source in FREE else shared.costs.draft_step_seconds(-luck)
        prices = shared.allocator.level_seconds(self._pledge, step, -luck)
        return expected_accepted(chance, len(prices) - 1), prices

    def _pays(self, draft: Draft) -> bool:
        """Whether the next token of a draft is worth its position."""
        calibration = self._shared.calibrations[draft.source]
        *before, last = draft.confidences
        known, standing = self._standing
        if known != tuple(before):
            standing = prod(map(calibration.probability, before))
        chance = calibration.probability(last)
        self._standing = draft.confidences, standing * chance
        gains, prices = self._outlook(draft.source)
        return standing * chance > stopping_threshold(prices, gains, self._rate)

    def _pays_sure(self) -> bool:
        """Whether one more token that the target cannot but accept costs less than it gains."""
        prices = self._shared.allocator.level_seconds(self._pledge, 0.0)
        return self._rate > 0.0 and len(prices) > 1 and self._rate * prices[1] < 1.0


def _most_valuable(gains: list[float], prices: list[float], limit: int, rate: float) -> tuple[float, int]:
    """What the best number of draft tokens up to `limit` is worth, in tokens at this rate; and the number."""
    worth = [gain - rate * price for gain, price in zip(gains[: limit + 1], prices, strict=False)]
    best = max(worth)
    return best, worth.index(best)
