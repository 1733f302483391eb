"""Whole models with our kernels and with llama.cpp's."""

from __future__ import annotations

import numpy as np
import pytest

from forward_requests import request, text
from kernels.library import at_level, open_library
from llamaspec import LlamaModel
from llamaspec.kernels import library
from llamaspec.llama import runtime
from llamaspec.values import Logits
from model_store import OpenModel
from tiny_models import WRITERS, Recipe

ONE_ORDER = ("llama", "mixtral", "gemma3")  # families whose logits do not depend on the width


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if runtime.kernels().level is None:
        pytest.skip(f"no kernels: {runtime.kernels().reason}")


def logits(model: LlamaModel, n_tokens: int, width: int) -> Logits:
    """Return the logits of all tokens, evaluated `width` at a time: [n_tokens, V]."""
    model.forget()
    rows = []
    for end in range(width, n_tokens + 1, width):
        n = end - width + 1
        rows.append(model.forward(request(n, draft=text(end)[n:])).copy())
    return np.concatenate(rows)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", WRITERS)
def test_logits_are_those_of_llama_cpp(opened: OpenModel, kind: str, dtype: str) -> None:
    model = opened(kind, Recipe(dtype=dtype), repack=False)
    before = library.n_products
    ours = logits(model, 24, 4)
    assert library.n_products > before
    with at_level(open_library(), ""):
        theirs = logits(model, 24, 4)
    difference = np.abs(ours - theirs).mean()  # logits have a standard deviation of 3
    assert difference < (0.01 if dtype in ("f32", "f16") else 0.25)
    assert difference > 0 or dtype == "f32"  # otherwise this compares nothing


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", ONE_ORDER)
def test_the_same_bits_at_every_width_and_on_any_number_of_threads(
    opened: OpenModel, kind: str, dtype: str
) -> None:
    before = library.n_missed
    alone = logits(opened(kind, Recipe(dtype=dtype)), 96, 1)
    for threads, width in ((1, 2), (2, 8), (3, 32), (4, 96), (2, 1)):
        found = logits(opened(kind, Recipe(dtype=dtype), threads=threads), 96, width)
        assert np.array_equal(found.view(np.int32), alone.view(np.int32)), (threads, width)
    assert library.n_missed == before


def test_an_expert_that_more_positions_chose_than_are_multiplied_together(opened: OpenModel) -> None:
    recipe = Recipe(dtype="q4_0")
    few = logits(opened("mixtral", recipe), 256, 32)[-1]
    for threads in (1, 3):
        model = opened("mixtral", recipe, threads=threads)
        before = library.n_products
        many = model.forward(request(256))[-1]
        # One evaluation: attention and seven products of each of two layers, and the output
        assert library.n_products - before == 2 * 9 + 1
        assert np.array_equal(many.view(np.int32), few.view(np.int32))
