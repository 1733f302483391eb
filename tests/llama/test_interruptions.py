"""Ctrl-C or an abort at any moment leaves later answers right."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from forward_requests import (
    EXACT,
    MEMORIES,
    TOLERANCE,
    RandomRows,
    Rounds,
    assert_same,
    evaluate,
    fresh,
    request,
)
from llamaspec import LlamaModel
from llamaspec.errors import EvaluationAbortedError
from model_store import OpenModel

INTERRUPTIBLE = (
    "llama_decode",
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
    "llama_memory_clear",
    "llama_state_seq_get_size",
    "llama_state_seq_get_data",
    "llama_state_seq_set_data",
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
    """Ctrl-C may come before and after every call of llama.cpp; the cache must know what it holds."""
    model, other = opened(kind, n_ctx=256, **EXACT), opened(kind, n_ctx=256, **EXACT)
    rows = RandomRows(np.random.default_rng(11), 70)
    interrupts = Interrupts(np.random.default_rng(5), 0.15, after)
    interrupts.arrange(monkeypatch)
    for _ in range(120 if kind in ("llama", "gemma3") else 60):
        interrupts.armed = True
        for row in rows.leaving():
            model.release(row)
        batch = rows.batch()
        try:
            answers = evaluate(model, batch)
        except KeyboardInterrupt:
            interrupts.armed = False
            batch = rows.batch()
            answers = evaluate(model, batch)
        interrupts.armed = False
        for row, answer in answers.items():
            assert_same(answer, fresh(other, dict(batch)[row]), TOLERANCE[kind])
    assert interrupts.n > 20


OWN_CODE = (
    "_cache.py",
    "cells.py",
    "recurrent.py",
    "context.py",
    "model.py",
    "batch.py",
)


@dataclass
class AnyLine:
    """Ctrl-C before any line of the cache's own code, by chance: as a signal handler raises it."""

    rng: np.random.Generator
    mean_lines: int
    n: int = 0
    left: int = 0

    @contextmanager
    def armed(self) -> Iterator[None]:
        self.left = int(self.rng.integers(1, 2 * self.mean_lines))
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.endswith(OWN_CODE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self.left -= 1
        if self.left == 0:
            self.n += 1
            raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("kind", MEMORIES)
def test_an_interrupt_at_any_line_leaves_later_answers_right(opened: OpenModel, kind: str) -> None:
    model, other = opened(kind, n_ctx=256, **EXACT), opened(kind, n_ctx=256, **EXACT)
    rows = RandomRows(np.random.default_rng(13), 70)
    interrupts = AnyLine(np.random.default_rng(7), 250)
    for _ in range(150 if kind in ("llama", "gemma3") else 60):
        leaving, batch = rows.leaving(), rows.batch()
        try:
            with interrupts.armed():
                for row in leaving:
                    model.release(row)
                answers = evaluate(model, batch)
        except KeyboardInterrupt:
            for row in leaving:
                model.release(row)
            batch = rows.batch()
            answers = evaluate(model, batch)
        for row, answer in answers.items():
            assert_same(answer, fresh(other, dict(batch)[row]), TOLERANCE[kind])
    assert interrupts.n > 20


@pytest.mark.parametrize("verifies", [False, True], ids=["draft", "target"])
@pytest.mark.parametrize("kind", ["mamba", "jamba", "lfm2"])
@pytest.mark.parametrize("after", [False, True], ids=["before it ran", "after it ran"])
def test_interrupted_rounds_leave_later_answers_right(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, kind: str, after: bool, verifies: bool
) -> None:
    model, other = opened(kind, max_scored=16, **EXACT), opened(kind, max_scored=16, **EXACT)
    rounds = Rounds(np.random.default_rng(3), verifies)
    interrupts = Interrupts(np.random.default_rng(4), 0.15, after)
    interrupts.arrange(monkeypatch)
    for _ in range(40):
        for wanted in rounds.requests():
            interrupts.armed = True
            try:
                answer = model.forward(wanted)
            except KeyboardInterrupt:
                continue  # the next request comes without this one having been answered
            interrupts.armed = False
            assert_same(answer, fresh(other, wanted), TOLERANCE[kind])
    assert interrupts.n > 5


@pytest.mark.parametrize("kind", MEMORIES)
def test_forgetting_may_be_interrupted(opened: OpenModel, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model, other = opened(kind, **EXACT), opened(kind, **EXACT)
    model.forward(request(20))
    clear = lib.llama_memory_clear

    def interrupted(*arguments: object) -> None:
        clear(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(lib, "llama_memory_clear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.forget()
    monkeypatch.undo()
    assert_same(model.forward(request(21)), fresh(other, request(21)), TOLERANCE[kind])


@dataclass
class Aborts:
    """Abort evaluations by chance: llama.cpp stops at the first node of its graph."""

    model: LlamaModel
    rng: np.random.Generator
    n: int = 0
    armed: bool = False

    def arrange(self, monkeypatch: pytest.MonkeyPatch) -> None:
        decode = lib.llama_decode

        def aborted(*arguments: object) -> object:
            if self.armed and self.rng.random() < 0.4:
                self.n += 1
                self.model.abort()
            return decode(*arguments)

        monkeypatch.setattr(lib, "llama_decode", aborted)


@pytest.mark.parametrize("kind", MEMORIES)
def test_aborted_evaluations_leave_later_answers_right(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What llama.cpp really leaves behind when it stops; nothing that was cached before is lost."""
    model, other = opened(kind, n_ctx=256, **EXACT), opened(kind, n_ctx=256, **EXACT)
    rows = RandomRows(np.random.default_rng(12), 70)
    aborts = Aborts(model, np.random.default_rng(6))
    aborts.arrange(monkeypatch)
    for _ in range(120 if kind in ("llama", "gemma3") else 60):
        for row in rows.leaving():
            model.release(row)
        batch = rows.batch()
        aborts.armed = True
        try:
            answers = evaluate(model, batch)
        except EvaluationAbortedError:
            aborts.armed = False
            answers = evaluate(model, batch)
        aborts.armed = False
        for row, answer in answers.items():
            assert_same(answer, fresh(other, dict(batch)[row]), TOLERANCE[kind])
    assert aborts.n > 20
