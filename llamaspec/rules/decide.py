"""The decision about one round: guess because it pays, guess in order to learn, or do not guess.

A pure function of what is believed and of what may be lost. Three questions, in this order: how many
guesses can be lost without breaking the bound against plain decoding; does guessing that many pay; if not,
could it pay with some luck, and is a try affordable. Knows no rounds: rules/lengths.py keeps the beliefs.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.rules.calibration import Calibration
from llamaspec.rules.costs import CostModel
from llamaspec.rules.planning import FixedPlan, Prices, best_plan, expected_accepted, stopping_thresholds

CAUTION = 2.0  # standard deviations by which a bet must be safe
HOPE = 1.0  # standard deviations of luck for which a try is made
BOLDNESS = 0.25  # standard deviations of luck that the ordinary decision counts on
HORIZON = 32  # tokens over which catching up must pay back
CHECK_EVERY = 5  # rounds after which a narrow gain is checked against a plain round
NARROW, NARROW_EARLY = 1.08, 1.3  # what a narrow gain is, and while plain rounds are little known
KNOWN_AFTER = 6  # plain rounds
WORTH_A_LOOK = 1.04  # a length is tried when it could be better than the best known by this factor


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coming round will do."""

    limit: int = 0  # guesses at most
    guesses: bool = False  # guessing is believed to pay
    n_try: int = 0  # guesses to make only in order to learn
    try_loss: float = 0.0  # what they are believed to lose, plain tokens
    thresholds: tuple[float, ...] = ()  # [n] how likely n guesses must stand for one more
    model_rate: float | None = None  # tokens per second of the best fixed length, where guessing pays


FIRST_GUESS = Plan(limit=1, guesses=True, thresholds=(2.0,))  # exactly one


@dataclass(frozen=True, slots=True)
class Situation:
    """What the decision rests on."""

    costs: CostModel
    chances: Calibration
    prices: Prices
    room: float  # plain tokens that the round may lose
    room_to_explore: float  # plain tokens that a try may lose
    n_unread: int  # tokens that the draft must read first
    n_since_plain: int  # rounds since the last one without guesses
    bonus: float  # what stopping early brings over a fixed length, as a factor
    is_first: bool  # no guess has been made yet
    may_try: bool  # the last try that failed is long enough ago
    may_look: bool  # it is time to think about other lengths


def decide(now: Situation) -> Plan:
    """Plan one round."""
    prices, chances = now.prices, now.chances
    plain = prices.plain_seconds
    catch_up = now.costs.catch_up_seconds(now.n_unread)
    if now.is_first and not now.costs.has_prior and prices.longest:
        return FIRST_GUESS  # nothing is known of guesses but what the first one tells
    stakes = _stakes(now, catch_up)
    limit = min(1, prices.longest) if now.is_first else prices.longest
    while limit and stakes[limit] > now.room:
        limit -= 1
    if not limit:
        return Plan()
    hoped = best_plan(prices, chances.bound(BOLDNESS), limit).tokens_per_second * now.bonus * plain
    if (hoped - 1.0) * HORIZON <= (catch_up / plain if now.n_unread > 1 else 0.0):
        return _try(now, limit, catch_up) if now.may_try else Plan()
    narrow = NARROW if now.costs.n_observed[0] >= KNOWN_AFTER else NARROW_EARLY
    if hoped < narrow and now.n_since_plain >= CHECK_EVERY:
        return Plan()
    best = best_plan(prices, chances.ahead, prices.longest)
    rate = max(best.tokens_per_second * now.bonus, 1.0 / plain)
    n_look, loss = _look(now, best, rate, limit) if now.may_look else (0, 0.0)
    thresholds = tuple(stopping_thresholds(prices, chances.ahead, rate))
    return Plan(limit, True, n_look, loss, thresholds, best.tokens_per_second)


def _stakes(now: Situation, catch_up: float) -> list[float]:
    """Plain tokens that a round of 0, 1, ... guesses loses with bad luck in times and chances."""
    prices = now.prices
    dear = now.costs.batch_seconds_with(CAUTION)
    accepted = expected_accepted(now.chances.bound(-CAUTION), prices.longest)
    plain, step = prices.plain_seconds, prices.step_seconds
    base = catch_up - prices.batch_seconds[0]
    return [(base + n * step + dear[n]) / plain - accepted[n] for n in range(prices.longest + 1)]


def _try(now: Situation, limit: int, catch_up: float) -> Plan:
    """Guess in order to learn: as many as teach most for what they cost, if luck could make it pay."""
    prices, plain = now.prices, now.prices.plain_seconds
    hope = now.chances.bound(HOPE)
    likely = expected_accepted(now.chances.ahead, limit)
    lucky = expected_accepted(hope, limit)
    cheap = _hopeful_prices(now)
    if best_plan(cheap, hope, prices.longest).tokens_per_second * plain <= 1.0:
        return Plan()
    best, n_best, loss_of_best = 0.0, 0, 0.0
    for n in range(1, limit + 1):
        if (1.0 + lucky[n]) * plain <= cheap.seconds(n):
            continue  # only more guesses could pay: save the room for them
        cost = (catch_up + prices.seconds(n)) / plain - 1.0
        loss = cost - likely[n]
        judged = 1.0 + lucky[n - 1]
        lesson = judged / max(cost - (likely[n] + lucky[n]) / 2, 0.1)
        if loss <= now.room_to_explore and lesson > best:
            best, n_best, loss_of_best = lesson, n, loss
    return Plan(limit, False, n_best, loss_of_best) if n_best else Plan()


def _look(now: Situation, best: FixedPlan, rate: float, limit: int) -> tuple[int, float]:
    """A length that would be faster were its unmeasured width cheaper than believed, and its loss; or 0."""
    prices, chance = now.prices, now.chances.ahead
    cheap = _hopeful_prices(now)
    other = best_plan(cheap, chance, limit)
    n = other.n_guesses
    if n == best.n_guesses or other.tokens_per_second <= WORTH_A_LOOK * best.tokens_per_second:
        return 0, 0.0
    tokens = 1.0 + expected_accepted(chance, n)[n]
    loss = (prices.seconds(n) - tokens / rate) / prices.plain_seconds
    return (n, loss) if loss < now.room_to_explore else (0, 0.0)


def _hopeful_prices(now: Situation) -> Prices:
    """Prices if all were cheaper than believed, most where least is known."""
    batch = now.costs.batch_seconds_with(-HOPE)[: now.prices.longest + 1]
    return Prices(batch, now.costs.hopeful_step_seconds, now.prices.rest_seconds)
