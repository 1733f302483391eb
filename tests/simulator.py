"""A machine and a text without a model: what a length policy would gain, in microseconds a round.

A text is a row of positions; whether the guess at a position stands is drawn beforehand, so that every
policy meets the same text. The policy sees noisy seconds; the account is kept in expected seconds.
Knows nothing of tokens. The optimum of a known text comes from dynamic programming: `optimal_rate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamaspec.protocols import LengthPolicy
from llamaspec.values import NO_COPY, NO_DRAFT, CostCurve, Draft, Round

Array = npt.NDArray[np.float64]
N_WIDTHS = 40


@dataclass(frozen=True)
class Machine:
    """What a round costs. Seconds are expected values; the noise comes on top."""

    verify_seconds: Array  # [N_WIDTHS] of width 1, 2, ...
    draft_seconds: float  # one step of the draft
    catch_up: float = 0.15  # each token that the draft has not read, as a part of a step
    rest_seconds: float = 0.0003
    growth: float = 1.0  # how much dearer the target is at token 512 than at token 0
    jitter: float = 0.0  # standard deviation of the logarithm of a time
    spikes: float = 0.0  # share of times that take three times as long

    def scale(self, position: int) -> float:
        """How much dearer an evaluation is at this position of the text."""
        return 1.0 + (self.growth - 1.0) * position / 512

    def noise(self, rng: np.random.Generator) -> float:
        """The factor of one measured time."""
        factor = float(np.exp(self.jitter * rng.standard_normal()))
        return factor * (3.0 if rng.random() < self.spikes else 1.0)

    def curve(self) -> CostCurve:
        """What an honest probe would have measured."""
        widths = tuple(range(1, 18))
        return CostCurve(widths, tuple(self.verify_seconds[: len(widths)].tolist()), self.draft_seconds)


@dataclass(frozen=True)
class Passage:
    """A text, one entry for each position."""

    chances: Array  # chance that the guess stands
    stands: npt.NDArray[np.bool_]  # whether it does
    confidences: Array  # what the draft says of itself

    def __len__(self) -> int:
        return len(self.chances)


@dataclass(frozen=True)
class Run:
    """What a policy did with a passage."""

    n_tokens: tuple[int, ...]  # after each round
    seconds: tuple[float, ...]  # after each round
    plain_seconds: tuple[float, ...]  # plain decoding of as many tokens
    lengths: tuple[int, ...]  # guesses of each round

    @property
    def to_plain(self) -> float:
        """Time of the whole run, as a multiple of plain decoding."""
        return self.seconds[-1] / self.plain_seconds[-1]

    def worst_to_plain(self, n_tokens: int) -> float:
        """The largest multiple of plain decoding at any moment from a number of tokens on."""
        pairs = zip(self.n_tokens, self.seconds, self.plain_seconds, strict=True)
        return max(seconds / plain for n, seconds, plain in pairs if n >= n_tokens)

    def seconds_from(self, n_tokens: int) -> float:
        """Time spent behind a number of tokens."""
        return self.seconds[-1] - float(np.interp(n_tokens, self.n_tokens, self.seconds))


def play(
    policy: LengthPolicy, machine: Machine, passage: Passage, seed: int = 0, copies: Passage | None = None
) -> Run:
    """Let a policy decode a passage. `copies` are guesses that cost nothing, preferred to others.

    Where they are the passage itself, nobody else guesses.
    """
    rng = np.random.default_rng(seed)
    position, lag, seconds, plain = 0, 0, 0.0, 0.0
    run: list[tuple[int, float, float, int]] = []
    while position < len(passage):
        draft = _propose(policy, passage, position, copies)
        n, n_verified = len(draft), policy.n_to_verify(draft)
        width = policy.width(n_verified)
        scale = machine.scale(position)
        drafting = machine.draft_seconds * (n + machine.catch_up * lag) if n and not draft.is_copy else 0.0
        verifying = float(machine.verify_seconds[width - 1]) * scale
        source = copies if copies is not None and draft.is_copy else passage
        stands = source.stands[position : position + n_verified]
        accepted = n_verified if stands.all() else int(np.argmin(stands))
        policy.observe(
            Round(
                drafted=draft.tokens,
                confidences=draft.confidences,
                n_verified=n_verified,
                n_accepted=accepted,
                next_token=0,
                draft_seconds=drafting * machine.noise(rng) + 1e-6,
                verify_seconds=verifying * machine.noise(rng),
                rest_seconds=machine.rest_seconds * machine.noise(rng),
                is_copy=draft.is_copy,
            )
        )
        lag = lag + accepted + 1 if n == 0 or draft.is_copy else int(accepted == n)
        plain += sum(
            float(machine.verify_seconds[0]) * machine.scale(position + i) + machine.rest_seconds
            for i in range(accepted + 1)
        )
        position += accepted + 1
        seconds += drafting + verifying + machine.rest_seconds
        run.append((position, seconds, plain, n))
    positions, times, plain_times, lengths = zip(*run, strict=True)
    return Run(positions, times, plain_times, lengths)


def _propose(policy: LengthPolicy, passage: Passage, position: int, copies: Passage | None) -> Draft:
    if copies is not None:
        draft = _guess(policy, copies, position, NO_COPY)
        draft = draft.first(policy.n_to_verify(draft))
        if len(draft) or copies is passage:
            return draft
    return _guess(policy, passage, position, NO_DRAFT)


def _guess(policy: LengthPolicy, passage: Passage, position: int, draft: Draft) -> Draft:
    room = len(passage) - position - 1
    n, confidences = 0, list[float]()
    while n < room and policy.wants_more(draft):
        confidences.append(float(passage.confidences[position + n]))
        n += 1
        draft = Draft(np.zeros(n, dtype=np.int32), (), tuple(confidences), draft.is_copy)
    return draft


def table(seconds: dict[int, float]) -> Array:
    """A cost for every width, straight lines between the measured ones and beyond the last."""
    widths, times = np.array(list(seconds)), np.array(list(seconds.values()))
    slope = max((times[-1] - times[-3]) / (widths[-1] - widths[-3]), times[-1] / widths[-1] / 2)
    every = np.arange(1, N_WIDTHS + 1)
    beyond = times[-1] + slope * np.maximum(every - widths[-1], 0)
    costs: Array = np.interp(every, widths, times) + beyond - times[-1]
    return costs


def passage(chances: Array, confidences: Array, seed: int) -> Passage:
    """Draw which guesses stand."""
    rng = np.random.default_rng(seed)
    return Passage(chances, rng.random(len(chances)) < chances, confidences)


def optimal_rate(
    machine: Machine, levels: Sequence[float], weights: Sequence[float], longest: int = 16
) -> float:
    """Tokens per second of the best policy there is, where the chance of each guess is known once drawn.

    The chances are independent draws from `levels`. Renewal-reward: the best rate is the one at which the
    best round, with time priced at that rate, is worth nothing. Bisection over the rate; for each rate a
    dynamic programme over (guesses made, chance that they all stand).
    """
    low, high = 0.0, (longest + 1) / float(machine.verify_seconds.min())
    for _ in range(40):
        rate = (low + high) / 2
        if _value_of_round(machine, rate, np.array(levels), np.array(weights), longest) > 0:
            low = rate
        else:
            high = rate
    return low


def _value_of_round(machine: Machine, rate: float, levels: Array, weights: Array, longest: int) -> float:
    """Expected tokens minus the price of the time, of the best round at this price.

    What the draft must read after a full acceptance is left out: the optimum is a little too good.
    """
    grid = np.linspace(-12.0, 0.0, 241)  # log of the chance that all guesses stand
    cost = np.minimum.accumulate(machine.verify_seconds[: longest + 1][::-1])[::-1]  # padding allowed
    value = -rate * cost[longest] * np.ones_like(grid)
    for n in range(longest - 1, -1, -1):
        ahead = np.zeros_like(grid)
        for level, weight in zip(levels, weights, strict=True):
            after = np.clip(grid + np.log(max(level, 1e-5)), -12.0, 0.0)
            ahead += weight * (np.exp(after) + np.interp(after, grid, value))
        value = np.maximum(-rate * cost[n], ahead - rate * machine.draft_seconds)
    return 1.0 + float(value[-1]) - rate * machine.rest_seconds
