"""A child process that answers, fails or takes too long; limits that can only be lowered."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llamaspec.llama.child import Outcome, run_child

CHILD = """
import os, sys
from llamaspec.llama.child import end_with_answer, end_with_parent, limit_cpu, limit_memory

def main():
    end_with_parent()
    exec(sys.argv[1], globals())
"""


@pytest.fixture(autouse=True)
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose `main` runs a given code."""
    (tmp_path / "some_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)


def ended(code: str, seconds: float = 60.0) -> Outcome | None:
    return run_child("some_child", [code], seconds=seconds)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("end_with_answer('é')", Outcome(0, "é".encode())),
        ("os.kill(os.getpid(), 9)", Outcome(-9, b"")),
        ("raise ValueError", Outcome(1, b"")),
    ],
)
def test_an_outcome(code: str, expected: Outcome) -> None:
    assert ended(code) == expected


def test_an_answer_that_would_block_the_pipe_is_cut_off() -> None:
    found = ended("end_with_answer('x' * (1 << 20))")
    assert found is not None
    assert 1000 < len(found.answer) < 1 << 16


def test_a_child_that_takes_too_long() -> None:
    assert ended("import time; time.sleep(600)", 0.3) is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
def test_limits_are_lowered_but_never_raised() -> None:
    code = (
        "import resource; limit_cpu(50); limit_cpu(90); limit_memory(1 << 30); limit_memory(1 << 40);"
        "cpu, data = (resource.getrlimit(name)[0] for name in (resource.RLIMIT_CPU, resource.RLIMIT_DATA));"
        "end_with_answer(f'{cpu} {data < 1 << 40}')"
    )
    assert ended(code) == Outcome(0, b"50 True")
