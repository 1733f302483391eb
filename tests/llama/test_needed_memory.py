"""The estimate of a model's memory from its file, next to what llama.cpp allocates."""

from __future__ import annotations

import pytest
from llama_cpp import llama_cpp as lib

from llamaspec.llama import runtime
from llamaspec.llama.file_facts import needed_bytes
from llamaspec.llama.options import ModelOptions
from model_store import ModelStore, OpenModel
from tiny_models import Recipe

N_SEQUENCES = 3
HEADER = 512  # bytes of a saved state that are not state, at most


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "jamba", "lfm2", "nemotron_h", "qwen35"])
@pytest.mark.parametrize("n_ctx", [None, 256])
def test_the_estimate_is_what_is_allocated(
    store: ModelStore, opened: OpenModel, kind: str, n_ctx: int | None
) -> None:
    recipe = Recipe(n_layers=4, n_context=1024)
    path = store.path(kind, recipe)
    model = opened(kind, recipe, n_ctx=n_ctx)
    assert model.context_size == (n_ctx or 1024)
    n_contexts = N_SEQUENCES if model.keeps_states else 1
    n_back = int(lib.llama_n_rs_seq(model._contexts[0].pointer))
    cache = model.weights.kv_bytes_per_token(model.options) * model.context_size
    states = model.try_memory().fixed_bytes if model.keeps_states else 0
    # Contexts share the memory of attention, which takes at least a weight for each of its rows.
    attention = model.try_memory().attention_bytes_per_token * model.context_size
    is_ours = runtime.kernels().level is not None and model.facts().keeps_positions
    assert (attention > 24 * 4 * model.context_size) == is_ours
    options = ModelOptions(n_ctx=n_ctx, threads=1)
    found = needed_bytes(path, options, N_SEQUENCES)
    n_states = 1 + (n_back or 1)  # without earlier ones, one is copied before a draft is verified
    n_bytes = path.stat().st_size + attention
    least = n_bytes + n_contexts * (cache + n_states * (states - HEADER))
    assert least <= found <= n_bytes + n_contexts * (cache + n_states * states)
    as_draft = needed_bytes(path, options, N_SEQUENCES, is_draft=True)
    assert (as_draft > found) == model.keeps_states


def test_all_sequences_of_a_model_without_states_share_one_cache(store: ModelStore) -> None:
    path, few, many = store.path(), ModelOptions(n_ctx=64), ModelOptions(n_ctx=64, n_cells=256)
    per_token = (needed_bytes(path, many, 4) - needed_bytes(path, few, 1)) / (256 - 64)
    assert per_token == (needed_bytes(path, few) - path.stat().st_size) / 64 > 0
