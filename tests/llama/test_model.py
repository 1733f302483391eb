"""A real model behaves like a pure function: whatever was asked before, the answer is that of a fresh one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from asks import EXACT, LANES, MEMORIES, TOLERANCE, RandomCalls, Rounds, asked, assert_same, fresh, tokens
from llamaspec import Ask, EvaluationError, LlamaspecError, MemoryFullError, ModelOptions
from llamaspec.llama.options import BATCH
from model_store import OpenModel
from tiny_models import Recipe

LONG = Recipe(n_context=2048)


@pytest.mark.parametrize(
    ("kind", "n_calls", "n_ctx"),
    [
        ("llama", 400, 512),
        ("llama", 200, 256),
        ("gemma3", 400, 512),
        ("gemma3", 700, 256),  # less room: places behind the window are given away all the time
        ("mamba", 120, 512),
        ("jamba", 120, 512),
        ("lfm2", 120, 512),
    ],
)
def test_cached_answers_are_those_of_a_fresh_model(
    opened: OpenModel, kind: str, n_calls: int, n_ctx: int
) -> None:
    model, other = opened(kind, n_lanes=LANES, n_ctx=n_ctx, **EXACT), opened(kind, n_ctx=n_ctx, **EXACT)
    calls = RandomCalls(np.random.default_rng(100 * n_ctx))
    for _ in range(n_calls):
        asks = calls.call()
        assert_same(model.logits(asks), fresh(other, asks), TOLERANCE[kind])


@pytest.mark.parametrize("kind", ["llama", "gemma3", "jamba"])
def test_sequences_longer_than_a_batch(opened: OpenModel, kind: str) -> None:
    """Several parts per call, scores wanted on both sides of a border, a long beginning in common."""
    model, other = opened(kind, LONG, n_lanes=3, **EXACT), opened(kind, LONG, **EXACT)
    border = asked(BATCH + 3, n_scored=7)
    long = [asked(700, lane=0), Ask(1, np.append(asked(650).tokens, tokens(9, 9)), 3), asked(30, 1, lane=2)]
    back = asked(600, n_scored=2)
    for asks in ([border], [asked(BATCH)], long, [back], [asked(601, n_scored=1)]):
        assert_same(model.logits(asks), fresh(other, asks), TOLERANCE[kind])


def test_lanes_that_change_places(opened: OpenModel) -> None:
    """Once, a lane counted on what another lane had just been made to forget: a wrong text answered."""
    model, other = opened(n_lanes=2, **EXACT), opened(**EXACT)
    model.logits([asked(20, 1, lane=0), asked(20, 2, lane=1)])
    swapped = [asked(22, 2, lane=0), asked(22, 1, lane=1)]
    assert_same(model.logits(swapped), fresh(other, swapped))


def test_sliding_window_does_not_go_back_to_places_given_away(opened: OpenModel) -> None:
    """llama.cpp reuses the places behind the window: other lanes fill them while one lane stands still."""
    model, other = (opened("gemma3", n_lanes=n, n_ctx=256, **EXACT) for n in (4, 1))
    model.logits([asked(120)])
    for seed in range(1, 6):
        model.logits([asked(40, seed, lane=1 + seed % 3)])
    for n in (100, 60, 119, 17):
        assert_same(model.logits([asked(n)]), fresh(other, [asked(n)]), TOLERANCE["gemma3"])


@pytest.mark.parametrize("judges", [False, True], ids=["draft", "target"])
@pytest.mark.parametrize("kind", MEMORIES)
def test_wrong_guesses_leave_no_trace(opened: OpenModel, kind: str, judges: bool) -> None:
    model, other = opened(kind, max_scored=16, **EXACT), opened(kind, max_scored=16, **EXACT)
    rounds = Rounds(np.random.default_rng(17), judges)
    for _ in range(150 if judges else 50):
        for ask in rounds.asks():
            assert_same(model.logits([ask]), fresh(other, [ask]), TOLERANCE[kind])


def test_views_are_valid_until_the_next_call(opened: OpenModel) -> None:
    """No copy is made of V scores: a view that is kept shows the next answer."""
    model = opened()
    first = model.logits([asked(30, n_scored=3)])[0]
    kept = first.copy()
    assert not first.flags.owndata
    model.logits([asked(30, 1, n_scored=3)])
    assert not np.array_equal(first, kept)


def test_the_asker_may_reuse_its_array(opened: OpenModel) -> None:
    """Once, the memory remembered the array instead of the tokens, and took a changed one for read."""
    model, other = opened(**EXACT), opened(**EXACT)
    buffer = asked(30).tokens.copy()
    model.logits([Ask(0, buffer, 1)])
    buffer[10:] = asked(30, 1).tokens[10:]
    assert_same(model.logits([Ask(0, buffer, 1)]), fresh(other, [Ask(0, buffer, 1)]))


@pytest.mark.parametrize("kind", MEMORIES)
def test_lanes_that_are_too_long_together(opened: OpenModel, kind: str) -> None:
    """Each fits alone. Where they do not fit together it says so, and the model goes on.

    Together they are also more than a batch of such a context takes: this once aborted the process.
    """
    model, other = opened(kind, n_lanes=3, n_ctx=256, **EXACT), opened(kind, n_ctx=256, **EXACT)
    asks = [asked(200, lane, lane) for lane in range(3)]
    if kind == "mamba":  # a state has one size whatever the text
        assert_same(model.logits(asks), fresh(other, asks))
    else:
        with pytest.raises(MemoryFullError, match=r"256 tokens is full.*--n-ctx"):
            model.logits(asks)
    for ask in (asked(150), asked(250, 1, lane=1)):
        model.forget()
        assert_same(model.logits([ask]), fresh(other, [ask]), TOLERANCE[kind])


def test_a_full_memory_empties_itself(opened: OpenModel) -> None:
    """The lanes of the failed call hold nothing afterwards, so a smaller question needs no `forget`."""
    model, other = opened(n_lanes=2, n_ctx=256, **EXACT), opened(n_ctx=256, **EXACT)
    model.logits([asked(200)])
    with pytest.raises(MemoryFullError):
        model.logits([asked(200, 1, lane=1)])
    assert_same(model.logits([asked(100, 1, lane=1)]), fresh(other, [asked(100, 1)]))


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [(1, MemoryFullError, "full"), (2, EvaluationError, "aborted"), (-3, EvaluationError, "code -3")],
)
def test_return_codes_of_llama_decode(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, status: int, error: type[LlamaspecError], says: str
) -> None:
    model, other = opened(**EXACT), opened(**EXACT)
    model.logits([asked(20)])
    monkeypatch.setattr(lib, "llama_decode", lambda *_: status)
    with pytest.raises(error, match=says):
        model.logits([asked(25)])
    monkeypatch.undo()
    assert_same(model.logits([asked(24)]), fresh(other, [asked(24)]))


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        ([], "at least one ask"),
        ([asked(5, lane=2)], "lanes below 2"),
        ([asked(5, lane=-1)], "lanes below 2"),
        ([asked(5), asked(6)], "distinct lanes"),
        ([asked(5, n_scored=-1)], "cannot score -1 of 5"),
        ([asked(5, n_scored=6)], "cannot score 6 of 5"),
        ([asked(0)], "cannot score 1 of 0"),
        ([asked(20, n_scored=9)], "at most 8 positions"),
        ([asked(20, n_scored=4), asked(20, 1, lane=1, n_scored=5)], "at most 8 positions"),
        ([asked(513)], "513 tokens in a context of 512"),
        ([Ask(0, tokens(5, 288), 1)], "below 288"),
        ([Ask(0, tokens(5, -1), 1)], "below 288"),
        ([Ask(0, tokens(2**31 - 1), 1)], "below 288"),
    ],
)
def test_what_would_abort_the_process_is_refused(opened: OpenModel, asks: list[Ask], says: str) -> None:
    model, other = opened(n_lanes=2, max_scored=8, **EXACT), opened(**EXACT)
    model.logits([asked(10)])
    with pytest.raises(ValueError, match=says):
        model.logits(asks)
    assert_same(model.logits([asked(12)]), fresh(other, [asked(12)]))


def test_a_whole_context_can_be_asked(opened: OpenModel) -> None:
    model, other = opened(**EXACT), opened(**EXACT)
    assert model.context_size == 512
    assert_same(model.logits([asked(512, n_scored=2)]), fresh(other, [asked(512, n_scored=2)]))


def test_a_closed_model_refuses_everything(opened: OpenModel) -> None:
    """Each of these read freed memory once."""
    model = opened()
    vocabulary = model.vocabulary
    model.close()
    model.close()
    uses: list[Callable[[], object]] = [
        lambda: model.logits([asked(5)]),
        model.forget,
        lambda: model.description,
        lambda: model.metadata("general.name"),
        lambda: vocabulary.tokenize(b"text"),
        lambda: vocabulary.piece(70),
        lambda: vocabulary.is_end(71),
        lambda: vocabulary.text(72),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()


def test_description_and_metadata(opened: OpenModel) -> None:
    model = opened()
    assert "llama" in model.description
    assert model.metadata("general.name") == "tiny llama"
    assert model.metadata("no.such.key") is None
    assert (model.vocabulary_size, model.trained_context_size) == (288, 512)


def test_options_reach_the_context(opened: OpenModel) -> None:
    """A model trained on more than 4096 tokens gets 4096 unless told."""
    long = Recipe(n_context=8192)
    assert opened("llama", long).context_size == 4096
    assert opened("llama", long, n_ctx=1024).context_size == 1024
    assert opened("llama", n_ctx=1024).context_size == 1024
    assert opened().context_size == 512


def test_repacking_is_optional(opened: OpenModel) -> None:
    """Quantised weights, several positions at once: here some builds of llama.cpp crash; see test_files."""
    recipe = Recipe(dtype="q4_0")
    packed, plain = opened("llama", recipe, **EXACT), opened("llama", recipe, repack=False, **EXACT)
    answers = [model.logits([asked(40, n_scored=8)])[0] for model in (packed, plain)]
    assert np.corrcoef(answers[0].ravel(), answers[1].ravel())[0, 1] > 0.99


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="threads must be"):
        ModelOptions(threads=0)
