"""Calls of llama.cpp that fail, at any moment and with several rows: later answers are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from forward_requests import EXACT, MEMORIES, TOLERANCE, RandomRows, Rounds, assert_same, evaluate, fresh
from llamaspec.errors import EvaluationError, MemoryFullError
from model_store import OpenModel

FULL, BROKEN, NOTHING = 1, -3, 0
# What each answers where it fails; a memory of keys and values can always be cut.
EVERYWHERE = {
    "llama_decode": (FULL, BROKEN),
    "llama_state_seq_get_data": (NOTHING,),
    "llama_state_seq_set_data": (NOTHING,),
}
OF_STATES = {
    **EVERYWHERE,
    "llama_state_seq_get_data_ext": (NOTHING,),
    "llama_state_seq_set_data_ext": (NOTHING,),
    "llama_memory_seq_rm": (False,),
}
CHANCES = {"llama_decode": 0.06, "llama_memory_seq_rm": 0.15}  # a failed evaluation empties the cache
STATES = ("mamba", "jamba", "lfm2")


@dataclass
class Failures:
    """Calls that fail, by chance: before they did anything, or behind what they did."""

    rng: np.random.Generator
    armed: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def arrange(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        for name, answers in (OF_STATES if kind in STATES else EVERYWHERE).items():
            monkeypatch.setattr(lib, name, self._around(name, getattr(lib, name), answers))

    def _around(
        self, name: str, function: Callable[..., object], answers: tuple[object, ...]
    ) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            # Taking everything out cannot fail.
            if not self.armed or self.rng.random() > CHANCES.get(name, 0.4) or arguments[-3:] == (0, -1, -1):
                return function(*arguments)
            answer = answers[int(self.rng.integers(len(answers)))]
            if answer == BROKEN and self.rng.random() < 0.5:
                function(*arguments)
            self.counts[name] += 1
            return answer

        return call


@pytest.mark.parametrize("kind", MEMORIES)
def test_failures_among_several_rows_leave_later_answers_right(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, other = opened(kind, n_ctx=144, **EXACT), opened(kind, n_ctx=144, **EXACT)
    rows, failures = RandomRows(np.random.default_rng(21), 70), Failures(np.random.default_rng(22))
    failures.arrange(monkeypatch, kind)
    for _ in range(120 if kind not in STATES else 60):
        for row in rows.leaving():
            model.release(row)
        batch = rows.batch()
        failures.armed = True
        try:
            answers = evaluate(model, batch)
        except (EvaluationError, MemoryFullError):
            failures.armed = False
            answers = evaluate(model, batch)
        failures.armed = False
        for row, answer in answers.items():
            assert_same(answer, fresh(other, dict(batch)[row]), TOLERANCE[kind])
    assert failures.counts["llama_decode"] > 1, failures.counts
    if kind == "llama":  # cells are moved when the cache is full
        assert failures.counts["llama_state_seq_get_data"], failures.counts
        assert failures.counts["llama_state_seq_set_data"], failures.counts


@pytest.mark.parametrize("verifies", [False, True], ids=["draft", "target"])
@pytest.mark.parametrize("kind", STATES)
def test_failures_in_rounds_leave_later_answers_right(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, kind: str, verifies: bool
) -> None:
    """Snapshots that cannot be taken or put back only cost reading again."""
    model, other = opened(kind, max_scored=16, **EXACT), opened(kind, max_scored=16, **EXACT)
    rounds, failures = Rounds(np.random.default_rng(23), verifies), Failures(np.random.default_rng(25))
    failures.arrange(monkeypatch, kind)
    for _ in range(25):
        for wanted in rounds.requests():
            failures.armed = True
            try:
                answer = model.forward(wanted)
            except (EvaluationError, MemoryFullError):
                continue  # the next request comes without this one having been answered
            finally:
                failures.armed = False
            assert_same(answer, fresh(other, wanted), TOLERANCE[kind])
    assert failures.counts["llama_decode"], failures.counts
    assert failures.counts.total() > 5
