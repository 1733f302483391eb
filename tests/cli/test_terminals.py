"""Pipes that close, full disks, terminals, colours, and help."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pexpect
import pytest
from rich.console import Console

from command import ENTRY, PROMPT, Answer, environment, expected, invoke, naming, run
from llamaspec.cli import output as terminal
from llamaspec.cli.generate import generate as command
from llamaspec.cli.main import main as group
from llamaspec.cli.output import Thoughts
from model_store import ModelStore
from patience import PATIENCE, until
from tiny_models import Recipe


def test_a_pipe_that_closes_early(store: ModelStore) -> None:
    """The text is longer than the pipe's buffer, so it cannot end before the pipe closes."""
    target = store.path("llama", Recipe(dtype="q8_0", n_context=1 << 15))
    arguments = [*naming([target]), PROMPT, "--n-ctx", "32768", "-n", "32000", "--seed", "1"]
    child = subprocess.Popen(
        [*ENTRY, "generate", *map(str, arguments)], pipesize=4096,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert child.stdout is not None
    head = os.read(child.stdout.fileno(), 10)
    child.stdout.close()
    child.stdout = None
    _, stderr = child.communicate(timeout=PATIENCE)
    assert head
    assert child.returncode not in (0, -signal.SIGPIPE)
    assert b"Traceback" not in stderr
    assert b"Exception" not in stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(models: list[Path]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*ENTRY, "generate", *map(str, naming(models)), PROMPT, "-n", "5", "--no-stats"],
            stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, env=environment(), check=False,
        )  # fmt: skip
    assert done.returncode == 1
    answer = Answer(1, "", done.stderr.decode())
    assert answer.complaints == ["llamaspec: No space left on device; check where the output goes"]


def test_a_terminal_that_knows_few_letters(models: list[Path]) -> None:
    """Characters that the terminal's encoding lacks are replaced; there is no traceback."""
    latin = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    answer = run(
        "generate", *naming(models), PROMPT, "-n", "60", "--seed", "5", env=latin, encoding="latin-1"
    )
    assert answer.code == 0
    right = expected(models, 5, 60).text.encode("latin-1", errors="replace").decode("latin-1")
    assert answer.stdout == right + "\n"
    assert "?" in right


GREEN = b"\x1b[32m"


def on_a_terminal(models: list[Path], *more: str, **env: str) -> bytes:
    code = "from llamaspec.cli import main, output; output.PATIENCE_SECONDS = 300; main.main()"  # no bar
    arguments = [
        "-c",
        code,
        "generate",
        *map(str, naming(models)),
        PROMPT,
        "-n",
        "40",
        "--seed",
        "5",
        "-k",
        "4",
    ]
    child = pexpect.spawn(
        sys.executable, [*arguments, "-k", "4", *more], env=environment(env), timeout=PATIENCE
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    output: bytes = child.before
    return output


def test_draft_tokens_are_coloured_on_a_terminal_only(models: list[Path]) -> None:
    coloured = on_a_terminal(models, "--show-drafts", "--no-stats")
    assert GREEN in coloured
    plain = on_a_terminal(models, "--no-stats")
    assert GREEN not in plain
    assert coloured.replace(GREEN, b"").replace(b"\x1b[0m", b"") == plain
    assert GREEN not in on_a_terminal(models, "--show-drafts", NO_COLOR="1")
    piped = invoke("generate", *naming(models), PROMPT, "-n", "40", "--seed", "5", "-k", "4", "--show-drafts")
    assert "\x1b[32m" not in piped.stdout


# Help


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["-h"], ["llamaspec generate \"def fibonacci(n):\"", "compare"]),
        ([], ["llamaspec generate \"def fibonacci(n):\"", "compare"]),
        (["models"], ["recommend", "pull"]),
        (["generate", "-h"], ["Examples:", "llamaspec generate -f prompt.txt", "[default: 256"]),
    ],
)  # fmt: skip
def test_help_shows_examples(command: list[str], says: list[str]) -> None:
    answer = invoke(*command)
    assert answer.code == 0
    assert answer.stderr == ""
    for part in says:
        assert part in answer.stdout


@pytest.mark.parametrize("columns", [100, 160])
def test_help_uses_the_terminal_s_width(columns: int) -> None:
    text = run("generate", "-h", env={"COLUMNS": str(columns)}).stdout.partition("Examples:")[0]
    assert columns - 20 < max(map(len, text.splitlines())) < columns


