"""`llamaspec worker` in a process on this machine."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import pytest

from command import ENTRY, environment
from llamaspec.llama import runtime
from llamaspec.llama.runtime import ggml_function
from patience import PATIENCE


def has_rpc() -> bool:
    """Return whether this build of llama.cpp has RPC workers."""
    runtime.start()
    return bool(ggml_function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC"))


needs_rpc = pytest.mark.skipif(
    not os.environ.get("CI") and not has_rpc(), reason="this build of llama.cpp has no RPC; .ci/run's has"
)


@dataclass(frozen=True)
class Worker:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def address(self) -> str:
        """The value of --rpc."""
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End the process without warning, and wait for its end."""
        self.process.kill()
        self.process.wait()


@contextmanager
def running_worker() -> Iterator[Worker]:
    """Start a worker that listens. If another program takes the port first, try another port."""
    while True:
        port = free_port()
        command = [*ENTRY, "worker", "--port", str(port), "--threads", "1"]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
            try:
                end = time.monotonic() + PATIENCE
                while process.poll() is None and time.monotonic() < end:
                    if "a worker listens on" in _said(log) and _listens(port):
                        yield Worker(process, port)
                        return
                    time.sleep(0.01)
            finally:
                process.kill()
                process.wait()
            said = _said(log)
        if "cannot listen" not in said:
            raise ChildProcessError(f"the worker did not start: {said}")


def free_port() -> int:
    """Return a port on which no program listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _said(log: IO[bytes]) -> str:
    """Return the output so far, without moving the file position, which the worker shares."""
    return os.pread(log.fileno(), 1 << 16, 0).decode(errors="replace")


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
