"""Unverified draft tokens cost no position, and still show whether they would have been accepted.

The counterfactual of a round is the acceptance of its first unverified draft token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from exact_law import (
    CHAINS,
    SAMPLINGS,
    SELF,
    THREE,
    TableStreams,
    mean,
    model_drafter,
    noise_tables,
    rounds,
    text,
)
from fakes import CountingUp, Length, Partly, all_but_last, every_second, nothing, sure
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.length.automatic import AutoLength
from llamaspec.protocols import RandomStreams, SequenceLength
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import DRAFT, TARGET, Draft, Round, TokenArray
from stepped import Stepped
from texts import alone, draft, stream, target

HowMany = Callable[[Draft, Sequence[Round]], int]
NO_SHADOW = 0.0, 0.0


class Until(Partly):
    """Drafts nothing after round `last`, and verifies tokens only in this round."""

    def __init__(self, n_draft: int, last: int, *, verifies: bool) -> None:
        super().__init__(n_draft, lambda draft, rounds: len(draft) * (verifies and len(rounds) == last))
        self.last, self.verifies = last, verifies

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> Until:
        return Until(self.n_draft, self.last, verifies=self.verifies)

    def wants_more(self, draft: Draft) -> bool:
        return len(self.rounds) <= self.last and super().wants_more(draft)


# -- the value of a counterfactual


@pytest.mark.parametrize("drafter", list(CHAINS))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize(("rule", "k", "i"), [("rejection", 1, 1), ("block", 1, 1), ("rejection", 2, 0)])
def test_a_counterfactual_is_accepted_as_often_as_a_verified_token(
    rule: str, k: int, i: int, sampling: str, drafter: str
) -> None:
    """The first of `k` draft tokens of a round, averaged over every outcome of the draws."""
    chain = SAMPLINGS[sampling]

    def round_of(length: Length, streams: RandomStreams) -> Round:
        chosen = CHAINS[drafter](chain, RULES[rule], streams)
        return rounds(THREE, chosen, length, RULES[rule], chain, streams)[i]

    def counterfactual(streams: RandomStreams) -> float:
        return (round_of(Until(k, i, verifies=False), streams).counterfactual or NO_SHADOW)[1]

    def verified(streams: RandomStreams) -> float:
        return float(round_of(Until(k, i, verifies=True), streams).n_accepted > 0)

    assert mean(counterfactual) == pytest.approx(mean(verified), abs=1e-12)
    assert mean(counterfactual) > 0 or drafter != "model" or sampling == "greedy"


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_the_counterfactual_after_a_verified_token_is_that_of_the_next(sampling: str) -> None:
    """One of two draft tokens is verified."""
    chain, rule = SAMPLINGS[sampling], RULES["rejection"]

    def first(length: Length, streams: RandomStreams) -> Round:
        return rounds(THREE, model_drafter(THREE, chain, rule, streams), length, rule, chain, streams)[0]

    def counterfactual(streams: RandomStreams) -> float:
        narrow = Partly(2, lambda draft, rounds: min(len(draft), 1))
        return (first(narrow, streams).counterfactual or NO_SHADOW)[1]

    assert mean(counterfactual) == pytest.approx(
        mean(lambda streams: first(Length(2), streams).n_accepted == 2)
    )


@pytest.mark.parametrize("drafter", list(CHAINS))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("n", [0, 1])
def test_a_counterfactual_is_accepted_if_the_token_would_have_been(
    n: int, sampling: str, drafter: str
) -> None:
    """Under the coupled rule, for every noise; there is none if a verified token is rejected."""
    chain, rule, told = SAMPLINGS[sampling], RULES["coupled"], set[float | None]()
    for noise in noise_tables():
        streams = TableStreams(noise)

        def first(length: Length, streams: TableStreams = streams) -> Round:
            return rounds(THREE, CHAINS[drafter](chain, rule, streams), length, rule, chain, streams)[0]

        found, right = first(Partly(2, lambda draft, rounds: n)), first(Length(2))
        if right.n_accepted < n or len(right.draft) <= n:
            assert found.counterfactual is None
        else:
            assert found.counterfactual == (right.confidences[n], float(right.n_accepted > n))
        told.add(found.counterfactual and found.counterfactual[1])
    assert told >= {0.0, 1.0} or drafter != "model" or sampling == "greedy"


@pytest.mark.parametrize("drafter", list(CHAINS))
def test_no_counterfactual_if_everything_is_verified(drafter: str) -> None:
    chain, rule = SAMPLINGS["plain"], RULES["coupled"]
    for k, seed in ((0, 0), (1, 1), (2, 2), (3, 3)):
        streams = SeededStreams(seed)
        chosen = CHAINS[drafter](chain, rule, streams)
        made = rounds(THREE, chosen, Length(k), rule, chain, streams, 30)
        assert {round_.counterfactual for round_ in made} == {None}


class Unknown(CountingUp):
    """A drafter that does not report the distributions of its tokens."""

    def propose(self, context: TokenArray, length: SequenceLength) -> Draft:
        return super().propose(context, length).without_distributions()


def test_no_counterfactual_without_distributions() -> None:
    """The tokens need not be verified, though."""
    chain, rule, streams = SAMPLINGS["plain"], RULES["coupled"], SeededStreams(1)
    plain = text(rounds(THREE, NoDrafter(), Length(), rule, chain, streams, 30))
    sizes = []
    for n in (nothing, sure, all_but_last):
        made = rounds(THREE, Unknown(), Partly(3, n), rule, chain, streams, 30)
        assert {round_.counterfactual for round_ in made} == {None}
        assert text(made) == plain
        sizes.append(sum(len(round_.draft) for round_ in made))
    assert sizes[0] == 0 < sizes[2]


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize(
    ("rule", "n"),
    [*((rule, every_second) for rule in RULES), ("coupled", sure), ("coupled", all_but_last)],
)
def test_counterfactuals_of_a_draft_that_is_the_target_are_accepted(
    rule: str, n: HowMany, sampling: str
) -> None:
    """Verified tokens are accepted, too. With a stale context, only this test would notice."""
    chain, n_shadows = SAMPLINGS[sampling], 0
    for seed in range(8):
        streams = SeededStreams(seed)
        drafter = model_drafter(SELF, chain, RULES[rule], streams)
        made = rounds(SELF, drafter, Partly(4, n), RULES[rule], chain, streams, 39)
        assert all(round_.n_accepted == len(round_.draft) for round_ in made)
        told = [round_.counterfactual and round_.counterfactual[1] for round_ in made]
        assert {*told} <= {None, 1.0}
        n_shadows += told.count(1.0)
        if n is every_second:
            assert told[:-1] == ([1.0, None] * len(told))[: len(told) - 1]
    assert n_shadows > 20 or n is sure


# -- the cost of a counterfactual


@pytest.mark.parametrize("n", [nothing, every_second, all_but_last, sure])
@pytest.mark.parametrize("is_right", [True, False])
def test_an_unverified_token_costs_a_draft_step_and_no_position(n: HowMany, *, is_right: bool) -> None:
    models = {TARGET: target(), DRAFT: target() if is_right else draft()}
    length = Partly(3, n)
    done = stream(Stepped(models), models, (1, 2, 3, 4), length=length, max_tokens=40).run()
    assert done.tokens == alone((1, 2, 3, 4), max_tokens=40)
    assert [round_.width for round_ in done.rounds] == [len(round_.draft) + 1 for round_ in done.rounds]
    prompt, *steps = models[DRAFT].evaluated
    assert (prompt.n_new, prompt.requests[0].n_logits) == (3, 0)
    assert [round_.n_draft_steps for round_ in done.rounds] <= [len(made) for made in length.made]
    assert sum(round_.n_draft_steps for round_ in done.rounds) == len(steps)
    # Of the draft tokens, the draft model has not processed only the last one when it is accepted.
    pairs = zip(done.rounds[:-1], length.made, length.made[1:], strict=False)
    n_unread = sum(len(made) == round_.n_accepted > 0 and len(after) > 0 for round_, made, after in pairs)
    assert sorted(step.n_new for step in steps) == [1] * (len(steps) - n_unread) + [2] * n_unread


# -- reports to policies


def test_policies_observe_dropped_tokens_and_counterfactuals() -> None:
    models = {TARGET: target(), DRAFT: draft()}
    length = Partly(2, every_second)
    done = stream(Stepped(models), models, length=length, max_tokens=30).run()
    made = zip(length.made, done.rounds, strict=True)
    assert [round_.n_dropped for round_ in done.rounds] == [len(of) - len(r.draft) for of, r in made]
    shadows = [
        (made.confidences[0], float(made.tokens[0] == round_.next_token)) if len(made) else None
        for made, round_ in zip(length.made[::2], done.rounds[::2], strict=True)
    ]
    assert {counterfactual[1] for counterfactual in shadows if counterfactual} == {0.0, 1.0}
    assert [round_.counterfactual for round_ in done.rounds[::2]] == shadows
    assert {round_.counterfactual for round_ in done.rounds[1::2]} == {None}
    assert [round_.counterfactual for round_ in length.rounds] == [
        round_.counterfactual for round_ in done.rounds
    ]


def test_all_draft_steps_are_priced() -> None:
    """For any number of verified draft tokens."""
    models = {TARGET: target(), DRAFT: draft()}
    length = Partly(3, lambda draft, rounds: min(len(rounds) % 4, len(draft)))
    done = stream(Stepped(models), models, length=length, max_tokens=30).run()
    assert [round_.n_priced_steps for round_ in done.rounds] == [r.n_draft_steps for r in done.rounds]


@pytest.mark.parametrize("n", [nothing, every_second, all_but_last, sure])
def test_the_automatic_length_knows_what_the_draft_has_not_processed(n: HowMany) -> None:
    """The first draft step of a round has to process it, besides the last token."""
    models = {TARGET: target(), DRAFT: target()}
    done = stream(Stepped(models), models, length=Partly(3, n), max_tokens=40).run()
    _, *steps = models[DRAFT].evaluated
    row, at = AutoLength().start_sequence(drops=True), 0
    for round_ in done.rounds:
        if round_.n_draft_steps:
            assert row.reading.n_unread == steps[at].n_new - 1
        at += round_.n_draft_steps
        row.observe(round_)


# -- answers of a policy


@pytest.mark.parametrize("drafter", list(CHAINS))
@pytest.mark.parametrize("n", [-9, -1, 99])
def test_a_policy_may_return_any_number(n: int, drafter: str) -> None:
    """More than were drafted means all."""
    chain, rule, streams = SAMPLINGS["plain"], RULES["coupled"], SeededStreams(3)
    length = Partly(3, lambda draft, rounds: n)
    made = rounds(THREE, CHAINS[drafter](chain, rule, streams), length, rule, chain, streams, 30)
    assert text(made) == text(rounds(THREE, NoDrafter(), Length(), rule, chain, streams, 30))
    whole = rounds(THREE, CHAINS[drafter](chain, rule, streams), Length(3), rule, chain, streams, 30)
    if n > 0:
        assert [len(a.draft) for a in made] == [len(b.draft) for b in whole]
