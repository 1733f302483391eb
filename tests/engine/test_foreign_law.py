"""Drafts of other vocabularies keep the law of the text: every branch of chance is walked.

The target's tokens are a, b and ab. The draft numbers the first two differently, does not have the third, and
has others that the target spells by two tokens, or not at all.
"""

from __future__ import annotations

import itertools

import pytest

from exact_law import (
    DROPPING,
    FOUR,
    LENGTHS,
    N_TOKENS,
    PROMPT,
    SAMPLINGS,
    THREE,
    TableStreams,
    distance,
    plain_law,
    rounds,
    text,
    walk,
)
from fake_constraint import Steps
from foreign import FakeVocabulary, related
from llamaspec.drafters.foreign import ForeignVocabulary
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.no_drafter import NoDrafter
from llamaspec.protocols import Drafter, RandomStreams, RowConstraint, Rule
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.parameters import Sampling
from llamaspec.values import DRAFT, TARGET, Round

MODELS = {TARGET: THREE[TARGET], DRAFT: FOUR[DRAFT]}
A_B_AB = FakeVocabulary([b"a", b"b", b"ab"])
OTHER = FakeVocabulary([b"b", b"x", b"a", b"ba"])
DOTTED, OTHER_DOTTED = FakeVocabulary([b"a", b".", b"a."]), FakeVocabulary([b".", b"x", b"a", b".a"])
WITH_END = FakeVocabulary([b"b", b"", b"a", b"ab"], specials={1: b"</s>"}, eos=1)
CONSTRAINT = Steps()
FOREIGN = {
    "intersection": related(A_B_AB, OTHER, intersection=True),
    "alignment": related(A_B_AB, OTHER, intersection=False),
    "alignment, one word ahead": related(DOTTED, OTHER_DOTTED, intersection=False, whole=0.3),
    "alignment of all but an end": related(A_B_AB, WITH_END, intersection=False),
}


def drafter(
    foreign: ForeignVocabulary,
    sampling: Sampling,
    rule: Rule,
    streams: RandomStreams,
    constraint: RowConstraint | None = None,
) -> Drafter:
    own = ModelDrafter(
        4, 64, sampling, rule, streams, n_tokens=3, n_prompt=len(PROMPT), constraint=constraint
    )
    return foreign.adapted(own)


@pytest.mark.parametrize("kind", list(FOREIGN))
@pytest.mark.parametrize("length", list(LENGTHS))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_is_the_targets(rule: str, sampling: str, length: str, kind: str) -> None:
    chain, made = SAMPLINGS[sampling], list[Round]()

    def run(streams: RandomStreams) -> tuple[int, ...]:
        chosen = drafter(FOREIGN[kind], chain, RULES[rule], streams)
        found = rounds(MODELS, chosen, LENGTHS[length], RULES[rule], chain, streams)
        made.extend(found)
        return text(found)

    assert distance(walk(run), plain_law(MODELS[TARGET], chain)) < 1e-12
    assert any(len(round_.draft) for round_ in made) or length == "K=0"


def noise_tables() -> list[dict[int, tuple[float, ...]]]:
    """A few noise vectors at every position that can be drawn; also for tokens that only the draft has."""
    vectors: list[tuple[float, ...]] = [
        (0.0,) * 7,
        (2.0, -1.0, 0.3, 0.5, -2.0, 1.0, 0.1),
        (-1.0, 0.5, 1.5, 0.0, 3.0, -1.0, 2.0),
    ]
    beyond: dict[int, tuple[float, ...]] = {1 + i: vectors[0] for i in range(N_TOKENS, 12)}
    return [
        beyond | {1 + i: vector for i, vector in enumerate(choice)}
        for choice in itertools.product(vectors, repeat=N_TOKENS)
    ]


@pytest.mark.parametrize("kind", list(FOREIGN))
@pytest.mark.parametrize("length", [*LENGTHS, *DROPPING])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_coupled_text_is_the_same_for_every_noise(sampling: str, length: str, kind: str) -> None:
    chain, rule, n_right = SAMPLINGS[sampling], RULES["coupled"], 0.0
    for noise in noise_tables():
        streams = TableStreams(noise)
        chosen = drafter(FOREIGN[kind], chain, rule, streams)
        found = rounds(MODELS, chosen, (LENGTHS | DROPPING)[length], rule, chain, streams)
        assert text(found) == text(rounds(MODELS, NoDrafter(), LENGTHS["K=0"], rule, chain, streams))
        n_right += sum(round_.n_accepted + (round_.shadow or (0.0, 0.0))[1] for round_ in found)
    assert n_right > 0 or length == "K=0" or sampling == "greedy"


@pytest.mark.parametrize("kind", list(FOREIGN))
@pytest.mark.parametrize("length", ["K=2", "every second"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_under_a_constraint(rule: str, length: str, kind: str) -> None:
    chain = SAMPLINGS["plain"]

    def run(streams: RandomStreams) -> tuple[int, ...]:
        chosen = drafter(FOREIGN[kind], chain, RULES[rule], streams, CONSTRAINT)
        return text(
            rounds(MODELS, chosen, LENGTHS[length], RULES[rule], chain, streams, constraint=CONSTRAINT)
        )

    assert distance(walk(run), plain_law(MODELS[TARGET], chain, CONSTRAINT)) < 1e-12
