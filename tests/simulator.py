"""A machine and a text without a model: what a length policy would gain, in microseconds a round.

A text is a row of positions; whether the guess at a position stands is drawn beforehand, so that every
policy meets the same text. The policy sees noisy seconds; the account is kept in expected seconds.
Knows nothing of tokens. The optimum of a known text comes from dynamic programming: `optimal_rate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llamaspec.length.costs import CostCurve
from llamaspec.protocols import LengthPolicy, SequenceLength
from llamaspec.values import Draft, Evaluation, Round, Source

Array = npt.NDArray[np.float64]
N_WIDTHS = 512


@dataclass(frozen=True)
class Machine:
    """What a round costs. Seconds are expected values; the noise comes on top."""

    verify_seconds: Array  # [N_WIDTHS] of width 1, 2, ...
    draft_seconds: float  # one step of the draft
    catch_up: float = 0.15  # each token that the draft has not read, as a part of a step
    rest_seconds: float = 0.0003
    draft_rest_seconds: float = 0.0  # more than that, in a row's round with drafts
    growth: float = 1.0  # how much dearer the target is at token 512 than at token 0
    jitter: float = 0.0  # standard deviation of the logarithm of a time
    spikes: float = 0.0  # share of times that take three times as long
    after_draft: float = 1.0  # how much dearer an evaluation without drafts is directly behind one with some

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
    lengths: tuple[int, ...]  # guesses of each round that were verified
    n_steps: tuple[int, ...]  # steps of the draft in each round

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
    """Let a policy decode a passage. `copies` are n-gram drafts that cost nothing, preferred to others.

    Where they are the passage itself, nobody else drafts.
    """
    return play_rows(policy, machine, [passage], seed, copies)


def play_rows(
    policy: LengthPolicy,
    machine: Machine,
    passages: Sequence[Passage],
    seed: int = 0,
    copies: Passage | None = None,
    n_sequences: int | None = None,
) -> Run:
    """The same for several texts that share every evaluation, and draft in lock-step; the others wait."""
    rng = np.random.default_rng(seed)
    rows, waiting = list[Row](), list(passages)
    seconds, plain, evaluation, n_drafted = 0.0, 0.0, 0, 0
    run: list[tuple[int, float, float, int, int]] = []
    while rows or waiting:
        while waiting and len(rows) < (n_sequences or len(passages)):
            rows.append(Row(policy.start_sequence(drops=True), waiting.pop(0), copies))
        evaluation += 1
        n_steps = 0
        while sum(row.step() for row in rows):
            n_steps += 1
        for row in rows:
            row.settle()
        n_before, n_drafted = n_drafted, sum(len(row.draft) for row in rows)
        width = rows[0].length.width(n_drafted + len(rows))
        assert width is not None
        scale = machine.scale(max(row.position for row in rows))
        lag = max((row.lag for row in rows if row.n_steps), default=0)
        drafting = machine.draft_seconds * (n_steps + machine.catch_up * lag) if n_steps else 0.0
        verifying = float(machine.verify_seconds[width - 1]) * scale
        verifying *= machine.after_draft if n_before and not n_drafted else 1.0
        drafting_noise, verifying_noise, overhead_noise = (machine.noise(rng) for _ in range(3))
        rests = [machine.rest_seconds + machine.draft_rest_seconds * (len(row.draft) > 0) for row in rows]
        for row, rest in zip(rows, rests, strict=True):
            n_made = row.verify(
                Evaluation(width, len(rows), evaluation),
                draft_seconds=drafting * drafting_noise * row.n_steps / max(n_steps, 1) + 1e-6,
                verify_seconds=verifying * verifying_noise,
                overhead_seconds=rest * overhead_noise,
            )
            plain += sum(
                float(machine.verify_seconds[len(rows) - 1]) / len(rows) * machine.scale(row.position - i - 1)
                + machine.rest_seconds
                for i in range(n_made)
            )
        seconds += drafting + verifying + sum(rests)
        run.append((sum(row.position for row in rows), seconds, plain, n_drafted, n_steps))
        for row in rows:
            if row.is_over:
                row.length.close()
        rows = [row for row in rows if not row.is_over]
    return Run(*zip(*run, strict=True))


class Row:
    """One text of a batch."""

    def __init__(self, length: SequenceLength, text: Passage, copies: Passage | None) -> None:
        self.length, self.position, self.lag, self.n_steps = length, 0, 0, 0
        self._texts = {Source.MODEL: text}
        if copies is not None:
            self._texts = {Source.NGRAM: copies, **({} if copies is text else self._texts)}
        self._length = len(text)
        self._open: list[Source] = []  # sources that have not been asked yet, the first being asked
        self.draft = Draft()
        self._start()

    @property
    def is_over(self) -> bool:
        return self.position >= self._length

    def step(self) -> bool:
        """Draft until the draft model is wanted; answers whether it is."""
        while self._open:
            room = self._length - self.position - 1
            if len(self.draft) >= room or not self.length.wants_more(self.draft):
                self._open = [] if len(self.draft) else self._open[1:]
                self.draft = self.draft if len(self.draft) or not self._open else self._drafted(self._open[0])
                continue
            self.draft = self._drafted(self.draft.source, len(self.draft) + 1)
            if self.draft.source is Source.MODEL:
                self.n_steps += 1
                return True
        return False

    def settle(self) -> None:
        """Let the policy say how many are verified."""
        n, whole = self.length.n_verified(self.draft), self.draft
        self._n_dropped = len(whole) - n
        self.draft, self._shadow = whole.first(n), None
        at = self.position + n
        if n < len(whole) and self._texts[whole.source].stands[self.position : at].all():
            self._shadow = whole.confidences[n], float(self._texts[whole.source].stands[at])

    def verify(self, evaluation: Evaluation, **measured: Any) -> int:
        """Take the draft tokens that are right; returns the number of new tokens."""
        n = len(self.draft)
        right = self._texts[self.draft.source].stands[self.position : self.position + n]
        n_accepted = n if right.all() else int(np.argmin(right))
        path = tuple(range(n_accepted))
        self.length.observe(
            Round(
                self.draft,
                path,
                0,
                evaluation,
                n_draft_steps=self.n_steps,
                n_dropped=self._n_dropped,
                counterfactual=self._shadow,
                **measured,
            )
        )
        self.lag = int(n_accepted == n + self._n_dropped) if self.n_steps else self.lag + n_accepted + 1
        self.position += n_accepted + 1
        self._start()
        return n_accepted + 1

    def _start(self) -> None:
        self.n_steps, self._open = 0, list(self._texts)
        self.draft = self._drafted(self._open[0])

    def _drafted(self, source: Source, n: int = 0) -> Draft:
        begin, end = self.position, self.position + n
        confidences = self._texts[source].confidences
        ahead = () if source is Source.MODEL else tuple(confidences[end : end + 64].tolist())
        return Draft(
            np.zeros(n, dtype=np.int32), (), tuple(confidences[begin:end].tolist()), source, ahead=ahead
        )


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
