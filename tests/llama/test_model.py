"""A real model behaves like a pure function: earlier requests never change an answer."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import tokens
from forward_requests import (
    EXACT,
    MEMORIES,
    TOLERANCE,
    RandomRows,
    Rounds,
    assert_same,
    evaluate,
    fresh,
    full,
    request,
    text,
)
from llamaspec import LlamaModel
from llamaspec.errors import ContextFullError
from llamaspec.llama.cells import CellTable
from llamaspec.llama.options import BATCH, DRAFT_SCORED
from llamaspec.values import TARGET, ForwardRequest
from model_store import OpenModel
from tiny_models import Recipe

LONG = Recipe(n_context=2048)


@pytest.mark.parametrize(
    ("kind", "n_calls", "longest", "n_sequences"),
    [
        ("llama", 500, 60, 4),
        ("llama", 500, 110, 3),
        ("gemma3", 500, 60, 4),
        ("mamba", 150, 60, 3),
        ("jamba", 150, 60, 3),
        ("lfm2", 150, 60, 3),
    ],
)
def test_cached_answers_are_those_of_a_fresh_model(
    opened: OpenModel,
    compactions: list[CellTable],
    kind: str,
    n_calls: int,
    longest: int,
    n_sequences: int,
) -> None:
    """Only 256 cells, so that sequences go to the store and back, and cells are moved, all the time."""
    model, other = opened(kind, n_ctx=256, **EXACT), opened(kind, n_ctx=256, **EXACT)
    rng = np.random.default_rng(100 * longest + n_calls)
    rows, n_answers = RandomRows(rng, longest, n_sequences), 0
    for _ in range(n_calls):
        for number in rows.leaving():
            model.release(number)
        batch = rows.batch()
        if rng.random() < 0.2:  # some requests are prepared, and evaluated later or never
            model.prepare([(number, wanted, 0) for number, wanted in rows.batch()])
        answers = evaluate(model, batch, int(rng.choice([0, 0, 2])))
        for number, answer in answers.items():
            assert_same(answer, fresh(other, dict(batch)[number]), TOLERANCE[kind])
        n_answers += len(answers)
    assert n_answers > n_calls
    if kind in ("llama", "gemma3"):
        assert len(compactions) > n_calls / 50


@pytest.mark.parametrize("kind", ["llama", "gemma3", "jamba"])
def test_sequences_longer_than_a_batch(opened: OpenModel, kind: str) -> None:
    """Several batches per request, logits on both sides of a border, a long common beginning."""
    model, other = opened(kind, LONG, **EXACT), opened(kind, LONG, **EXACT)
    long = [
        (0, request(700)),
        (1, ForwardRequest(TARGET, np.append(text(650), tokens(9, 9)), 3)),
        (2, request(30, 1)),
    ]
    batches = ([(0, request(BATCH + 3, n_logits=7))], [(0, request(BATCH))], long, [(0, request(600))])
    for batch in batches:
        answers = evaluate(model, batch)
        assert len(answers) == len(batch)
        for number, wanted in batch:
            assert_same(answers[number], fresh(other, wanted), TOLERANCE[kind])
            assert_same(fresh(model, wanted), fresh(other, wanted), TOLERANCE[kind])


def test_as_many_sequences_draft_as_a_draft_model_scores_positions(opened: OpenModel) -> None:
    """A server may run 16 completions at once: the sixteenth drafts, too."""
    model = opened(n_ctx=64, n_cells=1024, max_scored=DRAFT_SCORED, **EXACT)
    batch = [(number, ForwardRequest(TARGET, tokens(1, 2 + number))) for number in range(DRAFT_SCORED)]
    assert all(isinstance(n, int) for n in model.prepare([(*entry, 0) for entry in batch]))
    assert [len(logits) for logits in model.evaluate(batch)] == [1] * DRAFT_SCORED


def test_sequences_that_swap_their_requests(opened: OpenModel) -> None:
    """Once, a sequence shared cells that another had just lost, so the logits were wrong."""
    model, other = opened(**EXACT), opened(**EXACT)
    evaluate(model, [(0, request(80, 1)), (1, request(80, 2))])
    swapped = [(0, request(82, 2)), (1, request(82, 1))]
    for number, answer in evaluate(model, swapped).items():
        assert_same(answer, fresh(other, swapped[number][1]))


def test_a_sliding_window_does_not_return_to_reused_cells(opened: OpenModel) -> None:
    """llama.cpp reuses cells before the window: other sequences fill them while one waits."""
    model, other = opened("gemma3", n_ctx=256, **EXACT), opened("gemma3", n_ctx=256, **EXACT)
    model.forward(request(120))
    for seed in range(1, 6):
        model.forward(request(40, seed), number=seed % 3)
    for n in (100, 60, 119, 17):
        assert_same(model.forward(request(n)), fresh(other, request(n)), TOLERANCE["gemma3"])


@pytest.mark.parametrize("verifies", [False, True], ids=["draft", "target"])
@pytest.mark.parametrize("kind", MEMORIES)
def test_rejected_draft_tokens_leave_no_trace(opened: OpenModel, kind: str, verifies: bool) -> None:
    model, other = opened(kind, max_scored=16, **EXACT), opened(kind, max_scored=16, **EXACT)
    rounds = Rounds(np.random.default_rng(17), verifies)
    for _ in range(150 if verifies else 50):
        for wanted in rounds.requests():
            assert_same(model.forward(wanted), fresh(other, wanted), TOLERANCE[kind])


@pytest.mark.parametrize("kind", MEMORIES)
def test_the_same_request_again(opened: OpenModel, kind: str) -> None:
    """Everything is cached, and there is still an answer: once, a model with states had none."""
    model, other = opened(kind, **EXACT), opened(kind, **EXACT)
    for number, n in ((0, 40), (0, 40), (0, 30), (0, 30)):
        assert_same(model.forward(request(n), number), fresh(other, request(n)), TOLERANCE[kind])
    model.release(0)
    for n_logits in (0, 1):  # as when a prompt is processed and then continued
        wanted = request(30, n_logits=n_logits)
        answers = evaluate(model, [(1, wanted)])
        assert_same(answers[1], fresh(other, wanted), TOLERANCE[kind])


def test_the_caller_may_reuse_its_array(opened: OpenModel) -> None:
    """Once, the cache kept the caller's array, so tokens that were changed later counted as cached."""
    model, other = opened(**EXACT), opened(**EXACT)
    buffer = text(30).copy()
    model.forward(ForwardRequest(TARGET, buffer))
    buffer[10:] = text(30, 1)[10:]
    assert_same(model.forward(ForwardRequest(TARGET, buffer)), fresh(other, ForwardRequest(TARGET, buffer)))


