"""llama.cpp's RPC workers: other machines that compute layers of a model, and being one.

A worker has no authentication, and whoever reaches it can make it compute, read what lies there and crash
it: private networks only. A worker serves one client at a time. llama.cpp's client ends the process when it
loses a worker; all that can be done is to say so in one line (`_report_abort`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamaspec.errors import WorkerError, printable
from llamaspec.llama import runtime
from llamaspec.llama.options import Device, device_handles, device_of
from llamaspec.llama.runtime import ggml_function

PORT = 50052  # as llama.cpp's own worker
CONNECT_SECONDS = 5.0  # for a connection, and again for the first answer


def connect(addresses: Sequence[str]) -> list[int]:
    """Register workers, named HOST:PORT, with llama.cpp: the handles of their devices in the same order.

    WorkerError if one of them cannot be reached or is busy, or if this build of llama.cpp has no RPC.
    """
    add_server = _rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    _report_abort()
    devices: list[int] = []
    for address in addresses:
        _check_listens(address)
        found = _within_seconds(functools.partial(_asked, add_server, address), address)
        if not found:
            raise WorkerError(f"the worker {address} has no device to compute on; start it with one")
        devices += found
    return devices


def serve_worker(
    host: str,
    port: int,
    threads: int | None,
    devices: Sequence[Device],
    cache: Path | None,
    ready: Callable[[], None],
) -> None:
    """Be a worker that computes on `devices`, until a signal ends the process; only in the main thread.

    `cache` is a folder where weights are kept, so that a client sends them once. `ready` is called once the
    address is known to be free. WorkerError if it is not, or if this build of llama.cpp has no workers.
    """
    pointers, size = ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t
    start = _rpc_function(
        "ggml_backend_rpc_start_server", None, ctypes.c_char_p, ctypes.c_char_p, size, size, pointers
    )
    try:
        number = socket.gethostbyname(host)
        socket.create_server((number, port)).close()
    except OSError as error:
        is_name = isinstance(error, socket.gaierror)
        reason = error.strerror if is_name else os.strerror(error.errno or 0)  # create_server's is longer
        raise WorkerError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        ) from error
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Python would not notice them
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    handles = device_handles([device.name for device in devices])
    array = (ctypes.c_void_p * len(handles))(*handles)
    folder = os.fsencode(cache) if cache is not None else None
    ready()
    start(f"{number}:{port}".encode(), folder, threads or runtime.default_threads(), len(handles), array)
    raise WorkerError(f"the worker on {host}:{port} has ended; choose another --port or --device")


def _check_listens(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
        raise WorkerError(
            f"no worker can be reached at {address}: {reason}; "
            f"start one there with `llamaspec worker --host ADDRESS --port {port}`"
        ) from error


def _asked(add_server: Callable[[bytes], int | None], address: str) -> list[int]:
    """The devices of a worker, each of which has answered."""
    registered = add_server(address.encode())
    if not registered:
        return []
    count = ggml_function("ggml_backend_reg_dev_count", ctypes.c_size_t, ctypes.c_void_p)
    get = ggml_function("ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    handles = [get(registered, i) for i in range(count(registered))]
    for handle in handles:
        device_of(handle)  # llama.cpp remembers workers that it knew: only this asks them
    return handles


def _within_seconds(ask: Callable[[], list[int]], address: str) -> list[int]:
    """What llama.cpp is told; it waits without end for a worker that serves another client."""
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.append(ask()), name=f"rpc {address}", daemon=True)
    asking.start()
    asking.join(CONNECT_SECONDS)
    if not answers:
        raise WorkerError(
            f"{address} is busy with another client, or is no worker; a worker serves one client at a time"
        )
    return answers[0]


def _rpc_function(name: str, result: type | None, *arguments: type) -> Any:
    runtime.start()
    registry = ggml_function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")
    if not registry:
        raise WorkerError(
            "this build of llama.cpp has no RPC; build it with CMAKE_ARGS=-DGGML_RPC=ON, or by `make run`"
        )
    find = ggml_function(
        "ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p
    )
    return ctypes.CFUNCTYPE(result, *arguments)(find(registry, name.encode()))


@functools.cache
def _report_abort() -> object:
    """From now on, where llama.cpp would abort the process, end it with one line and exit code 1."""

    def end(message: bytes) -> None:
        said = printable(message.decode(errors="replace"))
        what = "a worker was lost, or is of another version" if "rpc" in said.lower() else "llama.cpp failed"
        with suppress(Exception):  # whatever happens, the process must end here
            sys.stdout.flush()
            sys.stderr.write(f"\nllamaspec: {what} ({said}); start it and run this again\n")
            sys.stderr.flush()
        os._exit(1)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(end)
    ggml_function("ggml_set_abort_callback", ctypes.c_void_p, type(callback))(callback)
    return callback  # llama.cpp keeps only a pointer
