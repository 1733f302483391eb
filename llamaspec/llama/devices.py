"""The devices that compute a model: those of this machine, and those of RPC workers on other machines.

A worker has no authentication: any client that reaches it can make it compute, read its data and crash it.
Use workers on private networks only. A worker serves one client at a time. If llama.cpp's client loses a
worker, it aborts the process; `_report_abort` can only make it say so in one line.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamaspec.errors import DeviceError, WorkerError, printable
from llamaspec.llama import resources, runtime
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.runtime import ggml_function

PORT = 50052  # the default of llama.cpp's own worker
CONNECT_SECONDS = 5.0  # timeout of a connection, and of the first answer
_KINDS = ("CPU", "GPU", "integrated GPU", "accelerator")  # ggml_backend_dev_type


@dataclass(frozen=True, slots=True)
class Device:
    """A device that computes layers."""

    name: str  # llama.cpp's, such as CPU, CUDA0, MTL0
    description: str
    kind: str  # one of `_KINDS`
    free_bytes: int
    total_bytes: int

    @property
    def is_gpu(self) -> bool:
        """Whether layers can be offloaded to the device."""
        return "GPU" in self.kind


def find_devices() -> tuple[Device, ...]:
    """Return the devices of this machine, in llama.cpp's order of preference."""
    return tuple(device_of(handle) for handle in _handles().values())


def device_of(handle: int) -> Device:
    """Describe a device; for a device of a worker, this asks the worker."""
    description = ggml_function("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    kind = ggml_function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle)
    sizes = ctypes.POINTER(ctypes.c_size_t)
    memory = ggml_function("ggml_backend_dev_memory", None, ctypes.c_void_p, sizes, sizes)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory(handle, ctypes.byref(free), ctypes.byref(total))
    return Device(
        name=_name(handle),
        description=description(handle).decode("utf-8", errors="replace"),
        kind=_KINDS[kind] if 0 <= kind < len(_KINDS) else "device",
        free_bytes=free.value,
        total_bytes=total.value,
    )


def leaves_main_memory(options: ModelOptions, chosen: Sequence[int] | None = None) -> bool:
    """Whether other devices than the CPU, such as those that a user has `chosen`, hold layers and cells."""
    return bool(chosen) or (runtime.can_offload() and options.offloads)


def free_gpu_bytes() -> int:
    """Return the free memory of all GPUs of this machine."""
    return sum(device.free_bytes for device in find_devices() if device.is_gpu)


def card_bytes(devices: Iterable[Device], system: str = sys.platform) -> int:
    """Return the memory of graphics cards; 0 on a Mac, whose GPU shares the main memory."""
    return sum(each.total_bytes for each in devices if each.kind == "GPU") if system != "darwin" else 0


def gpus_among(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the GPUs that llama.cpp uses by default: integrated ones only if there are no others."""
    cards = tuple(device for device in devices if device.kind == "GPU")
    return cards or tuple(device for device in devices if device.is_gpu)


def chosen_devices(options: ModelOptions) -> list[int] | None:
    """Return llama.cpp's handles of the devices for offloaded layers; None if llama.cpp chooses.

    llama.cpp never chooses a worker, because workers are not registered; so drafts stay on this machine.
    Raises DeviceError if there is no such device, and WorkerError if a worker cannot be reached.
    """
    workers = _connect(options.workers) if options.workers else []
    if options.devices is None and not workers:
        return None
    known = _handles() | {f"RPC{i}": handle for i, handle in enumerate(workers)}
    if options.devices is None:
        return [*workers, *(known[device.name] for device in gpus_among(find_devices()))]
    for name in options.devices:
        if name not in known:
            raise DeviceError(f"there is no device {name!r}; choose from {', '.join(known)}, or none")
    return [known[name] for name in options.devices]


def _handles() -> dict[str, int]:
    """Return llama.cpp's handles of the devices of this machine, by name."""
    runtime.start()
    count = ggml_function("ggml_backend_dev_count", ctypes.c_size_t)
    get = ggml_function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return {_name(handle): handle for handle in map(get, range(count()))}


def _name(handle: int) -> str:
    name: bytes = ggml_function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)(handle)
    return name.decode("utf-8", errors="replace")


# RPC workers


def _connect(addresses: Sequence[str]) -> list[int]:
    """Connect to workers, named HOST:PORT; return the handles of their devices in the same order."""
    add_server = _rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    _report_abort()
    devices: list[int] = []
    for address in addresses:
        _check_listens(address)
        found = _within_seconds(functools.partial(_add_worker, add_server, address), address)
        if not found:
            raise WorkerError(f"the worker {address} has no device; start it with --device")
        devices += found
    return devices


def serve_worker(
    host: str,
    port: int,
    threads: int | None,
    devices: Sequence[str],
    cache: Path | None,
    ready: Callable[[], None],
) -> None:
    """Serve as a worker on the named devices until a signal ends the process. Call it in the main thread.

    `cache` is a folder that keeps weights, so that a client sends them only once. `ready` is called when
    the address is known to be free. Raises WorkerError if it is in use, or if this build of llama.cpp has no
    workers.
    """
    runtime.choose_kernels(None)  # no model is opened here that would choose them
    pointers, size = ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t
    start = _rpc_function(
        "ggml_backend_rpc_start_server", None, ctypes.c_char_p, ctypes.c_char_p, size, size, pointers
    )
    try:
        address = socket.gethostbyname(host)
        socket.create_server((address, port)).close()
    except OSError as error:
        is_name = isinstance(error, socket.gaierror)
        # The strerror of create_server repeats the address.
        reason = error.strerror if is_name else os.strerror(error.errno or 0)
        raise WorkerError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        ) from error
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # Python runs no handlers inside `start`
        signal.signal(number, signal.SIG_DFL)
    handles = [handle for name, handle in _handles().items() if name in devices]
    array = (ctypes.c_void_p * len(handles))(*handles)
    folder = os.fsencode(cache) if cache is not None else None
    ready()
    start(f"{address}:{port}".encode(), folder, threads or resources.default_threads(), len(handles), array)
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


