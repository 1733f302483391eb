"""Prompts in the prompt context: the same logits, and no token is processed twice."""

from __future__ import annotations

import numpy as np
import pytest

from forward_requests import EXACT, Count, RandomRows, assert_same, evaluate, fresh, request, text
from llamaspec import LlamaModel
from llamaspec.llama import prompt_processor, resources
from llamaspec.llama.prompt_processor import MIN_TOKENS, PART, PromptProcessor, Trial
from llamaspec.values import TARGET, ForwardRequest
from model_store import OpenModel
from tiny_models import Recipe

LONG = Recipe(n_context=2048)


@pytest.fixture(autouse=True)
def f32_counts_as_repacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that both contexts compute the same logits: kernels for quantized weights round differently."""
    monkeypatch.setattr("llamaspec.llama.prompt_processor.NEVER_REPACKED", frozenset())


@pytest.fixture
def model(opened: OpenModel) -> LlamaModel:
    made = opened("llama", LONG, **EXACT)
    processor_of(made).gain = 2.0
    return made


@pytest.fixture
def other(opened: OpenModel) -> LlamaModel:
    return opened("llama", LONG, prompt_context=False, **EXACT)


def processor_of(model: LlamaModel) -> PromptProcessor:
    assert model.prompt_processor is not None
    return model.prompt_processor


def test_a_long_prompt_is_processed_once(model: LlamaModel, other: LlamaModel, evaluated: Count) -> None:
    wanted = request(300)
    answer = evaluate(model, [(0, wanted)])[0]
    assert evaluated.taken() == 300
    assert_same(answer, fresh(other, wanted))
    assert model.cache_use()[0] == 300
    evaluated.taken()
    evaluate(model, [(0, request(302))])
    assert evaluated.taken() == 2


def test_a_conversation_uses_the_prompt_context_if_it_has_enough_new_tokens(
    model: LlamaModel, other: LlamaModel, evaluated: Count
) -> None:
    for number, (n, n_new) in enumerate(((200, 200), (230, 30), (400, 170), (700, 300))):
        answer = evaluate(model, [(number, request(n))])[number]
        assert evaluated.taken() == n_new
        assert_same(answer, fresh(other, request(n)))
        evaluated.taken()
        model.release(number)


@pytest.mark.parametrize(("n", "gain", "in_prompt_context"), [
    (MIN_TOKENS + 1, 2.0, True), (MIN_TOKENS, 2.0, False), (300, 1.05, False),
])  # fmt: skip
def test_the_number_of_new_tokens_and_the_measured_gain_decide(
    model: LlamaModel, n: int, gain: float, in_prompt_context: bool
) -> None:
    processor_of(model).gain = gain
    model.prepare([(0, request(n), 0)])
    assert model.can_share(0) != in_prompt_context


@pytest.mark.parametrize("options", [
    {"prompt_context": False}, {"repack": False}, {"heads": True},
])  # fmt: skip
def test_models_without_a_prompt_context(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    made = opened("llama", LONG, **options)
    assert made.prompt_processor is None
    monkeypatch.undo()
    assert opened("llama", LONG).prompt_processor is None  # f32 is not repacked


def test_without_room_for_the_prompt_context_the_main_one_is_used(
    model: LlamaModel, other: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "available_bytes", lambda: 0)
    answer = evaluate(model, [(0, request(300))])[0]
    assert_same(answer, fresh(other, request(300)))


def test_a_cancelled_prompt_is_not_processed_again(model: LlamaModel, evaluated: Count) -> None:
    model.prepare([(0, request(1000), 0)])
    model.evaluate([(0, request(512, n_logits=0))])
    model.release(0)
    evaluated.taken()
    evaluate(model, [(1, request(1000))])
    assert evaluated.taken() == 488


def test_all_parts_of_a_prompt_go_to_the_prompt_context(
    model: LlamaModel, other: LlamaModel, evaluated: Count
) -> None:
    """Requests come with 512 more tokens each: once, only the first went to the prompt context."""
    n_processed = 0
    for n in (512, 1024, 1100):
        model.prepare([(0, request(n, n_logits=0), 0)])
        n_processed += not model.can_share(0)
        evaluate(model, [(0, request(n, n_logits=0))])
    assert n_processed == 3
    assert evaluated.taken() == 1100
    assert_same(evaluate(model, [(0, request(1101))])[0], fresh(other, request(1101)))


def test_a_common_beginning_of_two_prompts_is_processed_once(model: LlamaModel, evaluated: Count) -> None:
    first, second = (np.append(text(600), text(100, seed)) for seed in (1, 2))
    evaluate(model, [(0, ForwardRequest(TARGET, first)), (1, ForwardRequest(TARGET, second))])
    assert evaluated.taken() == 600 + 2 * 100


def test_both_contexts_are_measured_on_the_first_long_prompt(
    opened: OpenModel, other: LlamaModel, evaluated: Count
) -> None:
    """No token is processed twice for it, and short prompts measure nothing."""
    made = opened("llama", LONG, **EXACT)
    evaluate(made, [(0, request(4 * PART))])
    made.release(0)
    assert processor_of(made).gain is None
    evaluated.taken()
    wanted = request(4 * PART + 40, 3)
    answer = evaluate(made, [(1, wanted)])[1]
    assert evaluated.taken() == wanted.n_tokens
    assert processor_of(made).gain is not None
    assert_same(answer, fresh(other, wanted))


def test_a_prompt_that_is_cancelled_during_the_measurement_measures_nothing(opened: OpenModel) -> None:
    made = opened("llama", LONG, **EXACT)
    made.prepare([(0, request(800), 0)])
    assert made.prompt_chunk == PART
    made.evaluate([(0, request(PART, n_logits=0))])
    made.release(0)
    assert made.prompt_chunk == made.batch_size
    evaluate(made, [(1, request(800, 1))])
    assert processor_of(made).gain is not None


def test_the_gain_is_a_ratio_of_speeds() -> None:
    trial = Trial(0, 10, seconds={False: 3.0, True: 2.0}, n_tokens={False: 256, True: 256})
    assert trial.gain == pytest.approx(1.5)
    trial.n_tokens[True] = 96  # a part was found in the cache
    assert trial.gain is None


@pytest.mark.parametrize("seed", range(2))
def test_random_requests(
    model: LlamaModel, other: LlamaModel, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Sequences join, verify drafts, leave and return; prompts with 8 new tokens go to the prompt context."""
    monkeypatch.setattr(prompt_processor, "MIN_TOKENS", 8)
    rows, n_answers = RandomRows(np.random.default_rng(seed), longest=90, n_sequences=4), 0
    for _ in range(150):
        for number in rows.leaving():
            model.release(number)
        batch = rows.batch()
        for number, answer in evaluate(model, batch).items():
            assert_same(answer, fresh(other, dict(batch)[number]))
            n_answers += 1
    assert n_answers > 150
