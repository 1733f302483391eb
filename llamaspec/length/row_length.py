"""How many tokens to draft for one text, decided token by token.

Three questions before the first token: how many tokens can be lost within the regret budget; does drafting
pay with what is believed; if not, could it with some luck, and is it time to explore. Before every further
token: is it worth its position. Under any rule the answers depend only on earlier rounds and on the tokens
and confidences drafted so far. tests/length/test_auto_length.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from llamaspec.length.acceptance import RunningAverage
from llamaspec.length.allocator import Pledge
from llamaspec.length.planning import expected_accepted, stopping_threshold
from llamaspec.length.shared import FREE, Shared
from llamaspec.values import Draft, Round, Source

CAUTION = 1.5  # standard deviations by which a round must be safe
HOPE = 1.5  # standard deviations of luck for which exploration is worth it
CHECK_AFTER, CHECK_SHARE = 6, 0.01  # evaluations until plain decoding is timed again; what that may cost
CALM = 0.012  # explorations that fail become rarer until they cost this part of the time
FREE_WAIT = 16.0  # tokens before a free source that seems to lose is tried all the same
MEMORY, FREE_MEMORY = 20.0, 8.0  # verified tokens that a row's running average remembers


@dataclass(slots=True)
class View:
    """What a row knows of one source."""

    average: RunningAverage
    is_free: bool
    wait: float  # tokens until the next exploration
    n_since: int = 0  # tokens since the last one; of a free source since its last draft

    def learn(self, is_exploration: bool, gain: float, is_success: bool) -> None:
        """Let explorations that fail become rarer. `gain`: plain tokens."""
        if is_exploration or self.is_free:
            self.n_since = 0
        if is_success or gain > 0:
            self.wait = FREE_WAIT if self.is_free else 0.0
        elif is_exploration:
            self.wait = min(2 * self.wait + 1, max(-gain / CALM, 1.0))


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coming round of a row may do."""

    limit: int = 0  # draft tokens at most
    free_limit: int = 0  # of those that need no draft step
    is_exploration: bool = False
    rate: float = 0.0  # tokens per second that time is worth, all rows together


