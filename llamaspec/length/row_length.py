"""How many tokens to draft for one text, decided token by token.

Three questions before the first token: how many tokens can be lost within the regret budget; does drafting
pay with what is believed; if not, could it with some luck, and is it time to explore. Before every further
token: is it worth its position. Under any rule the answers depend only on earlier rounds and on the tokens
and confidences drafted so far. tests/length/test_auto_length.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from llamaspec.length.acceptance import Acceptance
from llamaspec.length.allocator import Pledge, expected_accepted, speed_up, stopping_threshold
from llamaspec.length.shared import FREE, Shared
from llamaspec.values import Draft, Round, Source

LUCK = 1.5  # standard deviations: of bad luck that a round must survive, of good luck worth exploring for
CHECK_AFTER, CHECK_SHARE = 6, 0.01  # evaluations until plain decoding is timed again; what that may cost
CALM = 0.012  # explorations that fail become rarer until they cost this part of the time
FREE_WAIT = 16.0  # tokens between explorations of a source in whose place another may draft


@dataclass(slots=True)
class View:
    """What a row knows of one source."""

    acceptance: Acceptance
    least_wait: float
    wait: float = 0.0  # tokens until the next exploration
    n_since: int = 0  # tokens since the last one

    def learn(self, explores: bool, gain: float) -> None:
        """Let explorations that fail become rarer. `gain`: plain tokens."""
        if explores:
            self.n_since = 0
            self.wait = max(min(2 * self.wait + 1, max(-gain / CALM, 1.0)), self.least_wait)
        if gain > 0:
            self.wait = self.least_wait


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coming round of a row may do with one source."""

    rate: float = 0.0  # tokens per second of all rows together, in the time spent so
    limit: int = 0  # draft tokens at most
    explores: bool = False


class AutoRow:
    """One row's share of `AutoLength`."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._pledge = Pledge()
        shared.start_row(self._pledge)
        self._views = {s: View(shared.usual[s].of_text(), FREE_WAIT if s in FREE else 0.0) for s in Source}
        self._plans: dict[Source, Plan] = {}  # of the open round
        self._standing: tuple[tuple[float, ...], float] = ((), 1.0)  # confidences; that all are accepted
        self.n_unread = 0  # tokens that the draft has not read, besides the last

    def wants_more(self, draft: Draft) -> bool:
        """Whether one more token is worth its position, or is drafted to explore."""
        plans, pledge, n = self._begin(), self._pledge, len(draft)
        plan, rate = plans.get(draft.source, Plan()), self._rate
        pledge.n_draft, pledge.is_drafting = n, True
        if n >= plan.limit:
            wants = False
        elif n:
            wants = self._pays(draft, rate)
        else:
            wants = plan.explores or plan.rate >= rate or draft.source not in FREE
        pledge.n_draft, pledge.is_drafting = n + wants, wants
        return wants

    def width(self, n_positions: int) -> int | None:
        """The cheapest allowed width of at least `n_positions`, of all rows together."""
        return self._shared.costs.cheapest_width(n_positions)

    def explores(self, source: Source) -> bool:
        """Whether a draft of this source in the open round only explores."""
        return self._begin().get(source, Plan()).explores

    def observe(self, round_: Round) -> None:
        """Learn acceptance and costs, and what exploring showed."""
        shared, view, explores = self._shared, self._views[round_.source], self.explores(round_.source)
        n_drafted, n_made, rate = len(round_.draft), round_.n_accepted + 1, self._rate
        shared.learn_acceptance(round_, view.acceptance)
        seconds = shared.observe(round_, self.n_unread)
        for source in shared.sources:
            self._views[source].acceptance.pass_tokens(n_made)
            self._views[source].n_since += n_made
        if n_drafted:
            rate = max(rate, shared.allocator.plain_rate(round_.n_rows)) / round_.n_rows
            view.learn(explores, n_made - seconds * rate)
        has_read = round_.n_draft_steps > 0
        self.n_unread = int(n_made > n_drafted) if has_read else self.n_unread + n_made
        self._plans, self._standing = {}, ((), 1.0)
        self._pledge.is_asking, self._pledge.is_drafting = False, n_drafted > 0
        self._pledge.last_evaluation = round_.evaluation

    def close(self) -> None:
        """The row has ended."""
        if self._pledge in self._shared.allocator.pledges:
            self._shared.allocator.pledges.remove(self._pledge)

    @property
    def _rate(self) -> float:
        """Tokens per second that time is worth."""
        return max((plan.rate for plan in self._plans.values()), default=0.0)

    def _begin(self) -> dict[Source, Plan]:
        shared = self._shared
        if not self._plans and shared.knows_plain:
            self._pledge.is_asking, self._pledge.n_draft = True, 0
            self._plans = {source: self._plan(source) for source in shared.sources}
            gain = self._rate / shared.allocator.plain_rate(shared.allocator.n_rows) - 1.0
            if gain > 0.0 and shared.n_since_plain >= CHECK_AFTER + gain / CHECK_SHARE:
                shared.wants_plain = True
            if shared.wants_plain:
                self._plans = dict.fromkeys(shared.sources, Plan())
        return self._plans

    def _plan(self, source: Source) -> Plan:
        shared, allocator, costs = self._shared, self._shared.allocator, self._shared.costs
        n_rows, view = allocator.n_rows, self._views[source]
        rate, left = (
            allocator.plain_rate(n_rows),
            shared.budget.left(shared.n_tokens, n_rows, costs.plain_spread) / n_rows,
        )
        if source not in FREE:
            if not costs.knows_step and costs.cheapest_width(n_rows + 1):
                return Plan(rate, 1, True)  # nothing is known but what one token shows
            left -= rate * costs.drafting_seconds(0, self.n_unread)
        gains, prices = self._outlook(source, -LUCK)
        limit = max((n for n, price in enumerate(prices) if rate * price - gains[n] <= left), default=0)
        if not limit:
            return Plan(rate)
        gains, prices = self._outlook(source)
        faster = speed_up(prices, gains[: limit + 1], rate)
        if faster > 1.0:
            return Plan(rate * faster, limit)
        is_due = view.n_since >= view.wait and rate * prices[1] - gains[1] <= left / 2
        explores = is_due and speed_up(*self._outlook(source, LUCK)[::-1], rate) > 1.0
        return Plan(rate, limit if explores else 0, explores)

    def _outlook(self, source: Source, luck: float = 0.0) -> tuple[list[float], list[float]]:
        """[m] tokens that 0, 1, ... draft tokens gain, and cost in seconds, with so much luck."""
        gains = expected_accepted(
            self._views[source].acceptance.probability(z=luck), self._shared.allocator.longest
        )
        step = 0.0 if source in FREE else self._shared.costs.draft_step_seconds(-luck)
        return gains, self._shared.allocator.level_seconds(self._pledge, step, -luck)

    def _pays(self, draft: Draft, rate: float) -> bool:
        """Whether the next token of a draft is worth its position."""
        calibration = self._shared.calibrations[draft.source]
        *before, last = draft.confidences
        known, standing = self._standing
        if known != tuple(before):
            standing = prod(map(calibration.probability, before))
        chance = calibration.probability(last)
        self._standing = draft.confidences, standing * chance
        gains, prices = self._outlook(draft.source)
        if draft.source in FREE:  # a match that goes on is as likely to go on
            gains = expected_accepted(chance, len(prices))
        return standing * chance > stopping_threshold(prices, gains, rate)
