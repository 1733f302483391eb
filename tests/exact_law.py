"""Random streams that walk every branch of chance, and small models with a known distribution of texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from fakes import (
    CountingUp,
    FakeModel,
    Length,
    OverDelivers,
    Partly,
    UntilToken,
    all_but_last,
    answer_alone,
    behind_even,
    every_second,
    sure,
)
from llamaspec.drafters.fallback import FallbackDrafter, NoDrafter
from llamaspec.drafters.model import ModelDrafter, SameTokens
from llamaspec.drafters.ngram import NgramDrafter
from llamaspec.engine.speculate import Speculation, speculate
from llamaspec.protocols import (
    Drafter,
    RandomStreams,
    Rule,
    SequenceConstraint,
    Stream,
)
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.filters import Sampling, distribution
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import DRAFT, TARGET, Distribution, Round, TokenArray

N_TOKENS = 3
PROMPT: TokenArray = np.array([1], dtype=np.int32)
THREE = {TARGET: FakeModel(seed=1), DRAFT: FakeModel(seed=2)}
FOUR = {TARGET: FakeModel(7, vocabulary_size=4), DRAFT: FakeModel(8, vocabulary_size=4)}
SELF = {TARGET: THREE[TARGET], DRAFT: THREE[TARGET]}
Models = dict[str, FakeModel]
Law = dict[tuple[int, ...], float]
Answer = TypeVar("Answer")

SAMPLINGS = {
    "plain": Sampling(temperature=1.0, top_k=None, top_p=None, min_p=None),
    "top-k": Sampling(temperature=0.7, top_k=2, top_p=None, min_p=None),
    "top-p, penalties": Sampling(
        temperature=1.0, top_k=None, top_p=0.8, min_p=None, repeat_penalty=1.5, frequency_penalty=0.3
    ),
    "greedy": Sampling(temperature=0.0),
}
WARM = Sampling(temperature=1.7, top_k=None, top_p=None, min_p=None)
WHOLE: dict[str, Length] = {**{f"K={k}": Length(k) for k in range(4)}, "until a token": UntilToken(1)}
LENGTHS = WHOLE | {  # decide what is verified before the first draft token is drawn
    "every second": Partly(2, every_second),
    "until a token, behind even texts": Partly(3, behind_even, token=1),
}
DROPPING: dict[str, Length] = {  # the decision depends on draft tokens, for rules that `drops`
    "what is sure": Partly(3, sure),
    "all but the last": Partly(3, all_but_last),
    "until a token, without it": Partly(3, all_but_last, token=1),
}


def same_tokens(draft: FakeModel) -> SameTokens:
    return SameTokens(draft.vocabulary_size, draft.vocabulary_size)


def model_drafter(
    models: Models,
    sampling: Sampling,
    rule: Rule,
    streams: RandomStreams,
    constraint: SequenceConstraint | None = None,
) -> ModelDrafter:
    draft = models[DRAFT]
    tokens, sampler = same_tokens(draft), Sampler(sampling, len(PROMPT), constraint)
    return ModelDrafter(tokens, draft.context_size, sampler, rule, streams)


MakeDrafter = Callable[[Sampling, Rule, RandomStreams], Drafter]
CHAINS: dict[str, MakeDrafter] = {
    "model": lambda *chance: model_drafter(THREE, *chance),
    "model at another temperature": lambda _, *chance: model_drafter(THREE, WARM, *chance),
    "copies": lambda *_: NgramDrafter(min_match=1),
    "copies, or else the model": lambda *chance: FallbackDrafter(
        [NgramDrafter(min_match=1), model_drafter(THREE, *chance)]
    ),
    "certain tokens": lambda *_: CountingUp(),
    "more than asked for": lambda *_: OverDelivers(),
}


class RepeatedDrawError(Exception):
    """Two draws used the same random number."""


class WalkingStreams:
    """Takes the branches of `path`, then the first of each draw, and counts the branches of every draw.

    Draws with the same (stream, position, attempt) have the same random number, so they are not independent.
    A second such draw raises an error.
    """

    def __init__(self, path: list[int]) -> None:
        self.path = path
        self.n_branches: list[int] = []
        self.probability = 1.0
        self.drawn: set[tuple[Stream, int, int]] = set()

    def choose(self, distribution: Distribution, stream: Stream, position: int, attempt: int = 0) -> int:
        self._note(stream, position, attempt)
        return int(distribution.tokens[self._branch(distribution.probabilities.tolist())])

    def chance(self, probability: float, stream: Stream, position: int, attempt: int = 0) -> bool:
        self._note(stream, position, attempt)
        if not 0 < probability < 1:
            return probability >= 1
        return self._branch([probability, 1 - probability]) == 0

    def _note(self, *draw: int) -> None:
        stream, position, attempt = draw
        if (key := (Stream(stream), position, attempt)) in self.drawn:
            raise RepeatedDrawError(str(key))
        self.drawn.add(key)

    def _branch(self, probabilities: list[float]) -> int:
        i = len(self.n_branches)
        if i == len(self.path):
            self.path.append(0)
        self.n_branches.append(len(probabilities))
        self.probability *= probabilities[self.path[i]]
        return self.path[i]


class TableStreams:
    """Noise from a table: a vector for each position, the same for draft and target."""

    def __init__(self, noise: dict[int, tuple[float, ...]]) -> None:
        self.noise = noise

    def choose(self, distribution: Distribution, stream: Stream, position: int, attempt: int = 0) -> int:
        assert (stream, attempt) == (Stream.TOKEN, 0), "the coupled rule draws nothing else"
        noise = np.array(self.noise[position])[distribution.tokens]
        return int(distribution.tokens[np.argmax(np.log(distribution.probabilities) + noise)])

    def chance(self, probability: float, stream: Stream, position: int, attempt: int = 0) -> bool:
        raise AssertionError("the coupled rule decides nothing by chance")


def noise_tables(first: int = len(PROMPT)) -> Iterator[dict[int, tuple[float, ...]]]:
    """Yield all combinations of a few noise vectors at the positions of a text that begins at `first`."""
    vectors: list[tuple[float, ...]] = [(0.0, 0.0, 0.0), (2.0, -1.0, 0.3), (-1.0, 0.5, 1.5)]
    for choice in itertools.product(vectors, repeat=N_TOKENS):
        unverified = [vectors[0]] * 2 * N_TOKENS  # for draft tokens after the end of the text
        yield dict(enumerate((*choice, *unverified), first))


def branches(run: Callable[[RandomStreams], Answer]) -> Iterator[tuple[Answer, float]]:
    """Yield the result of `run` in every branch of chance, with the probability of the branch."""
    path: list[int] = []
    while True:
        streams = WalkingStreams(path)
        answer = run(streams)
        yield answer, streams.probability
        while path and path[-1] == streams.n_branches[len(path) - 1] - 1:
            path.pop()
        if not path:
            return
        path[-1] += 1


def walk(run: Callable[[RandomStreams], tuple[int, ...]]) -> Law:
    """Return the distribution of the result of `run`."""
    law: Law = {}
    for answer, probability in branches(run):
        law[answer] = law.get(answer, 0.0) + probability
    return law


def mean(run: Callable[[RandomStreams], float]) -> float:
    """Return the mean of the result of `run`."""
    return sum(answer * probability for answer, probability in branches(run))


def rounds(
    models: Models,
    drafter: Drafter,
    length: Length,
    rule: Rule,
    sampling: Sampling,
    streams: RandomStreams,
    n_tokens: int = N_TOKENS,
    constraint: SequenceConstraint | None = None,
    prompt: TokenArray = PROMPT,
) -> list[Round]:
    """Run the loop on a prompt without a scheduler; return its rounds."""
    row = length.start_sequence(drops=rule.drops)
    config = Speculation(
        prompt, n_tokens, models[TARGET].context_size, rule, sampling, streams, constraint, drafter, row
    )
    return answer_alone(speculate(config), models, row.observe)


def text(made: list[Round]) -> tuple[int, ...]:
    """Return the tokens of rounds."""
    return tuple(int(token) for round_ in made for token in round_.tokens)


def plain_law(
    target: FakeModel,
    sampling: Sampling,
    constraint: SequenceConstraint | None = None,
    prompt: TokenArray = PROMPT,
) -> Law:
    """Multiply the target's own distributions, without the loop."""
    law: Law = {}
    for sequence in itertools.product(range(target.vocabulary_size), repeat=N_TOKENS):
        probability, path = 1.0, prompt
        for token in sequence:
            generated = path[len(prompt) :]
            seen = path if sampling.penalty_window is not None else generated
            scores = target.after(path)
            allowed = None if constraint is None else constraint.allowed(generated)
            if allowed is not None and not len(allowed):
                allowed = None  # after the end, where the text does not matter
            probability *= distribution(scores, sampling, seen, allowed).probability(token)
            path = np.append(path, np.int32(token))
        if probability:
            law[sequence] = probability
    return law


