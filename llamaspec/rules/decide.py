"""The decision about one round: guess because it pays, guess in order to learn, or do not guess.

A pure function of what is believed and of what may be lost. Three questions, in this order: how many
guesses can be lost without breaking the bound against plain decoding (if none, one may be drawn, and is
judged only where it is sure); does guessing that many pay; if not, could it pay with some luck, and is a try
affordable. Knows no rounds: rules/auto_length.py keeps the beliefs.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.rules.calibration import Calibration
from llamaspec.rules.costs import CostModel
from llamaspec.rules.planning import FixedPlan, Prices, best_plan, expected_accepted, stopping_thresholds

CAUTION = 2.0, 1.5  # standard deviations by which a bet must be safe: unprobed, probed
HOPE = 1.0  # standard deviations of luck for which a try is made
CURIOSITY = 2.0, 1.0  # and for which a width is looked at, where guessing pays already: unprobed, probed
BOLDNESS = 0.25  # standard deviations of luck that the ordinary decision counts on
HORIZON = 32  # tokens over which catching up must pay back
CHECK_EVERY = 5  # rounds after which a narrow gain is checked against a plain round
NARROW, NARROW_EARLY = 1.08, 1.3  # what a narrow gain is, and while plain rounds are little known
KNOWN_AFTER = 6  # plain rounds
LOOK_LOSS = 0.5  # plain tokens that a look may lose
PEEK = 0.4  # part of the room that drawing a guess may cost, where the room is too small for judging it
WORTH_A_LOOK = 1.04  # a length is tried when it could be better than the best known by this factor


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coming round will do."""

    limit: int = 0  # guesses at most
    guesses: bool = False  # guessing is believed to pay
    n_try: int = 0  # guesses to make only in order to learn
    try_loss: float = 0.0  # what they are believed to lose, plain tokens
    thresholds: tuple[float, ...] = ()  # [n] how likely n guesses must stand for one more
    look_width: int = 0  # the width to evaluate in order to learn its cost; 0: none
    rate: float = 0.0  # tokens per second that time is worth; 0 while that is unknown
    room: float | None = None  # plain tokens that judging a guess that is drawn may lose; None: any
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
    may_drop: bool  # guesses may go unjudged
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
    limit = prices.longest
    while limit and stakes[limit] > now.room:
        limit -= 1
    if not limit:
        return _peek(now, catch_up)
    hoped = best_plan(prices, chances.bound(BOLDNESS), limit).tokens_per_second * now.bonus * plain
    if (hoped - 1.0) * HORIZON <= (catch_up / plain if now.n_unread > 1 else 0.0):
        return _try(now, limit, catch_up) if now.may_try else Plan()
    narrow = NARROW if now.costs.n_observed[0] >= KNOWN_AFTER else NARROW_EARLY
    if hoped < narrow and now.n_since_plain >= CHECK_EVERY:
        return Plan()
    # Time is worth what can be had: a length that may not be bet on yet is no alternative.
    best = best_plan(prices, chances.ahead, limit)
    rate = max(best.tokens_per_second * now.bonus, 1.0 / plain)
    look, loss = _look(now, best, rate, limit) if now.may_look else (0, 0.0)
    thresholds = tuple(stopping_thresholds(prices, chances.ahead, rate))
    if look:
        limit = look - 1
    return Plan(
        limit, True, max(look - 1, 0), loss, thresholds, look, rate, model_rate=best.tokens_per_second
    )


def _stakes(now: Situation, catch_up: float) -> list[float]:
    """Plain tokens that a round of 0, 1, ... guesses loses with bad luck in times and chances."""
    prices = now.prices
    caution = CAUTION[now.costs.has_prior]
    dear = now.costs.batch_seconds_with(caution)
    accepted = expected_accepted(now.chances.bound(-caution), prices.longest)
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
    return Plan(limit, False, n_best, loss_of_best, rate=1.0 / plain) if n_best else Plan()


def _peek(now: Situation, catch_up: float) -> Plan:
    """Draw one guess, to be judged only if it is so sure that the room allows it."""
    prices = now.prices
    loss = (catch_up + prices.step_seconds) / prices.plain_seconds
    if not now.may_drop or not now.may_try or not prices.longest:
        return Plan()
    if loss > min(PEEK * now.room, now.room_to_explore):
        return Plan()
    return Plan(1, False, 1, loss, rate=1.0 / prices.plain_seconds, room=now.room - loss)


def _look(now: Situation, best: FixedPlan, rate: float, limit: int) -> tuple[int, float]:
    """The cheapest lesson among the widths that could be better than the best known, and its loss; or 0."""
    prices, costs, plain = now.prices, now.costs, now.prices.plain_seconds
    tokens = [1.0 + n for n in expected_accepted(now.chances.ahead, limit)]
    hoped = costs.verify_seconds_with(-CURIOSITY[costs.has_prior])
    look, least = 0, min(now.room_to_explore, LOOK_LOSS)
    for n in range(1, limit + 1):
        width = n + 1
        if width == costs.cheapest_width(best.n_guesses + 1) or not costs.allows(width):
            continue
        drafting = n * prices.step_seconds + prices.rest_seconds
        if tokens[n] <= WORTH_A_LOOK * best.tokens_per_second * (hoped[n] + drafting):
            continue
        loss = (costs.verify_seconds[n] + drafting - tokens[n] / rate) / plain
        if loss < least:
            look, least = width, loss
    return look, max(least, 0.0) if look else 0.0


def _hopeful_prices(now: Situation) -> Prices:
    """Prices if all were cheaper than believed, most where least is known."""
    batch = now.costs.batch_seconds_with(-HOPE)[: now.prices.longest + 1]
    return Prices(batch, now.costs.hopeful_step_seconds, now.prices.rest_seconds)
