"""How many tokens to draft, and how many of them to verify.

A round is planned before anything is drawn: the length with the most expected tokens per second, and that
rate, which prices all time of the round. Then confidences decide. Drafting stops when the next tokens are
worth less than their time, and only as many tokens are verified as are worth theirs. The first unverified one
still shows whether it would have been accepted. A draft that could win but does not is explored now and then.
Knows no model and no clock: the same rounds give the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np

from llamaspec.length.acceptance import (
    FARTHEST,
    NEAREST,
    SETTLED,
    Acceptance,
    Exploration,
    LearnedPrior,
    TextAcceptance,
    expected_accepted,
    verified_tokens,
)
from llamaspec.length.copies import CopyLength
from llamaspec.length.costs import Array, CostCurve, Costs
from llamaspec.length.reading import DraftReading
from llamaspec.length.tree import TreeAcceptance, TreePlan, plan_tree
from llamaspec.values import (
    CHUNK,
    COPIES,
    LONGEST_COPY,
    WAIT_SECONDS,
    Draft,
    Round,
    Source,
    UnusedDraft,
)

FREE = COPIES | {Source.GRAMMAR}  # sources that cost no draft step
REACH = 4  # positions of an evaluation at first; later at most 1.5 times the widest that was timed
TIMED = 2  # timings of plain decoding before anything is drafted
SURE = 0.95  # acceptance: if not even that would win, no draft is explored
SHARE, CREDIT = 0.015, 2.0  # budget of timings and exploring: share of all time; plain tokens at first
AS_GOOD = 0.98  # the shortest copy with this share of the best rate is taken: a longer one only risks more
CHANGED = 0.1  # relative change of plain decoding that is worth timing again soon
USUAL = 256.0  # tokens of a completion, before any has ended
REMEMBERED = 6  # completions in the average length: requests of a kind follow each other
CAUTION = 0.5  # share of the usual length to count on: prompt processing for a short answer is lost

Grown = TypeVar("Grown")


class AutoLength:
    """Drafts as many tokens as speed things up, decided token by token; none if drafting does not.

    Parameters
    ----------
    prior : CostCurve or LearnedPrior, optional
        Results of a probe or of earlier runs.
    widths : collection of int, optional
        The only numbers of positions that may be evaluated at once; 1 must be among them.
    longest : int
        Maximum draft tokens of a completion in one round.
    sources : collection of Source
        Where draft tokens come from.
    trees : bool
        Drafts may branch into trees.
    pads : bool
        Evaluations may be padded.

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
        pads: bool = True,
    ) -> None:
        if longest < 1:
            raise ValueError(f"the longest draft must be >= 1, got {longest}")
        if widths is not None and 1 not in widths:
            raise ValueError(f"width 1 must be allowed, got {sorted(widths)}")
        if not isinstance(prior, LearnedPrior):
            prior = LearnedPrior(prior, n_runs=0 if prior is None else SETTLED)
        self.n_runs = prior.n_runs
        self.costs = Costs(prior.curve, widths, pads=pads, is_settled=self.is_settled)
        self.longest, self.sources = longest, frozenset(sources)
        self.drafting = min(self.sources - FREE, key=list(Source).index, default=Source.MODEL)
        self.acceptance = {source: Acceptance(is_copied=source in COPIES) for source in Source}
        self.acceptance[self.drafting] = Acceptance(prior.log_odds)
        self.acceptance[Source.NGRAM] = Acceptance(prior.copy_log_odds, is_copied=True)
        self.trees = TreeAcceptance() if trees else None
        self.drafts, self.plain = Exploration(prior.distance), Exploration()  # explored where the other pays
        self.credit = 0.0  # seconds that timing widths and exploring may cost
        self.sequences: list[AutoSequence] = []
        self.n_tokens = 0
        self.usual_length = USUAL  # tokens of a text
        self.latest = -1  # evaluation

    @property
    def is_settled(self) -> bool:
        """Whether costs were measured often enough to be trusted."""
        return self.n_runs >= SETTLED

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> AutoSequence:
        """Start a completion."""
        sequence = AutoSequence(self, drops=drops, max_tokens=max_tokens)
        self.sequences.append(sequence)
        return sequence

    def plain_seconds(self, n_sequences: int = 1) -> float | None:
        """Estimated seconds of a round of so many completions without drafts; None before one was timed."""
        if not self.costs.n_timed:
            return None
        return float(self.costs.padded_seconds(n_sequences, n_sequences)[0])

    def width_to_time(self, n_sequences: int) -> int | None:
        """The width to pad a round of so many completions to, so that its cost is known; None for none."""
        wanted = self.costs.next_untimed() if self.sources and n_sequences == 1 else None
        return wanted[0] if wanted is not None and wanted[1] <= self.credit else None

    def experience(self) -> LearnedPrior:
        """What the next run should start from."""
        log_odds, copies = (
            tuple(self.acceptance[source].log_odds.tolist()) for source in (self.drafting, Source.NGRAM)
        )
        n_runs = min(self.n_runs + 1, SETTLED)
        return LearnedPrior(self.costs.learned(), log_odds, self.drafts.distance, copies, n_runs)

    def running(self) -> list[AutoSequence]:
        """The completions that are expected in the next evaluation."""
        return [
            sequence
            for sequence in self.sequences
            if sequence.is_open or sequence.evaluation >= max(self.latest - 1, 0)
        ]

    def observe(self, round_: Round) -> None:
        """Learn what a completion's round cost; an evaluation that several shared is learnt once."""
        self.n_tokens += round_.n_accepted + 1
        plain = (round_.n_accepted + 1) * self.costs.seconds(
            1
        )  # the first evaluation reads weights from disk
        self.credit += SHARE * min(round_.seconds / round_.n_sequences, plain)
        if round_.evaluation == self.latest and round_.n_sequences > 1:
            return
        self.latest = round_.evaluation
        self.drafts.n_since += 1
        self.plain.n_since += 1
        if round_.n_prefill:  # what it would have taken without the prompt is not known
            return
        before = self.costs.seconds(round_.width)
        self.costs.observe_verify(round_.width, round_.verify_seconds)
        if sum(self.costs.n_timed.values()) == TIMED:
            self.credit = CREDIT * self.costs.seconds(1)
        if round_.width == round_.n_sequences:
            self.plain.learn(paid=abs(self.costs.seconds(round_.width) / before - 1.0) > CHANGED)
        elif self.costs.is_surprised:  # does plain decoding take longer, too?
            self.plain.n_since = FARTHEST


