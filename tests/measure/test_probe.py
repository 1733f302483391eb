"""The probe, on a model with invented costs and rounding and a clock that only the model advances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest

from fakes import Clock
from llamaspec import ModelOptions, Pair
from llamaspec.llama import recurrent
from llamaspec.llama.cells import put_state
from llamaspec.measure.probe import (
    FULL,
    QUICK,
    Effort,
    Probe,
    compare_widths,
    measure,
)
from llamaspec.measure.turns import Spread
from llamaspec.values import NO_TOKENS, ForwardRequest, Logits, TokenArray
from model_store import OpenModel

KERNEL_CHANGE = 256  # cached tokens; beyond this, single positions are rounded differently


class Letters:
    """A vocabulary of bytes."""

    def tokenize(self, text: bytes) -> TokenArray:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int32)


@dataclass
class SlowModel:
    """Width w takes `first` + `more` * (w - 1) seconds of the invented clock; dips at multiples of four."""

    first: float = 0.016
    more: float = 0.005
    context_size: int = 4096
    n_cells: int | None = None
    rounds_deep_batches: bool = False
    now: float = 0.0
    description: str = "slow"
    keeps_states: bool = False
    is_disturbed: bool = False
    vocabulary_size: int = 256
    vocabulary: Letters = field(default_factory=Letters)
    options: ModelOptions = field(default_factory=ModelOptions)
    batch_size: int = 64
    max_scored: int = 65
    can_share: bool = True
    max_chunked_prefill: int = 0
    held: TokenArray = field(default_factory=lambda: NO_TOKENS)
    known: int = 0

    def n_cached(self, tokens: TokenArray) -> int:
        return 0

    def clock(self) -> float:
        return self.now

    def seconds(self, width: int) -> float:
        return (self.first + self.more * (width - 1)) * (0.8 if width % 4 == 0 else 1.0)

    def attended(self, n_tokens: int) -> float:
        return n_tokens

    def forget(self) -> None:
        self.held = NO_TOKENS

    def release(self, row: int) -> None:
        pass

    def abort(self) -> None:
        pass

    def recover(self) -> str | None:
        return None

    def prepare(self, batch: Sequence[tuple[int, ForwardRequest, int]]) -> list[int]:
        ((_, request, _),) = batch
        most = len(request.tokens) - request.n_logits
        self.known = 0
        while self.known < min(most, len(self.held)) and self.held[self.known] == request.tokens[self.known]:
            self.known += 1
        return [self.known]

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        ((_, request),) = batch
        tokens = np.concatenate([request.tokens, request.draft])
        n_new = len(tokens) - self.known + n_padding
        assert n_new <= self.batch_size
        self.held = tokens
        self.now += self.seconds(n_new)
        rows = np.zeros((request.n_scored, self.vocabulary_size), dtype=np.float32)
        if self.rounds_deep_batches and n_new > 1 and len(tokens) > KERNEL_CHANGE:
            rows += 0.1
        return [rows]


def pair_of(model: SlowModel, draft: SlowModel | None = None) -> Pair:
    def clock() -> float:
        return model.now + (draft.now if draft is not None else 0.0)

    if draft is not None:
        draft.vocabulary = model.vocabulary
    return Pair(cast(Any, model), cast(Any, draft), clock=clock)


def probe(model: SlowModel, effort: Effort, draft: SlowModel | None = None) -> Probe:
    return measure(pair_of(model, draft), effort)


@pytest.mark.parametrize(("effort", "limit"), [(QUICK, 20.0), (FULL, 120.0)])
@pytest.mark.parametrize("first", [0.002, 0.016, 0.05, 0.2])
def test_it_stays_within_its_time(effort: Effort, limit: float, first: float) -> None:
    model = SlowModel(first, first / 3)
    found = probe(model, effort)
    assert model.now < limit
    assert {1, 2, 3, 4} <= {row.width for row in found.widths}


def test_nothing_is_left_out_for_an_ordinary_model() -> None:
    for effort in (QUICK, FULL):
        model = SlowModel()
        found = probe(model, effort)
        assert found.depths == effort.depths
        assert tuple(row.width for row in found.widths) == effort.widths
        assert all(
            t.median == pytest.approx(model.seconds(row.width)) for row in found.widths for t in row.timings
        )


def test_without_the_long_context_no_width_is_called_exact() -> None:
    found = probe(SlowModel(0.5, 0.2), QUICK)
    assert found.left_out_depths == (320,)
    assert found.identical_widths == {1}


@pytest.mark.parametrize("first", [0.1, 0.2, 0.3])
def test_a_left_out_context_leaves_its_time_to_the_other(first: float) -> None:
    """A target of 7 billion parameters was measured for half of the time only, once at each of 8 widths."""
    model, fractions = SlowModel(first, first / 3), list[float]()
    found = measure(pair_of(model), FULL, fractions.append)
    assert found.left_out_depths == (1024,)
    assert model.now > 0.8 * FULL.seconds
    assert {*range(1, 18), 24} <= {row.width for row in found.widths}
    assert fractions == sorted(fractions)


def test_widths_must_be_identical_in_long_contexts_too() -> None:
    """On a CPU, llama.cpp uses another kernel for single positions if the KV cache holds more than 256.

    Compared after 64 tokens only, every width seemed exact, but --exact was not.
    """
    found = probe(SlowModel(rounds_deep_batches=True), QUICK)
    assert found.identical_widths == {1}
    assert found.widths[1].logit_difference == pytest.approx(0.1)
    assert probe(SlowModel(), QUICK).identical_widths == set(QUICK.widths)


def test_the_draft_is_timed_by_its_own_steps() -> None:
    model = SlowModel()
    draft = SlowModel(0.002, 0.0005, vocabulary_size=100)  # it lacks most letters
    found = probe(model, QUICK, draft)
    assert found.draft_step is not None
    assert found.draft_step.median == pytest.approx(draft.seconds(1))


@pytest.mark.parametrize("kind", ["llama", "jamba", "qwen35"])
def test_an_evaluation_is_timed_as_in_decoding(
    opened: OpenModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own positions, and directly after another: a state was restored before, and 78 ms were 126."""
    model, clock, restored = opened(kind), Clock(), list[int]()
    evaluate = model.evaluate

    def put(*state: Any) -> bool:
        restored.append(1)
        return put_state(*state)

    def counted(batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        for number, request in batch:
            cached = model.cached(number)
            assert cached is not None
            clock.passes(request.n_tokens - cached.n + 1_000 * len(restored))
        restored.clear()
        return evaluate(batch, n_padding)

    monkeypatch.setattr(recurrent, "put_state", put)
    monkeypatch.setattr(model, "evaluate", counted)
    with Pair(model, clock=clock) as pair:
        found = measure(pair, replace(QUICK, depths=(24, 60), most_turns=3, seconds=1e9))
    assert {row.width: {*row.timings} for row in found.widths} == {
        width: {Spread(width, width, width)} for width in QUICK.widths
    }


def test_small_contexts_shrink_widths_and_depths() -> None:
    found = probe(SlowModel(context_size=40), FULL)
    assert found.depths == (23,)
    assert max(row.width for row in found.widths) <= 20


def test_every_position_is_compared_if_there_is_time() -> None:
    """After 240 tokens only the last positions differ; the last two are not a whole batch of width 3."""
    model, tokens = SlowModel(rounds_deep_batches=True), np.arange(260, dtype=np.int32) % 256
    pair, widths = pair_of(model), (1, 2, 16, 3)
    found = pair.run(compare_widths(tokens, 242, widths))
    assert [found[width] for width in widths] == pytest.approx([0.0, 0.1, 0.1, 0.1])
    hurried = pair.run(compare_widths(tokens, 242, widths, lambda: 1.0))
    assert hurried == {1: 0.0, 2: 0.0}
