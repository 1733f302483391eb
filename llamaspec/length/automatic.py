"""Drafts as many tokens as speed generation up: how many each completion drafts, and how many are verified.

A round is planned before anything is drawn. The plan finds the length with the most expected tokens per
second, and that rate is the price of time in this round. Then confidences decide: drafting stops if the next
tokens are expected to gain less than their time, and the number of tokens that maximizes the expected gain is
verified. The first one that is not verified still shows whether it would have been accepted. If drafts could
win but lose at the moment, they are explored now and then. tests/simulator.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.costs import DENSE
from llamaspec.length.draft_prompt import DraftPrompt
from llamaspec.length.estimates import (
    Array,
    SequenceAcceptance,
    expected_accepted,
    summed,
    verified_tokens,
)
from llamaspec.length.prior import LearnedPrior
from llamaspec.length.shared import FREE, RoundPlan, Shared
from llamaspec.protocols import SequenceLength
from llamaspec.values import CHUNK, COPIES, LONGEST_COPY, WAIT_SECONDS, Attention, Draft, Round, Source

AT_ONCE = frozenset({Source.BLOCK})  # sources that need one step for a draft of any length
GIVEN = frozenset({Source.PREDICTION, Source.GRAMMAR})  # sources that come with a request
REACH = 4  # maximum positions of an evaluation at first; later 1.5 times the widest that was timed
SURE = 0.95  # acceptance: if even this would lose, drafts are not explored
FIRST = 16  # maximum tokens of a copy, until one of that length was accepted


class AutoLength:
    """Drafts as many tokens as speed generation up, decided token by token; none if drafting is slower.

    Parameters
    ----------
    prior : CostCurve or LearnedPrior, optional
        Results of a probe or of earlier runs.
    longest : int
        Maximum draft tokens of a completion in one round.
    sources : collection of Source
        Where draft tokens come from.
    pads : bool
        Plain rounds may be padded to time a width.

    Raises
    ------
    ValueError
        `longest` is not positive.
    """

    def __init__(
        self,
        prior: CostCurve | LearnedPrior | None = None,
        longest: int = 15,
        sources: Collection[Source] = frozenset({Source.MODEL}),
        *,
        pads: bool = True,
    ) -> None:
        if longest < 1:
            raise ValueError(f"the longest draft must be >= 1, got {longest}")
        if not isinstance(prior, LearnedPrior):
            prior = LearnedPrior(prior)
        self.shared = Shared(prior, longest, frozenset(sources), pads=pads)

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> AutoSequence:
        """Start a completion."""
        return AutoSequence(self.shared, drops=drops, max_tokens=max_tokens)

    def experience(self) -> LearnedPrior:
        """Return what the next run should start with."""
        return self.shared.experience()


class AutoSequence:
    """The length policy of one completion."""

    def __init__(self, shared: Shared, *, drops: bool, max_tokens: int | None) -> None:
        self._shared, self._drops, self._max_tokens = shared, drops, max_tokens
        shared.n_sequences += 1
        self._is_open = True
        self._acceptance = {
            source: SequenceAcceptance(learnt, is_copied=source in COPIES)
            for source, learnt in shared.acceptance.items()
        }
        self.reading = DraftPrompt(shared.costs, is_winning=shared.is_winning)
        self.is_drafting = False  # the latest round had draft steps
        self.n_written = 0  # tokens of the completion
        self.depth = 0.0  # cached tokens that a position attends to
        self._others: list[AutoSequence] = []  # that take part in the next evaluation
        self._plan: RoundPlan | None = None  # of the round that has begun
        self._longest_copy = FIRST

    def begin_round(self, depth: float, others: Sequence[SequenceLength]) -> None:
        """Begin a round of a sequence, in an evaluation together with `others`."""
        self.depth = depth
        self._others = [each for each in others if isinstance(each, AutoSequence)]

    def wants_more(self, draft: Draft) -> bool:
        """Whether the next tokens are worth their time, or should be explored."""
        plan, n, source = self._begun(), len(draft), draft.source
        if self.reading.n_to_read and source is self._shared.drafting:
            return n == 0
        if source in FREE and source not in plan.limits:
            plan.limits[source] = self._free_limit(plan, source, draft.ahead)
        if n >= plan.limits.get(source, 0):
            return False
        is_made = source in FREE or (source in AT_ONCE and self._drops)  # `n_verified` chooses its length
        return n == 0 or is_made or self._should_extend(plan, draft)

    def longest_copy(self) -> int:
        """As many tokens as earlier copies allow, and as many as are priced."""
        plan = self._begun()
        if plan.timed_width is not None:
            return plan.timed_width - 1
        return min(len(plan.prices) - 1, self._longest_copy)

    def n_verified(self, draft: Draft) -> int:
        """The number of draft tokens with the greatest expected net gain."""
        plan, source = self._begun(), draft.source
        if source is plan.explored and (source in FREE or not self._drops):
            return 0
        if not len(draft) or not self._drops or source in FREE:
            return len(draft)
        expected = self._expected(source, draft.confidences)
        n = int((expected - plan.rate * plan.prices[: len(expected)]).argmax())
        return max(n, int(plan.explored is source))  # prices may be wrong, and only an evaluation shows it

    def timed_width(self) -> int | None:
        """The width to time in this round; None = no padding."""
        return self._begun().timed_width

    def observe(self, round_: Round) -> Round:
        """Learn acceptance and costs; return the round with the seconds of a stall."""
        plan = self._begun()  # the drafter may not have asked
        found = [*verified_tokens(round_), *((round_.counterfactual,) if round_.counterfactual else ())]
        for confidence, outcome in found:
            self._acceptance[round_.source].learn(outcome, confidence)
        paid = any(outcome > 0.5 for _, outcome in found)
        n_unread, depth = self.reading.n_unread, self.depth
        credible = self._shared.learn(round_, plan, paid=paid, n_unread=n_unread, depth=depth)
        if round_.source in COPIES and len(round_.draft):
            n_right = self._longest_copy if round_.n_accepted == len(round_.draft) else round_.n_accepted
            self._longest_copy = min(max(FIRST, 2 * n_right), LONGEST_COPY)
        self.n_written += round_.n_accepted + 1
        self.is_drafting = round_.n_priced_steps > 0
        self.reading.observe(round_)
        self._plan = None
        return replace(round_, stalled_seconds=round_.draft_seconds + round_.verify_seconds - credible)

    def close(self) -> None:
        """End the completion."""
        if self._is_open:
            self._is_open = False
            self._shared.n_sequences -= 1
            self._shared.learn_length(self.n_written, self._max_tokens)

    def _begun(self) -> RoundPlan:
        """Return the plan of the round; make it if there is none."""
        if self._plan is None:
            self._plan = self._planned()
        return self._plan

    def _planned(self) -> RoundPlan:
        shared, costs = self._shared, self._shared.costs
        others = self._others
        n_sequences, drafting = 1 + len(others), [self, *(each for each in others if each.is_drafting)]
        n_drafting = len(drafting)
        # All drafting sequences get the same length: if the curve has steps, one position alone never pays.
        n, n_copies = (
            min(longest, max((max(REACH, widest * 3 // 2) - n_sequences) // n_drafting, 1))
            for longest, widest in (
                (shared.longest, costs.widest_timed(DENSE)),
                (LONGEST_COPY, costs.widest_timed()),
            )
        )
        n_most = max(n, n_copies) if shared.sources & COPIES else n
        seconds = costs.seconds_of(n_sequences, n_sequences + n_most * n_drafting, n_drafting)
        cached = Attention(self.depth + sum(each.depth for each in others))
        cached_for_each = Attention(0.0, sum(each.depth for each in drafting))  # draft token of all
        seconds = seconds + costs.attention_seconds(cached)
        seconds += costs.attention_seconds(cached_for_each) * np.arange(len(seconds))
        if shared.n_sequences > 1:  # others, also those whose prompt is processed, wait for a long copy
            n_short = int((seconds - seconds[0] <= WAIT_SECONDS).sum()) - 1
            seconds = seconds[: max(n_short, CHUNK) + 1]
        step = costs.drafting_seconds(1, 0, self.depth) / n_drafting
        plan = RoundPlan(plain=float(seconds[0]) / n_sequences, step=step)
        if not costs.knows_plain:
            return plan
        plan.prices, plan.rate = (seconds - seconds[0]) / n_drafting, 1.0 / plan.plain
        wanted = costs.next_untimed() if shared.sources and n_sequences == 1 else None
        if wanted is not None and wanted[1] <= shared.credit:
            plan.timed_width = wanted[0]
        elif shared.drafting in shared.sources and self.n_written:  # the target generates the first token
            self._plan_draft(plan, min(n, len(seconds) - 1), n_sequences)
        return plan

    def _plan_draft(self, plan: RoundPlan, n: int, n_sequences: int) -> None:
        """Decide whether the draft model drafts up to `n` tokens, is explored, or stays out of the round."""
        shared, costs, drafting = self._shared, self._shared.costs, self._shared.drafting
        known = costs.widest_timed(DENSE)  # the cost of wider evaluations is a guess, until they are timed
        spent = plan.prices[: n + 1] + plan.step * _n_steps(drafting, n)
        rates = (1.0 + expected_accepted(self._acceptance[drafting].probability(), n)) / (plan.plain + spent)
        if n_sequences == 1 < known and costs.next_untimed() is not None and not rates[:known].argmax():
            rates, spent = rates[:known], spent[:known]
            n = len(rates) - 1
        limit = n if costs.knows_step else 1
        shared.is_winning = bool(rates.argmax())
        if shared.is_winning:
            shared.drafts.reset()
            plan.rate = float(rates.max())
            if self.reading.is_asleep and not self._wakes(plan):
                plan.rate = 1.0 / plan.plain
            elif shared.plain.is_due():
                plan.times_plain = True
            else:
                plan.limits[drafting] = limit
                self.reading.plan_chunk(plan.plain)
        elif (
            shared.drafts.is_due()
            and bool((expected_accepted(SURE, n)[1:] > plan.rate * spent[1:]).any())
            and costs.drafting_seconds(1, self.reading.n_unread if self.reading.is_asleep else 0, self.depth)
            <= shared.credit
        ):
            shared.drafts.n_since = 0
            plan.explored, plan.limits[drafting] = drafting, limit if self._drops else 1

    def _wakes(self, plan: RoundPlan) -> bool:
        """Whether the draft model should process the prompt now."""
        n_left = self._shared.counted_length  # however long this one is: completions end by chance
        if self._max_tokens is not None:
            n_left = min(n_left, self._max_tokens - self.n_written)
        return self.reading.wakes(plan.plain, plan.rate, self.n_written, n_left)

    def _free_limit(self, plan: RoundPlan, source: Source, ahead: Sequence[float]) -> int:
        """Return how many tokens to take that need no draft step, if they are worth more than a draft.

        `ahead` are the confidences of the tokens that could be copied. If neither copies nor drafts win, one
        token is taken and not verified: it shows for free whether it would have been accepted.
        """
        shared, prices = self._shared, np.maximum(plan.prices, 0.0)  # no copy is verified to save time
        n_most = len(prices) - 1
        if not n_most or plan.times_plain or source not in shared.sources | GIVEN:
            return 0
        if plan.timed_width is not None:
            return plan.timed_width - 1  # the positions are evaluated anyway
        if source is Source.GRAMMAR:
            return int((expected_accepted(1.0, n_most) - plan.rate * prices).argmax())
        expected = self._expected(source, ahead[: min(n_most, self._longest_copy)])
        # The best rate of the copies alone: if cost grows evenly with width, a longer copy only risks more.
        rates = (1.0 + expected) / (plan.plain + prices[: len(expected)])
        n = int(rates.argmax())
        if rates[n] > plan.rate:
            return n
        if not plan.limits.get(shared.drafting):
            plan.explored = source
        return int(plan.explored is source)

    def _expected(self, source: Source, confidences: Sequence[float]) -> Array:
        """Return the expected number of accepted tokens among the first 0, 1, ... of a draft: [1 + n]."""
        return summed(self._acceptance[source].probabilities(confidences).cumprod())

    def _should_extend(self, plan: RoundPlan, draft: Draft) -> bool:
        """Whether a longer draft has a greater expected net gain than this one."""
        n, source = len(draft), draft.source
        prices = plan.prices[: plan.limits[source] + 1]
        expected = self._expected(source, draft.confidences)
        gains = expected - plan.rate * prices[: n + 1]
        n_ahead = len(prices) - 1 - n
        step = 0.0 if source in AT_ONCE else plan.step
        ahead = prices[n + 1 :] + step * np.arange(1, n_ahead + 1)
        accepted = expected_accepted(self._acceptance[source].probability(), len(ahead))[1:]
        later = expected[n] + (expected[n] - expected[n - 1]) * accepted - plan.rate * ahead
        return bool((later > (gains.max() if self._drops else gains[n])).any())


def _n_steps(source: Source, n: int) -> Array:
    """Return the number of draft steps for 0, 1, ... `n` tokens: [1 + n]."""
    steps: Array = np.arange(n + 1.0)
    return np.minimum(steps, 1.0) if source in AT_ONCE else steps
