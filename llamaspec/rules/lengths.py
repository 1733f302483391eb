"""How many tokens to guess: a fixed number, never more than a number, or what pays.

AutoLength stops where one more guess would bring fewer tokens than its time is worth, does not guess where
that is never so, and learns both sides, chances and costs, from the rounds. Rounds that guess only to
learn are few, and no bet is placed that could make the text slower than plain decoding by more than the
ledger allows. Knows no model and no clock: the same rounds give the same decisions.
tests/rules/test_lengths.py sets it against the best policy there is, found by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from llamaspec.protocols import LengthPolicy
from llamaspec.rules.calibration import Calibration
from llamaspec.rules.costs import CostModel
from llamaspec.rules.decide import FIRST_GUESS, Plan, Situation, decide
from llamaspec.rules.ledger import Ledger
from llamaspec.rules.planning import Prices, break_even
from llamaspec.rules.reasons import EDGES, ConfidenceBin, LengthCount, Reasons, Tally, WidthCost
from llamaspec.values import CostCurve, Draft, Round

CALM = 0.006  # tries that fail become rarer until they cost this part of the time
KEEP_TRYING = 0.25  # a try goes on while all its guesses stand with at least this chance
LOOK_EVERY = 4  # rounds between two thoughts about other lengths
OUTLIER = 1.3  # a round is booked with at most this multiple of the time it should have taken
BONUS_MEMORY, BONUS_MOST = 0.985, 1.25  # of what stopping early is worth


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same number of guesses; 0 is plain decoding.

    Examples
    --------
    >>> FixedLength(3).wants_more(Draft())
    True
    >>> FixedLength(3).width(3)
    4

    Raises
    ------
    ValueError
        The number is negative.
    """

    n_guesses: int

    def __post_init__(self) -> None:
        if self.n_guesses < 0:
            raise ValueError(f"draft length must be >= 0, got {self.n_guesses}")

    def wants_more(self, draft: Draft) -> bool:
        """Until the number is reached."""
        return len(draft) < self.n_guesses

    def width(self, n_guesses: int) -> int:
        """No padding: one position for each guess and one for the token after them."""
        return n_guesses + 1

    def observe(self, round_: Round) -> None:
        """Learns nothing."""


@dataclass(frozen=True, slots=True)
class AtMost:
    """Another policy, but never more guesses than a limit: what is left of a token budget."""

    policy: LengthPolicy
    limit: int  # guesses; 0 or less allows none

    def wants_more(self, draft: Draft) -> bool:
        """What the other policy says, below the limit."""
        return len(draft) < self.limit and self.policy.wants_more(draft)

    def width(self, n_guesses: int) -> int:
        """What the other policy says."""
        return self.policy.width(n_guesses)

    def observe(self, round_: Round) -> None:
        """The other policy learns."""
        self.policy.observe(round_)


