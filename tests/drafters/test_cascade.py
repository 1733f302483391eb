"""A draft of a draft: the same draft tokens as without it, in fewer evaluations, under every rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from exact_law import (
    CASCADES,
    DROPPING,
    LENGTHS,
    PROMPT,
    SAMPLINGS,
    SECOND,
    SELF,
    THIRD,
    THREE,
    Models,
    TableStreams,
    cascade_drafter,
    distance,
    model_drafter,
    noise_tables,
    plain_law,
    rounds,
    text,
    walk,
)
from fake_constraint import Steps
from fakes import (
    FakeModel,
    Length,
    Partly,
    UntilToken,
    all_but_last,
    behind_even,
    every_second,
    sure,
    tokens,
)
from llamaspec.drafters.cascade import CascadeDrafter, used
from llamaspec.drafters.fallback import FallbackDrafter, NoDrafter, drafting
from llamaspec.engine.speculate import Speculation
from llamaspec.errors import ContextFullError, EvaluationError, LlamaspecError, MemoryFullError, ScoresError
from llamaspec.protocols import Drafter, RandomStreams, SequenceLength
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.random_streams import CascadeStreams, SeededStreams
from llamaspec.values import (
    DRAFT,
    TARGET,
    Draft,
    Evaluation,
    Forward,
    ForwardRequest,
    Round,
    Source,
    TokenArray,
)

CASCADES = {
    **CASCADES,
    "three drafts": lambda *chance: cascade_drafter(THREE, [Length(2), Length(1)], *chance),
    "a draft that is the target": lambda *chance: cascade_drafter(SELF, [Length(2)], *chance),
    "a draft's draft, every second time": lambda *chance: cascade_drafter(
        THREE, [Partly(2, every_second)], *chance
    ),
    "two drafts, behind even texts": lambda *chance: cascade_drafter(
        THREE, [Partly(2, behind_even), Partly(1, every_second)], *chance
    ),
}


def error_of(cascade: str, rule: str, sampling: str, length: Length) -> float:
    """Return the distance between the distribution of the completion and the target's."""
    chain = SAMPLINGS[sampling]

    def run(streams: RandomStreams) -> tuple[int, ...]:
        drafter = CASCADES[cascade](chain, RULES[rule], streams)
        return text(rounds(THREE, drafter, length, RULES[rule], chain, streams))

    return distance(walk(run), plain_law(THREE[TARGET], chain))


