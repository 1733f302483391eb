"""A child process for calls of llama.cpp that may crash, hang, take all memory, or ignore Ctrl-C.

The child runs `main` of a module and writes one short answer. Its parent polls it, so that Ctrl-C and a time
limit work. The child's stdin is a pipe from its parent: if the parent dies, the pipe closes and the child
ends. tests/llama/test_child.py.
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
_LONGEST_ANSWER = 32_000  # bytes; a pipe holds 64 KiB, and the parent reads only when the child has ended


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
    """Run `main` of a module in a child process; None if it took longer than `seconds`.

    The child has `arguments` as `sys.argv[1:]`, and this process's environment with more variables. `on_wait`
    is called again and again while it runs; an exception there ends it. OSError or ValueError if it cannot
    be started.
    """
    # The child imports the modules of this process, and none from the working directory.
    program = f"import sys; sys.path[:] = sys.argv.pop().split('\\n'); from {module} import main; main()"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", program, *arguments, "\n".join(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "GGML_NO_BACKTRACE": "1", **(environment or {})},  # else a crash starts a debugger
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
        os.read(sys.stdin.fileno(), 1)  # the lock of sys.stdin.buffer would make a failed child abort
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end_with_answer(answer: str) -> NoReturn:
    """Write the answer and end, without freeing what may be damaged."""
    sys.stdout.buffer.write(answer.encode(errors="replace")[:_LONGEST_ANSWER])
    sys.stdout.buffer.flush()
    os._exit(0)


def limit_memory(n_bytes: int) -> None:
    """Allow so many more bytes of data, if the system can limit them; mapped weights do not count."""
    n_bytes += getattr(psutil.Process().memory_info(), "data", 0)  # allocated already; only Linux reports it
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_DATA, n_bytes)


def limit_cpu(seconds: int) -> None:
    """Lower the limit of processor time, in seconds since the process started."""
    _lower(resource.RLIMIT_CPU, seconds)


def _lower(kind: int, limit: int) -> None:
    soft, hard = resource.getrlimit(kind)
    known = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (min([limit, *known]), hard))
