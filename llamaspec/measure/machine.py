"""Facts about the machine, and the pairs of the catalog that fit it.

The catalog states the sizes of weights and KV caches, so nothing is fetched or loaded. Only a probe can tell
whether drafts make a pair faster.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

from llamaspec.catalog import Catalog, Entry
from llamaspec.errors import ModelFileError
from llamaspec.kernels import Kernels
from llamaspec.llama import resources, runtime
from llamaspec.llama.devices import Device, find_devices, gpus_among
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.resources import usage
from llamaspec.values import MTP

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
    n_logical: int  # hardware threads
    n_taken: float = 0.0  # hardware threads that other programs are using

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
        n_taken=taken_threads(),
    )


def taken_threads() -> float:
    """Measure for `LOOK_SECONDS` how many hardware threads other programs use."""
    watch = LoadWatch()
    time.sleep(LOOK_SECONDS)
    return watch.n_taken()


class LoadWatch:
    """Measures how many hardware threads programs use besides this process and its children."""

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


def too_many_taken(n_taken: float, n_physical: int, n_logical: int) -> bool:
    """Whether other programs use so many hardware threads that less than all cores are left."""
    return n_taken >= max(0.5, n_logical - n_physical + 0.5)


# Pairs that fit


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for a pair."""

    n_bytes: int
    is_gpu: bool = False  # on graphics cards, which need no room for other programs


@dataclass(frozen=True, slots=True)
class Choice:
    """A model of the catalog with its draft."""

    name: str
    draft: str | None  # a name, or "mtp"; None if only earlier text is copied
    weights_bytes: int  # of target and draft
    cache_bytes: int  # of target and draft, for a context of CACHE_TOKENS
    memory_gb: int  # main memory that the catalog recommends
    notes: str | None

    @property
    def needed_bytes(self) -> int:
        """Size of weights and caches."""
        return self.weights_bytes + self.cache_bytes

    def fits(self, room: Room) -> bool:
        """Whether there is enough room; the catalog's recommendation leaves some for other programs."""
        if room.is_gpu:
            return self.needed_bytes <= CROWDED * room.n_bytes
        return self.memory_gb * 10**9 <= room.n_bytes


def rooms_of(machine: MachineFacts, total_bytes: int) -> list[Room]:
    """Return the memory that a pair can use, best first: graphics cards, then main memory."""
    cards = [device for device in machine.gpus if device.kind == "GPU" and machine.system != "darwin"]
    on_cards = [Room(sum(card.total_bytes for card in cards), is_gpu=True)] if cards else []
    return [*on_cards, Room(total_bytes)]


def room_for_models() -> int:
    """Return the bytes that all loaded models may take by default: on GPUs, or else of main memory."""
    cards = gpus_among(find_devices()) if runtime.can_offload() and sys.platform != "darwin" else ()
    on_cards = sum(card.total_bytes for card in cards if card.kind == "GPU")
    return round(CROWDED * on_cards) or resources.total_bytes() * (FREE_SHARE - 1) // FREE_SHARE


def choices(catalog: Catalog, room: Room) -> list[Choice]:
    """Return the models that fit, best first: in the catalog's order, those without a draft last."""
    found = [choice for choice in _choices(catalog) if choice.fits(room)]
    return sorted(found, key=lambda choice: choice.draft is None)


def _choices(catalog: Catalog) -> Iterator[Choice]:
    for entry in catalog.entries.values():
        try:
            models = [entry] if entry.draft is None else [entry, catalog.find(entry.draft.partition(":")[0])]
        except ModelFileError:  # the draft is not in the catalog
            continue
        sizes = [_weights_bytes(model) for model in models]
        if entry.memory_gb is not None and all(sizes):
            draft = entry.draft or (MTP if entry.heads else None)
            cache_bytes = 10**6 * sum(model.cache_mb or 0 for model in models)
            yield Choice(entry.name, draft, sum(sizes), cache_bytes, entry.memory_gb, entry.notes)


def _weights_bytes(entry: Entry) -> int:
    """Return the size of the weights; 0 if unknown."""
    return entry.file().n_bytes or 0 if entry.path is None else 0


def expectation(machine: MachineFacts | None) -> str:
    """Return in words whether drafts should help on such hardware; `machine` is None if it is unknown."""
    if machine is None:
        return "whether they help depends on the hardware and the quantization"
    if machine.system == "darwin" and machine.gpus:
        return (
            "on Metal, evaluating several tokens at once can cost nearly as much as one by one "
            "(ggml-org/llama.cpp#25250), so a draft may not help; copies of earlier text do"
        )
    if machine.gpus:
        return (
            "on GPUs, evaluating several tokens at once costs little more than one, so drafts should help, "
            "less with a mixture of experts; llamaspec itself has not been measured there"
        )
    return (
        "on CPUs it depends on the kernels: on two cores, drafts helped with Q4_0 and F16 weights, but "
        "hardly with K-quants; a smaller pair or a mixture of experts is faster in any case"
    )
