"""The candidates of a position: the first is the token of a chain, the others are the next best."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.protocols import Stream
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sampling.sampler import Sampler, candidates
from llamaspec.values import Distribution

PATH = np.array([1, 2, 3], dtype=np.int32)
SCORES = np.log(np.array([0.1, 0.4, 0.3, 0.2], dtype=np.float32))


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.8), Sampling(temperature=1.0, top_k=3), Sampling(1.7)]
)
def test_each_candidate_is_the_draw_without_those_before_it(sampling: Sampling) -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        scores, streams = rng.standard_normal(50).astype(np.float32) * 2, SeededStreams(seed)
        found, confidences = candidates(scores, Sampler(sampling), PATH, streams, 4)
        q = Sampler(sampling).distribution(scores, PATH)
        for token in found:
            assert token == streams.choose(q, Stream.TOKEN, len(PATH))
            rest = q.tokens != token
            q = Distribution(q.tokens[rest], q.probabilities[rest])
        assert confidences == sorted(confidences, reverse=True)
        assert sum(confidences) <= 1 + 1e-12


def test_greedy_candidates_are_the_most_probable() -> None:
    found, confidences = candidates(SCORES, Sampler(Sampling(temperature=0)), PATH, SeededStreams(1), 3)
    assert found == [1, 2, 3]
    assert confidences == pytest.approx([0.4, 0.3, 0.2])


def test_penalties_come_first() -> None:
    sampling = Sampling(temperature=0, presence_penalty=5.0)
    assert candidates(SCORES, Sampler(sampling), PATH, SeededStreams(1), 4)[0][0] == 0


def test_no_more_candidates_than_tokens() -> None:
    sampling = Sampling(temperature=1.0, top_k=2)
    assert len(candidates(SCORES, Sampler(sampling), PATH, SeededStreams(1), 4)[0]) == 2


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.3, top_k=1)])
@pytest.mark.parametrize(("n", "n_likely"), [(1, 16), (4, 16), (5, 20)])
def test_greedy_candidates_have_the_confidences_of_temperature_1(
    n: int, n_likely: int, sampling: Sampling
) -> None:
    """Among the most probable tokens: four times as many as wanted, at least 16, and no other filter."""
    scores = np.linspace(8.0, 0.0, 60, dtype=np.float32)
    found, confidences = candidates(scores, Sampler(sampling), PATH, SeededStreams(1), n)
    weights = np.exp(scores[:n_likely].astype(np.float64))
    assert found == list(range(n))
    assert confidences == pytest.approx(weights[:n] / weights.sum())


def test_confidences_are_a_softmax_of_the_compared_scores() -> None:
    """Over all tokens that may be drawn, not only over the candidates."""
    sampling, streams = Sampling(1.0, None, None, None), SeededStreams(4)
    q = Sampler(sampling).distribution(SCORES, PATH)
    compared = np.exp(streams.perturbed(q, Stream.TOKEN, 3))
    found, confidences = candidates(SCORES, Sampler(sampling), PATH, streams, 2)
    best = np.argsort(-compared)[:2]
    assert found == best.tolist()
    assert confidences == pytest.approx(compared[best] / compared.sum())
