"""The pairs of the catalog that fit a machine, and what to expect of drafts on it.

The catalog states the sizes of weights and KV caches, so nothing is fetched or loaded. Only a probe can tell
whether drafts make a pair faster. tests/measure/test_recommend.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llamaspec.catalog import Catalog, Entry
from llamaspec.errors import ModelFileError
from llamaspec.llama.devices import card_bytes
from llamaspec.measure.machine import CROWDED, FREE_SHARE, MachineFacts
from llamaspec.values import MTP


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
        """Whether there is enough room, in main memory beside other programs.

        `memory_gb` does not tell: it names the sizes that machines are sold with.
        """
        share = CROWDED if room.is_gpu else 1 - 1 / FREE_SHARE
        return self.needed_bytes <= share * room.n_bytes


def rooms_of(machine: MachineFacts, total_bytes: int) -> list[Room]:
    """Return the memory that a pair can use, best first: graphics cards, then main memory."""
    on_cards = card_bytes(machine.gpus, machine.system)
    return [*([Room(on_cards, is_gpu=True)] if on_cards else []), Room(total_bytes)]


def choices(catalog: Catalog, room: Room) -> list[Choice]:
    """Return the models that fit, best first: in the catalog's order, those without a draft last."""
    found = [choice for choice in _choices(catalog) if choice.fits(room)]
    return sorted(found, key=lambda choice: choice.draft is None)


def _choices(catalog: Catalog) -> Iterator[Choice]:
    for entry in catalog.entries.values():
        try:
            models = [entry] if entry.draft is None else [entry, catalog.find(entry.draft)]
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
    if machine.kernels.level is not None:
        return (
            "here llamaspec's kernels evaluate several tokens for little more than the price of one, so "
            "drafts help in all usual quantizations if the draft is several times smaller"
        )
    return (
        "on CPUs it depends on the kernels: on two cores, drafts helped with Q4_0 and F16 weights, but "
        "hardly with K-quants; a smaller pair or a mixture of experts is faster in any case"
    )
