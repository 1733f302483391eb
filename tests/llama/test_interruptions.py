"""Ctrl-C at any moment leaves later answers right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from asks import EXACT, LANES, MEMORIES, TOLERANCE, RandomCalls, Rounds, asked, assert_same, fresh
from model_store import OpenModel

INTERRUPTIBLE = (
    "llama_decode",
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
    "llama_memory_clear",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_set_data_ext",
)


@dataclass
class Interrupts:
    """Ctrl-C before or after calls of llama.cpp, by chance."""

    rng: np.random.Generator
    chance: float
    after: bool
    armed: bool = False
    n: int = 0

    def arrange(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in INTERRUPTIBLE:
            monkeypatch.setattr(lib, name, self._around(getattr(lib, name)))

    def _around(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            interrupt = self.armed and self.rng.random() < self.chance
            result = function(*arguments) if self.after or not interrupt else None
            if interrupt:
                self.n += 1
                raise KeyboardInterrupt
            return result

        return call


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("after", [False, True], ids=["before it ran", "after it ran"])
def test_interrupted_evaluations_leave_later_answers_right(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, kind: str, after: bool
) -> None:
    """Ctrl-C may come before and after every call of llama.cpp; the memory must know what it holds."""
    model, other = opened(kind, n_lanes=LANES, **EXACT), opened(kind, **EXACT)
    calls = RandomCalls(np.random.default_rng(11), longest=40)
    interrupts = Interrupts(np.random.default_rng(5), 0.25, after)
    interrupts.arrange(monkeypatch)
    for _ in range(60):
        interrupts.armed = True
        asks = calls.call()
        try:
            answers = model.logits(asks)
        except KeyboardInterrupt:
            interrupts.armed = False
            asks = calls.call()
            answers = model.logits(asks)
        interrupts.armed = False
        assert_same(answers, fresh(other, asks), TOLERANCE[kind])
    assert interrupts.n > 20


@pytest.mark.parametrize("judges", [False, True], ids=["draft", "target"])
@pytest.mark.parametrize("kind", ["mamba", "jamba", "lfm2"])
@pytest.mark.parametrize("after", [False, True], ids=["before it ran", "after it ran"])
def test_interrupted_rounds_leave_later_answers_right(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, kind: str, after: bool, judges: bool
) -> None:
    model, other = opened(kind, max_scored=16, **EXACT), opened(kind, max_scored=16, **EXACT)
    rounds = Rounds(np.random.default_rng(3), judges)
    interrupts = Interrupts(np.random.default_rng(4), 0.15, after)
    interrupts.arrange(monkeypatch)
    for _ in range(40):
        for ask in rounds.asks():
            interrupts.armed = True
            try:
                answers = model.logits([ask])
            except KeyboardInterrupt:
                continue  # the next ask comes without this one having been answered
            interrupts.armed = False
            assert_same(answers, fresh(other, [ask]), TOLERANCE[kind])
    assert interrupts.n > 5


def test_forgetting_may_be_interrupted(opened: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = opened(**EXACT), opened(**EXACT)
    model.logits([asked(20)])
    clear = lib.llama_memory_clear

    def interrupted(*arguments: object) -> None:
        clear(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(lib, "llama_memory_clear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.forget()
    monkeypatch.undo()
    assert_same(model.logits([asked(21)]), fresh(other, [asked(21)]))
