"""What computes a model and its attention, as options and facts of its file say."""

from __future__ import annotations

from typing import Any

import pytest

from llamaspec import ModelOptions
from llamaspec.llama.options import Device, computing_devices, flash_attention_for, gpus_among

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


# A Q4_K_M file on a CPU, and what changes the answer.
FACTS: dict[str, Any] = {
    "file_type": "15",
    "n_heads": 12,
    "n_trained": 32768,
    "is_ordinary": True,
    "on_cpu": True,
}


@pytest.mark.parametrize(
    ("options", "facts", "expected"),
    [
        ({}, {}, "off"),
        ({}, {"file_type": None}, "auto"),
        ({}, {"file_type": "2"}, "auto"),  # Q4_0: the same numbers at every width
        ({}, {"on_cpu": False}, "auto"),
        ({}, {"is_ordinary": False}, "auto"),
        ({"n_ctx": 256}, {}, "auto"),
        ({"n_ctx": 256, "n_cells": 512}, {}, "off"),
        ({}, {"n_heads": 32, "n_trained": 131072}, "auto"),  # its scores would take 8 GiB
        ({"n_ctx": 16384}, {"n_heads": 32, "n_trained": 131072}, "off"),
        ({"cache_type_v": "bf16"}, {}, "auto"),
        ({"cache_type_k": "q8_0"}, {}, "auto"),
        ({"flash_attention": "auto"}, {}, "auto"),
        ({"flash_attention": "on"}, {}, "on"),
        ({"flash_attention": "off"}, {"file_type": "2"}, "off"),
    ],
)
def test_flash_attention_follows_from_facts(
    options: dict[str, Any], facts: dict[str, Any], expected: str
) -> None:
    assert flash_attention_for(ModelOptions(**options), **{**FACTS, **facts}) == expected
