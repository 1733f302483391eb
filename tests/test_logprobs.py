"""Log-probabilities, logit bias and penalties are the same with and without a draft, and as numpy says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forward_requests import fresh
from llamaspec import FixedLength, LlamaModel, ModelOptions, NoDrafter, Pair, Piece, Sampling, open_pair
from llamaspec.pair import MAX_LOGPROBS
from llamaspec.sampling.sampler import logprobs
from llamaspec.values import TARGET, ForwardRequest, TokenArray

CPU = ModelOptions(threads=1, gpu_layers=0)
PROMPT = "def f(self):\n    return "


@pytest.fixture(scope="module")
def pair(target_file: Path, draft_file: Path) -> Iterator[Pair]:
    with open_pair(target_file, draft_file, target_options=CPU, draft_options=CPU) as pair:
        yield pair


def pieces(pair: Pair, **settings: Any) -> list[Piece]:
    pair.forget()
    stream = pair.stream(PROMPT, **{"seed": 5, "max_tokens": 30, **settings})
    made = list(stream)
    return made[: len(stream.completion.tokens)]  # without the text that was held back


def test_how_many_tokens_may_be_told(pair: Pair) -> None:
    most = pieces(pair, logprobs=MAX_LOGPROBS, max_tokens=1, sampling=Sampling(temperature=0))[0].logprobs
    assert most is not None
    assert len(most.top) == MAX_LOGPROBS
    for n in (-1, MAX_LOGPROBS + 1):
        with pytest.raises(ValueError, match=f"logprobs must be from 0 to {MAX_LOGPROBS}, got {n}"):
            pieces(pair, logprobs=n)


@pytest.mark.parametrize("n", [0, 3])
def test_logprobs_do_not_depend_on_the_draft(pair: Pair, n: int) -> None:
    plain = pieces(pair, drafter=NoDrafter(), logprobs=n)
    drafted = pieces(pair, policy=FixedLength(4), logprobs=n)
    assert [(piece.token, piece.logprobs) for piece in drafted] == [
        (piece.token, piece.logprobs) for piece in plain
    ]
    assert all(piece.logprobs is not None and len(piece.logprobs.top) == n for piece in plain)
    assert {piece.logprobs for piece in pieces(pair)} == {None}  # not asked for


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rule": "block", "policy": FixedLength(3)},
        {"sampling": Sampling(temperature=0.1, top_k=2, logit_bias={70: 8.0}, presence_penalty=2.0)},
    ],
)
def test_logprobs_are_the_models_own(pair: Pair, target_file: Path, settings: dict[str, Any]) -> None:
    """They are log(softmax(logits)) of a fresh evaluation, without bias, temperature and truncation."""
    found = pieces(pair, logprobs=4, **settings)
    context: TokenArray = pair.target.vocabulary.tokenize(PROMPT.encode())
    with LlamaModel(target_file, CPU) as model:
        for piece in found:
            scores = fresh(model, ForwardRequest(TARGET, context))[0].astype(np.float64)
            right = scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
            assert piece.logprobs is not None
            assert piece.logprobs.logprob == pytest.approx(right[piece.token], abs=0.05)
            best = np.argsort(-right, kind="stable")[:4]
            assert [value for _, value in piece.logprobs.top] == pytest.approx(right[best], abs=0.05)
            context = np.append(context, np.int32(piece.token))


def test_logprobs_by_hand() -> None:
    row = np.log(np.array([0.1, 0.2, 0.2, 0.5], dtype=np.float32)) + np.float32(7)
    found = logprobs(row, 0, 3)
    assert np.exp(found.logprob) == pytest.approx(0.1)
    assert [token for token, _ in found.top] == [3, 1, 2]  # ties go to the lowest ids
    assert np.exp([value for _, value in found.top]) == pytest.approx([0.5, 0.2, 0.2])
    assert len(logprobs(row, 0, 9).top) == 4


def test_penalties_of_what_was_generated_leave_the_prompt_alone(pair: Pair) -> None:
    """OpenAI's definition: a token of the prompt is as good as any other until it is generated."""
    greedy = Sampling(temperature=0.0)
    vocabulary = pair.target.vocabulary
    every = np.arange(2, vocabulary.size, dtype=np.int32)  # a prompt with every token that is text
    prompt = np.concatenate([vocabulary.tokenize(PROMPT.encode()), every])

    def tokens(sampling: Sampling, n: int) -> tuple[int, ...]:
        pair.forget()
        return pair.stream(prompt, sampling=sampling, seed=1, max_tokens=n).run().tokens

    strong = Sampling(temperature=0.0, penalty_window=None, presence_penalty=1e4)
    assert tokens(strong, 1) == tokens(greedy, 1)
    written = tokens(strong, 20)
    assert len({*written}) == len(written)


def test_a_bias_of_no_token(pair: Pair) -> None:
    with pytest.raises(ValueError, match="logit bias"):
        pair.stream(PROMPT, sampling=Sampling(logit_bias={100_000: 1.0}))
