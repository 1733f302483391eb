"""Waiting for a condition, or for a process to sleep, without guessing how long that takes.

The limit only ends tests that hang. On a busy machine everything takes much less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 300.0  # seconds


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition. Raises an AssertionError if it never becomes true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.01)


def until_it_waits(process: int) -> None:
    """Wait until the main thread of a process sleeps, for instance because it reads from a terminal.

    Python notices a signal that comes just before it reads a line only after the line.
    """
    stat = Path(f"/proc/{process}/stat")
    if not stat.exists():  # another system than Linux
        time.sleep(1.0)
        return
    until(lambda: stat.read_text().rpartition(") ")[2].startswith("S"))
