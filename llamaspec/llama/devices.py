"""What llama.cpp can compute on: the devices that its build knows and this machine has."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from llama_cpp._ggml import libggml  # llama.h does not list devices, ggml does

from llamaspec.llama import runtime

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
    """All devices, those that llama.cpp prefers first."""
    runtime.start()
    count = _function("ggml_backend_dev_count", ctypes.c_size_t)
    get = _function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return tuple(_device(get(i)) for i in range(count()))


def _device(handle: int) -> Device:
    name = _function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    description = _function("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    kind = _function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle)
    sizes = ctypes.POINTER(ctypes.c_size_t)
    memory = _function("ggml_backend_dev_memory", None, ctypes.c_void_p, sizes, sizes)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory(handle, ctypes.byref(free), ctypes.byref(total))
    return Device(
        name=name(handle).decode("utf-8", errors="replace"),
        description=description(handle).decode("utf-8", errors="replace"),
        kind=_KINDS[kind] if 0 <= kind < len(_KINDS) else "device",
        free_bytes=free.value,
        total_bytes=total.value,
    )


def _function(name: str, result: type | None, *arguments: type) -> Any:
    function = libggml[name]  # by index: an object of our own, whose types nobody else changes
    function.restype, function.argtypes = result, arguments
    return function
