"""Drafts of drafts on the real engine: the completion is the target's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from command import invoke
from fakes import Length, Partly, all_but_last, every_second, sure
from llamaspec import (
    Completion,
    FixedLength,
    ModelOptions,
    NoDrafter,
    Pair,
    Sampling,
    TextStream,
    open_pair,
)
from llamaspec.length.policy import AutoLength
from llamaspec.protocols import Drafter
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.values import Draft, Round, Source
from model_store import ModelStore
from tiny_models import Recipe

CPU = ModelOptions(threads=1, gpu_layers=0)
TARGET = Recipe(dtype="q8_0")


@contextmanager
def opened(store: ModelStore, *drafts: Recipe, ngram: bool = False, n_draft: int = 3) -> Iterator[Pair]:
    """Open a cascade on one thread of the CPU, where Q8_0 is exact; each stage drafts `n_draft` tokens."""
    files = [store.path("llama", recipe) for recipe in drafts]
    target = store.path("llama", TARGET)
    with open_pair(target, files, ngram=ngram, target_options=CPU, draft_options=CPU) as pair:
        for stage in pair.stages:
            stage.length = Length(n_draft)
        yield pair


def helped(pair: Pair) -> list[tuple[int, int]]:
    """Return the numbers of draft tokens and of accepted tokens of every stage."""
    counts = []
    for stage in pair.stages:
        assert isinstance(stage.length, Length)
        rounds = stage.length.rounds
        counts.append((sum(len(r.draft) for r in rounds), sum(r.n_accepted for r in rounds)))
    return counts


@pytest.mark.parametrize("ngram", [False, True])
@pytest.mark.parametrize("noises", [(0.1, 0.3), (0.0, 0.1, 0.3)])
def test_same_seed_same_tokens(store: ModelStore, noises: Sequence[float], ngram: bool) -> None:
    prompt = "the end of the beginning and the beginning of the end of the beginning"
    drafts = [TARGET.draft(noise) for noise in noises]
    with opened(store, *drafts, ngram=ngram) as pair:
        for seed, temperature in enumerate((0.0, 0.8, 1.5)):
            sampling = Sampling(temperature=temperature)
            right = pair.stream(
                prompt, drafter=NoDrafter(), sampling=sampling, seed=seed, max_tokens=48
            ).run()
            for n_draft in (0, 1, 4, 7):
                pair.forget()
                policy = FixedLength(n_draft)
                found = pair.stream(prompt, policy=policy, sampling=sampling, seed=seed, max_tokens=48).run()
                assert found.tokens == right.tokens
        assert all(0 < n_accepted <= n_drafted for n_drafted, n_accepted in helped(pair)) or ngram
        for stage in pair.stages:
            assert isinstance(stage.length, Length)
            assert stage.length.n_closed == 12


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_models_that_are_all_the_same_are_never_rejected(store: ModelStore, rule: str) -> None:
    """A draft that reads stale tokens still gives the right text; only this test sees it."""
    with opened(store, TARGET, TARGET, TARGET) as pair:
        for seed in range(3):
            stream = pair.stream("the end", policy=FixedLength(6), seed=seed, max_tokens=50, rule=rule)
            completion = stream.run()
            assert completion.summary.acceptance_rate == 1
            assert {r.source for r in completion.rounds if len(r.draft)} == {Source.STAGE}
        for n_drafted, n_accepted in helped(pair):
            assert n_drafted == n_accepted > 30


@pytest.mark.parametrize("n", [every_second, sure, all_but_last])
def test_same_seed_same_tokens_where_a_part_is_verified(
    store: ModelStore, n: Callable[[Draft, Sequence[Round]], int]
) -> None:
    """Every stage verifies a part."""
    with opened(store, TARGET.draft(0.1), TARGET.draft(0.2), TARGET.draft(0.3)) as pair:
        for stage in pair.stages:
            stage.length = Partly(3, n)
        n_dropped = 0
        for seed, temperature in enumerate((0.0, 0.8, 1.5)):
            sampling = Sampling(temperature=temperature)

            def text(drafter: Drafter | None, seed: int = seed, sampling: Sampling = sampling) -> Completion:
                pair.forget()
                return pair.stream(
                    "the end of",
                    drafter=drafter,
                    policy=Partly(5, n),
                    sampling=sampling,
                    seed=seed,
                    max_tokens=48,
                ).run()

            right, found = text(NoDrafter()), text(None)
            assert found.tokens == right.tokens
            n_dropped += sum(round_.n_dropped for round_ in found.rounds)
        assert n_dropped > 5


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_what_models_that_are_all_the_same_leave_out_would_have_been_accepted(
    store: ModelStore, rule: str
) -> None:
    with opened(store, TARGET, TARGET, TARGET) as pair:
        for stage in pair.stages:
            stage.length = Partly(3, every_second)
        for seed in range(3):
            policy = Partly(6, every_second)
            found = pair.stream("the end", policy=policy, seed=seed, max_tokens=50, rule=rule).run()
            assert found.summary.acceptance_rate == 1
            assert {r.counterfactual and r.counterfactual[1] for r in found.rounds if r.n_dropped} == {1.0}


@pytest.mark.parametrize("rule", list(RULES))
def test_every_policy_is_told_whether_the_rule_drops(store: ModelStore, rule: str) -> None:
    told: list[bool] = []

    class Told(Length):
        def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> Told:
            told.append(drops)
            return self

    with opened(store, TARGET, TARGET, TARGET) as pair:
        for stage in pair.stages:
            stage.length = Told(1)
        pair.stream("the end", policy=Told(2), max_tokens=3, rule=rule).run()
        assert told == [RULES[rule].drops] * 3


def test_what_is_cached_does_not_matter(store: ModelStore) -> None:
    """Sequences with drafts of drafts run together, and one ends early. Each completion stays the same."""
    with opened(store, TARGET.draft(0.1), TARGET.draft(0.3)) as pair:
        prompts = ["the end", "the end of the", "in the beginning", "x"]

        def stream(i: int) -> TextStream:
            return pair.stream(prompts[i], seed=i, policy=FixedLength(5), max_tokens=40)

        alone = [stream(i).run().tokens for i in range(4)]
        early, *streams = stream(1), *(stream(i) for i in range(4))
        for n, _ in enumerate(itertools.zip_longest(early, *streams)):
            if n == 5:
                early.close()
        assert [each.completion.tokens for each in streams] == alone
        assert isinstance(pair.stages[0].length, Length)
        assert max(round_.n_sequences for round_ in pair.stages[0].length.rounds) > 1


def test_a_level_learns_by_itself(demo_files: tuple[Path, Path]) -> None:
    target, draft = demo_files
    with open_pair(target, [draft, draft], target_options=CPU, draft_options=CPU) as pair:
        completion = pair.stream("import os\n", policy=FixedLength(4), seed=1, max_tokens=120).run()
        n_made = sum(len(round_.draft) for round_ in completion.rounds)
        policy = pair.stages[0].length
        assert isinstance(policy, AutoLength)
        assert policy.costs.n_timed > n_made / 16 > 6  # it learns from every evaluation of its draft model


def test_the_command_takes_several_drafts(store: ModelStore) -> None:
    target, draft = (str(store.path("llama", recipe)) for recipe in (TARGET, TARGET.draft(0.1)))
    common = ["generate", "--target", target, "-p", "the end", "-n", "24", "--seed", "5", "-k", "4", "--json"]
    plain = invoke(*common, "--no-draft", "--draft", draft, "--draft", draft).json
    staged = invoke(*common, "--draft", draft, "--draft", draft).json
    assert staged["text"] == plain["text"]
    assert staged["draft_models"] == [draft, draft]
    assert staged["statistics"]["drafted"] > 0


def test_the_targets_policy_prices_tokens_not_evaluations(store: ModelStore) -> None:
    """A draft token of a staged draft costs less than an evaluation of the draft."""
    with opened(store, TARGET, TARGET) as pair:
        made = pair.stream("the end", policy=FixedLength(6), seed=1, max_tokens=50).run().rounds
        drafting = [round_ for round_ in made if len(round_.draft)]
        for round_ in drafting:
            assert round_.n_draft_steps == len(round_.draft)