@pytest.mark.parametrize("kind", MEMORIES)
def test_sequences_that_are_too_long_together(opened: OpenModel, kind: str) -> None:
    """Each fits alone. One that does not fit beside the others gets an error; the others continue."""
    model, other = opened(kind, n_ctx=256, **EXACT), opened(kind, n_ctx=256, **EXACT)
    batch = [(number, request(120, number)) for number in range(3)]
    if kind in ("mamba", "jamba", "lfm2"):  # each sequence has its own context
        assert full(model, batch) == []
    else:
        assert full(model, batch) == [2]
        (error,) = (answer for answer in model.prepare([(9, request(200, 9), 0)]) if answer)
        assert isinstance(error, ContextFullError)
        assert str(error).startswith("the context of 256 tokens is full: this completion needs 200, other ")
    for number, answer in evaluate(model, batch).items():
        assert_same(answer, fresh(other, batch[number][1]), TOLERANCE[kind])
    for number in range(3):
        model.release(number)
    assert_same(model.forward(request(250, 1)), fresh(other, request(250, 1)), TOLERANCE[kind])


@pytest.mark.parametrize("n_scored", [1, 6, 8])
def test_padding_changes_no_answer(opened: OpenModel, n_scored: int) -> None:
    """Also if the padding is wider than the number of positions that can be scored."""
    model, other = opened(max_scored=8, **EXACT), opened(**EXACT)
    for n in (20, 24, 22):
        wanted = request(n, n_logits=n_scored)
        assert_same(evaluate_padded(model, wanted, 3), fresh(other, wanted))


def evaluate_padded(model: LlamaModel, wanted: ForwardRequest, n_padding: int) -> np.ndarray:
    model.prepare([(0, wanted, n_padding)])
    return model.evaluate([(0, wanted)], n_padding)[0]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_garbage_between_sequences_is_removed(
    opened: OpenModel, compactions: list[CellTable], kind: str
) -> None:
    """Long before the cache is full."""
    model, other = opened(kind, n_cells=2048, **EXACT), opened(kind, **EXACT)
    for n in range(100, 140):
        batch = [(number, request(n, number, draft=text(12, 9))) for number in range(2)]
        answers = evaluate(model, batch)
    for number, wanted in batch:
        assert_same(answers[number], fresh(other, wanted), TOLERANCE[kind])
    assert 0 < len(compactions) < 10
    assert model.cache_use()[0] < 600
