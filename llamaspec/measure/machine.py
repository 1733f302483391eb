"""Facts about the machine: devices, cores, free memory, and the load of other programs."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from llamaspec.kernels import Kernels
from llamaspec.llama import resources, runtime
from llamaspec.llama.devices import Device, card_bytes, find_devices
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.resources import usage

CROWDED = 0.9  # of the free memory; evaluation needs more than weights and contexts
FREE_SHARE = 5  # models leave 1 / FREE_SHARE of the main memory to other programs
LOOK_SECONDS = 0.3  # for measuring the load of other programs


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The machine that models run on."""

    system: str  # sys.platform
    backend: str  # llama.cpp's build and CPU features, in one line
    devices: tuple[Device, ...]
    can_offload: bool  # this build can compute on GPUs
    has_nvidia: bool  # the machine has an NVIDIA GPU
    repacking_is_safe: bool  # False if the build uses AMX, which crashes
    kernels: Kernels  # our own
    free_bytes: int | None  # of main memory, before any model is loaded; None if unknown
    n_physical: int  # cores at full speed
    n_logical: int  # hardware threads of these cores
    n_taken: float = 0.0  # of them, those that other programs are using

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs that this build computes on."""
        return tuple(device for device in self.devices if device.is_gpu and self.can_offload)

    @property
    def is_busy(self) -> bool:
        """Whether other programs slow llamaspec down."""
        return too_many_taken(self.n_taken, self.n_physical, self.n_logical)

    def offloads(self, options: ModelOptions) -> bool:
        """Whether a model with these options computes on a GPU."""
        return bool(self.gpus) and options.offloads


def look_at_machine() -> MachineFacts:
    """Collect the facts from llama.cpp and the system; this takes `LOOK_SECONDS`."""
    watch = LoadWatch()
    time.sleep(LOOK_SECONDS)
    return MachineFacts(
        system=sys.platform,
        backend=runtime.backend_description().replace(" = 1 |", "").replace(" :", ":").rstrip(),
        devices=find_devices(),
        can_offload=runtime.can_offload(),
        has_nvidia=shutil.which("nvidia-smi") is not None,
        repacking_is_safe=runtime.repacking_is_safe(),
        kernels=runtime.kernels(),
        free_bytes=resources.available_bytes(),
        n_physical=resources.default_threads(),
        n_logical=resources.n_hardware_threads(),
        n_taken=watch.n_taken(),
    )


class LoadWatch:
    """Measures how many hardware threads of fast cores programs use besides this process and its children."""

    def __init__(self) -> None:
        self._begin, self._children = usage(), _seconds_of_children()

    def n_taken(self) -> float:
        """Return the average since the watch began."""
        now = usage()
        own = now.own - self._begin.own + max(_seconds_of_children() - self._children, 0.0)
        used = (now.idle - self._begin.idle + own) / max(now.wall - self._begin.wall, 1e-9)
        return max(0.0, resources.n_hardware_threads() - used)


def _seconds_of_children() -> float:
    """Return the processor time of all running children, and of theirs."""
    seconds = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            times = child.cpu_times()
            seconds += times.user + times.system
    return seconds


def load_in_words(n_taken: float) -> str | None:
    """Say that other programs used `n_taken` hardware threads, if that is too many; None if it is not."""
    n_physical, n_logical = resources.default_threads(), resources.n_hardware_threads()
    if not too_many_taken(n_taken, n_physical, n_logical):
        return None
    return f"other programs used {n_taken:.1f} of {n_logical} hardware threads"


def too_many_taken(n_taken: float, n_physical: int, n_logical: int) -> bool:
    """Whether other programs use so many hardware threads that less than all cores are left."""
    return n_taken >= max(0.5, n_logical - n_physical + 0.5)


def room_for_models() -> int:
    """Return the bytes that all loaded models may take by default: on GPUs, or else of main memory."""
    return (
        round(CROWDED * card_bytes(find_devices()))
        or resources.total_bytes() * (FREE_SHARE - 1) // FREE_SHARE
    )
