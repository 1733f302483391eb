"""How many tokens one completion drafts, and how many of them are verified.

A round is planned before anything is drawn: the length with the most expected tokens per second, and that
rate, which prices all time of the round. Then confidences decide. Drafting stops when the next tokens are
worth less than their time, and only as many tokens are verified as are worth theirs. The first unverified one
still shows whether it would have been accepted. tests/simulator.py.

Prompt processing takes a draft seconds before its first token. So the target writes the first token alone,
and the draft sleeps until it is expected to save more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from llamaspec.length.acceptance import TextAcceptance, expected_accepted, verified_tokens
from llamaspec.length.costs import Array
from llamaspec.length.tree import TreePlan, plan_tree
from llamaspec.values import CHUNK, COPIES, LONGEST_COPY, WAIT_SECONDS, Draft, Round, Source, UnusedDraft

if TYPE_CHECKING:
    from llamaspec.length.policy import AutoLength

FREE = COPIES | {Source.GRAMMAR}  # sources that cost no draft step
REACH = 4  # positions of an evaluation at first; later at most 1.5 times the widest that was timed
TIMED = 2  # timings of plain decoding before anything is drafted
SURE = 0.95  # acceptance: if not even that would win, no draft is explored
FIRST = 16  # tokens of a copy, until one was accepted as a whole
CAUTION = 0.5  # share of the usual length to count on: prompt processing for a short answer is lost
LITTLE = 64  # tokens that a draft processes at once, whatever that may save
SHORT = 8  # plain tokens: a prompt that takes the draft longer is processed in chunks beside the rounds
WAIT = 4  # it waits for a fourth of the tokens that plain decoding writes meanwhile, at most for 2 * PACE
PACE = 8  # tokens over which the pace of a completion is averaged


@dataclass(slots=True)
class RoundPlan:
    """What a completion's next round may cost, and what it is for."""

    plain: float  # seconds of a token without drafts
    step: float  # seconds of a draft step
    rate: float = 1.0  # tokens per second: the price of time
    prices: Array = field(default_factory=lambda: np.zeros(1))  # [1 + n] seconds of 0, 1, ... verified tokens
    limits: dict[Source, int] = field(default_factory=dict)  # maximum number of draft tokens
    explored: Source | None = None  # its draft is not expected to pay
    times_plain: bool = False  # nothing is drafted, so that plain decoding is timed again
    timed_width: int | None = None  # the round is padded to it
    n_to_read: int = 0  # tokens of the prompt that the draft processes, instead of drafting


