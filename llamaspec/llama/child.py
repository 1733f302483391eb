"""A child process for calls of llama.cpp that may crash, hang, take all memory, or ignore Ctrl-C.

The child runs `main` of a module and writes one short answer. The parent polls the child, so that Ctrl-C and
a time limit work. The child's stdin is a pipe from the parent: if the parent dies, the pipe closes and the
child ends. tests/llama/test_child.py.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import psutil

_POLL_SECONDS = 0.1
_LONGEST_ANSWER = 32_000  # bytes; a pipe holds 64 KiB, and the parent reads it only after the child has ended


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a child ended."""

    code: int  # exit code; -N = signal N
    answer: bytes


def run_child(
    module: str,
    arguments: Sequence[str],
    on_wait: Callable[[], None] | None = None,
    seconds: float = math.inf,
    environment: Mapping[str, str] | None = None,
) -> Outcome | None:
    """Run `main` of a module in a child process; return None if it takes longer than `seconds`.

    `arguments` become the child's `sys.argv[1:]`; `environment` is added to the variables of this process.
    `on_wait` is called repeatedly while the child runs; an exception there ends the child. Raises OSError or
    ValueError if the child cannot be started.
    """
    # The child has this process's module path, so that it imports nothing from the working directory.
    program = f"import sys; sys.path[:] = sys.argv.pop().split('\\n'); from {module} import main; main()"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", program, *arguments, "\n".join(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Without GGML_NO_BACKTRACE, a crash starts a debugger.
        env={**os.environ, "GGML_NO_BACKTRACE": "1", **(environment or {})},
    ) as child:
        assert child.stdout is not None
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                with suppress(subprocess.TimeoutExpired):
                    code = child.wait(_POLL_SECONDS)
                    return Outcome(code, child.stdout.read())
                if on_wait is not None:
                    on_wait()
        except BaseException:
            child.kill()
            raise
        child.kill()
        return None


# In the child


def end_with_parent() -> None:
    """End this process as soon as its parent is gone."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)  # not sys.stdin.buffer: Python aborts at exit if a thread has its lock
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end_with_answer(answer: str) -> NoReturn:
    """Write the answer and end at once, without freeing memory that may be damaged."""
    sys.stdout.buffer.write(answer.encode(errors="replace")[:_LONGEST_ANSWER])
    sys.stdout.buffer.flush()
    os._exit(0)


def limit_memory(n_bytes: int) -> None:
    """Allow `n_bytes` more of data if the system has such a limit; mapped weights do not count."""
    n_bytes += getattr(psutil.Process().memory_info(), "data", 0)  # in use already; only Linux reports it
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_DATA, n_bytes)


def limit_cpu(seconds: int) -> None:
    """Lower the limit of processor time to `seconds` since the process started."""
    _lower(resource.RLIMIT_CPU, seconds)


def _lower(kind: int, limit: int) -> None:
    soft, hard = resource.getrlimit(kind)
    known = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (min([limit, *known]), hard))
