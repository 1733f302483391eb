"""How many tokens one completion drafts, and how many of them are verified.

The policy plans a round; then confidences decide. Drafting stops when the next tokens are worth less than
their time, and only as many tokens are verified as are worth theirs. The first unverified one still shows
whether it would have been accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from llamaspec.length.acceptance import TextAcceptance, expected_accepted, verified_tokens
from llamaspec.length.costs import Array
from llamaspec.length.reading import DraftReading
from llamaspec.length.tree import TreePlan, plan_tree
from llamaspec.values import COPIES, LONGEST_COPY, Draft, Round, Source, UnusedDraft

if TYPE_CHECKING:
    from llamaspec.length.policy import AutoLength

FREE = COPIES | {Source.GRAMMAR}  # sources that cost no draft step
FIRST = 16  # tokens of a copy, until one was accepted as a whole
CAUTION = 0.5  # share of the usual length to count on: prompt processing for a short answer is lost

Grown = TypeVar("Grown")


@dataclass(slots=True)
class RoundPlan:
    """What a completion's next round may cost, and what it is for."""

    plain: float  # seconds of a token without drafts
    step: float  # seconds of a draft step
    rate: float = 1.0  # tokens per second: the price of time
    prices: Array = field(default_factory=lambda: np.zeros(1))  # [1 + n] seconds of 0, 1, ... verified tokens
    copy_prices: Array = field(default_factory=lambda: np.zeros(1))  # the same of copies, which may be longer
    limits: dict[Source, int] = field(default_factory=dict)  # draft tokens, at most
    explored: Source | None = None  # its draft is not expected to pay
    times_plain: bool = False  # nothing is drafted, so that plain decoding is timed again
    timed_width: int | None = None  # the round is padded to it
    n_to_read: int = 0  # tokens of the prompt that the draft processes, instead of drafting


