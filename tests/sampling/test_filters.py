"""Sampling filters, by hand on four tokens; the fast selection compared with a plain one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.errors import ScoresError
from llamaspec.sampling.filters import Sampling, Scores, biased, confidence, distribution, penalised
from llamaspec.values import Distribution

P = np.array([0.1, 0.4, 0.3, 0.2])
ROW: Scores = np.log(P).astype(np.float32)


def chain(
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Sampling:
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (chain(), {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}),
        (chain(top_k=2), {1: 4 / 7, 2: 3 / 7}),
        (chain(top_k=9), {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}),
        (chain(top_p=0.65), {1: 4 / 7, 2: 3 / 7}),  # 0.4 is not enough, 0.7 is
        (chain(top_p=0.01), {1: 1.0}),
        (chain(min_p=0.6), {1: 4 / 7, 2: 3 / 7}),  # at least 0.24
        (chain(top_k=3, top_p=0.5), {1: 4 / 7, 2: 3 / 7}),  # of the three: 4/9, then 7/9
        (chain(top_k=3, min_p=0.7, top_p=0.9), {1: 4 / 7, 2: 3 / 7}),
        (chain(temperature=0.5), {0: 1 / 30, 1: 16 / 30, 2: 9 / 30, 3: 4 / 30}),
        (chain(temperature=0.5, top_p=0.65), {1: 16 / 25, 2: 9 / 25}),  # truncation comes before temperature
        (chain(temperature=0), {1: 1.0}),
        (chain(top_k=1), {1: 1.0}),
        (chain(temperature=1e-300), {1: 1.0}),
    ],
)
def test_filters(sampling: Sampling, expected: dict[int, float]) -> None:
    found = distribution(ROW, sampling)
    assert found.tokens.tolist() == list(expected)
    assert found.probabilities == pytest.approx(list(expected.values()), abs=1e-6)


@pytest.mark.parametrize(
    "sampling", [chain(0), chain(top_k=1), chain(top_k=2), chain(top_p=0.3), chain(min_p=0.9)]
)
def test_ties_go_to_the_lowest_ids(sampling: Sampling) -> None:
    row = np.array([1, 5, 5, 5, 5], dtype=np.float32)
    tokens = distribution(row, sampling).tokens.tolist()
    assert tokens == list(range(1, 1 + len(tokens)))


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        ({"repeat_penalty": 2.0}, [1.0, -8.0, 6.0, 0.0]),  # positive scores are divided, others multiplied
        ({"presence_penalty": 1.5}, [0.5, -5.5, 6.0, 0.0]),
        ({"frequency_penalty": 0.5}, [1.0, -4.5, 6.0, 0.0]),
        ({"repeat_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.5}, [-1.0, -9.5, 6.0, 0.0]),
    ],
)
def test_penalties(penalty: dict[str, float], expected: list[float]) -> None:
    row = np.array([2, -4, 6, 0], dtype=np.float32)
    seen = np.array([0, 1, 0], dtype=np.int32)
    assert penalised(row, Sampling(**penalty), seen).tolist() == expected  # type: ignore[arg-type]
    assert row.tolist() == [2, -4, 6, 0]


@pytest.mark.parametrize(("share", "kept"), [(0.10005, [0, 1]), (0.09995, [0])])
def test_the_edge_of_min_p(share: float, kept: list[int]) -> None:
    """The fast selection before it is a little wider, so it never decides."""
    row = np.log(np.array([1.0, share], dtype=np.float32))
    assert distribution(row, chain(1.0, None, None, 0.1)).tokens.tolist() == kept


def test_only_the_last_tokens_count_as_seen() -> None:
    seen = np.array([1, 2, 3], dtype=np.int32)
    sampling = Sampling(temperature=0, presence_penalty=100.0, penalty_window=2)
    assert distribution(ROW, sampling, seen).tokens.tolist() == [1]


def plain_chain(row: Scores, sampling: Sampling) -> dict[int, float]:
    """Every step on the whole sorted vocabulary."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = np.exp(row[kept].astype(np.float64) - row.max())
    n = len(kept)
    if sampling.top_p is not None:
        n = min(n, int(np.searchsorted(np.cumsum(weights), sampling.top_p * weights.sum())) + 1)
    if sampling.min_p is not None:
        n = min(n, int((weights >= sampling.min_p).sum()))
    scaled = np.exp((row[kept[:n]].astype(np.float64) - row.max()) / sampling.temperature)
    return dict(zip(kept[:n], (scaled / scaled.sum()).tolist(), strict=True))


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 2, 7, 300, 5000]),
    top_k=st.none() | st.integers(1, 60),
    top_p=st.none() | st.sampled_from([0.1, 0.5, 0.9, 0.99]),
    min_p=st.none() | st.sampled_from([0.01, 0.1, 0.5]),
    rounded=st.booleans(),
)
@example(seed=0, size=300, top_k=25, top_p=0.9, min_p=0.01, rounded=False)  # top-p before min-p
def test_the_fast_selection_is_the_plain_one(
    seed: int, size: int, top_k: int | None, top_p: float | None, min_p: float | None, rounded: bool
) -> None:
    row = (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)
    row = np.round(row) if rounded else row  # many ties
    sampling = chain(0.7, top_k, top_p, min_p)
    found = distribution(row, sampling)
    plain = plain_chain(row, sampling)
    if not set(found.tokens.tolist()) ^ set(plain):
        assert found.probabilities == pytest.approx([plain[t] for t in found.tokens.tolist()])
        return
    # If rounding decides at the edge of top-p, one token may differ.
    assert top_p is not None
    assert abs(len(found.tokens) - len(plain)) <= 1


