"""Signals at random moments, as scripts/random_signals.py sends them; what they leave at a terminal."""

from __future__ import annotations

import os
import random
import signal
import termios
from pathlib import Path
from typing import Any

import pytest

from command import PROMPT, naming
from llamaspec.cli.signals import leave_the_terminal_as_found
from patience import until, until_it_waits
from random_signals import SIGNALS, Terminal, environment, try_one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    return tmp_path


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_at_random_moments(models: list[Path], folder: Path, number: signal.Signals) -> None:
    options = ["-n", "300", "--timeline", "{folder}/timeline.html"]
    command = ["generate", *map(str, naming(models)), PROMPT, *options]
    delay = random.Random(int(number)).random()
    _, faults = try_one("generate", command, number, delay, folder)
    assert faults == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_chat_that_is_ended_leaves_the_terminal_as_it_was(
    talker: list[Path], folder: Path, number: signal.Signals
) -> None:
    """Line editing has it without echo; a shell of the time before would have been left so."""
    terminal = Terminal(["chat", *map(str, naming(talker))], environment(folder))
    until(lambda: termios.tcgetattr(terminal._slave) != terminal._before)
    until_it_waits(terminal.process.pid)
    terminal.process.send_signal(number)
    assert terminal.ended() == -number
    assert terminal.faults() == []


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_terminal_gets_back_what_it_had_unless_it_is_another_job_s(
    monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """SIGHUP is ignored here, as under nohup, and stays so."""
    done: list[object] = []
    handlers: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_IGN}
    monkeypatch.setattr(signal, "getsignal", handlers.get)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(os, "isatty", lambda fd: fd != 1)
    monkeypatch.setattr(termios, "tcgetattr", lambda fd: f"as {fd} was")
    monkeypatch.setattr(termios, "tcsetattr", lambda *found: done.append(found))
    monkeypatch.setattr(os, "tcgetpgrp", lambda _fd: os.getpgrp() + (not is_ours))
    monkeypatch.setattr(os, "write", lambda fd, _said: done.append(fd))
    monkeypatch.setattr(os, "kill", lambda *sent: done.append(sent))
    monkeypatch.setenv("TERM", "xterm")
    leave_the_terminal_as_found()
    assert handlers[signal.SIGHUP] == signal.SIG_IGN
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert handlers[signal.SIGTERM] == signal.SIG_DFL
    put_back = [(0, termios.TCSANOW, "as 0 was"), 2] if is_ours else []
    assert done == [*put_back, (os.getpid(), signal.SIGTERM)]