class AutoSequence:
    """The length policy of one completion."""

    def __init__(self, policy: AutoLength, *, drops: bool, max_tokens: int | None) -> None:
        self._policy, self.drops, self.max_tokens = policy, drops, max_tokens
        self.acceptance = {
            source: TextAcceptance(shared, is_copied=source in COPIES)
            for source, shared in policy.acceptance.items()
        }
        self.reading = DraftReading(policy.costs)
        self.is_drafting = False  # its latest round had draft steps
        self.n_written = 0  # tokens of the completion
        self._evaluation = -1  # that it took part in last
        self._plan: RoundPlan | None = None  # of the round that has begun
        self._longest_copy = FIRST

    @property
    def n_to_read(self) -> int:
        """Prompt tokens that the draft processes in this round, instead of drafting."""
        return self._plan.n_to_read if self._plan is not None else 0

    @property
    def unused(self) -> UnusedDraft | None:
        """Why the draft has not read the prompt."""
        return self.reading.unused

    def takes_part(self, evaluation: int) -> bool:
        """Whether its round has begun, or it took part in this evaluation or a later one."""
        return self._plan is not None or self._evaluation >= evaluation

    def wants_more(self, draft: Draft) -> bool:
        """Whether the next tokens are worth their time, or should be explored."""
        plan, n, source = self._begun(), len(draft), draft.source
        if plan.n_to_read and source is self._policy.drafting:
            return n == 0
        if source in FREE and source not in plan.limits:
            plan.limits[source] = self._plan_free(plan, source, draft.ahead)
        if n >= plan.limits.get(source, 0):
            return False
        return n == 0 or source in FREE or self._pays(plan, draft)

    def n_verified(self, draft: Draft) -> int:
        """The number of draft tokens that is worth most."""
        plan, source = self._begun(), draft.source
        if source is plan.explored and (source in FREE or not self.drops):
            return 0
        if not len(draft) or not self.drops or source in FREE or draft.parents is not None:
            return len(draft)
        expected = self._expected(source, draft.confidences)
        return int((expected - plan.rate * plan.prices[: len(expected)]).argmax())

    def tree(self, grow: Callable[[TreePlan], Grown]) -> Grown | None:
        """How a tree grows in the next round; None if a chain is as good, or nothing is known."""
        policy, plan = self._policy, self._begun()
        if policy.trees is None or plan.explored is not None:
            return None
        usual = self.acceptance[policy.drafting].probability()
        prices = plan.prices[: plan.limits.get(policy.drafting, 0) + 1]
        found = plan_tree(policy.trees, usual, prices, plan.step, policy.costs, plan.rate, plan.plain)
        return grow(found) if found else None

    def width(self, n_positions: int) -> int | None:
        """The cheapest allowed width of at least `n_positions`, over all completions."""
        policy, plan = self._policy, self._begun()
        if plan.timed_width is not None and n_positions <= plan.timed_width:
            return plan.timed_width
        if plan.times_plain and n_positions <= len(policy.running()) and policy.costs.allows(n_positions):
            return n_positions  # not padded
        return policy.costs.padded_width(n_positions)

    def observe(self, round_: Round) -> None:
        """Learn acceptance and costs."""
        plan, reading = self._begun(), self.reading  # the drafter may not have asked
        n_made, n_steps = round_.n_accepted + 1, round_.n_priced_steps
        n_read = 0 if n_steps or not round_.draft_seconds else plan.n_to_read or reading.n_unread
        found = [*verified_tokens(round_), *((round_.counterfactual,) if round_.counterfactual else ())]
        for confidence, outcome in found:
            self.acceptance[round_.source].learn(outcome, confidence)
        paid = any(outcome > 0.5 for _, outcome in found)
        self._policy.learn(round_, plan, paid=paid, n_unread=reading.n_unread)
        if round_.source in COPIES and len(round_.draft):
            n_right = self._longest_copy if round_.n_accepted == len(round_.draft) else round_.n_accepted
            self._longest_copy = min(max(FIRST, 2 * n_right), LONGEST_COPY)
        self.n_written += n_made
        pace = (round_.verify_seconds + round_.overhead_seconds) / n_made
        has_read = len(round_.draft) + round_.n_dropped >= n_made
        reading.learn(n_made, n_read, pace, drafted=n_steps > 0, has_read=has_read)
        self.is_drafting, self._evaluation, self._plan = n_steps > 0, round_.evaluation, None

    def observe_prompt(self, n: int, seconds: float) -> None:
        """Learn from a prompt chunk of `n` tokens that the target has processed."""
        self._policy.costs.observe_prompt(n, seconds)

    def start_prompt(self, n_unread: int) -> None:
        """Start a completion whose prompt has `n_unread` tokens that the draft has not processed."""
        plan = self._policy.plan_round(self)
        self.reading.begin(n_unread, self._saving(plan))

    def observe_reading(self, n: int, seconds: float) -> None:
        """Learn from `n` prompt tokens that the draft has processed."""
        self._policy.costs.observe_reading(n, seconds)

    def plain_seconds(self, n_sequences: int) -> float | None:
        """As the policy's."""
        return self._policy.plain_seconds(n_sequences)

    def close(self) -> None:
        """End the completion."""
        self._policy.end_sequence(self)

    def should_read(self, plan: RoundPlan) -> bool:
        """Whether the draft has read the prompt, or should do so now; notes why not."""
        reading, saving = self.reading, self._saving(plan)
        if not reading.is_asleep or reading.is_waking or reading.pays(saving, plan.plain, self.n_written):
            return True
        reading.sleep_on(saving)
        return False

    def _saving(self, plan: RoundPlan) -> float:
        """Seconds that drafts are expected to save in the rest of the completion."""
        n_left = CAUTION * self._policy.usual_length  # whatever was written: texts end by chance
        if self.max_tokens is not None:
            n_left = min(n_left, self.max_tokens - self.n_written)
        return self.reading.saving(n_left, plan.plain, plan.rate)

    def _begun(self) -> RoundPlan:
        """The plan of the round; made if that has not been done."""
        if self._plan is None:
            self._plan = self._policy.plan_round(self)
        return self._plan

    def _plan_free(self, plan: RoundPlan, source: Source, ahead: Sequence[float]) -> int:
        """How many tokens to take that cost no draft step; they must be worth more than a draft.

        If nothing is drafted, one that is not verified: it shows for free whether it would be accepted.
        `ahead` are the confidences of what could be copied.
        """
        policy, prices = self._policy, plan.copy_prices
        n_most = len(prices) - 1
        if not n_most or plan.times_plain or source not in {*policy.sources, Source.GRAMMAR}:
            return 0
        if plan.timed_width is not None:
            return plan.timed_width - 1  # the positions are evaluated anyway
        if source is Source.GRAMMAR:
            return int((expected_accepted(1.0, n_most) - plan.rate * prices).argmax())
        expected = self._expected(source, ahead[: min(n_most, self._longest_copy)])
        # At the rate of the copies themselves: where width costs as it grows, a longer one only risks more.
        rates = (1.0 + expected) / (plan.plain + prices[: len(expected)])
        n = int(rates.argmax())
        if rates[n] > plan.rate:
            return n
        if not plan.limits.get(policy.drafting):
            plan.explored = source
        return int(plan.explored is source)

    def _expected(self, source: Source, confidences: Sequence[float]) -> Array:
        """Expected number of accepted tokens among the first n of a draft: [n]."""
        return np.concatenate(([0.0], self.acceptance[source].probabilities(confidences).cumprod().cumsum()))

    def _pays(self, plan: RoundPlan, draft: Draft) -> bool:
        """Whether drafting on is worth more than stopping here."""
        n, source = len(draft), draft.source
        expected = self._expected(source, draft.confidences)
        worth = expected - plan.rate * plan.prices[: n + 1]
        ahead = plan.prices[n + 1 :] + plan.step * np.arange(1, len(plan.prices) - n)
        gains = expected_accepted(self.acceptance[source].probability(), len(ahead))[1:]
        later = expected[n] + (expected[n] - expected[n - 1]) * gains - plan.rate * ahead
        return bool((later > (worth.max() if self.drops else worth[n])).any())
