#!/usr/bin/env python
"""Sends signals to commands at random moments, and looks at what they leave behind.

    python scripts/random_signals.py --count 500 --seed 1

Each command runs at a terminal of its own, with the embedded pair. Afterwards its exit code must be one that
is documented, no traceback may have been shown, the terminal must be as before, what was stored must be
whole, and the next command must work. The last line on stdout is JSON. Exit code 1 where there was a fault.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
PATIENCE_SECONDS = 300.0
PROMPT = "def f(self, a, b):\n" + "    x = a + b\n" * 40
COMMANDS: dict[str, list[str]] = {
    "generate": ["generate", "-n", "300", "-k", "2", "--timeline", "{folder}/timeline.html", PROMPT],
    "generate --json": ["generate", "-n", "300", "--json", PROMPT],
    "chat": ["chat", "-n", "100", "--save", "{folder}/talk.json"],
    "serve": ["serve", "--port", "0"],
    "probe": ["probe", "--quick"],
    "models": ["models", "list"],
}
# The command tells that its own code runs, by a byte.
START = """
import os, sys
def started(event, arguments):
    if event == "import" and arguments[0] == "llamaspec.cli.main":
        os.write({fd}, b".")
sys.addaudithook(started)
from llamaspec.__main__ import main
main()
"""
TRACES = (b"Traceback", b"Exception ignored", b"internal error", b"Fatal Python")


def _become_its_session() -> None:
    """As after a log-in: what runs in the background may have been told to ignore signals."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@dataclass
class Terminal:
    """A terminal with a command at it."""

    arguments: Sequence[str]
    environment: dict[str, str]
    shown: bytes = b""
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._master, self._slave = pty.openpty()
        self._before = termios.tcgetattr(self._slave)
        ready, tell = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", START.format(fd=tell), *self.arguments],
            stdin=self._slave, stdout=self._slave, stderr=self._slave, env=self.environment,
            pass_fds=[tell], start_new_session=True,
            preexec_fn=_become_its_session,
        )  # fmt: skip
        os.close(tell)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert os.read(ready, 1) == b"."
        os.close(ready)

    def _read(self) -> None:
        with suppress(OSError):  # the end, on Linux
            while piece := os.read(self._master, 1 << 16):
                self.shown += piece

    def type(self, line: bytes) -> None:
        """As a person would."""
        os.write(self._master, line)

    def ended(self, *, stops: bool = False) -> int:
        """The exit code, once the process has ended and all it wrote is read; a server can be stopped."""
        code = self._ended(stops=stops)
        self._after = termios.tcgetattr(self._slave)
        os.close(self._slave)
        self._reader.join(PATIENCE_SECONDS)
        os.close(self._master)
        return code

    def _ended(self, *, stops: bool) -> int:
        begin = time.monotonic()
        while time.monotonic() - begin < PATIENCE_SECONDS:
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(0.2)
            if self.arguments[0] == "chat":
                self.type(b"\x04")
            elif stops:
                self.process.terminate()
        self.process.kill()
        self.process.wait()
        return -signal.SIGKILL

    def faults(self) -> list[str]:
        """What is wrong with the terminal, now that the process has ended."""
        found = [f"shows {trace.decode()}" for trace in TRACES if trace in self.shown]
        if self._after != self._before:
            found.append("the terminal's settings are changed")
        for name, on, off in (
            ("cursor", b"\x1b[?25h", b"\x1b[?25l"),
            ("paste", b"\x1b[?2004l", b"\x1b[?2004h"),
        ):
            if self.shown.rfind(off) > self.shown.rfind(on):
                found.append(f"the terminal's {name} mode is changed")
        return found


def codes(name: str, number: signal.Signals) -> set[int]:
    """Exit codes that are documented; 0 where the signal came too late, or is not for this command."""
    if number == signal.SIGINT:
        return {0, 130, -number}  # shells say 130 to both; Python ends so in its last milliseconds
    if number == signal.SIGPIPE:  # Python ignores it
        return {0, -signal.SIGTERM} if name == "serve" else {0}
    return {0, -number}


