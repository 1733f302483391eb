"""As many guesses as pay.

AutoLength stops where one more guess would bring fewer tokens than its time is worth, does not guess where
that is never so, and learns both sides, chances and costs, from the rounds. Rounds that guess only to
learn are few, and no bet is placed that could make the text slower than plain decoding by more than the
ledger allows. Knows no model and no clock: the same rounds give the same decisions.
tests/rules/test_speed.py sets it against the best policy there is, found by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from llamaspec.rules.calibration import KNOTS, Calibration
from llamaspec.rules.copies import Copies
from llamaspec.rules.costs import CostBelief, CostModel
from llamaspec.rules.decide import CAUTION, FIRST_GUESS, Plan, Situation, decide
from llamaspec.rules.ledger import ROOM, Ledger
from llamaspec.rules.planning import Prices, break_even
from llamaspec.rules.reasons import EDGES, ConfidenceBin, LengthCount, Reasons, Tally, WidthCost
from llamaspec.values import CostCurve, Draft, Round

CALM = 0.006  # tries that fail become rarer until they cost this part of the time
KEEP_TRYING = 0.25  # a try goes on while all its guesses stand with at least this chance
BENEFIT_OF_DOUBT = 1.0  # standard deviations of luck that a guess is granted before it is dropped
DROPS = 8  # drafts dropped without a judgement, after which one is judged in any case
LOOK_EVERY = 4  # rounds between two thoughts about other lengths
OUTLIER = 1.3  # a round is booked with at most this multiple of the time it should have taken
BONUS_MEMORY, BONUS_MOST = 0.985, 1.25  # of what stopping early is worth


@dataclass(frozen=True, slots=True)
class Experience:
    """What a policy has learnt about a pair on a machine, for the next run.

    Raises
    ------
    ValueError
        The acceptance is no chance, or there are not as many levels as the calibration has knots.
    """

    costs: CostBelief
    acceptance: float  # chance that a guess stands
    confidence_levels: tuple[float, ...]  # log-odds that guesses stand, by the draft's confidence

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1 or len(self.confidence_levels) != len(KNOTS):
            raise ValueError("this is not what a policy learns")


class AutoLength:
    """As many guesses as pay, after every guess anew; none where guessing does not pay.

    Parameters
    ----------
    prior : CostCurve or Experience, optional
        From a probe, or from an earlier run. A stale or foreign one is corrected, or dropped, within a few
        rounds.
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
        self,
        prior: CostCurve | Experience | None = None,
        widths: Collection[int] | None = None,
        longest: int = 16,
    ) -> None:
        if longest < 1:
            raise ValueError(f"the longest draft must be >= 1, got {longest}")
        if widths is not None and 1 not in widths:
            raise ValueError(f"width 1 must be allowed, got {sorted(widths)}")
        self._longest = max(w for w in range(1, longest + 2) if widths is None or w in widths) - 1
        self._is_experienced = isinstance(prior, Experience)
        known = prior if isinstance(prior, Experience) else None
        self._costs = CostModel(prior.costs if isinstance(prior, Experience) else prior, longest + 1, widths)
        self._chances = Calibration((known.acceptance, known.confidence_levels) if known else None)
        self._copies = Copies()
        self._asks_model = False  # somebody guesses who does not copy
        self._ledger = Ledger()
        self._tally = Tally()
        self._n_tokens = self._n_guessed_rounds = self._n_rounds = self._n_since_plain = 0
        self._n_dropped = 0  # drafts since one was judged
        self._may_drop = False  # somebody asks what is worth verifying: not every rule allows the question
        self._n_unread = 0  # tokens that the draft has not read, besides the last
        self._knows_plain = False  # a round without guesses has been timed
        self._unbooked: Round | None = None  # a first round, from before the cost of a plain one is known
        self._wait, self._n_since_try = 0.0, 0  # tokens
        self._bonus_made = self._bonus_expected = 60.0  # tokens: made, and expected of fixed lengths
        self._plan = FIRST_GUESS if prior is None else Plan()

    def wants_more(self, draft: Draft) -> bool:
        """Whether one guess more is worth its time, or is made to learn."""
        n, plan = len(draft), self._plan
        if draft.is_copy:
            return n < self._longest and self._knows_plain
        self._asks_model = True
        if n >= min(plan.limit, self._longest):
            return False
        if n == 0:
            return plan.guesses or plan.n_try > 0
        standing = self._chances.all_stand(draft.confidences)
        if n < plan.n_try and standing > KEEP_TRYING:
            return True
        return n < len(plan.thresholds) and standing > plan.thresholds[n]

    def n_to_verify(self, draft: Draft) -> int:
        """Those whose evaluation pays; once in a while all, lest a wrong belief lives on."""
        if draft.is_copy:
            return self._n_copies_worth(draft)
        self._may_drop = True
        if self._plan.room is not None:
            return int(self._is_sure(draft, self._plan.room))
        rate, batch = self._plan.rate, self._costs.batch_seconds
        if self._n_dropped >= DROPS:
            return len(draft)
        n_best, best, tokens, standing = 0, 0.0, 0.0, 1.0
        for n, confidence in enumerate(draft.confidences, start=1):
            standing *= self._chances.hopeful_chance(confidence, BENEFIT_OF_DOUBT)
            tokens += standing
            value = tokens - rate * (batch[n] - batch[0])
            if value > best:
                n_best, best = n, value
        return n_best

    def width(self, n_guesses: int) -> int:
        """The cheapest allowed width that judges all guesses, or a wider one to learn its cost."""
        if n_guesses < self._plan.look_width:
            return self._plan.look_width
        return self._costs.cheapest_width(n_guesses + 1)

    def observe(self, round_: Round) -> None:
        """Learn chances and costs, and decide about the next round."""
        n, n_verified, costs = len(round_.drafted), round_.n_verified, self._costs
        n_steps = 0 if round_.is_copy else n
        width = self.width(n_verified)
        n_made = round_.n_accepted + 1
        if self._knows_plain:
            self._tally.compare(n_made, self._likely_seconds(n_steps, width), round_.seconds)
        self._copies.observe(round_)
        if not round_.is_copy:
            self._learn_chances(round_)
        costs.observe_verify(width, round_.verify_seconds)
        costs.observe_draft(n_steps, self._n_unread, round_.draft_seconds)
        costs.observe_rest(round_.rest_seconds + (0.0 if n_steps else round_.draft_seconds))
        self._n_since_try += n_made
        if n and self._knows_plain:
            self._book(round_)
        elif n_verified:
            self._unbooked = round_
        elif self._unbooked is not None:  # the cost of a plain round is known from here on
            first, self._unbooked = self._unbooked, None
            self._book(first)
        self._chances.pass_tokens(n_made)
        self._n_unread = int(round_.n_accepted == n) if n_steps else self._n_unread + n_made
        self._n_tokens += n_made
        self._n_rounds += 1
        self._n_guessed_rounds += n_steps > 0
        self._n_since_plain = self._n_since_plain + 1 if n_verified else 0
        self._n_dropped = 0 if n_verified or not n else self._n_dropped + 1
        self._tally.lengths[n] += 1
        self._knows_plain = self._knows_plain or (n_verified == 0 and not costs.doubts_plain)
        self._plan = self._decide() if self._knows_plain else Plan()

    @property
    def n_tokens(self) -> int:
        """Tokens made under this policy."""
        return self._n_tokens

    def experience(self) -> Experience:
        """What has been learnt up to now."""
        return Experience(self._costs.belief(), self._chances.usual, self._chances.levels)

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
            acceptance=self._chances.ahead if self._asks_model else None,
            n_copies_judged=self._copies.n_judged,
            n_copies_accepted=self._copies.n_accepted,
            break_even_acceptance=break_even(prices),
            n_predicted_tokens=tally.n_tokens,
            predicted_seconds=tally.predicted_seconds,
            measured_seconds=tally.measured_seconds,
            gained_seconds=self._ledger.gain * prices.plain_seconds,
            n_tries=tally.n_tries,
            explored_seconds=tally.explored_seconds,
        )

    def _is_sure(self, draft: Draft, room: float) -> bool:
        """Whether judging the first guess loses no more than `room`, with bad luck in time and chance."""
        costs = self._costs
        caution, plain = CAUTION[costs.has_prior], costs.batch_seconds[0]
        if not len(draft):
            return False
        sure = self._chances.hopeful_chance(draft.confidences[0], -caution)
        return costs.batch_seconds_with(caution)[1] / plain - 1.0 - sure <= room

    def _n_copies_worth(self, draft: Draft) -> int:
        prices, costs = self._prices(), self._costs
        room = self._ledger.room(self._n_tokens, costs.plain_spread)  # a model that guesses comes first
        return self._copies.n_worth(
            draft,
            prices,
            costs.batch_seconds_with(CAUTION[costs.has_prior]),
            max(self._plan.rate if self._asks_model else 0.0, 1.0 / prices.plain_seconds),
            room - 2 * ROOM if self._asks_model and self._plan.guesses else room,
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
                is_first=self._n_guessed_rounds == 0 and not self._is_experienced,
                may_drop=self._may_drop,
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
        plain, n_steps = self._prices().plain_seconds, 0 if round_.is_copy else n
        seconds = min(round_.seconds, OUTLIER * self._likely_seconds(n_steps, self.width(round_.n_verified)))
        gain = self._ledger.book(n_made, seconds, plain)
        if round_.is_copy:
            return
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
