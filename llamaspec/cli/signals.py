"""Signal handlers for the time before and after a command.

Ctrl-C ends the process at once while modules are imported and after the command is done; otherwise Python
would print a traceback, and a C extension may turn it into another error. SIGTERM and SIGHUP end the process
but restore the terminal first, because line editing turns echo off and a progress bar hides the cursor.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130
_AGAIN_SECONDS = 0.02
_RESET = b"\x1b[0m\x1b[?25h\x1b[?2004l"  # no colour, cursor shown, bracketed paste off


def end_the_process_on_interrupt() -> None:
    """End the process at the next Ctrl-C, unless Ctrl-C is ignored or has another handler."""
    if _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def let_interrupts_raise() -> None:
    """Let Ctrl-C raise KeyboardInterrupt if it would end the process."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """End the process at Ctrl-C within a block."""
    before = signal.getsignal(signal.SIGINT)
    end_the_process_on_interrupt()
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_are_not_echoed() -> Iterator[None]:
    """Keep "^C" out of the text of a terminal within a block."""
    if sys.stdin is None or not sys.stdin.isatty() or os.name != "posix":
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    changed = [*before]
    changed[3] &= ~termios.ECHOCTL
    termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def leave_the_terminal_as_found() -> None:
    """Restore the terminal if SIGTERM or SIGHUP ends the process, unless they have another handler."""
    terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]
    if not terminals or not _is_main_thread():
        return
    import termios  # not on every system

    before = termios.tcgetattr(terminals[0])

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        with suppress(OSError, termios.error):  # the terminal may be closed, or belong to another job
            if os.tcgetpgrp(terminals[0]) == os.getpgrp():
                termios.tcsetattr(terminals[0], termios.TCSANOW, before)
                if os.environ.get("TERM", "dumb") != "dumb":
                    os.write(terminals[-1], _RESET)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


@contextmanager
def signals_reach_input() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end `input` even if they arrive just before it waits for a key.

    Python runs a handler only between two of its own instructions. A signal after the last one, and before
    the system call that waits, would be answered after the next key. But Python writes each signal into a
    pipe at once. A thread reads it and sends the signal again, until the handler ends the process.
    """
    if not _is_main_thread():
        yield
        return
    main, (reading, writing) = threading.get_ident(), os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        while number := os.read(reading, 1):
            if number[0] in (signal.SIGTERM, signal.SIGHUP):
                time.sleep(_AGAIN_SECONDS)
                signal.pthread_kill(main, number[0])

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        watcher.join()
        os.close(reading)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _end(_signal: int, _frame: FrameType | None) -> NoReturn:
    os._exit(EXIT_INTERRUPTED)
