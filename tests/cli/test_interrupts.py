"""Ctrl-C at any moment keeps the text that was generated."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from command import ENTRY, PROMPT, Answer, environment, expected, naming, python
from model_store import ModelStore
from patience import PATIENCE
from tiny_models import Recipe

INTERRUPTED_AFTER = """
import signal
from llamaspec.llama.batch import Batch
fill, calls = Batch.fill, []
def counted(self, nodes):
    calls.append(None)
    if len(calls) == {calls}:
        signal.raise_signal(signal.SIGINT)
    return fill(self, nodes)
Batch.fill = counted
from llamaspec.cli.main import main
main()
"""


def interrupted(calls: int, *arguments: str | Path, command: str = "generate") -> Answer:
    """Send Ctrl-C at the given evaluation."""
    return python(INTERRUPTED_AFTER.format(calls=calls), command, *arguments)


def test_ctrl_c_with_json(models: list[Path]) -> None:
    answer = interrupted(60, *naming(models), PROMPT, "-n", "400", "--seed", "9", "-k", "2", "--json")
    assert answer.code == 130
    assert answer.complaints == []
    assert answer.json["stop_reason"] == "interrupt"
    found = answer.json["tokens"]
    assert 20 < len(found) < 400
    assert found == list(expected(models, 9, len(found)).tokens)
    assert answer.json["statistics"]["rounds"] > 0


def test_ctrl_c_while_the_prompt_is_read(models: list[Path]) -> None:
    answer = interrupted(1, *naming(models), PROMPT, "-n", "400", "-k", "2", "--json")
    assert answer.code == 130
    assert (answer.json["tokens"], answer.json["text"]) == ([], "")
    assert answer.json["statistics"]["tokens_per_second"] is None


def test_ctrl_c_while_loading(models: list[Path]) -> None:
    code = """
import signal
from llamaspec.cli import output as terminal
terminal.SlowProgress.__call__ = lambda self, fraction: signal.raise_signal(signal.SIGINT)
from llamaspec.cli.main import main
main()
"""
    answer = python(code, "generate", *naming(models), PROMPT)
    assert (answer.code, answer.stdout, answer.stderr.strip()) == (130, "", "")


LOST = """
import signal
from llamaspec.llama import runtime
from llama_cpp import llama_cpp as lib
free, calls = runtime._free, []
def interrupted(*arguments):
    calls.append(None)
    if len(calls) == 1:
        signal.raise_signal(signal.SIGINT)
log = lib.llama_log_callback(interrupted)
runtime._free = lambda *arguments: (free(*arguments), {call})
from llamaspec.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "call", ["interrupted()", "log(2, b'x', None)"], ids=["a finalizer", "llama.cpp's log"]
)
def test_ctrl_c_where_nobody_can_be_told(models: list[Path], call: str) -> None:
    """Python alone would print a traceback there and continue."""
    answer = python(LOST.format(call=call), "generate", *naming(models), PROMPT, "-n", "20")
    assert "Traceback" not in answer.stderr
    assert "ignored" not in answer.stderr
    assert answer.code in (0, 130)  # the signal may come after the end


SIGNALS = {signal.SIGINT: {130}, signal.SIGTERM: {-15}, signal.SIGHUP: {-1}, signal.SIGPIPE: {0}}


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_while_text_is_written(store: ModelStore, tmp_path: Path, number: signal.Signals) -> None:
    """The signal comes at random moments after the first character."""
    models, rng = [store.path("llama", Recipe(dtype="q8_0"))], random.Random(int(number))
    timeline = tmp_path / "timeline.html"
    options = ["-n", "480", "--seed", "9", "--no-stats", "--timeline", str(timeline)]
    whole = expected(models, 9, 480).text
    for _ in range(3):
        timeline.unlink(missing_ok=True)
        child = subprocess.Popen(
            [*ENTRY, "generate", *map(str, naming(models)), PROMPT, *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        )  # fmt: skip
        assert child.stdout is not None
        text = os.read(child.stdout.fileno(), 1)
        for _ in range(rng.randrange(40)):
            text += os.read(child.stdout.fileno(), 1)
        child.send_signal(number)
        rest, stderr = child.communicate(timeout=PATIENCE)
        # A fast machine may have written the whole text before the signal.
        assert child.returncode in SIGNALS[number] | {0}
        assert b"Traceback" not in stderr
        assert b"ignored" not in stderr
        assert whole.startswith((text + rest).decode(errors="ignore").rstrip("\n"))
        assert not timeline.exists() or timeline.read_text().rstrip().endswith("</html>")
        assert not list(tmp_path.glob("*.tmp"))


def test_a_comparison_that_is_stopped_shows_its_complete_turns(models: list[Path]) -> None:
    arguments = [*naming(models), PROMPT, "-n", "8", "-r", "50", "-k", "3"]
    answer = interrupted(200, *arguments, "--json", command="compare")
    assert answer.code == 130
    n_runs = {len(arm["runs"]) for arm in answer.json["arms"]}
    assert len(n_runs) == 1
    assert n_runs <= {*range(1, 50)}
    assert answer.json["interrupted"] is True
    assert f"stopped after {n_runs.pop()} of 50 runs" in answer.stderr
    early = interrupted(5, *arguments, command="compare")
    assert (early.code, early.stdout) == (130, "")
