"""What a question costs: only what the memory does not hold, also after wrong guesses."""

from __future__ import annotations

import numpy as np
import pytest

from asks import LANES, MEMORIES, Count, RandomCalls, asked, tokens
from llamaspec import Ask
from llamaspec.llama.snapshots import SPACING
from model_store import OpenModel


def test_every_distinct_position_is_evaluated_once(opened: OpenModel, evaluated: Count) -> None:
    """Whatever the memory holds, a call costs the distinct prefixes that it does not hold, and the scored."""
    model = opened(n_lanes=LANES)
    calls = RandomCalls(np.random.default_rng(3))
    for _ in range(200):
        asks = calls.call()
        model.logits(asks)
        given = [(node.position, tuple(sorted(node.lanes))) for node in evaluated.nodes]
        distinct = {ask.tokens[: i + 1].tobytes() for ask in asks for i in range(len(ask.tokens))}
        by_prefix = [
            next(ask for ask in asks if ask.lane == lanes[0]).tokens[: position + 1].tobytes()
            for position, lanes in given
        ]
        assert len(by_prefix) == len(set(by_prefix))
        assert set(by_prefix) <= distinct
        for ask in asks:  # the scored ones are among them, with the lane of the ask
            scored = {(i, ask.lane) for i in range(len(ask.tokens) - ask.n, len(ask.tokens))}
            assert scored <= {(position, lane) for position, lanes in given for lane in lanes}
        evaluated.taken()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_a_call_costs(opened: OpenModel, evaluated: Count, kind: str) -> None:
    model = opened(kind, n_lanes=3)
    costs = []
    for asks in (
        [asked(50)],  # everything
        [asked(50)],  # asked again: the scored position only
        [asked(54, n_scored=5)],  # the last token and four guesses
        [asked(53)],  # two guesses rejected: one position
        [asked(53, lane=1)],  # another lane takes over what the first knows
        [
            asked(60, lane=0),
            Ask(2, np.append(asked(56).tokens, tokens(5)), 1),
        ],  # 7 in common (53..59), 1 alone
    ):
        model.logits(asks)
        costs.append(evaluated.taken())
    assert costs == [50, 1, 5, 1, 1, 8]


@pytest.mark.parametrize(("kind", "back"), [("mamba", 3), ("jamba", 3), ("lfm2", 1)])
def test_states_go_back_to_a_copy(opened: OpenModel, evaluated: Count, kind: str, back: int) -> None:
    """Where llama.cpp keeps no earlier states, what stood since the last copy is read again, no more."""
    model = opened(kind)
    costs = []
    for n in (50, 55, 53, 54):  # a copy is taken at 50
        model.logits([asked(n)])
        costs.append(evaluated.taken())
    assert costs == [50, 5, back, 1]


@pytest.mark.parametrize("kind", ["mamba", "jamba", "lfm2"])
def test_states_of_several_lanes_are_read_again(opened: OpenModel, evaluated: Count, kind: str) -> None:
    model = opened(kind, n_lanes=2)
    costs = []
    for n in (50, 55, 53, 54):
        model.logits([asked(n)])
        costs.append(evaluated.taken())
    assert costs == [50, 5, 53, 1]


@pytest.mark.parametrize(("kind", "judges", "most"), [
    ("llama", True, 0), ("llama", False, 0),
    ("lfm2", True, 0), ("lfm2", False, SPACING),
    ("mamba", True, 2 * SPACING), ("mamba", False, SPACING),
    ("jamba", True, 2 * SPACING), ("jamba", False, SPACING),
])  # fmt: skip
def test_what_wrong_guesses_cost(
    opened: OpenModel, evaluated: Count, kind: str, judges: bool, most: int
) -> None:
    """Tokens read again in a round of up to eight guesses: a few, however long the text is."""
    model, rng = opened(kind, max_scored=16), np.random.default_rng(2)
    text = asked(100).tokens
    model.logits([Ask(0, text[:-1], 0)])
    evaluated.taken()
    for _ in range(60):
        n_guesses, n_new = int(rng.integers(0, 9)), 1  # the last token of the text has not been read yet
        path = np.concatenate([text, rng.integers(2, 288, n_guesses).astype(np.int32)])
        n_right = int(rng.integers(0, n_guesses + 1))
        for end in [len(path)] if judges else range(len(text), len(path) + 1):
            model.logits([Ask(0, path[:end], n_guesses + 1 if judges else 1)])
        assert evaluated.taken() - n_guesses - n_new <= most
        text = np.concatenate([path[: len(text) + n_right], rng.integers(2, 288, 1).astype(np.int32)])


def test_reading_alone_scores_nothing_and_what_is_remembered_is_not_read_again(
    opened: OpenModel, evaluated: Count
) -> None:
    model = opened()
    tokens = np.arange(1, 41, dtype=np.int32)
    assert model.logits([Ask(0, tokens[:30], 0)])[0].shape == (0, model.vocabulary_size)
    model.logits([Ask(0, tokens[:30], 0)])
    model.logits([Ask(0, tokens[:20], 0)])
    assert len(evaluated.nodes) == 30
    model.logits([Ask(0, tokens, 2)])
    assert len(evaluated.nodes) == 50


@pytest.mark.parametrize("kind", MEMORIES)
def test_what_is_remembered_is_not_evaluated(opened: OpenModel, evaluated: Count, kind: str) -> None:
    model, random = opened(kind), np.random.default_rng(1)
    sequence = tokens(2)
    for _ in range(60):
        kept = sequence[: random.integers(1, len(sequence) + 1)] if random.random() < 0.4 else sequence
        new = random.integers(2, 6, size=random.integers(0, 8), dtype=np.int32)
        sequence = np.concatenate([kept, new])[:200]
        remembered = model.remembered(sequence)
        model.logits([Ask(0, sequence, 1)])
        assert evaluated.taken() == len(sequence) - remembered
