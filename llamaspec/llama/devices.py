"""What llama.cpp can compute on: the devices that its build knows and this machine has."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from llamaspec.errors import DeviceError
from llamaspec.llama import runtime
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.runtime import ggml_function

_KINDS = ("CPU", "GPU", "integrated GPU", "accelerator")  # ggml_backend_dev_type


@dataclass(frozen=True, slots=True)
class Device:
    """One device."""

    name: str  # as llama.cpp numbers it: CPU, CUDA0, MTL0
    description: str
    kind: str  # CPU, GPU, integrated GPU, accelerator
    free_bytes: int
    total_bytes: int

    @property
    def is_gpu(self) -> bool:
        """Whether layers can be offloaded to it."""
        return "GPU" in self.kind


def find_devices() -> tuple[Device, ...]:
    """All devices of this machine, those that llama.cpp prefers first."""
    return tuple(device_of(handle) for handle in _handles())


def gpus_among(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Those that llama.cpp offloads to where it chooses: integrated ones only if there are no others."""
    cards = tuple(device for device in devices if device.kind == "GPU")
    return cards or tuple(device for device in devices if device.is_gpu)


def computing_devices(
    options: ModelOptions, n_layers: int, found: Sequence[Device] | None = None
) -> frozenset[str]:
    """What a model loaded like this computes on, of `found` or here; `n_layers` without the output."""
    found = find_devices() if found is None else found
    names = options.devices
    if names is None:
        names = tuple(device.name for device in gpus_among(found)) if options.offloads else ()
    is_whole = options.gpu_layers is None or options.gpu_layers > n_layers
    if not names or not options.offloads:
        return frozenset({"CPU"})
    return frozenset(names) if is_whole else frozenset({*names, "CPU"})


def device_handles(names: Sequence[str]) -> list[int]:
    """llama.cpp's handles of devices of this machine.

    Raises
    ------
    DeviceError
        There is no such device.
    """
    known = {_name(handle): handle for handle in _handles()}
    for name in names:
        if name not in known:
            raise DeviceError(f"there is no device {name}; llama.cpp finds {', '.join(known)} here")
    return [known[name] for name in names]


def device_of(handle: int) -> Device:
    """What a handle stands for; of a worker's device, it is asked."""
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


def as_size(n: int) -> str:
    """Bytes for people."""
    return f"{n / 2**30:.1f} GiB" if n >= 2**29 else f"{n / 2**20:.1f} MiB"


def _handles() -> list[int]:
    runtime.start()
    count = ggml_function("ggml_backend_dev_count", ctypes.c_size_t)
    get = ggml_function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return [get(i) for i in range(count())]


def _name(handle: int) -> str:
    name: bytes = ggml_function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)(handle)
    return name.decode("utf-8", errors="replace")