def environment(folder: Path) -> dict[str, str]:
    """Nothing of the person's own is read or written."""
    own = {f"LLAMASPEC_{kind}": str(folder / kind.lower()) for kind in ("CACHE", "CONFIG")}
    return {**os.environ, **own, "XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder),
            "TERM": "xterm", "LLAMASPEC_TRUST_FILES": "1"}  # fmt: skip


def try_one(
    name: str, arguments: Sequence[str], number: signal.Signals | None, delay: float, folder: Path
) -> tuple[int, list[str]]:
    """Run a command, with a signal so many seconds after its start; its exit code, and what is wrong."""
    told = [argument.format(folder=folder) if "{folder}" in argument else argument for argument in arguments]
    terminal = Terminal(told, environment(folder))
    if name == "chat":
        terminal.type(b"import os\n")
    elif name == "serve":
        threading.Thread(target=_ask, args=(terminal,), daemon=True).start()
    if number is not None:
        with suppress(subprocess.TimeoutExpired):
            terminal.process.wait(delay)
        terminal.process.send_signal(number)
    code = terminal.ended(stops=name == "serve" and number in (None, signal.SIGPIPE))
    faults = terminal.faults() + stored_faults(folder, may_leave=code < 0)
    if number is not None and code not in codes(name, number):
        faults.append(f"exit code {code} after {number.name}")
    if faults:
        print(f"{name}: {faults}\n{terminal.shown.decode(errors='replace')[-3000:]}", flush=True)
    return code, faults


def _ask(terminal: Terminal) -> None:
    """A client of the server, until it has gone."""
    while terminal.process.poll() is None:
        address = re.search(rb"http://[\d.:]+", terminal.shown)
        if address is None:
            time.sleep(0.05)
            continue
        request = urllib.request.Request(
            f"{address[0].decode()}/v1/completions",
            data=json.dumps({"model": "x", "prompt": PROMPT, "max_tokens": 100}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with suppress(OSError):  # refused, or cut off
            urllib.request.urlopen(request, timeout=PATIENCE_SECONDS).read()


def stored_faults(folder: Path, *, may_leave: bool) -> list[str]:
    """Files that are not whole, or were forgotten; who was killed cannot remove anything."""
    found = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        if path.suffix == ".tmp":
            if not may_leave:
                found.append(f"{path.name} was left")
            path.unlink()
        elif path.suffix == ".json":
            try:
                json.loads(path.read_text())
            except ValueError:
                found.append(f"{path.name} is not whole")
        elif path.suffix == ".html" and not path.read_text().rstrip().endswith("</html>"):
            found.append(f"{path.name} is not whole")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="signals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no command after so long")
    wanted = parser.parse_args()
    rng, begin = random.Random(wanted.seed), time.monotonic()
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config").mkdir()
        spans = dict.fromkeys(COMMANDS, 5.0)
        for _ in range(wanted.count):
            if time.monotonic() - begin > wanted.seconds:
                break
            command, number = rng.choice(list(COMMANDS)), rng.choice(SIGNALS)
            (folder / "talk.json").unlink(missing_ok=True)  # it belongs to another conversation
            start = time.monotonic()
            code, wrong = try_one(command, COMMANDS[command], number, rng.random() * spans[command], folder)
            if code == 0 and command not in (
                "chat",
                "serve",
            ):  # it came too late, so this is how long it takes
                spans[command] = 0.5 * spans[command] + 0.5 * (time.monotonic() - start)
            outcomes[f"{command} {number.name} {code}"] += 1
            faults.update(wrong)
        for command in COMMANDS:  # undisturbed, with what the others have left
            if command not in ("chat", "serve"):
                code, wrong = try_one(command, COMMANDS[command], None, 0.0, folder)
                faults.update([*wrong, *([f"{command} then fails"] if code else [])])
    for outcome, times in sorted(outcomes.items()):
        print(f"{times:6}  {outcome}")
    print(json.dumps({"signals": outcomes.total(), "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
