"""`llamaspec worker` on this machine, in a process of its own, for measurements and tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

ENTRY = [sys.executable, "-c", "from llamaspec.__main__ import main; main()"]
_LONGEST_START = 300.0  # seconds


@dataclass(frozen=True)
class Worker:
    """A process, and where it listens."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def address(self) -> str:
        """As --rpc takes it."""
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End it as a power cut would, and wait until it has ended."""
        self.process.kill()
        self.process.wait()


@contextmanager
def running_worker(threads: int = 1, env: Mapping[str, str] | None = None) -> Iterator[Worker]:
    """A worker that listens; another port is tried where somebody else was faster.

    Raises
    ------
    ChildProcessError
        It does not start; with what it said.
    """
    while True:
        port = free_port()
        command = [*ENTRY, "worker", "--port", str(port), "--threads", str(threads)]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
            try:
                end = time.monotonic() + _LONGEST_START
                while process.poll() is None and time.monotonic() < end:
                    if "a worker on" in _said(log) and _listens(port):
                        yield Worker(process, port)
                        return
                    time.sleep(0.01)
            finally:
                process.kill()
                process.wait()
            said = _said(log)
        if "cannot listen" not in said:
            raise ChildProcessError(f"the worker did not start: {said}")


def _said(log: IO[bytes]) -> str:
    """What it wrote up to now; its place in the file, which both share, stays."""
    return os.pread(log.fileno(), 1 << 16, 0).decode(errors="replace")


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
