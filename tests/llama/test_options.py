"""The choice of devices; options with which logits are exact."""

from __future__ import annotations

import pytest

from llamaspec import ModelOptions
from llamaspec.llama import runtime
from llamaspec.llama.devices import Device, gpus_among
from llamaspec.llama.options import exact

CPU = Device("CPU", "a processor", "CPU", 0, 0)
CARDS = tuple(Device(name, "a card", "GPU", 2**30, 2**31) for name in ("CUDA0", "CUDA1"))
INTEGRATED = Device("Vulkan1", "part of a processor", "integrated GPU", 2**30, 2**31)


def test_integrated_gpus_are_used_if_there_are_no_others() -> None:
    assert gpus_among((CPU, INTEGRATED)) == (INTEGRATED,)
    assert gpus_among((CPU, *CARDS, INTEGRATED)) == CARDS


def test_exact_options_leave_cpus_one_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "can_offload", lambda: False)
    usual = exact(ModelOptions())
    assert (usual.cache_type_k, usual.cache_type_v) == ("f16", "bf16")
    for types in (("q8_0", "f16"), ("q8_0", "q8_0"), ("f32", "bf16")):
        kept = ModelOptions(cache_type_k=types[0], cache_type_v=types[1])
        assert exact(kept, chooses_values=False).cache_type_v == types[1]
    for of_keys, of_values in (("f16", "f16"), ("f16", "f32"), ("f32", "f16")):  # llama.cpp converts f32
        options = ModelOptions(cache_type_k=of_keys, cache_type_v=of_values)
        assert exact(options).cache_type_v == "bf16"
        with pytest.raises(ValueError, match="drop --cache-type-v"):
            exact(options, chooses_values=False)
    with pytest.raises(ValueError, match="drop --flash-attn off"):
        exact(ModelOptions(flash_attention="off"))
    monkeypatch.setattr(runtime, "can_offload", lambda: True)
    assert exact(ModelOptions()).cache_type_v == "f16"
    assert exact(ModelOptions(gpu_layers=0)).cache_type_v == "bf16"
