"""A simulated machine and text, to measure a length policy without a model, in microseconds a round.

For each position of a text, it is drawn beforehand whether a draft token would be accepted, so every policy
gets the same text. The policy sees noisy seconds; results are in expected seconds. `optimal_rate` computes
the optimum for a known text by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from llamaspec.length.cost_curve import CostCurve
from llamaspec.protocols import LengthPolicy, SequenceLength
from llamaspec.values import NO_ATTENTION, Attention, Draft, Evaluation, Round, Source

Array = npt.NDArray[np.float64]
N_WIDTHS = CHUNK = 512  # positions


@dataclass(frozen=True)
class Machine:
    """Costs of a round. Seconds are expected values, to which noise is added."""

    verify_seconds: Array  # [N_WIDTHS] of width 1, 2, ...
    draft_seconds: float  # one step of the draft
    catch_up: float = 0.15  # each token that the draft has not processed, as a share of a step
    rest_seconds: float = 0.0003  # overhead of a round
    draft_rest_seconds: float = 0.0  # more overhead, in a round with draft tokens
    attention: float = 0.0  # cost of a cached token, relative to an evaluation of width 1
    share: float = 0.3  # of that, for each position of a sequence but the first
    draft_attention: float = 0.0  # cost of a cached token in the draft, relative to its step
    jitter: float = 0.0  # standard deviation of the logarithm of a time
    spikes: float = 0.0  # share of evaluations that take three times as long
    after_draft: float = 1.0  # relative cost of an evaluation without drafts, directly after one with some

    def seconds(self, width: int, attention: Attention = NO_ATTENTION) -> float:
        """Return the cost of an evaluation."""
        cached = self.attention * (attention.first + self.share * attention.others)
        return float(self.verify_seconds[width - 1] + self.verify_seconds[0] * cached)

    def at(self, depth: float) -> Machine:
        """Return a machine whose evaluations without cached tokens cost what these cost at a depth."""
        more = 1.0 + self.share * np.arange(N_WIDTHS)
        verify = self.verify_seconds + self.verify_seconds[0] * self.attention * depth * more
        draft = self.draft_seconds * (1.0 + self.draft_attention * depth)
        return replace(self, verify_seconds=verify, draft_seconds=draft, attention=0.0, draft_attention=0.0)

    def noise(self, rng: np.random.Generator) -> float:
        """Return the factor of one measured time."""
        factor = float(np.exp(self.jitter * rng.standard_normal()))
        return factor * (3.0 if rng.random() < self.spikes else 1.0)

    def curve(self) -> CostCurve:
        """Return the curve that an exact probe would measure."""
        widths = tuple(range(1, 18))
        return CostCurve(
            widths,
            tuple(self.verify_seconds[: len(widths)].tolist()),
            self.draft_seconds,
            attention=self.attention,
            attention_share=self.share,
            draft_attention=self.draft_attention,
        )


@dataclass(frozen=True)
class Passage:
    """A text, one entry for each position."""

    chances: Array  # chance that a draft token is accepted
    stands: npt.NDArray[np.bool_]  # whether it is
    confidences: Array  # of the draft in this token

    def __len__(self) -> int:
        return len(self.chances)


@dataclass(frozen=True)
class Run:
    """The rounds of a policy on a passage."""

    n_tokens: tuple[int, ...]  # after each round
    seconds: tuple[float, ...]  # after each round
    plain_seconds: tuple[float, ...]  # plain decoding of as many tokens
    lengths: tuple[int, ...]  # verified draft tokens of each round
    n_steps: tuple[int, ...]  # draft steps of each round

    @property
    def to_plain(self) -> float:
        """Time of the whole run, relative to plain decoding."""
        return self.seconds[-1] / self.plain_seconds[-1]

    def seconds_from(self, n_tokens: int) -> float:
        """Return the time spent after a number of tokens."""
        return self.seconds[-1] - float(np.interp(n_tokens, self.n_tokens, self.seconds))


def play(
    policy: LengthPolicy,
    machine: Machine,
    passage: Passage,
    seed: int = 0,
    copies: Passage | None = None,
    **more: Any,
) -> Run:
    """Let a policy decode a passage. `copies` are drafts without steps, which are preferred to others.

    If they are the passage itself, there is no other draft.
    """
    return play_together(policy, machine, [passage], seed, copies, **more)


def play_together(
    policy: LengthPolicy,
    machine: Machine,
    passages: Sequence[Passage],
    seed: int = 0,
    copies: Passage | None = None,
    n_sequences: int | None = None,
    depths: Sequence[int] = (),
    *,
    is_disturbed: bool = False,
) -> Run:
    """Let a policy decode several passages that share every evaluation, at most `n_sequences` at once.

    Each follows a prompt of `depths` tokens, by default none. `is_disturbed`: other programs took cores.
    """
    rng = np.random.default_rng(seed)
    sequences = list[SimulatedSequence]()
    waiting = list(zip(passages, depths or [0] * len(passages), strict=True))
    seconds, plain, evaluation, n_drafted = 0.0, 0.0, 0, 0
    run: list[tuple[int, float, float, int, int]] = []
    while sequences or waiting:
        while waiting and len(sequences) < (n_sequences or len(passages)):
            text, depth = waiting.pop(0)
            sequences.append(SimulatedSequence(policy.start_sequence(drops=True), text, copies, depth))
            observe_prompt(sequences[-1].length, machine, depth, rng)
        for each in sequences:
            each.length.begin_round(each.depth, [other.length for other in sequences if other is not each])
        evaluation += 1
        n_steps = 0
        while sum(each.step() for each in sequences):
            n_steps += 1
        for each in sequences:
            each.settle()
        n_before, n_drafted = n_drafted, sum(len(each.draft) for each in sequences)
        width = n_drafted + len(sequences)
        if len(sequences) == 1:
            width = max(width, sequences[0].length.timed_width() or 0)
        attention = Attention()
        for each in sequences:
            attention = attention.plus(each.depth, len(each.draft) + 1)
        depth = max(each.depth for each in sequences)
        lag = max((each.lag for each in sequences if each.n_steps), default=0)
        steps = n_steps * (1.0 + machine.draft_attention * depth) + machine.catch_up * lag
        drafting = machine.draft_seconds * steps if n_steps else 0.0
        verifying = machine.seconds(width, attention)
        verifying *= machine.after_draft if n_before and not n_drafted else 1.0
        drafting_noise, verifying_noise, overhead_noise = (machine.noise(rng) for _ in range(3))
        rests = [
            machine.rest_seconds + machine.draft_rest_seconds * (len(each.draft) > 0) for each in sequences
        ]
        plain_token = machine.seconds(len(sequences), Attention(attention.first)) / len(sequences)
        for each, rest in zip(sequences, rests, strict=True):
            n_made = each.verify(
                Evaluation(width, len(sequences), evaluation, 0, attention, is_disturbed),
                draft_seconds=drafting * drafting_noise * each.n_steps / max(n_steps, 1) + 1e-6,
                verify_seconds=verifying * verifying_noise,
                overhead_seconds=rest * overhead_noise,
            )
            plain += n_made * (plain_token + machine.rest_seconds)
        seconds += drafting + verifying + sum(rests)
        run.append((sum(each.position for each in sequences), seconds, plain, n_drafted, n_steps))
        for each in sequences:
            if each.is_over:
                each.length.close()
        sequences = [each for each in sequences if not each.is_over]
    return Run(*zip(*run, strict=True))


def observe_prompt(length: SequenceLength, machine: Machine, depth: int, rng: np.random.Generator) -> None:
    """Let a policy see how long the chunks of a prompt take."""
    for begin in range(0, depth - CHUNK + 1, CHUNK):
        if length.reading is not None:
            attention = Attention().plus(begin + CHUNK // 2, CHUNK)
            seconds = machine.seconds(CHUNK, attention) * machine.noise(rng)
            length.reading.observe_prompt(Evaluation(CHUNK, 1, 0, 0, attention), seconds)


class SimulatedSequence:
    """One sequence of a batch."""

    def __init__(self, length: SequenceLength, text: Passage, copies: Passage | None, depth: int) -> None:
        self.length, self.position, self.lag, self.n_steps = length, 0, 0, 0
        self._n_prompt = depth
        self._texts = {Source.MODEL: text}
        if copies is not None:
            self._texts = {Source.NGRAM: copies, **({} if copies is text else self._texts)}
        self._length = len(text)
        self._open: list[Source] = []  # sources in order: the current one, and those not asked yet
        self.draft = Draft()
        self._start()

    @property
    def depth(self) -> int:
        """Cached tokens."""
        return self._n_prompt + self.position

    @property
    def is_over(self) -> bool:
        return self.position >= self._length

    def step(self) -> bool:
        """Draft until a step of the draft model is needed; return whether one is."""
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
        """Let the policy decide how many draft tokens are verified."""
        n, whole = self.length.n_verified(self.draft), self.draft
        self._n_dropped = len(whole) - n
        self.draft, self._shadow = whole.first(n), None
        at = self.position + n
        if n < len(whole) and self._texts[whole.source].stands[self.position : at].all():
            self._shadow = whole.confidences[n], float(self._texts[whole.source].stands[at])

    def verify(self, evaluation: Evaluation, **measured: Any) -> int:
        """Accept the draft tokens that are right; return the number of new tokens."""
        n = len(self.draft)
        right = self._texts[self.draft.source].stands[self.position : self.position + n]
        n_accepted = n if right.all() else int(np.argmin(right))
        self.length.observe(
            Round(
                self.draft,
                n_accepted,
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
    """Return the cost of every width: straight lines between the measured ones and beyond the last."""
    widths, times = np.array(list(seconds)), np.array(list(seconds.values()))
    slope = max((times[-1] - times[-3]) / (widths[-1] - widths[-3]), times[-1] / widths[-1] / 2)
    every = np.arange(1, N_WIDTHS + 1)
    beyond = times[-1] + slope * np.maximum(every - widths[-1], 0)
    costs: Array = np.interp(every, widths, times) + beyond - times[-1]
    return costs


def passage(chances: Array, confidences: Array, seed: int) -> Passage:
    """Draw which draft tokens are accepted."""
    rng = np.random.default_rng(seed)
    return Passage(chances, rng.random(len(chances)) < chances, confidences)


def optimal_rate(
    machine: Machine, levels: Sequence[float], weights: Sequence[float], longest: int = 16
) -> float:
    """Return the tokens per second of the optimal policy, which knows the chance of each drawn token.

    The chances are independent draws from `levels`. By renewal-reward theory, the best rate is the one at
    which the best round gains nothing if time is priced at that rate. Bisection finds it; for each rate,
    dynamic programming goes over (number of draft tokens, chance that all are accepted).
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
    """Return the expected tokens of the best round minus the price of its time.

    It ignores the token that the draft must process after a full acceptance, so it is slightly too high.
    """
    grid = np.linspace(-12.0, 0.0, 241)  # log of the chance that all draft tokens are accepted
    cost = machine.verify_seconds[: longest + 1]
    value = -rate * cost[longest] * np.ones_like(grid)
    for n in range(longest - 1, -1, -1):
        ahead = np.zeros_like(grid)
        for level, weight in zip(levels, weights, strict=True):
            after = np.clip(grid + np.log(max(level, 1e-5)), -12.0, 0.0)
            ahead += weight * (np.exp(after) + np.interp(after, grid, value))
        value = np.maximum(-rate * cost[n], ahead - rate * machine.draft_seconds)
    return 1.0 + float(value[-1]) - rate * machine.rest_seconds
