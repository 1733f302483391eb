"""Threads that OpenMP keeps for a thread are gone when it is done; counted by the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Two threads compute one after the other: each would keep helpers of its own.
EVALUATE = """
import ctypes, threading
import psutil
from llamaspec import ModelOptions, demo_target, open_pair
from llamaspec.llama.openmp import end_own_threads

ctypes.CDLL("libgomp.so.1")
with open_pair(demo_target(), target_options=ModelOptions(threads=3)) as pair:
    counts = []
    for wait in (False, True):
        pair.stream("def", max_tokens=2).run()
        counts.append(psutil.Process().num_threads())
        if wait:
            end_own_threads()
            counts.append(psutil.Process().num_threads())
    pair.stream("def", max_tokens=2).run()
    print(*counts)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP computes on Linux")
def test_helpers_of_a_thread_that_is_done_end() -> None:
    ran = subprocess.run([sys.executable, "-c", EVALUATE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    first, second, after = map(int, ran.stdout.split())
    assert first == second
    assert after == second - 2
