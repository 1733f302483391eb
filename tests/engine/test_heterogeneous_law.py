"""Drafts with another vocabulary keep the target's distribution, by enumeration of all draws.

The target's tokens are a, e and ae. The draft has the first two under other ids, lacks the third, and has
more.
"""

from __future__ import annotations

from functools import partial

import pytest

from exact_law import DROPPING, FOUR, LENGTHS, PROMPT, SAMPLINGS, THREE, coupled, error_of
from fake_constraint import Steps
from llamaspec.drafters.common_vocabulary import CommonTokens
from llamaspec.drafters.model import ModelDrafter
from llamaspec.protocols import Drafter, RandomStreams, Rule, SequenceConstraint
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import DRAFT, TARGET
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
    assert error_of(MODELS, drafter, LENGTHS[length], RULES[rule], SAMPLINGS[sampling]) < 1e-12


@pytest.mark.parametrize("length", [*LENGTHS, *DROPPING])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_coupled_text_is_the_same_for_every_noise(sampling: str, length: str) -> None:
    n_right = 0.0
    for made in coupled(MODELS, drafter, (LENGTHS | DROPPING)[length], SAMPLINGS[sampling]):
        n_right += sum(round_.n_accepted + (round_.counterfactual or (0.0, 0.0))[1] for round_ in made)
    assert n_right > 0 or length == "K=0" or sampling == "greedy"


@pytest.mark.parametrize("length", ["K=2", "every second"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_under_a_constraint(rule: str, length: str) -> None:
    make, chain = partial(drafter, constraint=CONSTRAINT), SAMPLINGS["plain"]
    assert error_of(MODELS, make, LENGTHS[length], RULES[rule], chain, CONSTRAINT) < 1e-12
