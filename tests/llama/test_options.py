"""The choice of devices."""

from __future__ import annotations

from llamaspec.llama.devices import Device, gpus_among

CPU = Device("CPU", "a processor", "CPU", 0, 0)
CARDS = tuple(Device(name, "a card", "GPU", 2**30, 2**31) for name in ("CUDA0", "CUDA1"))
INTEGRATED = Device("Vulkan1", "part of a processor", "integrated GPU", 2**30, 2**31)


def test_integrated_gpus_are_used_if_there_are_no_others() -> None:
    assert gpus_among((CPU, INTEGRATED)) == (INTEGRATED,)
    assert gpus_among((CPU, *CARDS, INTEGRATED)) == CARDS
