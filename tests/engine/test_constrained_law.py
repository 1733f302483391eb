"""The distribution of a constrained completion: the target's, masked, with any drafter and rule.

As in test_exact_law.py, every outcome of every draw is enumerated; for the coupled rule, every noise table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from exact_law import (
    DROPPING,
    LENGTHS,
    PROMPT,
    SAMPLINGS,
    THREE,
    WHOLE,
    TableStreams,
    coupled,
    error_of,
    model_drafter,
    rounds,
)
from fake_constraint import Steps
from fakes import CountingUp, Length, answered
from llamaspec.drafters.fallback import FallbackDrafter, ForcedDrafter
from llamaspec.drafters.ngram import NgramDrafter
from llamaspec.protocols import Drafter, RandomStreams, Rule, SequenceConstraint
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.filters import Sampling
from llamaspec.values import DRAFT, Evaluation, Forward, ForwardRequest, Source

Make = Callable[[SequenceConstraint, Sampling, Rule, RandomStreams], Drafter]
N = len(PROMPT)


def drafter_of_model(
    constraint: SequenceConstraint, sampling: Sampling, rule: Rule, streams: RandomStreams
) -> Drafter:
    return model_drafter(THREE, sampling, rule, streams, constraint)


CONSTRAINTS = {"steps": Steps(), "steps to an end": Steps(end=1)}
CHAINS: dict[str, Make] = {
    "model": lambda c, *chance: drafter_of_model(c, *chance),
    "model that knows nothing of it": lambda c, *chance: model_drafter(THREE, *chance),
    "what is forced": lambda c, *_: ForcedDrafter(c, N),
    "copies, the model, what is forced": lambda c, *chance: FallbackDrafter(
        [
            NgramDrafter(1),
            drafter_of_model(c, *chance),
            ForcedDrafter(c, N),
        ]
    ),
    "certain tokens": lambda *_: CountingUp(),
}
CHAIN_SAMPLINGS = {
    **{name: SAMPLINGS[name] for name in ("plain", "top-k", "greedy")},
    "bias, penalties of what was generated": Sampling(
        temperature=1.2, top_k=None, top_p=0.9, min_p=None, presence_penalty=0.4, frequency_penalty=0.3,
        penalty_window=None, logit_bias={0: 1.5, 2: -0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("drafter", list(CHAINS))
@pytest.mark.parametrize("length", [*WHOLE, "every second"])
@pytest.mark.parametrize("sampling", list(CHAIN_SAMPLINGS))
@pytest.mark.parametrize("constraint", list(CONSTRAINTS))
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_is_the_masked_targets(
    rule: str, constraint: str, sampling: str, length: str, drafter: str
) -> None:
    chain, allows = CHAIN_SAMPLINGS[sampling], CONSTRAINTS[constraint]
    make = partial(CHAINS[drafter], allows)
    assert error_of(THREE, make, LENGTHS[length], RULES[rule], chain, allows) < 1e-12


@pytest.mark.parametrize("drafter", list(CHAINS))
@pytest.mark.parametrize("length", [*WHOLE, "every second", "what is sure", "all but the last"])
@pytest.mark.parametrize("sampling", list(CHAIN_SAMPLINGS))
def test_the_coupled_text_is_the_masked_one(sampling: str, length: str, drafter: str) -> None:
    chain, allows = CHAIN_SAMPLINGS[sampling], Steps()
    make = partial(CHAINS[drafter], allows)
    for made in coupled(THREE, make, (LENGTHS | DROPPING)[length], chain, allows):
        assert allows.is_complete(made[0].tokens)


def test_a_forced_token_is_a_draft_token_without_an_evaluation() -> None:
    """After 0 comes 2: no draft model is evaluated, and the target always accepts."""
    chain, streams = SAMPLINGS["plain"], TableStreams(dict.fromkeys(range(1, 60), (9.0, 0.0, 0.0)))
    drafter = ForcedDrafter(Steps(), N)
    made = rounds(THREE, drafter, Length(3), RULES["coupled"], chain, streams, 30, constraint=Steps())
    drafted = [round_ for round_ in made if len(round_.draft)]
    assert len(drafted) >= 10
    assert {round_.source for round_ in drafted} == {Source.GRAMMAR}
    assert all(round_.n_accepted == len(round_.draft) for round_ in drafted)


def test_a_draft_model_is_not_evaluated_without_a_choice() -> None:
    streams = TableStreams(dict.fromkeys(range(1, 60), (9.0, 0.0, 0.0)))
    asked: list[int] = []

    def answer(request: ForwardRequest) -> Forward:
        asked.append(len(request.tokens))
        return Forward(THREE[DRAFT].logits(request), 0.0, 0, Evaluation(1))

    drafter = model_drafter(THREE, SAMPLINGS["plain"], RULES["coupled"], streams, Steps())
    draft = answered(drafter.propose(PROMPT, Length(6)), answer)
    assert draft.tokens.tolist() == [0, 2, 0, 2, 0, 2]
    assert asked == [N, N + 2, N + 4]
    assert draft.confidences[1::2] == (1.0, 1.0, 1.0)
