"""The cost of a request: only tokens that are not cached are evaluated, also after rejections."""

from __future__ import annotations

import numpy as np
import pytest

from forward_requests import MEMORIES, Count, RandomRows, evaluate, request, text
from llamaspec.errors import ContextFullError
from llamaspec.llama.recurrent import HEADER, SPACING
from llamaspec.values import DRAFT, TARGET, ForwardRequest
from model_store import OpenModel

CUT = ("llama", "gemma3")  # models whose memory can be cut


@pytest.mark.parametrize("kind", CUT)
def test_the_number_of_evaluated_positions(opened: OpenModel, evaluated: Count, kind: str) -> None:
    model, costs = opened(kind), []
    for number, wanted in (
        (0, request(50)),  # all tokens
        (0, request(50)),  # again: only the scored position
        (0, request(50, draft=text(54)[50:])),  # the last token and four draft tokens
        (0, request(53)),  # two of them rejected: one position
        (1, request(53)),  # another sequence shares the tokens of the first
        (1, request(20)),
        (0, request(54)),  # and the first has lost none
        (2, request(60, 1)),  # other tokens
    ):
        model.forward(wanted, number)
        costs.append(evaluated.taken())
    assert costs == [50, 1, 5, 1, 1, 1, 1, 60]


@pytest.mark.parametrize(("n", "cost"), [(32, 1), (31, 32)])
def test_the_minimum_length_of_a_shared_prefix(
    opened: OpenModel, evaluated: Count, n: int, cost: int
) -> None:
    """While a prompt is processed, one token is enough; later only a long prefix is shared."""
    model = opened()
    model.forward(request(100), number=0)
    evaluated.taken()
    model.forward(request(4), number=1)
    assert evaluated.taken() == 1
    model.forward(request(4 + n + 1), number=1)
    assert evaluated.taken() == cost


@pytest.mark.parametrize("kind", CUT)
def test_a_common_prompt_is_processed_once(opened: OpenModel, evaluated: Count, kind: str) -> None:
    """Also if its sequence has ended, and if several sequences start at once."""
    model, batch = opened(kind), [(number, request(200, n_logits=0)) for number in range(5)]
    model.forward(request(150), number=9)
    model.release(9)
    evaluated.taken()
    for entry in batch:
        evaluate(model, [entry])
    assert evaluated.taken() == 50
    evaluate(model, [(number, request(201 + number, draft=text(3, number))) for number in range(5)])
    assert evaluated.taken() == sum(range(1, 6)) + 15


@pytest.mark.parametrize("kind", ["mamba", "jamba", "lfm2"])
def test_states_of_several_sequences_roll_back_independently(
    opened: OpenModel, evaluated: Count, kind: str
) -> None:
    """Each sequence has its own context; once, several sequences evaluated all tokens again every round."""
    model = opened(kind)
    for number in range(3):
        model.forward(request(60, number, n_logits=0), number)
    evaluated.taken()
    for n in (61, 62, 63):
        evaluate(model, [(number, request(n, number, draft=text(4, 9))) for number in range(3)])
        assert evaluated.taken() <= 3 * (5 + 2)


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_second_turn_costs_only_its_own_tokens(opened: OpenModel, evaluated: Count, kind: str) -> None:
    """The sequence of the first turn has ended; its tokens are found again."""
    model = opened(kind)
    model.forward(request(100, n_logits=0), number=0)
    model.forward(request(70, 1), number=1)
    model.release(0)
    model.forward(request(80, 1), number=1)
    evaluated.taken()
    model.forward(request(120), number=2)
    assert evaluated.taken() == 20


@pytest.mark.parametrize("kind", MEMORIES)
def test_agents_in_turns_process_no_token_twice(opened: OpenModel, evaluated: Count, kind: str) -> None:
    """Two growing conversations and short requests in between: each finds its tokens in the store."""
    model = opened(kind)
    for turn, number in enumerate(range(0, 12, 3)):
        for agent in (1, 2):
            model.forward(request(60 + 30 * turn, agent), number + agent)
            model.release(number + agent)
            assert evaluated.taken() == (30 if turn else 60)
        model.forward(request(20, 10 + turn), number)
        model.release(number)
        assert evaluated.taken() == 20


