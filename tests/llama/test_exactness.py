"""Why the bits of logits may depend on what is evaluated beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forward_requests import request
from llamaspec.kernels import Kernels
from llamaspec.llama import model as models
from llamaspec.llama import runtime
from llamaspec.values import ForwardRequest
from model_store import OpenModel

with_kernels = pytest.mark.skipif(runtime.kernels().level is None, reason="the kernels are off")


@with_kernels
@pytest.mark.parametrize(
    "kind",
    ["llama", "mixtral", "gemma3", "deepseek2", "gemma4", "step35", "qwen35moe", "mamba", "nemotron_h"],
)
@pytest.mark.parametrize("n_ctx", [600, 20])
def test_with_our_kernels_there_is_no_reason(opened: OpenModel, kind: str, n_ctx: int) -> None:
    model = opened(kind, n_ctx=n_ctx)
    before = model.forward(request(19)).copy()
    assert model.why_inexact() is None
    for tokens in (request(19).tokens, np.ones(19, dtype=np.int32)):  # those of the trial, too
        assert model.n_cached(tokens) == 0
    assert np.array_equal(model.forward(request(19)), before)


@with_kernels
@pytest.mark.parametrize("kinds", [("q8_0", "q8_0"), ("f16", "q8_0"), ("q8_0", "bf16")])
def test_a_cache_of_q8_0_is_no_reason(opened: OpenModel, kinds: tuple[str, str]) -> None:
    assert opened(n_ctx=600, cache_type_k=kinds[0], cache_type_v=kinds[1]).why_inexact() is None


@with_kernels
@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("llama", {"flash_attention": "off"}, "flash attention is off; drop --flash-attn off"),
        ("llama", {"cache_type_k": "q5_1"}, "this model with q5_1 keys and f16 values; use f16 or q8_0"),
        (
            "llama",
            {"cache_type_v": "q4_0"},
            "this model with f16 keys and q4_0 values; use f16 or q8_0 for both",
        ),
        ("mamba", {"flash_attention": "off"}, "flash attention is off; drop --flash-attn off"),
        (
            "lfm2",
            {"cache_type_k": "q4_0"},
            "this model with q4_0 keys and f16 values; use f16 or q8_0 for both",
        ),
    ],
)
def test_what_llama_cpp_computes_is_a_reason(
    opened: OpenModel, kind: str, options: dict[str, Any], reason: str
) -> None:
    found = opened(kind, n_ctx=600, **options).why_inexact()
    assert found is not None
    assert reason in found


@with_kernels
def test_other_devices_are_a_reason(opened: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "leaves_main_memory", lambda options, chosen: True)
    assert "layers are computed on other devices" in (opened().why_inexact() or "")


@with_kernels
def test_a_type_of_weights_that_the_kernels_do_not_take_is_a_reason(opened: OpenModel) -> None:
    model = opened()
    model.weights.suits_kernels = False
    assert "use another quantization" in (model.why_inexact() or "")


def test_kernels_that_are_off_are_a_reason(opened: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "kernels", lambda: Kernels(reason="they are too new; wait"))
    assert opened().why_inexact() == "llama.cpp's kernels only: they are too new; wait"


@with_kernels
@pytest.mark.parametrize(
    ("n_products", "n_missed"),
    [
        ((0, 17, 34), (0, 0, 1)),  # a product was left to llama.cpp
        ((0, 9, 26), (0, 0, 0)),  # a wide evaluation was given to something else, such as BLAS
        ((0, 0, 0), (0, 0, 0)),  # nothing calls the kernels
    ],
)
def test_an_operation_that_llama_cpp_computes_is_seen(
    opened: OpenModel,
    monkeypatch: pytest.MonkeyPatch,
    n_products: tuple[int, ...],
    n_missed: tuple[int, ...],
) -> None:
    model, forward, n_evaluated = opened(), models.LlamaModel.forward, [0]

    def counted(*arguments: Any) -> Any:
        n_evaluated[0] += 1
        return forward(*arguments)

    counts = {
        "n_products": property(lambda _: n_products[n_evaluated[0]]),
        "n_missed": property(lambda _: n_missed[n_evaluated[0]]),
    }
    monkeypatch.setattr(models.LlamaModel, "forward", counted)
    monkeypatch.setattr(models, "library", type("Counts", (), counts)())
    assert "a part of this model with f16 keys and f16 values; use another" in (model.why_inexact() or "")


@with_kernels
def test_states_that_depend_on_the_width_are_a_reason(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forward = opened("lfm2"), models.LlamaModel.forward

    def rounded(model: models.LlamaModel, wanted: ForwardRequest) -> Any:
        is_wide = wanted.n_before and not model.n_cached(wanted.tokens)
        return np.nextafter(forward(model, wanted), np.float32(9)) if is_wide else forward(model, wanted)

    monkeypatch.setattr(models.LlamaModel, "forward", rounded)
    assert "use another model" in (model.why_inexact() or "")
