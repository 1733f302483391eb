"""What a doctor says of a machine and of the room on it, from measured facts: one finding each.

Loads, measures and prints nothing. A finding that is not ok names its remedy, and with which settings: by the
role of the model and the field of its options, such as "draft.n_ctx".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llamaspec.errors import LlamaspecError
from llamaspec.llama.devices import Device, as_size
from llamaspec.llama.facts import MemoryFacts, ModelFacts
from llamaspec.llama.options import ModelOptions

OK, WARNING, PROBLEM = "ok", "warning", "problem"
CROWDED = 0.9  # of the free memory; computing needs some more than weights and contexts


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: str  # ok, warning or problem
    topic: str
    text: str
    remedy: str | None = None  # None where nothing needs to be done
    settings: tuple[str, ...] = ()  # with which something can be done
    error: LlamaspecError | None = None  # what it was made of

    @classmethod
    def of_error(cls, topic: str, error: LlamaspecError) -> Finding:
        """A problem; our errors end with their remedy, behind a semicolon."""
        text, _, remedy = str(error).rpartition("; ")
        return cls(PROBLEM, topic, text or str(error), remedy if text else None, error=error)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the models will run on."""

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


@dataclass(frozen=True, slots=True)
class Examined:
    """A loaded model and what was measured of it."""

    role: str  # target or draft
    name: str  # of the file
    description: str  # architecture, size and quantisation
    facts: ModelFacts
    memory: MemoryFacts
    options: ModelOptions
    context_size: int
    trained_context_size: int
    flash_attention: bool | None  # what llama.cpp chose; None where it did not say
    step_seconds: float  # one token

    @property
    def needed_bytes(self) -> int:
        """Weights and the KV cache of the whole context."""
        return self.facts.weights_bytes + self.memory.size(self.context_size)


def machine_findings(machine: Machine) -> Iterator[Finding]:
    """Build, devices."""
    if machine.repacking_is_safe:
        yield Finding(OK, "backend", machine.backend)
    else:
        yield Finding(
            WARNING,
            "backend",
            f"{machine.backend}: a build with AMX, which crashes, so its fast kernels stay off",
            "build llama.cpp with CMAKE_ARGS=-DCMAKE_CXX_FLAGS=-mno-amx-tile, or by `make run`",
        )
    shown = ", ".join(_device(device) for device in machine.devices)
    if machine.system == "darwin" and not machine.can_offload:
        yield Finding(
            WARNING,
            "devices",
            f"{shown}; this build has no Metal",
            "build llama.cpp anew with CMAKE_ARGS=-DGGML_METAL=on",
        )
    elif machine.has_nvidia and not machine.can_offload:
        yield Finding(
            WARNING,
            "devices",
            f"{shown}; an NVIDIA GPU is here, but this build computes on the CPU only",
            "build llama.cpp anew with CMAKE_ARGS=-DGGML_CUDA=on",
        )
    else:
        yield Finding(OK, "devices", shown + ("" if machine.can_offload else "; no GPU offload"))


def busy_finding(machine: Machine) -> Iterator[Finding]:
    """Whether other programs use the cores; nothing on a quiet machine."""
    if machine.n_taken >= max(0.5, machine.n_logical - machine.n_physical + 0.5):
        yield Finding(
            WARNING,
            "load",
            f"other programs use {machine.n_taken:.1f} of {machine.n_logical} hardware threads; llamaspec "
            f"computes with fewer threads while they do, and is slower than on a quiet machine",
            "close what computes beside it",
        )


def _device(device: Device) -> str:
    free = f", {as_size(device.free_bytes)} free" if device.is_gpu else ""
    return f"{device.name} ({device.description}{free})"


def thread_finding(machine: Machine, role: str, asked: int | None) -> Finding:
    """Threads of one model."""
    n, topic = machine.n_physical if asked is None else asked, f"{role} threads"
    text = f"{n} of {machine.n_physical} full-speed cores, {machine.n_logical} hardware threads"
    if n > machine.n_physical:
        return Finding(
            WARNING,
            topic,
            f"{text}: too many wait for each other",
            f"ask for {machine.n_physical}",
            (f"{role}.threads",),
        )
    return Finding(OK, topic, text + (" (default)" if asked is None else ""))


def room_finding(machine: Machine, models: Sequence[Examined]) -> Finding:
    """Weights and contexts on this machine against what was free before."""
    models = [model for model in models if not model.options.workers]
    if not models:
        return Finding(OK, "memory", "weights and context lie on the workers")
    needed = sum(model.needed_bytes for model in models)
    on_gpu = any(machine.offloads(model.options) for model in models)
    free = sum(device.free_bytes for device in machine.gpus) if on_gpu else machine.free_bytes
    place = "on the GPU" if on_gpu else "in main memory"
    parts = " + ".join(
        f"{model.role} {as_size(model.facts.weights_bytes)} weights, "
        f"{as_size(model.memory.size(model.context_size))} context"
        for model in models
    )
    text = f"{as_size(needed)} needed ({parts})"
    if free is None:
        return Finding(OK, "memory", f"{text}; the system does not say what is free")
    text += f", {as_size(free)} free {place}"
    if needed <= CROWDED * free:
        return Finding(OK, "memory", text)
    remedy = "open a smaller context, choose a smaller quantisation, or close programs"
    if on_gpu:
        settings = ("target.n_ctx", "target.gpu_layers")
        return Finding(WARNING, "memory", text, f"{remedy}; or put fewer layers on the GPU", settings)
    return Finding(PROBLEM if needed > free else WARNING, "memory", text, remedy, ("target.n_ctx",))
