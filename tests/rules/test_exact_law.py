"""The law of the text with guesses is the law without, to rounding: every branch of chance is walked.

No seeds and no statistics: `WalkingDice` takes every branch that a draw can take and multiplies its
probability. For the coupled rule, where draft and target share their noise, a finite set of noise tables
is walked instead, and the texts must be the same for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from fakes import CountingUp, DropsUnlikely, FakeModel, UntilToken
from llamaspec.drafters.chain import FirstThatGuesses
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.ngram import NgramDrafter
from llamaspec.drafters.silent import SilentDrafter
from llamaspec.engine.decode import Speculation, decode
from llamaspec.protocols import Dice, Drafter, Judge, LengthPolicy, Rule, Use
from llamaspec.rules.dice import SeededDice
from llamaspec.rules.lengths import FixedLength
from llamaspec.rules.sampling import distribution
from llamaspec.rules.verify import RULES, Rejection
from llamaspec.values import Distribution, Draft, Sampling, TokenArray, Verdict

N_TOKENS = 3
PROMPT: TokenArray = np.array([1], dtype=np.int32)
TARGET = FakeModel(seed=1)
OTHER = FakeModel(seed=2)
Law = dict[tuple[int, ...], float]

SAMPLINGS = {
    "plain": Sampling(temperature=1.0, top_k=None, top_p=None, min_p=None),
    "top-k": Sampling(temperature=0.7, top_k=2, top_p=None, min_p=None),
    "top-p, penalties": Sampling(
        temperature=1.0, top_k=None, top_p=0.8, min_p=None, repeat_penalty=1.5, frequency_penalty=0.3
    ),
    "greedy": Sampling(temperature=0.0),
}
WARM = Sampling(temperature=1.7, top_k=None, top_p=None, min_p=None)
POLICIES: dict[str, LengthPolicy] = {
    **{f"K={k}": FixedLength(k) for k in range(4)},
    "until a token": UntilToken(1),
    "unlikely guesses dropped": DropsUnlikely(),
}
DRAFTERS: dict[str, Callable[[Sampling, Rule, Dice], Drafter]] = {
    "other model": lambda sampling, rule, dice: ModelDrafter(OTHER, sampling, rule, dice),
    "other temperature": lambda sampling, rule, dice: ModelDrafter(OTHER, WARM, rule, dice),
    "the target": lambda sampling, rule, dice: ModelDrafter(TARGET, sampling, rule, dice),
    "copies": lambda sampling, rule, dice: NgramDrafter(min_match=1),
    "copies, or else another model": lambda sampling, rule, dice: FirstThatGuesses(
        [NgramDrafter(min_match=1), ModelDrafter(OTHER, sampling, rule, dice)]
    ),
    "certain guesses": lambda sampling, rule, dice: CountingUp(),
    "silent": lambda sampling, rule, dice: SilentDrafter(),
}


class WalkingDice:
    """Takes the branches that `path` names, the first where it names none, and notes how many there were."""

    def __init__(self, path: list[int]) -> None:
        self.path = path
        self.n_branches: list[int] = []
        self.probability = 1.0

    def choose(self, distribution: Distribution, use: Use, position: int, attempt: int = 0) -> int:
        return int(distribution.tokens[self._branch(distribution.probabilities.tolist())])

    def chance(self, probability: float, use: Use, position: int, attempt: int = 0) -> bool:
        if not 0 < probability < 1:
            return probability >= 1
        return self._branch([probability, 1 - probability]) == 0

    def _branch(self, probabilities: list[float]) -> int:
        i = len(self.n_branches)
        if i == len(self.path):
            self.path.append(0)
        self.n_branches.append(len(probabilities))
        self.probability *= probabilities[self.path[i]]
        return self.path[i]


def walk(run: Callable[[Dice], tuple[int, ...]]) -> Law:
    """The law of what `run` answers."""
    law: Law = {}
    path: list[int] = []
    while True:
        dice = WalkingDice(path)
        answer = run(dice)
        law[answer] = law.get(answer, 0.0) + dice.probability
        while path and path[-1] == dice.n_branches[len(path) - 1] - 1:
            path.pop()
        if not path:
            return law
        path[-1] += 1


def text(speculation: Speculation) -> tuple[int, ...]:
    """The tokens that the loop adds to the prompt."""
    rounds = decode(PROMPT, len(PROMPT) + N_TOKENS, speculation)
    return tuple(int(token) for round_ in rounds for token in round_.tokens)


def speculation(
    rule: Rule, drafter: Drafter, policy: LengthPolicy, sampling: Sampling, dice: Dice
) -> Speculation:
    return Speculation(TARGET, drafter, policy, rule, sampling, dice, clock=lambda: 0.0)


def plain_law(sampling: Sampling) -> Law:
    """By multiplying the target's own distributions, without any loop."""
    law: Law = {}
    for sequence in itertools.product(range(TARGET.vocabulary_size), repeat=N_TOKENS):
        probability, path = 1.0, PROMPT
        for token in sequence:
            probability *= distribution(TARGET.row(path), sampling, path).probability(token)
            path = np.append(path, np.int32(token))
        if probability:
            law[sequence] = probability
    return law


