"""Drafts with another vocabulary keep the target's distribution, by enumeration of all draws.

The target's tokens are a, e and ae. The draft has the first two under other ids, lacks the third, and has
more.
"""

from __future__ import annotations

import pytest

from exact_law import (
    DROPPING,
    FOUR,
    LENGTHS,
    PROMPT,
    SAMPLINGS,
    THREE,
    TableStreams,
    distance,
    noise_tables,
    plain_law,
    rounds,
    text,
    walk,
)
from fake_constraint import Steps
from llamaspec.drafters.common_vocabulary import CommonTokens
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.drafters.model import ModelDrafter
from llamaspec.protocols import Drafter, RandomStreams, Rule, SequenceConstraint
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import DRAFT, TARGET, Round
from vocabularies import FakeVocabulary

MODELS = {TARGET: THREE[TARGET], DRAFT: FOUR[DRAFT]}
COMMON = CommonTokens(FakeVocabulary([b"a", b"e", b"ae"]), FakeVocabulary([b"e", b"x", b"a", b"ea"]))
CONSTRAINT = Steps()


def drafter(
    sampling: Sampling, rule: Rule, streams: RandomStreams, constraint: SequenceConstraint | None = None
) -> Drafter:
    return ModelDrafter(COMMON, 64, Sampler(sampling, len(PROMPT), constraint), rule, streams)


@pytest.mark.parametrize("length", list(LENGTHS))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_is_the_targets(rule: str, sampling: str, length: str) -> None:
    chain, made = SAMPLINGS[sampling], list[Round]()

    def run(streams: RandomStreams) -> tuple[int, ...]:
        chosen = drafter(chain, RULES[rule], streams)
        found = rounds(MODELS, chosen, LENGTHS[length], RULES[rule], chain, streams)
        made.extend(found)
        return text(found)

    assert distance(walk(run), plain_law(MODELS[TARGET], chain)) < 1e-12
    assert any(len(round_.draft) for round_ in made) or length == "K=0"


@pytest.mark.parametrize("length", [*LENGTHS, *DROPPING])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_coupled_text_is_the_same_for_every_noise(sampling: str, length: str) -> None:
    chain, rule, n_right = SAMPLINGS[sampling], RULES["coupled"], 0.0
    for noise in noise_tables():
        streams = TableStreams(noise)
        chosen = drafter(chain, rule, streams)
        found = rounds(MODELS, chosen, (LENGTHS | DROPPING)[length], rule, chain, streams)
        assert text(found) == text(rounds(MODELS, NoDrafter(), LENGTHS["K=0"], rule, chain, streams))
        n_right += sum(round_.n_accepted + (round_.counterfactual or (0.0, 0.0))[1] for round_ in found)
    assert n_right > 0 or length == "K=0" or sampling == "greedy"


@pytest.mark.parametrize("length", ["K=2", "every second"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_under_a_constraint(rule: str, length: str) -> None:
    chain = SAMPLINGS["plain"]

    def run(streams: RandomStreams) -> tuple[int, ...]:
        chosen = drafter(chain, RULES[rule], streams, CONSTRAINT)
        return text(
            rounds(MODELS, chosen, LENGTHS[length], RULES[rule], chain, streams, constraint=CONSTRAINT)
        )

    assert distance(walk(run), plain_law(MODELS[TARGET], chain, CONSTRAINT)) < 1e-12