def _add_worker(add_server: Callable[[bytes], int | None], address: str) -> list[int]:
    """Register a worker and ask for each of its devices; return their handles."""
    registered = add_server(address.encode())
    if not registered:
        return []
    count = ggml_function("ggml_backend_reg_dev_count", ctypes.c_size_t, ctypes.c_void_p)
    get = ggml_function("ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    handles = [get(registered, i) for i in range(count(registered))]
    for handle in handles:
        device_of(handle)  # asks the worker: a handle may come from an earlier connection
    return handles


def _within_seconds(ask: Callable[[], list[int]], address: str) -> list[int]:
    """Return the answer of a worker; llama.cpp itself would wait for a busy worker for ever."""
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.append(ask()), name=f"rpc {address}", daemon=True)
    asking.start()
    asking.join(CONNECT_SECONDS)
    if not answers:
        raise WorkerError(
            f"{address} is busy with another client or is not a worker; a worker serves one client at a time"
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
    """Make the process end with one line and exit code 1 if llama.cpp aborts from now on."""

    def end(message: bytes) -> None:
        reason = printable(message.decode(errors="replace"))
        is_worker = "rpc" in reason.lower()
        fault, remedy = "llama.cpp failed", "run this again with --verbose"
        if is_worker:
            fault, remedy = "a worker was lost, or has another version", "start the worker and run this again"
        with suppress(Exception):  # the process must end here in any case
            sys.stdout.flush()
            sys.stderr.write(f"\nllamaspec: {fault} ({reason}); {remedy}\n")
            sys.stderr.flush()
        os._exit(1)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(end)
    ggml_function("ggml_set_abort_callback", ctypes.c_void_p, type(callback))(callback)
    return callback  # `cache` keeps it alive: llama.cpp has only a pointer
