"""llama.cpp in this process: what is raised in callbacks, the reasons of failures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from llama_cpp import llama_cpp as lib

from forward_requests import request
from llamaspec import EvaluationError
from llamaspec.llama import runtime
from model_store import OpenModel
from patience import PATIENCE


def in_a_callback(name: str) -> Any:
    """What ctypes tells the hook when a callback raises KeyError(name)."""
    return SimpleNamespace(exc_value=KeyError(name), err_msg="ignored on calling ctypes callback")


def test_what_is_raised_in_a_callback_is_raised_behind_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that: what else nobody can be told of goes where it always goes, and afterwards all does."""
    shown: list[object] = []
    usual = shown.append
    monkeypatch.setattr(sys, "unraisablehook", usual)
    elsewhere = SimpleNamespace(exc_value=KeyError("y"), err_msg="ignored in")
    with pytest.raises(KeyError, match="x"), runtime.raising_callbacks():  # noqa: PT012
        sys.unraisablehook(elsewhere)
        sys.unraisablehook(in_a_callback("x"))
    assert shown == [elsewhere]
    assert sys.unraisablehook is usual


def test_blocks_that_overlap_in_two_threads_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models were loaded at once, and the one that ended last put the other's dead hook back.

    From then on, what any callback of the process raised was lost.
    """
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    blocks = {name: runtime.raising_callbacks() for name in ("first", "second")}

    def leave(name: str) -> None:
        sys.unraisablehook(in_a_callback(name))
        blocks[name].__exit__(None, None, None)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
        threads = {"first": one, "second": another}
        for name in blocks:
            threads[name].submit(blocks[name].__enter__).result(PATIENCE)
        for name in blocks:
            with pytest.raises(KeyError, match=name):
                threads[name].submit(leave, name).result(PATIENCE)
    assert shown == []
    later = in_a_callback("later")
    sys.unraisablehook(later)
    assert shown == [later]


def test_a_block_inside_another_gets_its_own() -> None:
    usual = sys.unraisablehook
    with pytest.raises(KeyError, match="outer"), runtime.raising_callbacks():  # noqa: PT012
        with pytest.raises(KeyError, match="inner"), runtime.raising_callbacks():
            sys.unraisablehook(in_a_callback("inner"))
        sys.unraisablehook(in_a_callback("outer"))
    assert sys.unraisablehook is usual


def _call(function: Callable[[Any], object], argument: object) -> None:
    function(argument)


def test_a_hook_that_somebody_sets_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook often calls the one before it: ours may be called after the block, and must not call itself."""
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    for _ in range(2):
        with runtime.raising_callbacks():
            after = sys.unraisablehook = partial(_call, sys.unraisablehook)
        assert sys.unraisablehook is after
    error = in_a_callback("x")
    sys.unraisablehook(error)
    assert shown == [error]


def test_a_failure_is_not_explained_by_an_older_one(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, the oldest of the last eight errors was the reason, whatever it belonged to."""
    model = opened()
    runtime.log.callback(4, b"an error of long ago\n", None)

    def fails(*_: object) -> int:
        runtime.log.callback(4, b"the cause\n", None)
        runtime.log.callback(4, b"its consequence\n", None)
        return -3

    monkeypatch.setattr(lib, "llama_decode", fails)
    with pytest.raises(EvaluationError, match=r"\(code -3\): the cause$"):
        model.forward(request(5))