@pytest.mark.parametrize(("kind", "back"), [("mamba", 3), ("jamba", 3), ("lfm2", 1)])
def test_states_go_back_to_a_checkpoint(opened: OpenModel, evaluated: Count, kind: str, back: int) -> None:
    """If llama.cpp keeps no earlier states, only tokens since the last checkpoint are evaluated again."""
    model, costs = opened(kind), []
    for n in (50, 55, 53, 54):  # a checkpoint is taken at 50
        model.forward(ForwardRequest(DRAFT, text(n)))
        costs.append(evaluated.taken())
    assert costs == [50, 5, back, 1]


def test_a_stored_sequence_keeps_its_own_checkpoints(opened: OpenModel) -> None:
    """Once, a sequence that continued from the same states overwrote those in the store."""
    model = opened("mamba")
    model.forward(request(100), number=0)
    model.release(0)
    model.forward(ForwardRequest(TARGET, np.append(text(80), text(60, 1))), number=1)
    model.release(1)
    for number, n, n_cached in ((2, 75, 100 - HEADER), (3, 100, 100)):
        wanted = ForwardRequest(TARGET, np.append(text(n), text(5, number)))
        assert model.prepare([(number, wanted, 0)]) == [n_cached]
        model.release(number)


@pytest.mark.parametrize(("kind", "verifies", "most"), [
    ("llama", True, 0), ("llama", False, 0),
    ("lfm2", True, 0), ("lfm2", False, SPACING),
    ("mamba", True, 2 * SPACING), ("mamba", False, SPACING),
    ("jamba", True, 2 * SPACING), ("jamba", False, SPACING),
])  # fmt: skip
def test_the_cost_of_rejected_draft_tokens(
    opened: OpenModel, evaluated: Count, kind: str, verifies: bool, most: int
) -> None:
    """In rounds of up to eight draft tokens, only a few tokens are evaluated again at any length."""
    model, rng = opened(kind, max_scored=16), np.random.default_rng(2)
    path = text(100)
    model.forward(ForwardRequest(TARGET, path[:-1], 0))
    evaluated.taken()
    for _ in range(60):
        n_draft, n_new = int(rng.integers(0, 9)), 1  # the last token is not evaluated yet
        draft = rng.integers(2, 288, n_draft).astype(np.int32)
        n_accepted = int(rng.integers(0, n_draft + 1))
        if verifies:
            model.forward(ForwardRequest(TARGET, path, draft=draft))
        else:
            for end in range(n_draft + 1):
                model.forward(ForwardRequest(DRAFT, np.concatenate([path, draft[:end]])))
        assert evaluated.taken() - n_draft - n_new <= most
        path = np.concatenate([path, draft[:n_accepted], rng.integers(2, 288, 1).astype(np.int32)])


def test_a_prefill_scores_nothing_and_is_not_repeated(opened: OpenModel, evaluated: Count) -> None:
    model = opened()
    assert evaluate(model, [(0, request(30, n_logits=0))])[0].shape == (0, model.vocabulary_size)
    evaluate(model, [(0, request(30, n_logits=0))])
    evaluate(model, [(0, request(20, n_logits=0))])
    assert evaluated.n == 30
    evaluate(model, [(0, request(40, n_logits=2))])
    assert evaluated.n == 40


@pytest.mark.parametrize("kind", CUT)
def test_cached_tokens_are_not_evaluated(opened: OpenModel, evaluated: Count, kind: str) -> None:
    """An evaluation saves as many tokens as `prepare` returns, after any requests."""
    model, rows = opened(kind, n_ctx=256), RandomRows(np.random.default_rng(1))
    for _ in range(200):
        for number in rows.leaving():
            model.release(number)
        batch = [(number, wanted) for number, wanted in rows.batch() if wanted.n_logits]
        prepared = model.prepare([(number, wanted, 0) for number, wanted in batch])
        assert not any(isinstance(n_cached, ContextFullError) for n_cached in prepared)
        for (number, wanted), n_cached in zip(batch, prepared, strict=True):
            model.evaluate([(number, wanted)])
            assert isinstance(n_cached, int)
            assert n_cached <= len(wanted.tokens) - wanted.n_logits
            assert evaluated.taken() == wanted.n_tokens - n_cached
