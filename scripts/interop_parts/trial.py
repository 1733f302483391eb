"""Runs one agent in a folder of its own and judges its effect."""

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

from interop_parts.server import Exchange, Script

ROOT = Path(__file__).resolve().parents[2]
MODEL = "any"
CALL_MARKS = (b"<tool_call>", b"</tool_call>")
State = Literal["ok", "failed", "skipped"]
Command = Sequence[str | Path]


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    check: str
    state: State
    reason: str = ""


@dataclass
class Trial:
    """One agent, the server it talks to, and the folder it runs in."""

    url: str  # of the server
    exchanges: list[Exchange]
    script: Script
    installed: Path  # its `bin` has the agent's program
    folder: Path
    seconds: float  # time limit of one command

    @property
    def api(self) -> str:
        """Return the base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def hello(self) -> Path:
        """Return the path of the file that most checks ask for."""
        return self.folder / "work" / "hello.txt"

    def begin(self, answers: Sequence[str], *, with_tools: bool) -> None:
        """Empty the folder, forget earlier requests, and set the model's answers."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("home", "work"):
            (self.folder / name).mkdir(parents=True)
        self.exchanges.clear()
        self.script.begin(answers, with_tools=with_tools)

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None) -> tuple[int | None, str]:
        """Run a command in `work`; return its exit code (None if it took too long) and its output."""
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
        turns: Sequence[Command],
        answers: Sequence[str],
        files: Mapping[str, str] | None = None,
        *,
        with_tools: bool = True,
        overflows: bool = False,
        is_done: Callable[[str], bool] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run an agent in a new folder, one command per turn, and judge its effect.

        Parameters
        ----------
        check : str
            Name of the check.
        turns : sequence of commands
        answers : sequence of str
            Answers of the model, in order; if `with_tools`, only requests that offer tools get them.
        files : mapping, optional
            Initial files of the folder: path and content.
        overflows : bool
            Whether one of the requests must be too long for the context; the last one must fit.
        is_done : callable, optional
            Returns whether the task is done, given the output of the last turn; by default, whether
            `hello` has the right content.
        env : mapping, optional
        """
        self.begin(answers, with_tools=with_tools)
        for name, content in (files or {}).items():
            (self.folder / name).write_text(content)
        for command in turns:
            code, output = self.run(*command, env=env)
        asked = [each for each in self.exchanges if each.path.startswith("/v1/") and each.request]
        summary = _summary(asked) + ("" if code is not None else f", stopped after {self.seconds:g} s")
        did = f"exit code {code}: {output.strip()[-200:]}"
        failed = _failed(asked, overflows, did)
        if failed is None and not (is_done or self._wrote_hello)(output):
            failed = f"not done; {did}"
        if failed is not None:
            return Result(check, "failed", f"{summary}: {failed}")
        return Result(check, "ok", summary)

    def _wrote_hello(self, _: str) -> bool:
        return self.hello.is_file() and self.hello.read_text(errors="replace").strip() == "hello"


def _summary(asked: Sequence[Exchange]) -> str:
    how = "streamed" if any(each.is_stream for each in asked) else "whole"
    counted = {
        "calls": sum(each.has_call for each in asked),
        "results sent back": sum(each.brings_result for each in asked),
        "too long": sum(each.overflows for each in asked),
    }
    return f"{len(asked)} requests, {how}" + "".join(f", {n} {name}" for name, n in counted.items() if n)


def _failed(asked: Sequence[Exchange], overflows: bool, did: str) -> str | None:
    """Return what went wrong between agent and server, or None. `did` says how the agent ended."""
    for each in asked:
        if each.status not in (None, httpx.codes.OK) and not (overflows and each.overflows):
            return f"{each.path}: {each.status} {each.answer[:200].decode(errors='replace')}"
        if any(mark in each.answer for mark in CALL_MARKS):
            return "an answer's text contains the marks of a tool call"
    if not asked:
        return f"the agent sent no request; {did}"
    if not any(each.is_whole for each in asked):
        return "no answer was sent completely"
    if overflows and not any(each.overflows for each in asked):
        return "no request was too long for the context"
    if asked[-1].overflows:
        return f"the agent did not shorten the conversation; {did}"
    return None