class AutoSequence:
    """The length policy of one completion."""

    def __init__(self, policy: AutoLength, *, drops: bool, max_tokens: int | None) -> None:
        self._policy, self._drops, self.max_tokens = policy, drops, max_tokens
        self._acceptance = {
            source: TextAcceptance(shared, is_copied=source in COPIES)
            for source, shared in policy.acceptance.items()
        }
        self.is_drafting = False  # its latest round had draft steps
        self.n_written = 0  # tokens of the completion
        self._evaluation = -1  # that it took part in last
        self._plan: RoundPlan | None = None  # of the round that has begun
        self._longest_copy = FIRST
        self.n_unread = 0  # tokens that the draft has not processed, besides the last
        self._is_asleep = False  # the draft has not processed the prompt
        self.unused: UnusedDraft | None = None  # why not
        self._pace: float | None = None  # seconds of a token, without those of draft models; recently

    @property
    def n_to_read(self) -> int:
        """Prompt tokens that the draft processes in this round, instead of drafting."""
        return self._plan.n_to_read if self._plan is not None else 0

    def takes_part(self, evaluation: int) -> bool:
        """Whether its round has begun, or it took part in this evaluation or a later one."""
        return self._plan is not None or self._evaluation >= evaluation

    def wants_more(self, draft: Draft) -> bool:
        """Whether the next tokens are worth their time, or should be explored."""
        plan, n, source = self._begun(), len(draft), draft.source
        if plan.n_to_read and source is self._policy.drafting:
            return n == 0
        if source in FREE and source not in plan.limits:
            plan.limits[source] = self._free_limit(plan, source, draft.ahead)
        if n >= plan.limits.get(source, 0):
            return False
        return n == 0 or source in FREE or self._pays(plan, draft)

    def n_verified(self, draft: Draft) -> int:
        """The number of draft tokens that is worth most."""
        plan, source = self._begun(), draft.source
        if source is plan.explored and (source in FREE or not self._drops):
            return 0
        if not len(draft) or not self._drops or source in FREE or draft.parents is not None:
            return len(draft)
        expected = self._expected(source, draft.confidences)
        return int((expected - plan.rate * plan.prices[: len(expected)]).argmax())

    def tree(self) -> TreePlan | None:
        """How a tree grows in the next round; None if a chain is as good, or nothing is known."""
        policy, plan = self._policy, self._begun()
        if policy.trees is None or plan.explored is not None:
            return None
        usual = self._acceptance[policy.drafting].probability()
        prices = plan.prices[: plan.limits.get(policy.drafting, 0) + 1]
        return plan_tree(policy.trees, usual, prices, plan.step, policy.costs, plan.rate, plan.plain)

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
        plan = self._begun()  # the drafter may not have asked
        found = [*verified_tokens(round_), *((round_.counterfactual,) if round_.counterfactual else ())]
        for confidence, outcome in found:
            self._acceptance[round_.source].learn(outcome, confidence)
        paid = any(outcome > 0.5 for _, outcome in found)
        self._policy.learn(round_, plan, paid=paid, n_unread=self.n_unread)
        if round_.source in COPIES and len(round_.draft):
            n_right = self._longest_copy if round_.n_accepted == len(round_.draft) else round_.n_accepted
            self._longest_copy = min(max(FIRST, 2 * n_right), LONGEST_COPY)
        self.n_written += round_.n_accepted + 1
        self.is_drafting = round_.n_priced_steps > 0
        self._learn_reading(round_, plan)
        self._evaluation, self._plan = round_.evaluation, None

    def observe_prompt(self, n: int, seconds: float) -> None:
        """Learn from a prompt chunk of `n` tokens that the target has processed."""
        self._policy.costs.observe_prompt(n, seconds)

    def start_prompt(self, n_unread: int) -> None:
        """Start a completion whose prompt has `n_unread` tokens that the draft has not processed."""
        self.n_unread, self._is_asleep = n_unread, n_unread > LITTLE
        self._sleep_on(self._saving(self._planned()))

    def observe_reading(self, n: int, seconds: float) -> None:
        """Learn from `n` prompt tokens that the draft has processed."""
        self._policy.costs.observe_reading(n, seconds)

    def plain_seconds(self, n_sequences: int) -> float | None:
        """As the policy's."""
        return self._policy.plain_seconds(n_sequences)

    def close(self) -> None:
        """End the completion."""
        self._policy.end_sequence(self)

    # The plan of a round

    def _begun(self) -> RoundPlan:
        """The plan of the round; made if that has not been done."""
        if self._plan is None:
            self._plan = self._planned()
        return self._plan

    def _planned(self) -> RoundPlan:
        policy, costs = self._policy, self._policy.costs
        others = [each for each in policy.running() if each is not self]
        n_sequences = min(1 + len(others), costs.widest_allowed)  # more are not evaluated together
        n_drafting = min(1 + sum(each.is_drafting for each in others), n_sequences)
        # All that draft take as many each: where the curve has steps, one position never pays for all.
        n, n_copies = (
            min(longest, max((max(REACH, widest * 3 // 2) - n_sequences) // n_drafting, 1))
            for longest, widest in ((policy.longest, costs.widest_narrow), (LONGEST_COPY, costs.widest))
        )
        n_most = max(n, n_copies) if policy.sources & COPIES else n
        seconds = costs.padded_seconds(n_sequences, n_sequences + n_most * n_drafting, n_drafting)
        if len(policy.sequences) > 1:  # others wait while a copy is verified, also those that read a prompt
            n_short = int((seconds - seconds[0] <= WAIT_SECONDS).sum()) - 1
            seconds = seconds[: max(n_short, CHUNK) + 1]
        plan = RoundPlan(plain=float(seconds[0]) / n_sequences, step=costs.step_seconds / n_drafting)
        if sum(average.n for average in costs.averages.values()) < TIMED:
            return plan
        plan.prices, plan.rate = (seconds - seconds[0]) / n_drafting, 1.0 / plan.plain
        wanted = costs.next_untimed() if policy.sources and n_sequences == 1 else None
        if wanted is not None and wanted[1] <= policy.credit:
            plan.timed_width = wanted[0]
        elif policy.drafting in policy.sources and self.n_written:  # a draft reads the prompt after a token
            self._plan_draft(plan, min(n, len(seconds) - 1), n_sequences)
        return plan

    def _plan_draft(self, plan: RoundPlan, n: int, n_sequences: int) -> None:
        """Decide whether the draft model drafts up to `n` tokens, is explored, or stays out of the round."""
        policy, costs, drafting = self._policy, self._policy.costs, self._policy.drafting
        known = costs.widest_narrow  # what wider evaluations cost is a guess: they are timed without a draft
        spent = plan.prices[: n + 1] + plan.step * np.arange(n + 1)
        rates = (1.0 + expected_accepted(self._acceptance[drafting].probability(), n)) / (plan.plain + spent)
        if n_sequences == 1 < known and costs.next_untimed() is not None and not rates[:known].argmax():
            rates, spent = rates[:known], spent[:known]
            n = len(rates) - 1
        limit = n if costs.knows_step else 1
        if rates.argmax():
            policy.drafts.reset()
            plan.rate = float(rates.max())
            if self._is_asleep and not self._wakes(plan):
                plan.rate = 1.0 / plan.plain
            elif policy.plain.is_due() and costs.allows(n_sequences):
                plan.times_plain = True
            else:
                plan.limits[drafting] = limit
                plan.n_to_read = self._next_chunk(plan) if self._is_asleep else 0
        elif (
            policy.drafts.is_due()
            and bool((expected_accepted(SURE, n)[1:] > plan.rate * spent[1:]).any())
            and costs.drafting_seconds(1, self.n_unread if self._is_asleep else 0) <= policy.credit
        ):
            policy.drafts.begin()
            plan.explored, plan.limits[drafting] = drafting, limit if self._drops else 1

    def _free_limit(self, plan: RoundPlan, source: Source, ahead: Sequence[float]) -> int:
        """How many tokens to take that cost no draft step; they must be worth more than a draft.

        If nothing is drafted, one that is not verified: it shows for free whether it would be accepted.
        `ahead` are the confidences of what could be copied.
        """
        policy, prices = self._policy, plan.prices
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
        """Expected number of accepted tokens among the first 0, 1, ... of a draft: [1 + n]."""
        return np.concatenate(([0.0], self._acceptance[source].probabilities(confidences).cumprod().cumsum()))

    def _pays(self, plan: RoundPlan, draft: Draft) -> bool:
        """Whether drafting on is worth more than stopping here."""
        n, source = len(draft), draft.source
        prices = plan.prices[: plan.limits[source] + 1]
        expected = self._expected(source, draft.confidences)
        worth = expected - plan.rate * prices[: n + 1]
        ahead = prices[n + 1 :] + plan.step * np.arange(1, len(prices) - n)
        gains = expected_accepted(self._acceptance[source].probability(), len(ahead))[1:]
        later = expected[n] + (expected[n] - expected[n - 1]) * gains - plan.rate * ahead
        return bool((later > (worth.max() if self._drops else worth[n])).any())

    # What the draft has processed

    def _saving(self, plan: RoundPlan) -> float:
        """Seconds that drafts are expected to save in the rest of the completion."""
        n_left = CAUTION * self._policy.usual_length  # whatever was written: completions end by chance
        if self.max_tokens is not None:
            n_left = min(n_left, self.max_tokens - self.n_written)
        pace = plan.plain if self._pace is None else min(self._pace, plan.plain)
        return max(pace - 1.0 / plan.rate, 0.0) * n_left

    def _wakes(self, plan: RoundPlan) -> bool:
        """Whether the draft should process the prompt now; notes why not.

        Known only after some tokens: if these are copied, no draft is wanted.
        """
        seconds, saving = self.n_unread * self._policy.costs.reading_seconds, self._saving(plan)
        has_waited = self.n_written >= min(seconds / plan.plain / WAIT, 2 * PACE)
        if has_waited and saving > seconds:
            self.unused = None
            return True
        self._sleep_on(saving)
        return False

    def _sleep_on(self, saving: float) -> None:
        """Keep sleeping: the draft would not earn back its prompt."""
        self.unused = UnusedDraft(self.n_unread * self._policy.costs.reading_seconds, saving)

    def _next_chunk(self, plan: RoundPlan) -> int:
        """Tokens of the prompt for the draft to process beside this round; 0 = all that are left.

        A chunk takes about as long as a plain round. It has `CHUNK` tokens at least, because on CPUs each
        token of a chunk of 32 costs 1.5 times as much as one of 64.
        """
        token = self._policy.costs.reading_seconds
        if self.n_unread * token <= SHORT * plan.plain:
            return 0
        return min(self.n_unread, max(CHUNK, int(plan.plain / token)))

    def _learn_reading(self, round_: Round, plan: RoundPlan) -> None:
        n_made = round_.n_accepted + 1
        if self.is_drafting:  # the draft has processed all there was
            has_read = len(round_.draft) + round_.n_dropped >= n_made
            self.n_unread, self.unused = int(not has_read), None
        else:
            n_read = (plan.n_to_read or self.n_unread) if round_.draft_seconds else 0
            self.n_unread = max(self.n_unread - n_read, 0) + n_made
        self._is_asleep &= self.n_unread > LITTLE
        pace, usual = (round_.verify_seconds + round_.overhead_seconds) / n_made, self._pace
        self._pace = pace if usual is None else usual + (pace - usual) * n_made / (n_made + PACE)
