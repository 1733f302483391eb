"""What signals do where no command handles them.

Ctrl-C ends the process at once while modules are loaded, and when all is done: Python would show a traceback,
and a module of C may make another error of it. SIGTERM and SIGHUP end it as they end any other, but leave the
terminal as it was found: line editing has it without echo, a progress bar hides the cursor.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130
_USUAL = b"\x1b[0m\x1b[?25h\x1b[?2004l"  # no colour, a cursor, pasted text as it is typed


def end_the_process_on_interrupt() -> None:
    """From now on, unless Ctrl-C is ignored or handled otherwise."""
    if _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
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


def leave_the_terminal_as_found() -> None:
    """When SIGTERM or SIGHUP end the process, unless they are ignored or handled otherwise."""
    terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]
    if not terminals or not _is_main_thread():
        return
    import termios  # not on every system

    before = termios.tcgetattr(terminals[0])

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        with suppress(OSError, termios.error):  # it may have gone, or be another job's
            if os.tcgetpgrp(terminals[0]) == os.getpgrp():
                termios.tcsetattr(terminals[0], termios.TCSANOW, before)
                if os.environ.get("TERM", "dumb") != "dumb":
                    os.write(terminals[-1], _USUAL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _end(_signal: int, _frame: FrameType | None) -> NoReturn:
    os._exit(EXIT_INTERRUPTED)
