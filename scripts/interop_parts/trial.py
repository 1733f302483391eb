"""One client at its task: where it runs, what it is answered, and how its effect is judged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from interop_parts.relay import Change, Exchange, Relay
from interop_parts.servers import Script

ROOT = Path(__file__).resolve().parents[2]
MODEL = "any"
State = Literal["ok", "answered", "failed", "skipped"]
Command = Sequence[str | Path]


@dataclass(frozen=True)
class Result:
    """What came of one check."""

    check: str
    state: State
    reason: str = ""


@dataclass
class Trial:
    """Where one client runs."""

    relay: Relay
    script: Script | None  # None: a real model
    installed: Path  # with the client's program
    folder: Path
    seconds: float

    @property
    def api(self) -> str:
        """The URL that OpenAI's clients want."""
        return f"{self.relay.url}/v1"

    def begin(self, answers: Sequence[str] | None, *, with_tools: bool = True) -> None:
        """Forget earlier requests; these are the answers to come, where they are not a model's own."""
        self.relay.exchanges.clear()
        self.relay.changes.clear()
        if self.script is not None:
            self.script.begin(answers, with_tools=with_tools)

    def fresh(self) -> Path:
        """An empty folder to work in."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "home").mkdir(parents=True)
        work = self.folder / "work"
        work.mkdir()
        return work

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None) -> tuple[int | None, str]:
        """The exit code, None if it was too slow, and the output of a command in the folder of this trial."""
        home = str(self.folder / "home")
        variables = {
            "PATH": f"{self.installed / 'bin'}:{os.environ['PATH']}",
            "HOME": home,
            "XDG_CONFIG_HOME": home,
            "XDG_DATA_HOME": home,
            "XDG_CACHE_HOME": home,
            "XDG_STATE_HOME": home,
            "NO_PROXY": "127.0.0.1",
            "OPENAI_API_KEY": "none",
            "OPENAI_API_BASE": self.api,
            "OPENAI_BASE_URL": self.api,
            "PYTHONPATH": str(ROOT / "scripts"),
            "TERM": "dumb",
            "CI": "1",
            **(env or {}),
        }
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=self.folder / "work",
            env=variables,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            output, _ = process.communicate(timeout=self.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
        return process.returncode, output

    def task(
        self,
        check: str,
        is_done: Callable[[str], bool],
        *commands: Command,
        answers: Sequence[str] | None = None,
        with_tools: bool = True,
        changes: Sequence[Change] = (),
        overflows: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run an agent, with a command for each of its turns, and judge its effect.

        `is_done` is handed the output of the last command. `answers`: what a script says, `with_tools` only
        to requests that offer tools. `changes` apply to a real model only. `overflows`: the context is too
        small for some request, but not for the last.
        """
        self.begin(answers, with_tools=with_tools)
        if self.script is None:
            self.relay.changes += changes
        for command in commands:
            code, output = self.run(*command, env=env)
        asked = [each for each in self.relay.exchanges if each.path.startswith("/v1/") and each.request]
        told = _told(asked) + ("" if code is not None else f", stopped after {self.seconds:g} s")
        failed = _failed(asked, overflows, f"exit code {code}: {output.strip()[-200:]}")
        if failed is not None:
            return Result(check, "failed", f"{told}: {failed}")
        if self.script is not None and answers is not None and not is_done(output):
            return Result(check, "failed", f"{told}: not done; {output.strip()[-200:]}")
        return Result(check, "ok" if is_done(output) else "answered", told)


def _told(asked: Sequence[Exchange]) -> str:
    how = "streamed" if any(each.is_stream for each in asked) else "whole"
    told = f"{len(asked)} requests, {how}"
    counted = {
        "calls": sum(each.has_call for each in asked),
        "cut": sum(each.is_cut for each in asked),
        "results sent back": sum(each.brings_result for each in asked),
        "too long": sum(each.overflows for each in asked),
    }
    return told + "".join(f", {n} {name}" for name, n in counted.items() if n)


def _failed(asked: Sequence[Exchange], overflows: bool, otherwise: str) -> str | None:
    """What went wrong between client and server; `otherwise`: what the client did instead of asking."""
    wrong = next(
        (
            each
            for each in asked
            if each.status not in (None, httpx.codes.OK) and not (overflows and each.overflows)
        ),
        None,
    )
    if wrong is not None:
        return f"{wrong.path}: {wrong.status} {wrong.answer[:200].decode(errors='replace')}"
    if not asked:
        return f"it asked nothing; {otherwise}"
    if not any(each.is_whole for each in asked):
        return "before an answer ended"
    if any(each.leaks for each in asked):
        return "marks of a call are text of an answer"
    if overflows and not any(each.overflows for each in asked):
        return "every request fitted the context"
    if asked[-1].overflows:
        return f"it did not shorten the conversation; {otherwise}"
    return None
