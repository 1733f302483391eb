"""Exceptions, aborts and failing calls of llama.cpp at any moment: later answers are right."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from forward_requests import EXACT, MEMORIES, TOLERANCE, RandomRows, Rounds, assert_same, evaluate, fresh
from llamaspec import LlamaModel
from llamaspec.errors import EvaluationAbortedError, EvaluationError, MemoryFullError
from model_store import OpenModel

STATES = ("mamba", "jamba", "lfm2")
CALLS = (
    "llama_decode",
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
    "llama_memory_clear",
    "llama_state_seq_get_size_ext",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_set_data_ext",
)
FULL, BROKEN, NOTHING = 1, -3, 0
# Return value of each call if it fails. Keys and values can always be cut.
FAILURES = {
    "llama_decode": (FULL, BROKEN),
    "llama_state_seq_get_data_ext": (NOTHING,),
    "llama_state_seq_set_data_ext": (NOTHING,),
}
FAILURES_OF_STATES = {**FAILURES, "llama_memory_seq_rm": (False,)}
CHANCES = {"llama_decode": 0.06, "llama_memory_seq_rm": 0.15}  # a failed evaluation empties the cache


@dataclass
class Faults:
    """Random faults while armed; `counts` says how many of each kind."""

    rng: np.random.Generator
    is_armed: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def armed(self) -> Iterator[None]:
        self.is_armed = True
        try:
            yield
        finally:
            self.is_armed = False

    def happens(self, name: str, chance: float) -> bool:
        if not self.is_armed or self.rng.random() > chance:
            return False
        self.counts[name] += 1
        return True

    def interrupt(self, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
        """Raise an exception before or after calls of llama.cpp."""

        def around(name: str, function: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object) -> object:
                is_interrupted = self.happens(name, 0.15)
                result = function(*arguments) if after or not is_interrupted else None
                if is_interrupted:
                    raise KeyboardInterrupt
                return result

            return call

        for name in CALLS:
            monkeypatch.setattr(lib, name, around(name, getattr(lib, name)))

    def fail(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        """Make calls of llama.cpp fail, before or after they have done their work."""

        def around(name: str, function: Callable[..., object], answers: tuple[object, ...]) -> Any:
            def call(*arguments: object) -> object:
                # Removing everything cannot fail.
                if arguments[-3:] == (0, -1, -1) or not self.happens(name, CHANCES.get(name, 0.4)):
                    return function(*arguments)
                answer = answers[int(self.rng.integers(len(answers)))]
                if answer == BROKEN and self.rng.random() < 0.5:
                    function(*arguments)
                return answer

            return call

        for name, answers in (FAILURES_OF_STATES if kind in STATES else FAILURES).items():
            monkeypatch.setattr(lib, name, around(name, getattr(lib, name), answers))

    def abort(self, monkeypatch: pytest.MonkeyPatch, model: LlamaModel) -> None:
        """Make llama.cpp stop at the first node of its graph."""
        decode = lib.llama_decode

        def call(*arguments: object) -> object:
            if self.happens("llama_decode", 0.4):
                model.abort()
            return decode(*arguments)

        monkeypatch.setattr(lib, "llama_decode", call)


@dataclass
class AnyLine(Faults):
    """An exception before a random line of the cache's code, as a signal handler raises it."""

    left: int = 0

    @contextmanager
    def armed(self) -> Iterator[None]:
        self.left = int(self.rng.integers(1, 500))
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        own = ("_cache.py", "_cells.py", "/cells.py", "recurrent.py", "context.py", "model.py", "batch.py")
        return self._line if frame.f_code.co_filename.endswith(own) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self.left -= 1
        if self.left == 0:
            self.counts["line"] += 1
            raise KeyboardInterrupt
        return self._line


def check_rows(model: LlamaModel, other: LlamaModel, kind: str, faults: Faults, n: int, seed: int) -> None:
    """Several sequences with random requests; after a fault, each answer is that of a fresh model."""
    rows = RandomRows(np.random.default_rng(seed), 70)
    for _ in range(n):
        leaving, batch = rows.leaving(), rows.batch()
        try:
            with faults.armed():
                for number in leaving:
                    model.release(number)
                answers = evaluate(model, batch)
        except (KeyboardInterrupt, EvaluationAbortedError, EvaluationError, MemoryFullError) as error:
            for number in leaving:
                model.release(number)
            if isinstance(error, KeyboardInterrupt):
                batch = rows.batch()
            answers = evaluate(model, batch)
        for number, answer in answers.items():
            assert_same(answer, fresh(other, dict(batch)[number]), TOLERANCE[kind])


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("fault", ["before a call", "after a call", "any line", "aborts", "failures"])
def test_faults_among_several_sequences_leave_later_answers_right(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, kind: str, fault: str
) -> None:
    model, other = opened(kind, n_ctx=256, **EXACT), opened(kind, n_ctx=256, **EXACT)
    faults = (AnyLine if fault == "any line" else Faults)(np.random.default_rng(5))
    if fault == "aborts":
        faults.abort(monkeypatch, model)
    elif fault == "failures":
        faults.fail(monkeypatch, kind)
    elif fault != "any line":
        faults.interrupt(monkeypatch, after=fault == "after a call")
    check_rows(model, other, kind, faults, 60 if kind in STATES else 120, seed=11)
    assert faults.counts.total() > (3 if fault == "failures" else 20), faults.counts
    if fault == "failures" and kind == "llama":  # cells are moved when the cache is full
        assert faults.counts["llama_state_seq_get_data_ext"], faults.counts
        assert faults.counts["llama_state_seq_set_data_ext"], faults.counts


@pytest.mark.parametrize("verifies", [False, True], ids=["draft", "target"])
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("fault", ["before a call", "after a call", "failures"])
def test_faults_in_rounds_leave_later_answers_right(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, kind: str, fault: str, verifies: bool
) -> None:
    """If checkpoints cannot be taken or restored, tokens are evaluated again."""
    model, other = opened(kind, max_scored=16, **EXACT), opened(kind, max_scored=16, **EXACT)
    rounds, faults = Rounds(np.random.default_rng(23), verifies), Faults(np.random.default_rng(25))
    if fault == "failures":
        faults.fail(monkeypatch, kind)
    else:
        faults.interrupt(monkeypatch, after=fault == "after a call")
    for _ in range(25):
        for wanted in rounds.requests():
            try:
                with faults.armed():
                    answer = model.forward(wanted)
            except (KeyboardInterrupt, EvaluationError, MemoryFullError):
                continue  # the next request comes before this one is answered
            assert_same(answer, fresh(other, wanted), TOLERANCE[kind])
    assert faults.counts["llama_decode"], faults.counts
