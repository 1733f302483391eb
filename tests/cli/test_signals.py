"""Signals at random moments, as scripts/random_signals.py sends them; what they leave at a terminal."""

from __future__ import annotations

import random
import signal
import termios
from pathlib import Path

import pytest

from command import PROMPT, naming
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
