"""Waiting without guessing how long things take: for a condition, or for a process that has nothing to do.

A limit only ends what hangs. It is far above what anything takes on a busy machine, and no test says by it
whether something was fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 300.0  # seconds


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; AssertionError where it never comes."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "what was waited for never came"
        time.sleep(0.01)


def until_it_waits(process: int) -> None:
    """Wait until the main thread of a process sleeps, as it does in reading a line from a terminal.

    A signal that comes just before Python waits for a line is noticed only after the line.
    """
    stat = Path(f"/proc/{process}/stat")
    if not stat.exists():  # another system than Linux
        time.sleep(1.0)
        return
    until(lambda: stat.read_text().rpartition(") ")[2].startswith("S"))