@pytest.mark.parametrize("row", [[np.nan, 1.0], [-np.inf, -np.inf], [np.inf, 0.0]])
def test_scores_that_are_not_numbers_are_refused(row: list[float]) -> None:
    with pytest.raises(ScoresError, match="not finite"):
        distribution(np.array(row, dtype=np.float32), chain())


def test_impossible_tokens_stay_impossible() -> None:
    row = np.array([0, -np.inf, 1, -np.inf], dtype=np.float32)
    assert distribution(row, chain()).tokens.tolist() == [0, 2]


def test_confidence_is_the_draft_s_own_probability() -> None:
    assert confidence(ROW, 2, distribution(ROW, chain(top_k=2))) == pytest.approx(3 / 7)
    assert confidence(ROW, 1, Distribution.certain(1)) == pytest.approx(0.4)
    assert confidence(ROW, 2, Distribution.certain(2), np.array([0, 2, 3])) == pytest.approx(0.5)
    assert confidence(ROW, 1, Distribution.certain(1), np.array([0])) == 1.0  # at most 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 0.0},
        {"repeat_penalty": 0.0},
        {"min_p": 1.1},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -float("inf")},
        {"penalty_window": 0},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1 << 40: 1.0}},
        {"logit_bias": {3: 1.0, 4: float("inf")}},
        {"logit_bias": {3: float("nan")}},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Sampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "edge",
    [
        {"temperature": 0.0, "top_k": 1, "top_p": 1.0, "min_p": 1.0, "penalty_window": 1},
        {"repeat_penalty": 1e-9, "presence_penalty": -9.0, "frequency_penalty": 0.0, "logit_bias": {0: -9.0}},
    ],
)
def test_settings_at_the_edge_of_their_range_are_accepted(edge: dict[str, float]) -> None:
    made = Sampling(**edge)  # type: ignore[arg-type]
    assert {name: getattr(made, name) for name in edge} == edge


def test_defaults() -> None:
    """They are those of llama.cpp."""
    assert Sampling() == Sampling(0.8, 40, 0.95, 0.05, None, None, None, 64, None)
    assert Sampling(repeat_penalty=1.0).penalises
    assert Sampling(presence_penalty=0.0).penalises
    assert Sampling(frequency_penalty=0.0).penalises
    assert not Sampling(penalty_window=3, logit_bias={1: 1.0}).penalises


def test_a_bias_is_added_before_anything_else() -> None:
    """The bias is the target's; a draft may have fewer tokens."""
    row, bias = ROW.copy(), {0: 2.0, 2: -1.5, 4: 9.0, 7: 9.0}
    expected = row + np.array([2.0, 0.0, -1.5, 0.0], dtype=np.float32)
    biases = Sampling(logit_bias=bias).biases
    assert biases is not None
    assert biased(row, biases).tolist() == expected.tolist()
    assert row.tolist() == ROW.tolist()
    found = distribution(row, Sampling(1.0, 2, None, None, logit_bias=bias))
    assert found.tokens.tolist() == [0, 1]
    assert distribution(row, Sampling(0, logit_bias=bias, presence_penalty=5.0), np.array([0])).tokens == [1]


def test_only_allowed_tokens_are_drawn() -> None:
    allowed = np.array([0, 2, 3], dtype=np.int32)
    found = distribution(ROW, chain(top_k=2), allowed=allowed)
    assert found.tokens.tolist() == [2, 3]
    assert found.probabilities == pytest.approx([0.6, 0.4])
    assert distribution(ROW, chain(0), allowed=allowed).tokens.tolist() == [2]


def test_probability_of_a_token_that_did_not_survive_is_zero() -> None:
    assert Distribution.certain(5).probability(5) == 1.0
    assert Distribution.certain(5).probability(4) == 0.0
    assert Distribution.certain(5).probability(6) == 0.0
