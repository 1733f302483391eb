"""Workers of tests: `llamaspec worker` in a process of its own, which may be killed."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from command import ENTRY, environment
from llamaspec.llama.workers import has_rpc
from patience import until

needs_rpc = pytest.mark.skipif(
    not os.environ.get("CI") and not has_rpc(), reason="this build of llama.cpp has no RPC; .ci/run's has"
)


class Worker:
    """A process, and where it listens."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port
        self.address = f"127.0.0.1:{port}"

    def kill(self) -> None:
        """End it as a power cut would, and wait until it has ended."""
        self.process.kill()
        self.process.wait()


@contextmanager
def running_worker(folder: Path) -> Iterator[Worker]:
    """A worker that listens; another port is tried where somebody else was faster."""
    while True:
        port = free_port()
        log = folder / f"worker-{port}.log"
        command = [*ENTRY, "worker", "--port", str(port), "--threads", "1"]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment())
        try:
            until(lambda process=process, port=port: process.poll() is not None or _listens(port))  # type: ignore[misc]
            if process.poll() is None:
                yield Worker(process, port)
                return
            assert "cannot listen" in log.read_text(), log.read_text()
        finally:
            process.kill()
            process.wait()


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
