"""Random numbers from a seed: their distribution, their independence, and shared noise."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.protocols import Stream
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import Distribution

COIN = Distribution(np.array([4, 9], dtype=np.int32), np.array([0.5, 0.5]))
SKEWED = Distribution(np.array([0, 3, 7, 100_000], dtype=np.int32), np.array([0.6, 0.25, 0.1, 0.05]))

GOLDEN_TOKENS = [7, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 3]
GOLDEN_LONG = [100_000, 100_000, 0, 0, 0, 0, 0, 0, 7, 0, 3, 7]
GOLDEN_CHANCES = [False, True, True, False, False, True, True, True]


def test_golden_values() -> None:
    """A seed gives the same completion in every version."""
    for seed, golden in ((7, GOLDEN_TOKENS), (0x9234_5678_9ABC_DEF1, GOLDEN_LONG)):
        streams = SeededStreams(seed)
        assert [streams.choose(SKEWED, Stream.TOKEN, position) for position in range(12)] == golden
    streams = SeededStreams(7)
    assert [streams.chance(0.5, Stream.ACCEPT, position, 3) for position in range(8)] == GOLDEN_CHANCES


def test_the_law_of_a_draw() -> None:
    n, streams = 20_000, SeededStreams(1)
    drawn = np.array([streams.choose(SKEWED, Stream.TOKEN, position) for position in range(n)])
    counts = np.array([(drawn == token).sum() for token in SKEWED.tokens])
    expected = n * SKEWED.probabilities
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 16.3  # chi-square, 3 degrees, 0.1 %; the seed is fixed


def test_the_law_of_a_chance() -> None:
    streams = SeededStreams(2)
    hits = sum(streams.chance(0.3, Stream.ACCEPT, position) for position in range(20_000))
    assert abs(hits - 6000) < 4 * 65


@pytest.mark.parametrize("stream", list(Stream))
def test_never_and_always(stream: Stream) -> None:
    streams = SeededStreams(3)
    assert not any(streams.chance(0.0, stream, position) for position in range(100))
    assert all(streams.chance(1.0, stream, position) for position in range(100))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("high seed", lambda position: SeededStreams(5 + 2**32).choose(COIN, Stream.TOKEN, position, 2)),
        ("seed", lambda position: SeededStreams(6).choose(COIN, Stream.TOKEN, position, 2)),
        ("stream", lambda position: SeededStreams(5).choose(COIN, Stream.DRAFT, position, 2)),
        ("position", lambda position: SeededStreams(5).choose(COIN, Stream.TOKEN, position + 1, 2)),
        ("attempt", lambda position: SeededStreams(5).choose(COIN, Stream.TOKEN, position, 3)),
    ],
)
def test_draws_that_differ_in_anything_are_independent(name: str, other: object) -> None:
    assert callable(other)
    n = 4000
    same = sum(SeededStreams(5).choose(COIN, Stream.TOKEN, i, 2) == other(i) for i in range(n))
    assert abs(same - n / 2) < 4 * np.sqrt(n) / 2


def test_the_same_arguments_give_the_same_number() -> None:
    assert SeededStreams(5).choose(SKEWED, Stream.TOKEN, 9) == SeededStreams(5 + 2**64).choose(
        SKEWED, Stream.TOKEN, 9
    )


def test_models_that_nearly_agree_usually_draw_the_same_token() -> None:
    """With probability at least (1 - TV) / (1 + TV), so the coupled rule accepts."""
    near = Distribution(SKEWED.tokens, np.array([0.55, 0.3, 0.1, 0.05]))
    streams, n = SeededStreams(8), 4000
    same = sum(
        streams.choose(SKEWED, Stream.TOKEN, i) == streams.choose(near, Stream.TOKEN, i) for i in range(n)
    )
    assert same / n > 0.95 / 1.05
