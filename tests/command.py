"""Runs the `llamaspec` command and other programs in processes of their own, or the command in this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from llamaspec import Completion, ModelOptions, open_pair
from llamaspec.cli.main import main
from llamaspec.kernels import VARIABLE
from patience import PATIENCE

ENTRY = [sys.executable, "-c", "from llamaspec.__main__ import main; main()"]
PROMPT = "def f(self):\n    return "
FIXED = {"LLAMASPEC_TRUST_FILES": "1"}
# Commands print such lines if a step takes more than two seconds, as on a busy machine.
PROGRESS = re.compile(r"^llamaspec: [a-z ]+(?:: \d+%)? \.\.\.\n", re.MULTILINE)
NOTICES = ("llamaspec: no --draft given", "llamaspec: warning: this build of llama.cpp uses AMX")


@dataclass(frozen=True)
class Answer:
    """The exit code and the output of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one line on stdout."""
        lines = self.stdout.splitlines()
        assert len(lines) == 1, self
        answer: dict[str, Any] = json.loads(lines[0])
        return answer

    @property
    def complaints(self) -> list[str]:
        """The lines on stderr, without progress and notices, which depend on the machine."""
        lines = PROGRESS.sub("", self.stderr).splitlines()
        return [line for line in lines if not line.startswith(NOTICES)]


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without the variables that change llamaspec's output."""
    unwanted = ("LLAMASPEC_", "NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING", "COLUMNS")
    kept = {
        name: value for name, value in os.environ.items() if name == VARIABLE or not name.startswith(unwanted)
    }
    return {**kept, "PYTHONUTF8": "1", **FIXED, **(changes or {})}


def answer_of(
    command: Sequence[str | Path],
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    encoding: str = "utf-8",
) -> Answer:
    """Run a program to its end; drop lines of progress from its stderr."""
    done = subprocess.run(
        [*map(str, command)],
        input=stdin, capture_output=True, env=environment(env), timeout=PATIENCE, check=False,
    )  # fmt: skip
    stderr = PROGRESS.sub("", done.stderr.decode(encoding))
    return Answer(done.returncode, done.stdout.decode(encoding), stderr)


def run(*arguments: str | Path, **how: Any) -> Answer:
    """Run the command in a process of its own."""
    return answer_of([*ENTRY, *arguments], **how)


def python(code: str, *arguments: str | Path, env: Mapping[str, str] | None = None) -> Answer:
    """Run Python code in a process of its own."""
    return answer_of([sys.executable, "-c", code, *arguments], env=env)


def invoke(*arguments: str | Path, stdin: bytes = b"") -> Answer:
    """Run the command in this process, and raise what it raises."""
    result = CliRunner().invoke(main, list(map(str, arguments)), input=stdin, prog_name="llamaspec")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def generate(*arguments: str | Path, models: Sequence[Path], stdin: bytes = b"") -> Answer:
    """Run `generate` with a target and perhaps a draft, on one thread."""
    return invoke("generate", *naming(models), *arguments, stdin=stdin)


def naming(models: Sequence[Path]) -> list[str | Path]:
    """Return the options that name a target and perhaps a draft."""
    names = zip(("--target", "--draft"), models, strict=False)
    return [*(part for name in names for part in name), "--threads", "1"]


def said(answer: Answer) -> str:
    """Return the one line of an error."""
    assert answer.code == 1
    assert "Traceback" not in answer.stderr
    return answer.stderr.splitlines()[-1]


def expected(models: list[Path], seed: int, n: int, prompt: str = PROMPT, **settings: object) -> Completion:
    """Return the same completion by the Python API, without drafts."""
    with open_pair(models[0], target_options=ModelOptions(threads=1)) as pair:
        return pair.stream(prompt, seed=seed, max_tokens=n, **settings).run()  # type: ignore[arg-type]