@pytest.mark.parametrize("cascade", list(CASCADES))
@pytest.mark.parametrize("length", ["K=1", "K=2", "until a token", "every second"])
@pytest.mark.parametrize("sampling", ["top-k", "top-p, penalties", "greedy"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_is_the_targets(rule: str, sampling: str, length: str, cascade: str) -> None:
    assert error_of(cascade, rule, sampling, LENGTHS[length]) < 1e-12


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_dropping_tokens_because_of_their_value_changes_the_law(rule: str) -> None:
    """The draft is no longer drawn from the distributions that it reports."""
    chain = SAMPLINGS["plain"]

    def run(streams: RandomStreams) -> tuple[int, ...]:
        drafter = cascade_drafter(THREE, [Partly(2, sure)], chain, RULES[rule], streams)
        return text(rounds(THREE, drafter, Length(2), RULES[rule], chain, streams))

    assert distance(walk(run), plain_law(THREE[TARGET], chain)) > 1e-3


@pytest.mark.parametrize("cascade", list(CASCADES))
@pytest.mark.parametrize("length", list(LENGTHS))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_coupled_text_is_the_same_for_every_noise(sampling: str, length: str, cascade: str) -> None:
    chain, rule = SAMPLINGS[sampling], RULES["coupled"]
    for noise in noise_tables():
        streams = TableStreams(noise)
        drafter = CASCADES[cascade](chain, rule, streams)
        plain = rounds(THREE, NoDrafter(), Length(), rule, chain, streams)
        assert text(rounds(THREE, drafter, LENGTHS[length], rule, chain, streams)) == text(plain)


@pytest.mark.parametrize("lengths", [[Partly(2, sure)], [Partly(3, all_but_last), Partly(2, sure)]])
@pytest.mark.parametrize("length", ["K=3", "what is sure", "all but the last"])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_the_coupled_text_is_the_same_if_tokens_are_dropped(
    sampling: str, length: str, lengths: Sequence[Length]
) -> None:
    """Of the draft, of its draft, or of the third draft."""
    chain, rule = SAMPLINGS[sampling], RULES["coupled"]
    for noise in noise_tables():
        streams = TableStreams(noise)
        drafter = cascade_drafter(THREE, lengths, chain, rule, streams)
        plain = rounds(THREE, NoDrafter(), Length(), rule, chain, streams)
        assert text(rounds(THREE, drafter, (LENGTHS | DROPPING)[length], rule, chain, streams)) == text(plain)


# -- draft tokens, and the number of evaluations ------------------------------------------------------------


def proposed(
    drafter: Drafter,
    models: Models,
    context: TokenArray,
    length: SequenceLength,
    fails: Callable[[ForwardRequest], bool] = lambda request: False,
    error: type[LlamaspecError] = ContextFullError,
) -> tuple[Draft, list[ForwardRequest]]:
    """Return a draft and the requests that it took."""
    asked: list[ForwardRequest] = []
    coroutine = drafting(drafter, context, length)
    try:
        request = next(coroutine)
        while True:
            asked.append(request)
            if fails(request):
                request = coroutine.throw(error("not this time"))
                continue
            logits = models[request.model].logits(request)
            request = coroutine.send(Forward(logits, 0.5, 0, Evaluation(request.n_scored, 1, len(asked))))
    except StopIteration as end:
        made: Draft = end.value
        return made, asked


WIDE: Models = {
    TARGET: FakeModel(1, 40), DRAFT: FakeModel(2, 40), SECOND: FakeModel(2, 40, spread=1.4),
    THIRD: FakeModel(3, 40),
}  # fmt: skip


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize(
    "lengths",
    [
        [Length(3)],
        [UntilToken(7)],
        [Length(4), Length(2)],
        [Partly(4, sure)],
        [Partly(4, all_but_last), Partly(2, every_second)],
    ],
)
@pytest.mark.parametrize("wanted", [Length(1), Length(6), UntilToken(11, 9)])
def test_a_cascade_drafts_the_tokens_of_its_model_alone(
    wanted: Length, lengths: Sequence[Length], sampling: str
) -> None:
    """Under the coupled rule: the same tokens, drawn from the same distributions, by fewer evaluations."""
    chain, rule = SAMPLINGS[sampling], RULES["coupled"]
    n_staged = n_alone = 0
    for seed in range(8):
        streams, context = SeededStreams(seed), tokens(1, *range(seed))
        alone, asked = proposed(model_drafter(WIDE, chain, rule, streams), WIDE, context, wanted)
        drafter = cascade_drafter(WIDE, lengths, chain, rule, streams)
        staged, asked_staged = proposed(drafter, WIDE, context, wanted)
        assert staged.tokens.tolist() == alone.tokens.tolist()
        assert np.allclose(staged.confidences, alone.confidences)
        for one, other in zip(staged.distributions, alone.distributions, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert np.allclose(one.probabilities, other.probabilities)
        assert staged.source is Source.STAGE
        n_alone += len(asked)
        n_staged += sum(request.model == DRAFT for request in asked_staged)
    assert n_staged <= n_alone
    assert n_staged < n_alone or wanted.n_draft == 1


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_a_draft_that_is_its_own_draft_is_never_rejected(sampling: str, rule: str) -> None:
    """With a stale context a draft stays lossless; only this test would notice."""
    for seed in range(5):
        length, streams = Length(3), SeededStreams(seed)
        drafter = cascade_drafter(SELF, [length, Length(1)], SAMPLINGS[sampling], RULES[rule], streams)
        made = rounds(SELF, drafter, Length(8), RULES[rule], SAMPLINGS[sampling], streams, 36)
        assert all(round_.n_accepted == len(round_.draft) == 8 for round_ in made)
        assert {round_.n_accepted for round_ in length.rounds} == {3}
        assert all(round_.n_accepted == len(round_.draft) for round_ in length.rounds)


def test_the_helper_drafts_no_more_than_the_draft_needs() -> None:
    """The last token of a draft is the model's own, so the helper does not draft it."""
    streams = SeededStreams(0)
    for n, n_helped in ((1, [0]), (2, [1]), (4, [3]), (6, [3, 1])):
        length = Length(3)
        drafter = cascade_drafter(SELF, [length], SAMPLINGS["plain"], RULES["coupled"], streams)
        draft, asked = proposed(drafter, SELF, PROMPT, Length(n))
        assert len(draft) == n
        assert [len(round_.draft) for round_ in length.rounds] == n_helped
        assert [len(r.draft) for r in asked if r.model == DRAFT] == n_helped


def test_the_policy_of_a_stage_learns_the_costs_of_its_evaluations() -> None:
    """Each takes half a second; rounds attribute them to the model and its helper."""
    length = Length(3)
    drafter = cascade_drafter(SELF, [length], SAMPLINGS["plain"], RULES["rejection"], SeededStreams(0))
    proposed(drafter, SELF, PROMPT, Length(8))
    seconds = [(r.draft_seconds, r.verify_seconds, r.n_draft_steps, r.width) for r in length.rounds]
    assert seconds == [(1.5, 0.5, 3, 4), (1.5, 0.5, 3, 4)]


# -- faults ------------------------------------------------------------------------------------------------


def test_every_draft_processes_the_prompt() -> None:
    chance = SAMPLINGS["plain"], RULES["coupled"], SeededStreams(0)
    drafter = cascade_drafter(THREE, [Length(2), Length(1)], *chance)
    asked = [(request.model, request.tokens.tolist()) for request in drafter.prepare(tokens(1, 2, 0))]
    assert asked == [(DRAFT, [1, 2]), (SECOND, [1, 2]), (THIRD, [1, 2])]


def test_the_draft_continues_alone_if_its_draft_has_no_room() -> None:
    drafter = cascade_drafter(WIDE, [Length(3)], SAMPLINGS["plain"], RULES["coupled"], SeededStreams(3))
    alone = model_drafter(WIDE, SAMPLINGS["plain"], RULES["coupled"], SeededStreams(3))
    expected, _ = proposed(alone, WIDE, PROMPT, Length(5))
    draft, asked = proposed(drafter, WIDE, PROMPT, Length(5), lambda request: request.model == SECOND)
    assert draft.tokens.tolist() == expected.tokens.tolist()
    assert {len(request.draft) for request in asked} == {0}


def test_tokens_stay_in_the_draft_if_the_model_has_no_more_room() -> None:
    drafter = cascade_drafter(SELF, [Length(1)], SAMPLINGS["plain"], RULES["coupled"], SeededStreams(3))
    draft, _ = proposed(drafter, SELF, PROMPT, Length(5), lambda r: r.model == DRAFT and len(r.tokens) > 2)
    assert len(draft) == 2


@pytest.mark.parametrize("fault", [ScoresError, EvaluationError, MemoryFullError])
def test_a_draft_that_failed_is_not_used_again(fault: type[LlamaspecError]) -> None:
    for name, n_tokens in ((DRAFT, 0), (SECOND, 5)):

        def fails(request: ForwardRequest, name: str = name) -> bool:
            return request.model == name

        drafter = cascade_drafter(WIDE, [Length(3)], SAMPLINGS["plain"], RULES["coupled"], SeededStreams(3))
        assert len(proposed(drafter, WIDE, PROMPT, Length(5), fails, fault)[0]) == n_tokens
        assert drafter.fault == "not this time"
        asked = proposed(drafter, WIDE, PROMPT, Length(5))[1]
        assert name not in {request.model for request in asked}


def test_a_short_context_slides_along_the_sequence() -> None:
    """The draft processes the end of the sequence, and always has room for its own draft."""
    models = {**WIDE, DRAFT: FakeModel(2, 40, context_size=12), SECOND: FakeModel(2, 40, context_size=9)}
    chain, rule, streams = SAMPLINGS["plain"], RULES["coupled"], SeededStreams(0)
    own = CascadeStreams(streams)
    drafter = CascadeDrafter(
        model_drafter(models, chain, rule, streams),
        model_drafter(models, chain, rule, own, name=SECOND),
        Length(4),
        own,
    )
    plain = rounds(models, NoDrafter(), Length(), rule, chain, streams, 50)
    made = rounds(models, drafter, Length(5), rule, chain, streams, 50)
    assert text(made) == text(plain)
    assert all(len(round_.draft) == 5 for round_ in made[:-3])


@pytest.mark.parametrize("rule", list(RULES))
def test_no_model_is_evaluated_for_forced_tokens(rule: str) -> None:
    chain, allows = SAMPLINGS["plain"], Steps()
    for seed in range(20):
        streams = SeededStreams(seed)
        drafter = cascade_drafter(THREE, [Length(2)], chain, RULES[rule], streams, allows)
        made = rounds(THREE, drafter, Length(5), RULES[rule], chain, streams, 20, allows)
        path = [int(PROMPT[-1]), *text(made)]
        assert all(b == 2 for a, b in pairwise(path[1:]) if a == 0)
    n_evaluated = [len(r.tokens) for r in proposed(drafter, THREE, tokens(1, 0), Length(1))[1]]
    assert not n_evaluated  # after 0 comes 2


def test_the_end_of_a_sequence_closes_the_policies_of_all_levels() -> None:
    lengths = [Length(1), Length(2), Length(3)]
    chance = SAMPLINGS["plain"], RULES["coupled"], SeededStreams(0)
    drafter = FallbackDrafter([NoDrafter(), cascade_drafter(THREE, lengths[1:], *chance)])
    sampling, rule, streams = chance
    Speculation(tokens(1), 1, 64, rule, sampling, streams, None, drafter, lengths[0]).close()
    assert [length.n_closed for length in lengths] == [1, 1, 1]


def test_tokens_that_were_not_wanted_count_as_rejected() -> None:
    """A stage once counted all its tokens as a gain, and kept drafting although few of them were used."""
    made = Round(Draft.certain([5, 6, 7]), (0, 1, 2), 8, Evaluation(4), verify_seconds=1.0)
    assert used(made, 4) is made
    for n in (1, 2, 3):
        assert used(made, n).tokens.tolist() == [5, 6, 7][:n]
        assert used(made, n).n_accepted == n - 1
        assert (used(made, n).width, used(made, n).verify_seconds, len(used(made, n).draft)) == (4, 1.0, 3)