def distance(a: Law, b: Law) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


@pytest.mark.parametrize("drafter", list(DRAFTERS))
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_is_the_targets(rule: str, sampling: str, policy: str, drafter: str) -> None:
    chain = SAMPLINGS[sampling]

    def run(dice: Dice) -> tuple[int, ...]:
        guesser = DRAFTERS[drafter](chain, RULES[rule], dice)
        return text(speculation(RULES[rule], guesser, POLICIES[policy], chain, dice))

    assert distance(walk(run), plain_law(chain)) < 1e-12


class ForgetsResidual:
    """A wrong rule: where a guess falls it draws from p, not from what the guesses left of p."""

    name = "forgets the residual"
    may_drop = False

    def guess(self, distribution: Distribution, dice: Dice, start: int, i: int) -> int:
        return dice.choose(distribution, Use.GUESS, start + i, attempt=start)

    def verify(self, draft: Draft, target: Judge, dice: Dice, start: int) -> Verdict:
        for i, (x, q) in enumerate(zip(draft.tokens.tolist(), draft.distributions, strict=True)):
            p = target.distribution(i)
            if p.probability(x) >= q.probability(x):
                continue
            return Verdict(i, dice.choose(p, Use.RESIDUAL, start + i))  # p instead of what is left of it
        return Verdict(
            len(draft), dice.choose(target.distribution(len(draft)), Use.TOKEN, start + len(draft))
        )


def test_a_wrong_rule_is_found_out() -> None:
    chain = SAMPLINGS["plain"]

    def run(dice: Dice) -> tuple[int, ...]:
        guesser = ModelDrafter(OTHER, chain, ForgetsResidual(), dice)
        return text(speculation(ForgetsResidual(), guesser, FixedLength(2), chain, dice))

    assert distance(walk(run), plain_law(chain)) > 0.01


def test_rejection_may_not_drop_guesses_for_what_they_are() -> None:
    class Dropping(Rejection):
        may_drop = True

    chain = SAMPLINGS["plain"]

    def run(dice: Dice) -> tuple[int, ...]:
        guesser = ModelDrafter(OTHER, chain, Dropping(), dice)
        return text(speculation(Dropping(), guesser, DropsUnlikely(), chain, dice))

    assert distance(walk(run), plain_law(chain)) > 0.01


class TableDice:
    """Noise from a table: one vector for each position, the same for draft and target."""

    def __init__(self, noise: dict[int, tuple[float, ...]]) -> None:
        self.noise = noise

    def choose(self, distribution: Distribution, use: Use, position: int, attempt: int = 0) -> int:
        assert use is Use.TOKEN, "the coupled rule draws nothing else"
        noise = np.array(self.noise[position])[distribution.tokens]
        return int(distribution.tokens[np.argmax(np.log(distribution.probabilities) + noise)])

    def chance(self, probability: float, use: Use, position: int, attempt: int = 0) -> bool:
        raise AssertionError("the coupled rule decides nothing by chance")


def noise_tables() -> Iterator[dict[int, tuple[float, ...]]]:
    """All combinations of a few noise vectors at every position that can be drawn."""
    vectors = [(0.0, 0.0, 0.0), (2.0, -1.0, 0.3), (-1.0, 0.5, 1.5)]
    for choice in itertools.product(vectors, repeat=N_TOKENS):
        yield {1 + i: vector for i, vector in enumerate(choice)}


@pytest.mark.parametrize("drafter", list(DRAFTERS))
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_coupled_text_is_the_same_for_every_noise(sampling: str, policy: str, drafter: str) -> None:
    chain, rule = SAMPLINGS[sampling], RULES["coupled"]
    texts = set()
    for noise in noise_tables():
        dice = TableDice(noise)
        guesser = DRAFTERS[drafter](chain, rule, dice)
        with_guesses = text(speculation(rule, guesser, POLICIES[policy], chain, dice))
        assert with_guesses == text(speculation(rule, SilentDrafter(), FixedLength(0), chain, dice))
        texts.add(with_guesses)
    assert len(texts) > 1 or sampling == "greedy"


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_draft_that_is_the_target_is_never_rejected(rule: str, sampling: str, k: int) -> None:
    for seed in range(10):
        dice, chain = SeededDice(seed), SAMPLINGS[sampling]
        guesser = ModelDrafter(TARGET, chain, RULES[rule], dice)
        rounds = decode(PROMPT, 40, speculation(RULES[rule], guesser, FixedLength(k), chain, dice))
        assert all(round_.n_accepted == len(round_.drafted) for round_ in rounds)