class AutoSequence:
    """The length policy of one completion."""

    def __init__(self, policy: AutoLength, *, drops: bool, max_tokens: int | None) -> None:
        self._policy, self._drops, self._max_tokens = policy, drops, max_tokens
        self._acceptance = {
            source: TextAcceptance(shared, is_copied=source in COPIES)
            for source, shared in policy.acceptance.items()
        }
        self.is_open = False  # its round has begun
        self.is_drafting = False  # its latest round had draft steps
        self.evaluation = -1  # that it took part in last
        self.n_written = 0  # tokens of the text
        self._copies, self.reading = CopyLength(), DraftReading(policy.costs)
        # Of the open round:
        self._plain = self._rate = 1.0  # seconds of a token without drafts; tokens per second of the plan
        self._prices: Array = np.zeros(1)  # [n] this text's share of what n verified tokens cost, in seconds
        self._copy_prices: Array = np.zeros(1)  # the same of copies, which may be longer
        self._step = 0.0  # seconds of a draft step
        self._limits: dict[Source, int] = {}  # draft tokens, at most
        self._explored: Source | None = None  # whose draft is not expected to pay
        self._checks = False  # nothing is drafted, so that plain decoding is timed again
        self._calibrated: int | None = None  # the width that the round is padded to, to be timed

    @property
    def n_to_read(self) -> int:
        """Prompt tokens that the draft processes in this round, instead of drafting."""
        return self.reading.n_to_read

    @property
    def unused(self) -> UnusedDraft | None:
        """Why the draft has not read the prompt."""
        return self.reading.unused

    def wants_more(self, draft: Draft) -> bool:
        """Whether the next tokens are worth their time, or should be explored."""
        self._begin()
        n, source = len(draft), draft.source
        if self.n_to_read and source is self._policy.drafting:
            return n == 0
        if source in FREE and source not in self._limits:
            self._limits[source] = self._plan_free(source, draft.ahead)
        if n >= self._limits.get(source, 0):
            return False
        return n == 0 or source in FREE or self._pays(draft)

    def n_verified(self, draft: Draft) -> int:
        """The number of draft tokens that is worth most."""
        source = draft.source
        if source is self._explored and (source in FREE or not self._drops):
            return 0
        if not len(draft) or not self._drops or source in FREE or draft.parents is not None:
            return len(draft)
        expected = self._expected(source, draft.confidences)
        return int((expected - self._rate * self._prices[: len(expected)]).argmax())

    def tree(self, grow: Callable[[TreePlan], Grown]) -> Grown | None:
        """How a tree grows in the next round; None if a chain is as good, or nothing is known."""
        self._begin()
        policy, limit = self._policy, self._limits.get(self._policy.drafting, 0)
        if policy.trees is None or self._explored is not None:
            return None
        usual, prices = self._acceptance[policy.drafting].probability(), self._prices[: limit + 1]
        plan = plan_tree(policy.trees, usual, prices, self._step, policy.costs, self._rate, self._plain)
        return grow(plan) if plan else None

    def width(self, n_positions: int) -> int | None:
        """The cheapest allowed width of at least `n_positions`, over all completions."""
        policy = self._policy
        if self._calibrated is not None and n_positions <= self._calibrated:
            return self._calibrated
        if self._checks and n_positions <= len(policy.running()) and policy.costs.allows(n_positions):
            return n_positions  # not padded, to be timed
        return policy.costs.padded_width(n_positions)

    def observe(self, round_: Round) -> None:
        """Learn acceptance and costs."""
        self._begin()  # the drafter may not have asked
        policy, reading = self._policy, self.reading
        n_made, n_steps = round_.n_accepted + 1, round_.n_priced_steps
        n_read = 0 if n_steps or not round_.draft_seconds else reading.n_to_read or reading.n_unread
        found = [*verified_tokens(round_), *((round_.counterfactual,) if round_.counterfactual else ())]
        for confidence, outcome in found:
            self._acceptance[round_.source].learn(outcome, confidence)
        if policy.trees is not None and round_.draft.parents is not None:
            policy.trees.learn(round_)
        if n_steps and round_.draft.is_chain:
            policy.costs.observe_draft(n_steps, reading.n_unread, round_.draft_seconds)
        policy.observe(round_)
        if self._checks:
            policy.plain.n_since = 0
        if self._calibrated is not None:
            policy.credit -= max(round_.verify_seconds - n_made * self._plain, 0.0)
        if n_steps and self._explored is policy.drafting:
            policy.drafts.learn(paid=any(outcome > 0.5 for _, outcome in found))
            policy.credit -= max(round_.seconds / round_.n_sequences - n_made * self._plain, 0.0)
        elif n_read and self._explored is policy.drafting:
            policy.credit -= round_.draft_seconds
        if round_.source in COPIES and len(round_.draft):
            gain = n_made - round_.seconds / (round_.n_sequences * self._plain)
            self._copies.learn(len(round_.draft), round_.n_accepted, gain)
        self.n_written += n_made
        pace = (round_.verify_seconds + round_.overhead_seconds) / n_made
        has_read = len(round_.draft) + round_.n_dropped >= n_made
        reading.learn(n_made, n_read, pace, drafted=n_steps > 0, has_read=has_read)
        self.is_open, self.is_drafting, self.evaluation = False, n_steps > 0, round_.evaluation

    def observe_prompt(self, n: int, seconds: float) -> None:
        """Learn from a prompt chunk of `n` tokens that the target has processed."""
        self._policy.costs.observe_prompt(n, seconds)

    def start_prompt(self, n_unread: int) -> None:
        """Start a completion whose prompt has `n_unread` tokens that the draft has not processed."""
        self._begin()
        self.is_open = False
        self.reading.begin(n_unread, self._saving())

    def observe_reading(self, n: int, seconds: float) -> None:
        """Learn from `n` prompt tokens that the draft has processed."""
        self._policy.costs.observe_reading(n, seconds)

    def plain_seconds(self, n_sequences: int) -> float | None:
        """As the policy's."""
        return self._policy.plain_seconds(n_sequences)

    def close(self) -> None:
        """End the completion."""
        policy = self._policy
        if self in policy.sequences:
            policy.sequences.remove(self)
            could_be_usual = self._max_tokens is None or self._max_tokens >= policy.usual_length
            if self.n_written and could_be_usual:
                policy.usual_length += (self.n_written - policy.usual_length) / REMEMBERED

    def _saving(self) -> float:
        """Seconds that drafts are expected to save in the rest of the completion."""
        n_left = CAUTION * self._policy.usual_length  # whatever was written: texts end by chance
        if self._max_tokens is not None:
            n_left = min(n_left, self._max_tokens - self.n_written)
        return self.reading.saving(n_left, self._plain, self._rate)

    def _begin(self) -> None:
        """Plan the round, if that has not been done."""
        if self.is_open:
            return
        policy, costs, source = self._policy, self._policy.costs, self._policy.drafting
        reading = self.reading
        self.is_open, self._checks, self._limits, self._explored = True, False, {}, None
        self._calibrated = None
        reading.n_to_read = 0
        others = [each for each in policy.running() if each is not self]
        n_sequences = min(1 + len(others), costs.widest_allowed)  # more are not evaluated together
        n_drafting = min(1 + sum(sequence.is_drafting for sequence in others), n_sequences)
        # Texts that draft take as many each: where the curve has steps, one position never pays for all.
        n, n_copies = (
            min(longest, max((max(REACH, widest * 3 // 2) - n_sequences) // n_drafting, 1))
            for longest, widest in ((policy.longest, costs.widest_narrow), (LONGEST_COPY, costs.widest))
        )
        n_copies = max(n, n_copies) if policy.sources & COPIES else n
        seconds = costs.padded_seconds(n_sequences, n_sequences + n_copies * n_drafting, n_drafting)
        if len(policy.sequences) > 1:  # others wait while a copy is verified, also those that read a prompt
            n_short = int((seconds - seconds[0] <= WAIT_SECONDS).sum()) - 1
            seconds = seconds[: max(n_short, CHUNK) + 1]
        self._prices, self._copy_prices = np.zeros(1), np.zeros(1)
        self._step, self._plain = costs.step_seconds / n_drafting, float(seconds[0]) / n_sequences
        if sum(average.n for average in costs.averages.values()) < TIMED:
            return
        self._copy_prices, self._rate = (seconds - seconds[0]) / n_drafting, 1.0 / self._plain
        self._prices = self._copy_prices[: n + 1]
        self._calibrated = policy.width_to_time(n_sequences)
        if source not in policy.sources or self._calibrated is not None or not self.n_written:
            return  # the first token comes before a draft reads the prompt
        spent = self._prices + self._step * np.arange(n + 1)
        rates = (1.0 + expected_accepted(self._acceptance[source].probability(), n)) / (self._plain + spent)
        known = costs.widest_narrow  # what wider evaluations cost is a guess: they are timed without a draft
        if n_sequences == 1 < known and costs.next_untimed() is not None and not rates[:known].argmax():
            rates, spent, self._prices = rates[:known], spent[:known], self._prices[:known]
            n = len(rates) - 1
        could_pay = bool((expected_accepted(SURE, n)[1:] > self._rate * spent[1:]).any())
        limit = n if costs.knows_step else 1
        if rates.argmax():
            policy.drafts.distance, self._rate = NEAREST, float(rates.max())
            self._checks = policy.plain.is_due() and costs.allows(n_sequences)
            saving = self._saving()
            if reading.is_asleep and not reading.is_waking and not reading.pays(saving, self._plain):
                reading.sleep_on(saving)
                self._checks, self._rate = False, 1.0 / self._plain
            elif not self._checks:
                self._limits[source] = limit
        elif reading.is_waking or (
            could_pay
            and policy.drafts.is_due()
            and costs.drafting_seconds(1, reading.n_unread if reading.unused else 0) <= policy.credit
        ):
            policy.drafts.n_since = 0
            self._explored, self._limits[source] = source, limit if self._drops else 1
        reading.is_waking = bool(self._limits) and reading.is_asleep
        if reading.is_waking:
            reading.wake(self._plain)

    def _plan_free(self, source: Source, ahead: Sequence[float]) -> int:
        """How many tokens to take that cost no draft step; they must be worth more than a draft.

        If nothing is drafted, one that is not verified: it shows for free whether it would be accepted.
        `ahead` are the confidences of what could be copied.
        """
        policy, prices = self._policy, self._copy_prices
        n_most = len(prices) - 1
        if not n_most or self._checks or source not in {*policy.sources, Source.GRAMMAR}:
            return 0
        if self._calibrated is not None:
            return self._calibrated - 1  # the positions are evaluated anyway
        if source is Source.GRAMMAR:
            return int((expected_accepted(1.0, n_most) - self._rate * prices).argmax())
        expected = self._expected(source, ahead[: self._copies.longest(ahead, prices, self._plain)])
        # At the rate of the copies themselves: where width costs as it grows, a longer one only risks more.
        rates = (1.0 + expected) / (self._plain + prices[: len(expected)])
        n = int((rates >= AS_GOOD * rates.max()).argmax())
        if rates[n] > self._rate:
            return n
        if not self._limits.get(policy.drafting):
            self._explored = source
        return int(self._explored is source)

    def _expected(self, source: Source, confidences: Sequence[float]) -> Array:
        """Expected number of accepted tokens among the first n of a draft: [n]."""
        return np.concatenate(([0.0], self._acceptance[source].probabilities(confidences).cumprod().cumsum()))

    def _pays(self, draft: Draft) -> bool:
        """Whether drafting on is worth more than stopping here."""
        n, source = len(draft), draft.source
        expected = self._expected(source, draft.confidences)
        worth = expected - self._rate * self._prices[: n + 1]
        ahead = self._prices[n + 1 :] + self._step * np.arange(1, len(self._prices) - n)
        gains = expected_accepted(self._acceptance[source].probability(), len(ahead))[1:]
        later = expected[n] + (expected[n] - expected[n - 1]) * gains - self._rate * ahead
        return bool((later > (worth.max() if self._drops else worth[n])).any())