class AutoLength:
    """As many guesses as pay, after every guess anew; none where guessing does not pay.

    Parameters
    ----------
    prior : CostCurve, optional
        From a probe. A stale or foreign one is corrected, or dropped, within a few rounds.
    widths : collection of int, optional
        The only widths at which the target may be evaluated; 1 must be among them.
    longest : int
        Never more guesses than this.

    Raises
    ------
    ValueError
        Width 1 is not allowed, or `longest` is not positive.
    """

    def __init__(
        self, prior: CostCurve | None = None, widths: Collection[int] | None = None, longest: int = 16
    ) -> None:
        if longest < 1:
            raise ValueError(f"the longest draft must be >= 1, got {longest}")
        if widths is not None and 1 not in widths:
            raise ValueError(f"width 1 must be allowed, got {sorted(widths)}")
        self._longest = max(w for w in range(1, longest + 2) if widths is None or w in widths) - 1
        self._costs = CostModel(prior, longest + 1, widths)
        self._chances = Calibration()
        self._ledger = Ledger()
        self._tally = Tally()
        self._n_tokens = self._n_guessed_rounds = self._n_rounds = self._n_since_plain = 0
        self._n_unread = 0  # tokens that the draft has not read, besides the last
        self._knows_plain = False  # a round without guesses has been timed
        self._unbooked: Round | None = None  # a first round, from before the cost of a plain one is known
        self._wait, self._n_since_try = 0.0, 0  # tokens
        self._bonus_made = self._bonus_expected = 60.0  # tokens: made, and expected of fixed lengths
        self._plan = FIRST_GUESS if prior is None else Plan()

    def wants_more(self, draft: Draft) -> bool:
        """Whether one guess more is worth its time, or is made to learn."""
        n, plan = len(draft), self._plan
        if n >= min(plan.limit, self._longest):
            return False
        if n == 0:
            return plan.guesses or plan.n_try > 0
        standing = self._chances.all_stand(draft.confidences)
        if n < plan.n_try and standing > KEEP_TRYING:
            return True
        return n < len(plan.thresholds) and standing > plan.thresholds[n]

    def width(self, n_guesses: int) -> int:
        """The cheapest allowed width that judges all guesses."""
        return self._costs.cheapest_width(n_guesses + 1)

    def observe(self, round_: Round) -> None:
        """Learn chances and costs, and decide about the next round."""
        n, costs, width = len(round_.drafted), self._costs, self.width(round_.n_verified)
        n_made = round_.n_accepted + 1
        if self._knows_plain:
            self._tally.compare(n_made, self._likely_seconds(n, width), round_.seconds)
        self._learn_chances(round_)
        costs.observe_verify(width, round_.verify_seconds)
        costs.observe_draft(n, self._n_unread, round_.draft_seconds)
        costs.observe_rest(round_.rest_seconds + (0.0 if n else round_.draft_seconds))
        self._n_since_try += n_made
        if n and self._knows_plain:
            self._book(round_)
        elif n:
            self._unbooked = round_
        elif self._unbooked is not None:  # the cost of a plain round is known from here on
            first, self._unbooked = self._unbooked, None
            self._book(first)
        self._chances.pass_tokens(n_made)
        self._n_unread = int(round_.n_accepted == n) if n else self._n_unread + 1
        self._n_tokens += n_made
        self._n_rounds += 1
        self._n_guessed_rounds += n > 0
        self._n_since_plain = self._n_since_plain + 1 if n else 0
        self._tally.lengths[n] += 1
        self._knows_plain = self._knows_plain or (n == 0 and not costs.doubts_plain)
        self._plan = self._decide() if self._knows_plain else Plan()

    def explain(self) -> Reasons:
        """Costs, chances and choices up to now."""
        costs, tally, prices = self._costs, self._tally, self._prices()
        bins = zip(EDGES, EDGES[1:], tally.judged, tally.accepted, strict=False)
        return Reasons(
            lengths=tuple(LengthCount(n, count) for n, count in sorted(tally.lengths.items())),
            widths=tuple(
                WidthCost(w, costs.verify_seconds[w - 1], costs.n_observed[w - 1], costs.cheapest_width(w))
                for w in range(1, self._longest + 2)
            ),
            draft_step_seconds=costs.draft_step_seconds,
            rest_seconds=costs.rest_seconds,
            bins=tuple(
                ConfidenceBin(low, high, judged, accepted, self._chances.chance((low + high) / 2))
                for low, high, judged, accepted in bins
            ),
            acceptance=self._chances.ahead,
            break_even_acceptance=break_even(prices),
            n_predicted_tokens=tally.n_tokens,
            predicted_seconds=tally.predicted_seconds,
            measured_seconds=tally.measured_seconds,
            gained_seconds=self._ledger.gain * prices.plain_seconds,
            n_tries=tally.n_tries,
            explored_seconds=tally.explored_seconds,
        )

    def _decide(self) -> Plan:
        n_tokens, ledger = self._n_tokens, self._ledger
        bonus = min(max(self._bonus_made / self._bonus_expected, 1.0), BONUS_MOST)
        return decide(
            Situation(
                costs=self._costs,
                chances=self._chances,
                prices=self._prices(),
                room=ledger.room(n_tokens, self._costs.plain_spread),
                room_to_explore=ledger.room_to_explore(n_tokens),
                n_unread=self._n_unread,
                n_since_plain=self._n_since_plain,
                bonus=bonus,
                is_first=self._n_guessed_rounds == 0,
                may_try=self._n_since_try >= self._wait,
                may_look=self._n_rounds % LOOK_EVERY == 0,
            )
        )

    def _learn_chances(self, round_: Round) -> None:
        n_judged = min(round_.n_accepted + 1, round_.n_verified)
        for i, confidence in enumerate(round_.confidences[:n_judged]):
            self._tally.judge(confidence, i < round_.n_accepted)
        self._chances.learn(round_.confidences, n_judged, round_.n_accepted)

    def _book(self, round_: Round) -> None:
        """Enter a round with guesses into the ledger, and let tries that fail become rarer."""
        n, n_made, plan = len(round_.drafted), round_.n_accepted + 1, self._plan
        plain = self._prices().plain_seconds
        seconds = min(round_.seconds, OUTLIER * self._likely_seconds(n, self.width(n)))
        gain = self._ledger.book(n_made, seconds, plain)
        if plan.n_try:
            loss = plan.try_loss if plan.guesses else -gain
            self._ledger.explored += loss
            self._tally.n_tries += 1
            self._tally.explored_seconds += loss * plain
            self._n_since_try = 0
            if round_.n_accepted == n:
                self._wait = 0.0
            elif not plan.guesses:
                self._wait = min(2 * self._wait + 1, max(plan.try_loss / CALM, 1.0))
        elif gain > 0:
            self._wait = 0.0
        if plan.model_rate is not None:
            self._bonus_made = BONUS_MEMORY * self._bonus_made + n_made
            self._bonus_expected = BONUS_MEMORY * self._bonus_expected + plan.model_rate * round_.seconds

    def _prices(self) -> Prices:
        costs = self._costs
        return Prices(costs.batch_seconds[: self._longest + 1], costs.draft_step_seconds, costs.rest_seconds)

    def _likely_seconds(self, n_guesses: int, width: int) -> float:
        costs = self._costs
        if not n_guesses:
            return costs.verify_seconds[width - 1] + costs.rest_seconds
        drafting = n_guesses * costs.draft_step_seconds + costs.catch_up_seconds(self._n_unread)
        return costs.verify_seconds[width - 1] + drafting + costs.rest_seconds
