"""Objects of llama.cpp are freed once: by closing, by garbage collection, and if construction fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from forward_requests import request, text
from llamaspec import (
    AutoLength,
    FixedLength,
    LlamaModel,
    ModelFileError,
    ModelOptions,
    Pair,
    PromptError,
    open_pair,
)
from llamaspec.engine.stream import TextStream
from llamaspec.errors import ClosedError
from model_store import ModelStore, OpenModel
from patience import until
from tiny_models import Recipe, write_bert

CPU = ModelOptions(threads=1)
CONTEXT = 64  # tokens


def stream(pair: Pair, seed: int) -> TextStream:
    return pair.stream(text(20, seed), seed=seed, max_tokens=80, policy=FixedLength(3))


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of llama.cpp's functions that freed something, in order."""
    gc.collect()  # otherwise objects of earlier tests might be freed in this one
    names: list[str] = []

    def noted(name: str) -> Callable[[object], None]:
        function = getattr(lib, name)

        def free(pointer: object) -> None:
            names.append(name)
            function(pointer)

        return free

    for name in ("llama_free", "llama_model_free"):
        monkeypatch.setattr(lib, name, noted(name))
    return names


ALL = ["llama_free", "llama_model_free"]


def has_freed(freed: list[str], expected: list[str]) -> bool:
    return sorted(freed) == sorted(expected)


def test_a_forgotten_pair_is_freed(target_file: Path, draft_file: Path, freed: list[str]) -> None:
    pair = open_pair(target_file, draft_file, target_options=CPU, draft_options=CPU)
    stream(pair, 1).run()
    unfinished = stream(pair, 2)
    next(unfinished)
    forgotten = weakref.ref(pair)
    del pair, unfinished
    gc.collect()
    assert forgotten() is None
    until(partial(has_freed, freed, ALL * 2))  # by the compute thread, which still has a reference


def test_heads_are_freed_before_their_target(store: ModelStore, freed: list[str]) -> None:
    """Also a head with weights of its own, which reads the target's KV cache."""
    for files, expected in (
        ((store.path("step35"), "mtp"), ["llama_free"] * 4 + ["llama_model_free"]),
        ((store.path("gemma4"), store.path("gemma4-assistant")), [*ALL, *ALL]),
    ):
        for closes in (True, False):
            pair = open_pair(*files, target_options=CPU)
            stream(pair, 1).run()
            freed.clear()
            if closes:
                pair.close()
            forgotten = weakref.ref(pair)
            del pair
            gc.collect()
            assert forgotten() is None
            until(partial(has_freed, freed, expected))
            assert freed[-1] == "llama_model_free"
            assert freed[0] == "llama_free"


def test_a_pair_closes_only_models_of_its_own(freed: list[str], tiny: Pair) -> None:
    """`compare` opened a second pair over the draft. Closing one of the pairs closed the draft of both."""
    assert tiny.draft is not None
    with Pair(tiny.draft) as alone:
        stream(alone, 1).run()
    assert freed == []
    with pytest.raises(ClosedError):
        stream(alone, 1).run()
    stream(tiny, 1).run()
    tiny.close()
    assert freed == ALL * 2


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_a_broken_cache_is_emptied_and_the_next_text_is_right(opened: OpenModel, kind: str) -> None:
    with Pair(opened(kind, n_ctx=256)) as pair:
        expected = stream(pair, 1).run().tokens
        (context,) = pair.target._contexts
        assert pair.call(pair.target.recover) is None
        pair.target.store._room.n_bytes += 1
        assert "bytes in the store" in str(pair.call(pair.target.recover))
        assert context.cache.n_used == pair.target.store.n_bytes == 0
        assert stream(pair, 1).run().tokens == expected


def test_a_forgotten_model_is_freed_at_once(target_file: Path, freed: list[str]) -> None:
    """No reference cycle keeps it: the garbage collector is off."""
    gc.disable()
    try:
        model = LlamaModel(target_file, CPU)
        model.forward(request(5))
        vocabulary = model.vocabulary
        del model
        assert freed == ["llama_free"]  # the vocabulary still needs the weights
        assert vocabulary.piece(70) == b"D"
        del vocabulary
        assert freed == ALL
    finally:
        gc.enable()


@pytest.mark.parametrize("step", ["llama_get_memory", "llama_set_abort_callback", "llama_init_from_model"])
def test_construction_that_fails_half_way_frees_everything(
    target_file: Path, freed: list[str], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError(step)

    monkeypatch.setattr(lib, step, failing)
    with pytest.raises(RuntimeError, match=step):
        LlamaModel(target_file, CPU)
    gc.collect()
    assert freed == (ALL[1:] if step == "llama_init_from_model" else ALL)


def test_a_pair_whose_draft_does_not_load_frees_the_target(
    target_file: Path, freed: list[str], tmp_path: Path
) -> None:
    draft = write_bert(tmp_path / "bert.gguf")
    with pytest.raises(ModelFileError):
        open_pair(target_file, draft, target_options=CPU)
    gc.collect()
    assert sorted(freed) == sorted(ALL * 2)


def test_logits_taken_before_closing_stay_readable(opened: OpenModel, freed: list[str]) -> None:
    model = opened()
    view = model.forward(request(30, n_logits=5))
    kept = view.copy()
    assert not view.flags.owndata
    model.close()
    gc.collect()
    assert freed == []
    part = view[2:]
    del view
    assert np.array_equal(part, kept[2:])
    del part
    gc.collect()
    assert freed == ALL


@pytest.mark.parametrize(
    "refused",
    [
        {"prompt": np.ones(CONTEXT, dtype=np.int32)},
        {"max_tokens": 0},
        {"stops": ("x", "")},
        {"prediction": "\ud800"},
    ],
)
def test_a_refused_text_leaves_nothing_in_a_policy(refused: dict[str, Any], store: ModelStore) -> None:
    """It stayed a sequence of its length policy forever. So the policy believed that later sequences were not
    alone, and kept their copies short.
    """
    files = store.path("llama"), store.path("llama", Recipe().draft(0.1))
    options = ModelOptions(n_ctx=CONTEXT, threads=1)
    with open_pair(*files, target_options=options, draft_options=options) as pair:
        policy = AutoLength()
        with pytest.raises((PromptError, ValueError)):
            pair.stream(**{"prompt": "the end", "policy": policy, **refused})
        assert policy.shared.n_sequences == 0
