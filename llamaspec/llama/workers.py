"""Other machines that compute layers of a model: llama.cpp's RPC workers, as a client and as a worker.

A worker has no authentication, and whoever reaches it can make it compute, read what lies there and crash
it: private networks only. A worker serves one client at a time.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llamaspec.errors import WorkerError
from llamaspec.llama import runtime
from llamaspec.llama.devices import Device, device_handles
from llamaspec.llama.relay import Relay
from llamaspec.llama.runtime import ggml_function

PORT = 50052  # as llama.cpp's own worker
_SECONDS = 60.0
_VERSION = (  # it imports what this process would, and nothing from the working directory
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "from llamaspec.llama.workers import print_version; print_version()"
)


class Workers:
    """Connections to workers; `close` them once nothing lies there any more.

    Parameters
    ----------
    addresses : sequence of str
        HOST:PORT of each.

    Raises
    ------
    WorkerError
        One of them cannot be reached, is busy, or is of another version of llama.cpp.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        add_server = _rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
        self._relays: list[Relay] = []
        self.devices: list[int] = []  # handles of llama.cpp's, in the order of the addresses
        try:
            for address in addresses:
                relay = Relay(address)
                self._relays.append(relay)
                _check_version(relay)
                registered = add_server(relay.endpoint.encode())
                relay.check()
                if not registered:
                    raise WorkerError(f"the worker {address} has no device to compute on; start it with one")
                self.devices += _devices_of(registered)
        except BaseException:
            self.close()
            raise

    @property
    def is_lost(self) -> bool:
        """Whether one of them is."""
        return any(relay.is_lost for relay in self._relays)

    def check(self) -> None:
        """Raise WorkerError if one of them is lost: then nothing that was computed may be used."""
        for relay in self._relays:
            relay.check()

    def close(self) -> None:
        """Let them go; more than once is allowed."""
        for relay in self._relays:
            relay.close()


def has_rpc() -> bool:
    """Whether this build of llama.cpp has RPC workers."""
    runtime.start()
    return bool(ggml_function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC"))


def serve_worker(
    host: str,
    port: int,
    threads: int | None,
    devices: Sequence[Device],
    cache: Path | None,
    ready: Callable[[], None],
) -> None:
    """Be a worker, until a signal ends the process; only in the main thread.

    Parameters
    ----------
    host : str
        Address to listen on.
    port : int
    threads : int, optional
        Of a CPU; None: its full-speed physical cores.
    devices : sequence of Device
        What to compute on.
    cache : Path, optional
        A folder where weights are kept, so that a client sends them once.
    ready : callable
        Called when nothing is known that could go wrong.

    Raises
    ------
    WorkerError
        The address cannot be listened on, or this build of llama.cpp has no workers.
    """
    start = _start_server()
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


def print_version() -> None:
    """Let llama.cpp print the version of its protocol: it does so before it listens, here on no address."""
    array = (ctypes.c_void_p * 1)(*device_handles(["CPU"]))
    _start_server()(b"nowhere", None, 1, 1, array)
    ctypes.CDLL(None).fflush(None)


@functools.cache
def own_protocol() -> tuple[int, int]:
    """Major and minor version of the protocol that this build of llama.cpp speaks.

    It says so only on stdout, so a process of its own is asked.
    """
    command = [sys.executable, "-I", "-c", _VERSION, "\n".join(sys.path)]
    done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    found = re.search(rb"RPC server v(\d+)\.(\d+)", done.stdout)
    if found is None:
        raise WorkerError(
            "llama.cpp does not say which version of RPC it speaks; install llama-cpp-python anew"
        )
    return int(found[1]), int(found[2])


def _check_version(relay: Relay) -> None:
    """Refuse what would end the process: the condition is that of `negotiate_hello` in ggml-rpc.cpp."""
    ours, theirs = own_protocol(), relay.protocol
    if theirs[0] != ours[0] or theirs[1] > ours[1]:
        raise WorkerError(
            f"the worker {relay.address} speaks version {theirs[0]}.{theirs[1]} of llama.cpp's RPC, this "
            f"machine {ours[0]}.{ours[1]}; install the same llamaspec and llama-cpp-python on both"
        )


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


def _start_server() -> Any:
    pointers = ctypes.POINTER(ctypes.c_void_p)
    sizes = ctypes.c_size_t, ctypes.c_size_t
    return _rpc_function(
        "ggml_backend_rpc_start_server", None, ctypes.c_char_p, ctypes.c_char_p, *sizes, pointers
    )


def _devices_of(registry: int) -> list[int]:
    count = ggml_function("ggml_backend_reg_dev_count", ctypes.c_size_t, ctypes.c_void_p)
    get = ggml_function("ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return [get(registry, i) for i in range(count(registry))]
