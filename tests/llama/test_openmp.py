"""Threads that OpenMP keeps for a thread are gone when it is done; counted by the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

EVALUATE = """
import ctypes, threading, time
import psutil
from llamaspec import ModelOptions, demo_target, open_pair

def left():  # a thread that was waited for may need a moment to be gone
    end = time.monotonic() + 60
    while psutil.Process().num_threads() > before and time.monotonic() < end:
        time.sleep(0.01)
    return psutil.Process().num_threads() - before

ctypes.CDLL("libgomp.so.1")
with open_pair(demo_target(), target_options=ModelOptions(threads=3)) as pair:
    before = psutil.Process().num_threads()
    of = pair.stream("def", max_tokens=3)
    next(of)
    print(psutil.Process().num_threads() - before)
    of.run()
    print(left())
    streams = [pair.stream("def", max_tokens=3, seed=i) for i in range(2)]
    threads = [threading.Thread(target=of.run) for of in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(left())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP computes on Linux")
def test_helpers_of_a_thread_whose_texts_are_done_end() -> None:
    ran = subprocess.run([sys.executable, "-c", EVALUATE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["2", "0", "0"]
