"""Runs commands again and again on the same stores, and ends some of them at random moments.

Used by `scripts/serve_soak.py --commands`. They read and write through pipes; `scripts/random_signals.py` has
them at terminals. Each exit code must be a documented one, nothing may be a traceback, the same seed must
give the same text, and what is stored must be whole.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from llamaspec import demo_draft, demo_target
from random_signals import PATIENCE_SECONDS, START, TRACES, codes, environment, stored_faults

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
SHAPE = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
PAIR = ("--target", "{folder}/models/target.gguf", "--draft", "{folder}/models/draft.gguf")
DAMAGED, NONE = "{folder}/models/damaged.gguf", "{folder}/models/none.gguf"
PROMPT = "def f(self, a, b):\n" + "    x = a + b\n" * 20
FIRST_SPAN = 4.0  # seconds that a command takes, until that is known
LAST_SECONDS = 30.0  # for processes of a command that was killed to notice
STALE = 2 * 86400  # seconds; older than what any store takes for another process's


@dataclass(frozen=True)
class Command:
    """What is run, and what becomes of it where nobody disturbs it."""

    arguments: tuple[str, ...]
    stdin: str = ""
    code: int = 0
    is_endless: bool = False


COMMANDS = {
    "generate the same": Command(("generate", "-n", "40", "--seed", "7", "def f(")),
    "generate --json": Command(("generate", "-n", "100", "--json", PROMPT)),
    "generate -f -": Command(("generate", "-n", "60", "-f", "-", *PAIR), PROMPT),
    "generate --ngram": Command(("generate", "-n", "120", "--ngram", PROMPT)),
    "generate --json-schema": Command(("generate", "-n", "40", "--json-schema", SHAPE, "x")),
    "generate --timeline": Command(("generate", "-n", "60", "--timeline", "{own}/timeline.html", PROMPT)),
    "generate damaged": Command(("generate", "-n", "4", "--target", DAMAGED, "x"), code=1),
    "generate nothing": Command(("generate", "-n", "4", "--target", NONE, "x"), code=1),
    "generate wrongly": Command(("generate", "-n", "none", "x"), code=2),
    "chat": Command(("chat", "-n", "40", "--save", "{own}/talk.json"), "import os\n/help\nx = 1\n"),
    "probe": Command(("probe", "--quick", "--json", *PAIR)),
    "doctor": Command(("doctor", "--json")),
    "audit": Command(("audit", "-n", "60", "--json")),
    "compare": Command(("compare", "-n", "30", "-r", "1", "--json", *PAIR)),
    "models list": Command(("models", "list")),
    "models add": Command(("models", "add", "--force", "own", "{folder}/models/target.gguf")),
    "models show": Command(("models", "show", "qwen3-14b", "--json")),
    "serve": Command(("serve", "--port", "0", *PAIR), is_endless=True),
}  # fmt: skip


@dataclass
class Commands:
    """Commands on the stores in one folder.

    Parameters
    ----------
    folder : Path
        Empty; the stores, the models and the temporary files.
    """

    folder: Path
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    n_killed: int = 0  # by a signal, so that they could not remove anything
    sizes: list[tuple[int, int]] = field(default_factory=list)  # files and bytes of the stores

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._spans = dict.fromkeys(COMMANDS, FIRST_SPAN)  # seconds
        for name in ("config", "cache", "models", "tmp"):
            (self.folder / name).mkdir()
        for path in (demo_target(), demo_draft()):
            shutil.copy(path, self.folder / "models")
        content = demo_target().read_bytes()
        (self.folder / "models" / "damaged.gguf").write_bytes(content[: len(content) // 2])
        self.environment = {
            **environment(self.folder), "LLAMASPEC_TRUST_FILES": "0", "TMPDIR": str(self.folder / "tmp"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }  # fmt: skip

    def drive(self, n_workers: int, seed: int, goes_on: Callable[[], bool]) -> None:
        """Run commands, so many at a time, while `goes_on`."""

        def work(i: int) -> None:
            rng, own = random.Random(f"{seed} {i}"), self.folder / f"own-{i}"
            own.mkdir(exist_ok=True)
            while goes_on():
                name = rng.choice(list(COMMANDS))
                number = rng.choice(SIGNALS) if COMMANDS[name].is_endless or rng.random() < 0.5 else None
                if rng.random() < 0.1:  # then it is another file, which has to be tried
                    os.utime(self.folder / "models" / "target.gguf")
                self.run(name, number, rng.random(), own)

        with ThreadPoolExecutor(n_workers) as workers:
            for done in [workers.submit(work, i) for i in range(n_workers)]:
                done.result()

    def run(self, name: str, number: signal.Signals | None, moment: float, own: Path) -> int:
        """Run a command, with a signal at a moment from 0 to 1 of the time that it takes; its exit code."""
        command, span = COMMANDS[name], self._spans[name]
        (own / "talk.json").unlink(missing_ok=True)  # it belongs to another conversation
        places = {"{folder}": str(self.folder), "{own}": str(own)}
        told = [_replaced(argument, places) for argument in command.arguments]
        begin = time.monotonic()
        code, stdout, stderr = _run(told, command.stdin, self.environment, number, moment * span)
        wrong = [f"shows {trace.decode()}" for trace in TRACES if trace in stdout + stderr]
        if code not in {command.code} | (set() if number is None else codes(name, number)):
            wrong.append(f"exit code {code}")
        if code == 0 and "--json" in command.arguments and not _is_json(stdout):
            wrong.append(f"not JSON: {stdout[:100]!r}")
        how = "undisturbed" if number is None else f"{number.name} at {moment * span:.3f} s"
        with self._lock:
            if code == command.code:  # nobody disturbed it, or too late
                self._spans[name] = 0.5 * span + 0.5 * (time.monotonic() - begin)
            if name == "generate the same" and code == 0:
                self.texts.add(stdout.decode())
            self.n_killed += code < 0
            self.outcomes[f"{name}: {how.split()[0]}, {code}"] += 1
            self.faults += [f"{name}, {how}: {w}: {stderr.decode(errors='replace')[-1500:]}" for w in wrong]
            self.sizes.append(self._size())
        return code

    def settle(self) -> dict[str, Any]:
        """What is left once all commands, and whoever else used the stores, have ended.

        Temporary files may be those of killed commands alone, and go when another command writes there later.
        """
        orphans = self._orphans()
        left = self._temporary()
        for path in left:
            os.utime(path, (time.time() - STALE,) * 2)
        own = self.folder / "own-0"
        own.mkdir(exist_ok=True)
        os.utime(self.folder / "models" / "target.gguf")
        os.utime(self.folder / "models" / "draft.gguf")
        for name in (name for name, command in COMMANDS.items() if not command.is_endless):
            self.run(name, None, 0.0, own)
        kept = self._temporary()
        with self._lock:
            if len(left) > self.n_killed:
                self.faults.append(f"{len(left)} temporary files after {self.n_killed} killed commands")
            if len(self.texts) > 1:
                self.faults.append(f"{len(self.texts)} texts of the same seed")
            self.faults += [f"still runs: {orphan}" for orphan in orphans]
            self.faults += stored_faults(self.folder, may_leave=True)
        thirds = max(1, len(self.sizes) // 3)
        return {
            "commands": sum(self.outcomes.values()),
            "outcomes": dict(sorted(self.outcomes.items())),
            "killed": self.n_killed,
            "temporary_files": {"left": len(left), "never_removed": [path.name for path in kept]},
            "stores": {"first": self.sizes[thirds - 1], "last": self.sizes[-1]},  # files, bytes
            "orphans": orphans,
            "faults": self.faults,
        }  # fmt: skip

    def _temporary(self) -> list[Path]:
        found = [path for path in self.folder.rglob("*.tmp") if path.is_file()]
        return sorted({*found, *(self.folder / "tmp").iterdir()})

    def _size(self) -> tuple[int, int]:
        n_files = n_bytes = 0
        for path in (self.folder / "cache").rglob("*"):
            with suppress(OSError):  # replaced in this moment
                n_files, n_bytes = n_files + path.is_file(), n_bytes + path.stat().st_size
        return n_files, n_bytes

    def _orphans(self) -> list[str]:
        """Processes of ended commands that still run."""
        end = time.monotonic() + LAST_SECONDS
        while True:
            ours = [process for process in psutil.process_iter() if self._is_ours(process)]
            if not ours or time.monotonic() > end:
                return [" ".join(process.cmdline())[:200] for process in ours]
            time.sleep(0.1)

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.pid != os.getpid() and process.environ().get("HOME") == str(self.folder)
        return False


def _run(
    arguments: list[str], stdin: str, env: dict[str, str], number: signal.Signals | None, delay: float
) -> tuple[int, bytes, bytes]:
    """Run a command, with a signal so many seconds after its own code begins: exit code, stdout, stderr."""
    ready, tell = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", START.format(fd=tell), *arguments], pass_fds=[tell], env=env,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)
    ends = [(signal.SIGKILL, PATIENCE_SECONDS)]
    if number is not None:
        ends.insert(0, (number, delay))
    text: bytes | None = stdin.encode()
    for end, seconds in ends:
        try:
            stdout, stderr = process.communicate(text, seconds)
            return process.returncode, stdout, stderr
        except subprocess.TimeoutExpired:  # noqa: PERF203
            process.send_signal(end)
            text = None  # it has been told
    stdout, stderr = process.communicate()
    return process.returncode, stdout, stderr + b"internal error: it does not end"


def _replaced(text: str, places: dict[str, str]) -> str:
    for place, name in places.items():
        text = text.replace(place, name)
    return text


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True