@pytest.mark.parametrize(
    ("command", "titles"),
    [
        ("generate", ["Prompt", "Conversation", "Models", "Decoding", "Output", "Other"]),
        ("chat", ["Conversation", "Reasoning", "Files", "Models", "Decoding", "Other"]),
        ("serve", ["Server", "Models", "Other"]),
        ("probe", ["Models", "Output", "Other"]),
    ],
)
def test_help_shows_options_in_groups(command: str, titles: list[str]) -> None:
    lines = invoke(*command.split(), "-h").stdout.splitlines()
    assert sum(line.startswith("  -") for line in lines) <= 20
    found = [line.rstrip(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert found == titles
    assert any("--target" in line for line in lines)


@pytest.mark.parametrize("name", ["generate", "chat", "serve", "bench", "compare", "probe", "audit"])
def test_all_options_are_shown_on_demand(name: str) -> None:
    found = group.get_command(click.Context(group), name)
    assert found is not None
    options = {option for parameter in found.params for option in parameter.opts if option.startswith("--")}
    answers = [invoke(name, option) for option in ("-h", "--help-all")]
    assert [answer.code for answer in answers] == [0, 0], answers
    few, everything = (set(answer.stdout.split()) for answer in answers)
    assert {"--target", "--draft", "--help-all"} < few
    assert "--cache-type-k" not in few
    assert options <= {word.rstrip(",") for word in everything}


@pytest.mark.parametrize("details", [[], ["full"]])
def test_statistics_do_not_swallow_the_prompt(models: list[Path], details: list[str]) -> None:
    answer = invoke("generate", *naming(models), "-n", "3", "--seed", "1", "--stats", *details, "ab c")
    assert answer.code == 0, answer
    assert answer.stdout == invoke("generate", *naming(models), "-n", "3", "--seed", "1", "ab c").stdout


def test_names_and_defaults_are_a_contract() -> None:
    """Scripts depend on these names."""
    found = {
        name: parameter.default
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    defaults: dict[str, object] = {
        "--max-tokens": 256, "-n": 256, "--temperature": 0.8, "-t": 0.8, "--top-k": 40, "--top-p": 0.95,
        "--min-p": 0.05, "--rule": "coupled",
    }  # fmt: skip
    assert {name: found[name] for name in defaults} == defaults


def test_llama_cpp_is_silent_unless_asked(models: list[Path]) -> None:
    common = ["generate", *naming(models), PROMPT, "-n", "3", "--no-stats", "--seed", "1"]
    assert run(*common).complaints == []
    verbose = run(*common, "--verbose")
    assert "llama_model_loader" in verbose.stderr
    assert verbose.stdout == run(*common).stdout


@pytest.mark.parametrize(
    ("is_shown", "at_terminal", "shown"),
    [
        (True, True, "\x1b[2mI \\x1b[2J\x1b[0m\x1b[2mthink\n\x1b[0m\n"),
        (True, False, "I \\x1b[2Jthink\n\n"),
        (False, True, "\x1b[2mthinking …\x1b[0m\n"),
        (False, False, ""),
    ],
)
def test_thoughts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_shown: bool,
    at_terminal: bool,
    shown: str,
) -> None:
    """Reasoning is dim and escaped on stderr; if hidden, a terminal shows one mark and a file none."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: at_terminal, raising=False)
    thoughts = Thoughts(is_shown=is_shown)
    thoughts.add("I \x1b[2J")
    thoughts.add("think\n")
    thoughts.end()
    thoughts.end()
    assert capsys.readouterr() == ("", shown)


def test_work_that_says_nothing_for_long_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a short prompt and a large model, nothing was shown for seconds."""
    shown = io.StringIO()
    monkeypatch.setattr(terminal, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(terminal, "stderr_console", lambda: Console(file=shown, force_terminal=True))
    with terminal.SlowProgress("probing") as progress:
        until(lambda: "probing" in shown.getvalue())
        progress(1.0)
        ended = len(shown.getvalue())
    assert len(shown.getvalue()) == ended


def test_a_pipe_has_plain_lines_instead_of_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was shown for the minutes that servers took to start."""
    monkeypatch.setattr(terminal, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.01)
    said = ""

    def has_said(line: str) -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return line in said

    with terminal.SlowProgress("probing") as progress:
        until(lambda: has_said("llamaspec: probing ...\n"))
        progress(0.5)
        until(lambda: has_said("llamaspec: probing: 50% ...\n"))


def test_quick_work_has_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.SlowProgress("probing") as progress:
        progress(0.5)
    assert capsys.readouterr().err == ""
