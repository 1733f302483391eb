"""Describe the machine that models run on: devices, cores, free memory, and the load of other programs."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass

from llamaspec.llama import runtime
from llamaspec.llama.options import Device, ModelOptions, find_devices
from llamaspec.llama.threads import usage

CROWDED = 0.9  # of the free memory; evaluation needs more than weights and contexts
LOOK_SECONDS = 0.3  # for measuring the load of other programs


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that the models will run on."""

    system: str  # sys.platform
    backend: str  # build and CPU features, in one line
    devices: tuple[Device, ...]
    can_offload: bool  # whether this build computes on GPUs
    has_nvidia: bool  # whether this machine has a GPU that CUDA would use
    repacking_is_safe: bool  # False: the build has AMX, which crashes
    free_bytes: int | None  # before any model was loaded; None where the system does not say
    n_physical: int  # cores at full speed
    n_logical: int  # threads of the processor
    n_taken: float = 0.0  # of these, how many other programs use at the moment

    @property
    def gpus(self) -> tuple[Device, ...]:
        """Those that this build computes on."""
        return tuple(device for device in self.devices if device.is_gpu and self.can_offload)

    def offloads(self, options: ModelOptions) -> bool:
        """Whether a model loaded like this computes on a GPU."""
        return bool(self.gpus) and options.offloads


def look_at_machine() -> Machine:
    """Collect facts from llama.cpp and the system."""
    return Machine(
        system=sys.platform,
        backend=runtime.backend_description().replace(" = 1 |", "").replace(" :", ":").rstrip(),
        devices=find_devices(),
        can_offload=runtime.can_offload(),
        has_nvidia=shutil.which("nvidia-smi") is not None,
        repacking_is_safe=runtime.repacking_is_safe(),
        free_bytes=runtime.available_bytes(),
        n_physical=runtime.default_threads(),
        n_logical=runtime.n_hardware_threads(),
        n_taken=_taken_cores(),
    )


def _taken_cores() -> float:
    """How many hardware threads other programs use, looked at for a moment."""
    before = usage()
    time.sleep(LOOK_SECONDS)
    after = usage()
    wall = after.wall - before.wall
    idle, own = (after.idle - before.idle) / wall, (after.own - before.own) / wall
    return max(0.0, runtime.n_hardware_threads() - idle - own)