def distance(a: Law, b: Law) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def error_of(
    models: Models,
    make: MakeDrafter,
    length: Length,
    rule: Rule,
    sampling: Sampling = SAMPLINGS["plain"],
    constraint: SequenceConstraint | None = None,
    prompt: TokenArray = PROMPT,
) -> float:
    """Return the distance between the distribution of completions with drafts and the target's."""

    def run(streams: RandomStreams) -> tuple[int, ...]:
        drafter, limits = make(sampling, rule, streams), {"constraint": constraint, "prompt": prompt}
        return text(rounds(models, drafter, length, rule, sampling, streams, **limits))  # type: ignore[arg-type]

    return distance(walk(run), plain_law(models[TARGET], sampling, constraint, prompt))


def coupled(
    models: Models,
    make: MakeDrafter,
    length: Length,
    sampling: Sampling,
    constraint: SequenceConstraint | None = None,
    prompt: TokenArray = PROMPT,
) -> Iterator[list[Round]]:
    """Yield the rounds with drafts for every noise, after comparing them with those of plain decoding."""
    rule, texts = RULES["coupled"], set[tuple[int, ...]]()
    for noise in noise_tables(len(prompt)):
        streams = TableStreams(noise)
        made, plain = (
            rounds(models, drafter, policy, rule, sampling, streams, constraint=constraint, prompt=prompt)
            for drafter, policy in ((make(sampling, rule, streams), length), (NoDrafter(), Length()))
        )
        assert text(made) == text(plain)
        texts.add(text(made))
        yield made
    assert len(texts) > 1 or sampling.temperature == 0
