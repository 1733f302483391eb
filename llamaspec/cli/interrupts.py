"""Ctrl-C where no command runs: while modules are loaded, and when all is done. The process ends at once.

Python would show a traceback there, and a module of C may make another error of it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130


def end_the_process_on_interrupt() -> None:
    """From now on, unless Ctrl-C is ignored or handled otherwise."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """For a while."""
    before = signal.getsignal(signal.SIGINT)
    end_the_process_on_interrupt()
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, before)


def _end(_signal: int, _frame: FrameType | None) -> NoReturn:
    os._exit(EXIT_INTERRUPTED)
