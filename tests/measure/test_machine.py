"""Facts about the machine: the load of other programs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from llamaspec.llama import resources
from llamaspec.llama.resources import Usage
from llamaspec.measure import machine
from patience import PATIENCE


def test_only_other_programs_count_as_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 hardware threads in 10 s, 12 s were idle, this process used 5 s and its children 3 s."""
    monkeypatch.setattr(resources, "n_hardware_threads", lambda: 4)
    looks = iter([Usage(100.0, 1.0, 50.0), Usage(110.0, 6.0, 62.0)])
    children = iter([7.0, 10.0])
    monkeypatch.setattr(machine, "usage", lambda: next(looks))
    monkeypatch.setattr(machine, "_seconds_of_children", lambda: next(children))
    assert machine.LoadWatch().n_taken() == pytest.approx(4 - 2.0)


def test_children_count_while_they_run() -> None:
    code = "while True: pass"
    before = machine._seconds_of_children()
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        deadline = time.monotonic() + PATIENCE
        while machine._seconds_of_children() <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert machine._seconds_of_children() > before
        child.kill()
