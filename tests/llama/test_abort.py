"""The flag that signals set: what other code wants woken is put back, whatever comes in between."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from llamaspec.llama.abort import AbortFlag
from llamaspec.llama.runtime import raising_callbacks


@pytest.fixture
def woken() -> Iterator[int]:
    """A descriptor that other code wants woken, as asyncio does."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    yield writer
    signal.set_wakeup_fd(-1)
    os.close(reader)
    os.close(writer)


def current() -> int:
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    return found


def test_what_was_there_comes_back(woken: int) -> None:
    flag = AbortFlag()
    with flag.armed():
        assert current() != woken
    assert current() == woken


def test_a_second_ctrl_c_at_the_end(woken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept the end from running, and signals went to the flag of a context for ever."""
    flag, other, set_wakeup_fd = AbortFlag(), AbortFlag(), signal.set_wakeup_fd

    def interrupted(*_arguments: object, **_settings: object) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), flag.armed():
        monkeypatch.setattr(signal, "set_wakeup_fd", interrupted)
    monkeypatch.setattr(signal, "set_wakeup_fd", set_wakeup_fd)
    assert current() != woken  # as it was left
    with other.armed():
        pass
    assert current() == woken


def test_a_flag_that_goes_takes_its_descriptor_along(woken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, set_wakeup_fd = AbortFlag(), signal.set_wakeup_fd

    def interrupted(*_arguments: object, **_settings: object) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), flag.armed():
        monkeypatch.setattr(signal, "set_wakeup_fd", interrupted)
    monkeypatch.setattr(signal, "set_wakeup_fd", set_wakeup_fd)
    del flag
    assert current() == woken


def test_what_is_raised_in_a_callback_is_raised_behind_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that: what else nobody can be told of goes where it always goes, and afterwards all does."""
    shown: list[object] = []
    usual = shown.append
    monkeypatch.setattr(sys, "unraisablehook", usual)
    in_a_callback = SimpleNamespace(exc_value=KeyError("x"), err_msg="ignored on calling ctypes callback")
    elsewhere = SimpleNamespace(exc_value=KeyError("y"), err_msg="ignored in")
    with pytest.raises(KeyError, match="x"), raising_callbacks():  # noqa: PT012
        sys.unraisablehook(elsewhere)
        sys.unraisablehook(in_a_callback)
    assert shown == [elsewhere]
    assert sys.unraisablehook is usual
