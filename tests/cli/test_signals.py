"""After a signal at a random moment, the terminal is as before, and there is no traceback."""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pexpect
import pytest

from command import PROMPT, environment, naming
from patience import PATIENCE, until, until_it_waits

# Writes a mark when llamaspec's own code begins: before that, Python itself answers a signal.
START = """
import os, sys
def started(event, arguments):
    if event == "import" and arguments[0] == "llamaspec.cli.main":
        os.write(1, b"started")
sys.addaudithook(started)
from llamaspec.__main__ import main
main()
"""
SIGNALS = {signal.SIGINT: {0, 130, -2}, signal.SIGTERM: {0, -15}, signal.SIGHUP: {0, -1}, signal.SIGPIPE: {0}}


def at_terminal(*arguments: str | Path, program: str = START) -> pexpect.spawn[bytes]:
    """A command at a terminal of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    child = pexpect.spawn(command[0], command[1:], env=environment({"TERM": "xterm"}), timeout=PATIENCE)
    child.expect_exact("started")
    return child


@pytest.fixture(scope="module")
def usual() -> list[Any]:
    """Return the settings of a new terminal."""
    master, terminal = pty.openpty()
    found = termios.tcgetattr(terminal)
    os.close(master)
    os.close(terminal)
    return found


def ended(child: pexpect.spawn[bytes], usual: list[Any]) -> int:
    """Wait for the command, check that its terminal is as before, and return the exit code."""
    child.expect(pexpect.EOF)
    shown: bytes = child.before
    assert termios.tcgetattr(child.child_fd) == usual
    child.close()
    for trace in (b"Traceback", b"Exception ignored", b"internal error", b"Fatal Python"):
        assert trace not in shown
    assert shown.rfind(b"\x1b[?25l") <= shown.rfind(b"\x1b[?25h"), "the cursor is hidden"
    assert shown.rfind(b"\x1b[?2004h") <= shown.rfind(b"\x1b[?2004l"), "pasting is bracketed"
    return int(child.exitstatus if child.signalstatus is None else -child.signalstatus)


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_at_random_moments(
    models: list[Path], tmp_path: Path, usual: list[Any], number: signal.Signals
) -> None:
    timeline = tmp_path / "timeline.html"
    child = at_terminal("generate", *naming(models), PROMPT, "-n", "300", "--timeline", timeline)
    time.sleep(random.Random(int(number)).random())
    child.kill(number)
    assert ended(child, usual) in SIGNALS[number]
    assert not timeline.exists() or timeline.read_text().rstrip().endswith("</html>")


EARLY = START.replace("llamaspec.cli.main", "llamaspec.cli.signals")  # the first that it imports


@pytest.mark.slow
def test_two_interrupts_at_the_start_leave_no_traceback() -> None:
    """The second one found Python cleaning up after the first: 1 of 86 printed a traceback."""
    chance = random.Random(0)
    for _ in range(12):
        command = [sys.executable, "-c", EARLY, "generate", "-h"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
        assert child.stdout is not None
        os.read(child.stdout.fileno(), 7)
        for seconds in (chance.random() * 0.3, chance.random() * 0.005):
            time.sleep(seconds)
            child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=PATIENCE)
        assert (child.returncode in (0, 130), stderr) == (True, b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_chat_that_is_ended_leaves_the_terminal_as_it_was(
    talker: list[Path], usual: list[Any], number: signal.Signals
) -> None:
    """Line editing turns echo off, and the next shell would not show what is typed."""
    child = at_terminal("chat", *naming(talker))
    until(lambda: termios.tcgetattr(child.child_fd) != usual)
    until_it_waits(child.pid)
    child.kill(number)
    assert ended(child, usual) == -number


# The signal arrives in another thread, so that it does not wake the main thread, as if it had arrived just
# before that waits for a key.
UNSEEN = """
import signal, sys, termios, threading, time
usual = termios.tcgetattr(0)
def send():
    while termios.tcgetattr(0) == usual:
        time.sleep(.01)
    time.sleep(.3)
    signal.pthread_kill(threading.get_ident(), NUMBER)
threading.Thread(target=send, daemon=True).start()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_just_before_a_chat_waits_for_a_key(
    talker: list[Path], usual: list[Any], number: signal.Signals
) -> None:
    """It was answered only after the next key."""
    program = UNSEEN.replace("NUMBER", str(int(number))) + START
    child = at_terminal("chat", *naming(talker), program=program)
    assert ended(child, usual) == -number
