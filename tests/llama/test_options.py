"""What computes a model, as its options say."""

from __future__ import annotations

from typing import Any

import pytest

from llamaspec import ModelOptions
from llamaspec.llama.devices import Device, computing_devices, gpus_among

CPU = Device("CPU", "a processor", "CPU", 0, 0)
CARDS = tuple(Device(name, "a card", "GPU", 2**30, 2**31) for name in ("CUDA0", "CUDA1"))
INTEGRATED = Device("Vulkan1", "part of a processor", "integrated GPU", 2**30, 2**31)


def test_integrated_gpus_count_where_there_are_no_others() -> None:
    assert gpus_among((CPU, INTEGRATED)) == (INTEGRATED,)
    assert gpus_among((CPU, *CARDS, INTEGRATED)) == CARDS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"CUDA0", "CUDA1"}),
        ({"gpu_layers": 5}, {"CUDA0", "CUDA1"}),
        ({"gpu_layers": 4}, {"CUDA0", "CUDA1", "CPU"}),  # the output and three of four layers
        ({"gpu_layers": 0}, {"CPU"}),
        ({"devices": ()}, {"CPU"}),
        ({"devices": ("CUDA1",)}, {"CUDA1"}),
        ({"devices": ("CUDA1",), "gpu_layers": 1}, {"CUDA1", "CPU"}),
    ],
)
def test_what_a_model_computes_on(options: dict[str, Any], expected: set[str]) -> None:
    assert computing_devices(ModelOptions(**options), 4, (CPU, *CARDS, INTEGRATED)) == expected
    assert computing_devices(ModelOptions(gpu_layers=3), 4, (CPU,)) == {"CPU"}
