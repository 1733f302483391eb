"""The commands beside scripts/serve_soak.py: what they check is seen to fail."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mixed_commands
from mixed_commands import COMMANDS, Commands

WRONGLY, LIST = "generate wrongly", "models list"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    for name in COMMANDS.keys() - {WRONGLY, LIST}:
        monkeypatch.delitem(COMMANDS, name)
    (tmp_path / "own").mkdir()
    return Commands(tmp_path)


def test_what_is_killed_leaves_nothing_wrong(commands: Commands, tmp_path: Path) -> None:
    commands.run(LIST, signal.SIGKILL, 0.0, tmp_path / "own")
    assert commands.n_killed == 1
    told = commands.settle()
    assert told["faults"] == []
    assert told["outcomes"] == {
        f"{LIST}: SIGKILL, -9": 1,
        f"{LIST}: undisturbed, 0": 1,
        f"{WRONGLY}: undisturbed, 2": 1,
    }


def test_faults_are_seen(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the soak could never fail."""
    monkeypatch.setitem(COMMANDS, WRONGLY, replace(COMMANDS[WRONGLY], code=0))
    monkeypatch.setattr(mixed_commands, "TRACES", (b"Invalid value",))
    commands.run(WRONGLY, None, 0.0, tmp_path / "own")
    assert [fault.split(": ")[1] for fault in commands.faults] == ["shows Invalid value", "exit code 2"]
    monkeypatch.delitem(COMMANDS, WRONGLY)
    (tmp_path / "cache" / ".probe.json.1.tmp").touch()
    (tmp_path / "cache" / "probe.json").write_text("{")
    commands.texts |= {"one", "other"}
    sleeper = [sys.executable, "-c", "input()"]
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE, env=commands.environment) as process:
        monkeypatch.setattr(mixed_commands, "LAST_SECONDS", 0.0)
        told = commands.settle()
        process.kill()
    assert told["temporary_files"] == {"left": 1, "never_removed": [".probe.json.1.tmp"]}
    assert [fault.split(":")[0] for fault in told["faults"][2:]] == [
        "1 temporary files after 0 killed commands",
        "2 texts of the same seed",
        "still runs",
        "probe.json is not whole",
    ]