class AutoRow:
    """One row's share of `AutoLength`."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._pledge = Pledge()
        shared.start_row(self._pledge)
        self._views: dict[Source, View] = {}
        self._plan: Plan | None = None  # of the open round
        self._tries_free = False  # the open round explores a free source
        self._n_unread = 0  # tokens that the draft has not read, besides the last

    def wants_more(self, draft: Draft) -> bool:
        """Whether one more token is worth its position, or is drafted to explore."""
        plan, pledge, n = self._begin(), self._pledge, len(draft)
        pledge.n_draft, pledge.is_drafting = n, True
        if draft.source is Source.GRAMMAR:
            wants = self._pays_sure(plan.rate)
        elif n >= (plan.free_limit if draft.source in FREE else plan.limit):
            wants = False
        elif n:
            wants = self._pays(draft, plan.rate)
        else:
            wants = draft.source not in FREE or self._wants_free(draft.source, plan)
        pledge.n_draft, pledge.is_drafting = n + wants, wants
        return wants

    def width(self, n_positions: int) -> int | None:
        """The cheapest allowed width of at least `n_positions`, of all rows together."""
        return self._shared.costs.cheapest_width(n_positions)

    def observe(self, round_: Round) -> None:
        """Learn acceptance and costs, and what exploring showed."""
        shared, source, plan = self._shared, round_.source, self._begin()
        n_drafted, n_made = len(round_.draft), round_.n_accepted + 1
        is_exploration = self._tries_free if source in FREE else plan.is_exploration
        shared.learn_acceptance(round_, self._view(source).average)
        seconds = shared.observe(round_, self._n_unread)
        gain = n_made - seconds * max(plan.rate, shared.allocator.plain_rate(round_.n_rows)) / round_.n_rows
        for view in self._views.values():
            view.average.pass_tokens(n_made)
            view.n_since += n_made
        is_complete = round_.n_accepted == n_drafted
        if n_drafted:
            self._view(source).learn(is_exploration, gain, is_complete and source not in FREE)
            if is_exploration:
                shared.tally.n_tries += 1
                shared.tally.explored_seconds -= gain * shared.allocator.plain_seconds(1)
        self._n_unread = int(is_complete) if round_.n_draft_steps else self._n_unread + n_made
        self._plan, self._tries_free = None, False
        self._pledge.is_asking, self._pledge.is_drafting = False, n_drafted > 0
        self._pledge.last_evaluation = round_.evaluation

    def close(self) -> None:
        """The row has ended."""
        if self._pledge in self._shared.allocator.pledges:
            self._shared.allocator.pledges.remove(self._pledge)

    def _view(self, source: Source) -> View:
        if source not in self._views:
            usual = self._shared.beliefs[source].usual
            is_free = source in FREE
            average = usual.fresh(FREE_MEMORY if is_free else MEMORY)
            self._views[source] = View(average, is_free, FREE_WAIT if is_free else 0.0)
        return self._views[source]

    def _begin(self) -> Plan:
        if self._plan is None:
            self._pledge.is_asking, self._pledge.n_draft = True, 0
            self._plan = self._decide() if self._shared.knows_plain else Plan()
        return self._plan

    def _decide(self) -> Plan:
        shared, allocator, costs = self._shared, self._shared.allocator, self._shared.costs
        n_rows = allocator.n_rows
        plain_rate = allocator.plain_rate(n_rows)
        if shared.wants_plain:
            return Plan(rate=plain_rate)
        left = shared.budget.left(shared.n_tokens, n_rows, costs.plain_spread) / n_rows
        free_limit = self._limit(Source.NGRAM, 0.0, left, plain_rate) if shared.has_free else 0
        nothing = Plan(0, free_limit, rate=plain_rate)
        if not shared.has_model or costs.doubts(n_rows):
            return nothing
        if costs.n_steps_timed == 0 and not costs.has_prior and costs.cheapest_width(n_rows + 1):
            return Plan(1, free_limit, True, plain_rate)  # nothing is known but what one token shows
        catch_up = plain_rate * costs.catch_up_seconds(self._n_unread)  # plain tokens
        limit = self._limit(Source.MODEL, costs.draft_step_seconds(CAUTION), left - catch_up, plain_rate)
        if not limit:
            return nothing
        view = self._view(Source.MODEL)
        likely = allocator.level_seconds(self._pledge, costs.draft_step_seconds())
        speed_up = _speed_up(likely, expected_accepted(view.average.probability, limit), plain_rate)
        if speed_up <= 1.0:
            cheap = allocator.level_seconds(self._pledge, costs.draft_step_seconds(-HOPE), -HOPE)
            hoped = _speed_up(
                cheap, expected_accepted(view.average.bound(HOPE), allocator.longest), plain_rate
            )
            loss = catch_up + plain_rate * likely[1] - view.average.probability
            if hoped <= 1.0 or view.n_since < view.wait or loss > left / 2:
                return nothing
            return Plan(limit, free_limit, True, plain_rate)
        if shared.n_since_plain >= CHECK_AFTER + (speed_up - 1.0) / CHECK_SHARE:
            shared.wants_plain = True
            return Plan(rate=plain_rate)
        return Plan(limit, free_limit, rate=plain_rate * speed_up)

    def _limit(self, source: Source, step_seconds: float, left: float, plain_rate: float) -> int:
        """The most draft tokens that, with bad luck, lose no more than `left` plain tokens."""
        allocator = self._shared.allocator
        dear = allocator.level_seconds(self._pledge, step_seconds, CAUTION)
        accepted = expected_accepted(self._view(source).average.bound(-CAUTION), allocator.longest)
        return max((n for n, cost in enumerate(dear) if plain_rate * cost - accepted[n] <= left), default=0)

    def _pays(self, draft: Draft, rate: float) -> bool:
        """Whether the next token of a draft is worth its position."""
        allocator, calibration = self._shared.allocator, self._shared.beliefs[draft.source].calibration
        standing = prod(map(calibration.probability, draft.confidences))
        if draft.source in FREE:
            step, ahead = 0.0, calibration.probability(draft.confidences[-1])
        else:
            step = self._shared.costs.draft_step_seconds()
            ahead = self._view(draft.source).average.probability
        costs = allocator.level_seconds(self._pledge, step)
        return standing > stopping_threshold(costs, expected_accepted(ahead, allocator.longest), rate)

    def _pays_sure(self, rate: float) -> bool:
        """Whether one more token that the target cannot but accept costs less than it gains."""
        shared = self._shared
        costs = shared.allocator.level_seconds(self._pledge, 0.0)
        is_due = shared.knows_plain and not shared.wants_plain
        return is_due and len(costs) > 1 and rate * costs[1] < 1.0

    def _wants_free(self, source: Source, plan: Plan) -> bool:
        """Whether a draft without steps is worth more than the best in its place, or is explored."""
        allocator, view = self._shared.allocator, self._view(source)
        costs = allocator.level_seconds(self._pledge, 0.0)
        first = view.average.bound(0.0 if plan.limit else HOPE)
        calibration = self._shared.beliefs[source].calibration
        ahead = expected_accepted(calibration.probability(0.9), allocator.longest - 1)
        gains = [first * (1.0 + gain) for gain in ahead]
        value = max(gain - plan.rate * cost for gain, cost in zip(gains, costs[1:], strict=True))
        self._tries_free = value <= plan.rate / allocator.plain_rate(allocator.n_rows) - 1.0
        return not self._tries_free or view.n_since >= view.wait


def _speed_up(costs: list[float], gains: list[float], plain_rate: float) -> float:
    """Of the best number of tokens, next to no draft: tokens of a row over its share of the time."""
    pairs = zip(costs[1:], gains[1:], strict=False)
    return max((1.0 + gain) / (1.0 + plain_rate * cost) for cost, gain in pairs)
