"""Copies from earlier answers of a pair change no token, and come only from the same scope."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llamaspec import FixedLength, NoDrafter, Pair, Sampling, open_pair
from llamaspec.engine.completion import Completion
from llamaspec.protocols import LengthPolicy
from llamaspec.values import Source
from test_oracles import CPU

BODY = "\n    with open(path) as file:\n        return "
PROMPTS = [f"def read_{name}(path):{BODY}" for name in ("lines", "lines", "words", "numbers")]


def n_copied(completion: Completion) -> int:
    return sum(each.n_accepted for each in completion.rounds if each.source is Source.EARLIER)


@pytest.fixture
def pair(demo_files: tuple[Path, Path]) -> Iterator[Pair]:
    with open_pair(demo_files[0], ngram=True, target_options=CPU) as pair:
        yield pair


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "block"), (0.8, "coupled"), (0.8, "rejection")])
def test_same_seed_same_text(pair: Pair, temperature: float, rule: str) -> None:
    sampling = Sampling(temperature=temperature)
    right = [
        pair.stream(
            prompt, seed=seed, sampling=sampling, drafter=NoDrafter(), max_tokens=60, scope=None
        ).run()
        for seed, prompt in enumerate(PROMPTS)
    ]
    n_accepted = 0
    policies: list[LengthPolicy | None] = [FixedLength(6), None]
    for policy in policies:
        pair.forget()
        for seed, prompt in enumerate(PROMPTS):
            found = pair.stream(
                prompt, seed=seed, sampling=sampling, policy=policy, max_tokens=60, rule=rule
            ).run()
            if rule == "coupled" or not temperature:
                assert found.tokens == right[seed].tokens
            n_accepted += n_copied(found)
    assert n_accepted > 5


def test_the_same_request_again_is_copied_as_a_whole(pair: Pair) -> None:
    greedy, policy = Sampling(temperature=0), FixedLength(15)
    first, again = (
        pair.stream(PROMPTS[0], sampling=greedy, policy=policy, max_tokens=60).run() for _ in range(2)
    )
    assert n_copied(first) == 0
    assert len(again.rounds) == 4
    assert again.tokens == first.tokens


@pytest.mark.parametrize(
    ("scopes", "expected"),
    [(("", ""), True), (("a", "a"), True), (("a", "b"), False), ((None, ""), False), (("", None), False)],
)
def test_only_answers_of_the_same_scope_are_copied(
    pair: Pair, scopes: tuple[str | None, str | None], expected: bool
) -> None:
    greedy, policy = Sampling(temperature=0), FixedLength(15)
    for scope in scopes:
        found = pair.stream(PROMPTS[0], sampling=greedy, policy=policy, max_tokens=30, scope=scope).run()
    assert (n_copied(found) > 0) is expected


def test_an_answer_that_was_interrupted_is_copied_up_to_there(pair: Pair) -> None:
    greedy, policy = Sampling(temperature=0), FixedLength(5)
    stream = pair.stream(PROMPTS[0], sampling=greedy, policy=policy, max_tokens=200)
    for _, _ in zip(range(20), stream, strict=False):
        pass
    stream.close()
    found = pair.stream(PROMPTS[0], sampling=greedy, policy=policy, max_tokens=15).run()
    assert n_copied(found) >= 10


def test_copies_that_are_switched_off(demo_files: tuple[Path, Path], pair: Pair) -> None:
    greedy = Sampling(temperature=0)
    with open_pair(demo_files[0], ngram=False, target_options=CPU) as other:
        arms = ((pair, True), (pair, False), (other, True), (other, True))
        runs = [
            each.stream(
                PROMPTS[0], sampling=greedy, policy=FixedLength(5), max_tokens=20, copies=copies
            ).run()
            for each, copies in arms
        ]
    assert [n_copied(run) for run in runs] == [0, 0, 0, 0]
