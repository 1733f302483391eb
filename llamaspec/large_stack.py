"""Runs functions of native libraries that recurse over their input, in a thread with a large stack.

llguidance recurses over the rules of a grammar, and llama.cpp's tokenizer over the characters of a word. An
overflow of the stack ends the process. tests/llama/test_long_words.py, tests/sampling/test_constraint.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

STACK_BYTES = 256 << 20  # the usual 8 MiB are too few; memory that is not used is not taken
_LOCK = threading.Lock()  # the stack size is a setting of the process


def with_large_stack(work: Callable[[], Result]) -> Result:
    """Return what a function returns that is called in a thread with a stack of STACK_BYTES."""
    pool = ThreadPoolExecutor(1, "llamaspec-large-stack")
    with _LOCK:
        usual = threading.stack_size(STACK_BYTES)
        try:
            result = pool.submit(work)
        finally:
            threading.stack_size(usual)
    pool.shutdown(wait=False)  # Ctrl-C does not wait for it
    return result.result()
