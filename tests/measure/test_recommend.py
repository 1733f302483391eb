"""Recommended pairs: those that fit, on the best memory, in the catalog's order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamaspec.catalog import Catalog, Entry, Quantization
from llamaspec.kernels import Kernels
from llamaspec.llama.devices import Device
from llamaspec.measure.machine import MachineFacts
from llamaspec.measure.recommend import Choice, Room, choices, expectation, rooms_of

GB = 10**9
CPU = Device("CPU", "a processor", "CPU", 3 * GB, 5 * GB)
CARD = Device("CUDA0", "a card", "GPU", 7 * GB, 11 * GB)
SHARED = Device("Vulkan0", "on the processor", "integrated GPU", 2 * GB, 13 * GB)
MACHINE = MachineFacts("linux", "built", (CPU,), False, False, True, Kernels(), 4 * GB, 2, 4)


def entry(
    name: str, n_bytes: int | None, cache_mb: int, memory_gb: int | None = None, **more: object
) -> Entry:
    known = {"q": Quantization("m.gguf", n_bytes)}
    return Entry(
        name, "a/b", None, "q", known, cache_mb=cache_mb, memory_gb=memory_gb, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def catalog(*entries: Entry) -> Catalog:
    return Catalog({each.name: each for each in entries})


LIST = catalog(
    entry("alone", 9 * GB, 100, 16),
    entry("large", 19 * GB, 2000, 32, draft="small"),
    entry("middle", 8 * GB, 700, 16, draft="small:q"),
    entry("heads", 3 * GB, 300, 8, heads=True),
    entry("small", 1 * GB, 50),
    entry("unsized", None, 7, 8, heads=True),
    entry("lost", 1 * GB, 7, 8, draft="nobody"),
)


@pytest.mark.parametrize(
    ("room", "names"),
    [
        (Room(4_120_000_000), []),  # 3.3 of 3.296
        (Room(8 * GB), ["heads"]),
        (Room(11_370_000_000), ["heads"]),  # 9.1 of 9.096
        (Room(16 * GB), ["middle", "heads", "alone"]),
        (Room(27 * GB), ["middle", "heads", "alone"]),
        (Room(28 * GB), ["large", "middle", "heads", "alone"]),  # 22.05 of 22.4
        (Room(33 * GB), ["large", "middle", "heads", "alone"]),
        (Room(11 * GB, is_gpu=True), ["middle", "heads", "alone"]),  # 9.75 of 9.9
        (Room(10_800_000_000, is_gpu=True), ["heads", "alone"]),  # 9.75 of 9.72
    ],
)
def test_pairs_that_fit_come_in_the_order_of_the_catalog(room: Room, names: list[str]) -> None:
    assert [choice.name for choice in choices(LIST, room)] == names


def test_the_memory_of_a_pair() -> None:
    middle, heads, alone = choices(LIST, Room(16 * GB))
    assert middle == Choice("middle", "small:q", 9 * GB, 750_000_000, 16, None)
    assert middle.needed_bytes == 9_750_000_000
    assert (heads.draft, heads.needed_bytes, alone.draft) == ("mtp", 3_300_000_000, None)


@pytest.mark.parametrize(
    ("devices", "can_offload", "system", "rooms"),
    [
        ((CPU,), True, "linux", [Room(6 * GB)]),
        ((CARD, CARD, CPU), True, "linux", [Room(22 * GB, is_gpu=True), Room(6 * GB)]),
        ((CARD, CPU), False, "linux", [Room(6 * GB)]),
        ((SHARED, CPU), True, "linux", [Room(6 * GB)]),
        ((CARD, CPU), True, "darwin", [Room(6 * GB)]),
    ],
)
def test_memory_that_a_pair_can_use(
    devices: tuple[Device, ...], can_offload: bool, system: str, rooms: list[Room]
) -> None:
    machine = replace(MACHINE, devices=devices, can_offload=can_offload, system=system)
    assert rooms_of(machine, 6 * GB) == rooms


def test_the_expected_effect_of_drafts() -> None:
    with_card = replace(MACHINE, devices=(CARD, CPU), can_offload=True)
    on_metal = replace(with_card, system="darwin")
    sentences = [expectation(each) for each in (None, MACHINE, with_card, on_metal)]
    quick = expectation(replace(MACHINE, kernels=Kernels("avx2")))
    assert "in all usual quantizations" in quick
    for text, begins in zip(sentences, ("whether", "on CPUs", "on GPUs", "on Metal"), strict=True):
        assert text.startswith(begins)
