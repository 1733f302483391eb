"""Completions have the same distribution with and without drafts, up to rounding, by enumeration.

There are no seeds and no statistics: `WalkingStreams` takes every outcome of a draw and multiplies the
probabilities. Under the coupled rule, where draft and target share their noise, a finite set of noise tables
is enumerated instead, and the completions must be the same for each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from exact_law import (
    CHAINS,
    DROPPING,
    FOUR,
    LENGTHS,
    SAMPLINGS,
    SELF,
    THREE,
    Models,
    RepeatedDrawError,
    coupled,
    error_of,
    model_drafter,
    rounds,
)
from fakes import FakeModel, Length
from llamaspec.drafters.model import ModelDrafter, SameTokens
from llamaspec.errors import ScoresError
from llamaspec.protocols import RandomStreams, Rule, Stream, TargetDistributions
from llamaspec.sampling.acceptance_rules import RULES, Block, Rejection
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import (
    DRAFT,
    TARGET,
    Distribution,
    Draft,
    ForwardRequest,
    Logits,
    Verification,
)


@pytest.mark.parametrize("drafter", list(CHAINS))
@pytest.mark.parametrize("length", list(LENGTHS))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_is_the_targets(rule: str, sampling: str, length: str, drafter: str) -> None:
    assert error_of(THREE, CHAINS[drafter], LENGTHS[length], RULES[rule], SAMPLINGS[sampling]) < 1e-12


class Fails(FakeModel):
    """Has no scores after a 0."""

    def logits(self, request: ForwardRequest) -> Logits:
        if 0 in (*request.tokens.tolist(), *request.draft.tolist()):
            raise ScoresError("scores that are not numbers")
        return super().logits(request)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_that_fails_after_a_token_keeps_it(rule: str) -> None:
    """Dropping it because of its value would change the distribution."""
    models, drafters = {**THREE, DRAFT: Fails(THREE[DRAFT].seed)}, list[ModelDrafter]()

    def make(*chance: Any) -> ModelDrafter:
        drafters.append(model_drafter(models, *chance))
        return drafters[-1]

    assert error_of(models, make, Length(3), RULES[rule]) < 1e-12
    assert {each.fault for each in drafters} == {None, "scores that are not numbers"}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("models", [FOUR, SELF], ids=["four tokens", "self-draft"])
def test_the_law_with_other_models(rule: str, models: Models) -> None:
    assert error_of(models, partial(model_drafter, models), Length(2), RULES[rule]) < 1e-12


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("length", list(DROPPING))
def test_dropping_tokens_because_of_their_value_changes_the_law(length: str, rule: str) -> None:
    """The reason for `Rule.drops`."""
    assert not RULES[rule].drops
    depends = length != "all but the last"
    error = error_of(THREE, CHAINS["model"], DROPPING[length], RULES[rule])
    assert (error > 1e-3) == depends


class Instead:
    """Random streams that confuse two streams."""

    def __init__(self, streams: RandomStreams, right: Stream, wrong: Stream) -> None:
        self.streams, self.right, self.wrong = streams, right, wrong

    def choose(self, distribution: Distribution, stream: Stream, position: int, attempt: int = 0) -> int:
        return self.streams.choose(distribution, self._taken(stream), position, attempt)

    def chance(self, probability: float, stream: Stream, position: int, attempt: int = 0) -> bool:
        return self.streams.chance(probability, self._taken(stream), position, attempt)

    def _taken(self, stream: Stream) -> Stream:
        return self.wrong if stream is self.right else stream


class ForgetsResidual(Rejection):
    """Replaces a rejected token by one from p instead of the residual."""

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        right = super().verify(draft, target, streams, start)
        n = right.n_accepted
        if n == len(draft):
            return right
        return Verification(n, streams.choose(target.after(n - 1), Stream.TOKEN, start + n, -1))


class DrawsResidualAsDraft(Rejection):
    """Draws from the residual with the random number of the rejected token."""

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        return super().verify(draft, target, Instead(streams, Stream.RESIDUAL, Stream.DRAFT), start)


class DrawsWithoutAttempt(Block):
    """Draws a draft token with the random number of an earlier round for the same position."""

    def draw(self, distribution: Distribution, streams: RandomStreams, start: int, i: int) -> int:
        return streams.choose(distribution, Stream.DRAFT, start + i)


class ForgetsWeight(Block):
    """Uses the residual of a single token for a block."""

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        right = super().verify(draft, target, streams, start)
        n = right.n_accepted
        if n == len(draft):
            return right
        p, q = target.after(n - 1), draft.distributions[n]
        left = [max(p.probability(t) - q.probability(t), 0.0) for t in p.tokens.tolist()]
        if not sum(left):
            return right
        rest = Distribution(p.tokens, np.array(left) / sum(left))
        return Verification(n, streams.choose(rest, Stream.RESIDUAL, start + n, -1))


@pytest.mark.parametrize(("rule", "models"), [(ForgetsResidual(), THREE), (ForgetsWeight(), FOUR)])
def test_a_wrong_residual_changes_the_law(rule: Rule, models: Models) -> None:
    assert error_of(models, partial(model_drafter, models), Length(2), rule) > 1e-3


@pytest.mark.parametrize("rule", [DrawsResidualAsDraft(), DrawsWithoutAttempt()])
def test_a_random_number_that_is_used_twice_changes_the_law(rule: Rule) -> None:
    with pytest.raises(RepeatedDrawError):
        error_of(THREE, CHAINS["model"], Length(3), rule)


EVERY_LENGTH = {**LENGTHS, **DROPPING}


@pytest.mark.parametrize("drafter", list(CHAINS))
@pytest.mark.parametrize("length", list(EVERY_LENGTH))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_coupled_text_is_the_same_for_every_noise(sampling: str, length: str, drafter: str) -> None:
    assert [*coupled(THREE, CHAINS[drafter], EVERY_LENGTH[length], SAMPLINGS[sampling])]


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_draft_that_is_the_target_is_never_rejected(rule: str, sampling: str, k: int) -> None:
    for seed in range(10):
        streams, chain = SeededStreams(seed), SAMPLINGS[sampling]
        drafter = model_drafter(SELF, chain, RULES[rule], streams)
        made = rounds(SELF, drafter, Length(k), RULES[rule], chain, streams, 39)
        assert all(round_.n_accepted == len(round_.draft) for round_ in made)
        assert max(len(round_.draft) for round_ in made) == k


def test_a_draft_with_more_tokens_keeps_the_law() -> None:
    """It proposes only tokens that the target has."""
    models = {TARGET: THREE[TARGET], DRAFT: FOUR[DRAFT]}

    def make(sampling: Sampling, rule: Rule, streams: RandomStreams) -> ModelDrafter:
        return ModelDrafter(SameTokens(4, 3), 64, Sampler(sampling), rule, streams)

    for rule in ("rejection", "block"):
        assert error_of(models, make, Length(2), RULES[rule]) < 1e-12
