"""A model's limits: refused requests, options, small contexts, metadata."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as lib

from chat_models import with_template
from command import python
from fakes import tokens
from forward_requests import EXACT, MEMORIES, TOLERANCE, assert_same, fresh, full, request, text
from llamaspec import (
    EvaluationError,
    LlamaModel,
    LlamaspecError,
    MemoryFullError,
    ModelOptions,
)
from llamaspec.errors import ClosedError, ContextFullError, EvaluationAbortedError, ScoresError
from llamaspec.llama import resources, runtime
from llamaspec.llama.context import Context, default_context_size
from llamaspec.values import TARGET, ForwardRequest
from model_store import ModelStore, OpenModel
from tiny_models import Recipe, write_longrope


def test_more_requests_than_sequences(opened: OpenModel) -> None:
    """As many as a draft model scores positions at once; once, the last of them had no sequence."""
    model = opened(max_scored=4)
    answers = model.prepare([(number, request(5, number), 0) for number in range(5)])
    assert [type(answer) for answer in answers] == [int, int, int, int, ContextFullError]
    model.evaluate([(number, request(5, number)) for number in range(4)])
    model.release(1)
    assert model.prepare([(4, request(5, 4), 0), (0, request(6, 0), 0)]) == [0, 5]


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (1, MemoryFullError, "full"),
        (2, EvaluationAbortedError, "aborted"),
        (-3, EvaluationError, "code -3"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_return_codes_of_llama_decode(
    opened: OpenModel,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    status: int,
    error: type[LlamaspecError],
    says: str,
) -> None:
    model, other = opened(kind, **EXACT), opened(kind, **EXACT)
    model.forward(request(20))
    monkeypatch.setattr(lib, "llama_decode", lambda *_: status)
    with pytest.raises(error, match=says):
        model.forward(request(25))
    monkeypatch.undo()
    assert_same(model.forward(request(24)), fresh(other, request(24)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_finite(opened: OpenModel, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """At any of the scored positions. The KV cache keeps nothing of such an evaluation."""
    model, other = opened(**EXACT), opened(**EXACT)
    view = Context._view

    def spoilt(self: Context, *arguments: Any) -> Any:
        scores = view(self, *arguments).copy()
        scores[-1, 7] = value
        return scores

    monkeypatch.setattr(Context, "_view", spoilt)
    with pytest.raises(ScoresError, match="not numbers"):
        model.forward(request(20, n_logits=2))
    assert model.n_cached(text(20)) == 0
    monkeypatch.undo()
    assert_same(model.forward(request(20)), fresh(other, request(20)))


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (request(0, n_logits=0), "0 tokens do not fit"),
        (request(513), "513 tokens do not fit a context of 512"),
        (request(510, draft=text(3)), "513 tokens do not fit"),
        (request(20, n_logits=9), "9 scored, is too wide"),
        (ForwardRequest(TARGET, tokens(5, 288)), "from 0 to 287"),
        (ForwardRequest(TARGET, tokens(5, -1)), "from 0 to 287"),
        (ForwardRequest(TARGET, tokens(2**31 - 1)), "from 0 to 287"),
        (request(5, draft=tokens(-(2**31))), "from 0 to 287"),
    ],
)
def test_requests_that_would_abort_the_process_are_refused(
    opened: OpenModel, wanted: ForwardRequest, says: str
) -> None:
    model, other = opened(max_scored=8, **EXACT), opened(**EXACT)
    model.forward(request(10))
    with pytest.raises(ValueError, match=says):
        model.forward(wanted)
    assert_same(model.forward(request(12)), fresh(other, request(12)))


def test_a_closed_model_refuses_everything(opened: OpenModel) -> None:
    """Each of these calls once read freed memory."""
    model = opened()
    vocabulary = model.vocabulary
    model.close()
    model.close()
    uses: list[Callable[[], object]] = [
        lambda: model.forward(request(5)),
        model.forget,
        model.try_memory,
        lambda: model.description,
        lambda: model.metadata("general.name"),
        lambda: vocabulary.tokenize(b"text"),
        lambda: vocabulary.piece(70),
        lambda: vocabulary.is_end(71),
        lambda: vocabulary.text(72),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_options_reach_the_context(opened: OpenModel) -> None:
    """By default, a model gets the context that it was trained for."""
    long = Recipe(n_context=6000)
    assert opened("llama", long).context_size == 6000
    assert opened("llama", long, n_ctx=1024).context_size == 1024
    assert opened("llama", n_ctx=1024).context_size == 1024
    assert opened().context_size == 512


GIB = 1 << 30


@pytest.mark.parametrize(
    ("trained", "per_token", "weights", "room", "size"),
    [
        (131_072, 32 << 10, GIB // 2, 64 * GIB, 32_768),  # at most as much as the weights, or 1 GiB
        (131_072, 32 << 10, 5 * GIB, 64 * GIB, 131_072),
        (131_072, 32 << 10, 5 * GIB, 9 * GIB, 32_768),  # an eighth of the memory, doubled from 4096
        (40_000, 1 << 10, GIB, 64 * GIB, 40_000),
        (131_072, 128 << 10, 5 * GIB, 2 * GIB, 4096),  # the minimum
        (2048, 128 << 10, 5 * GIB, 2 * GIB, 2048),
        (1 << 20, 0.0, GIB, GIB, 1 << 20),
    ],
)
def test_the_default_context(trained: int, per_token: float, weights: int, room: int, size: int) -> None:
    assert default_context_size(trained, per_token, weights, room) == size


@pytest.mark.parametrize(
    ("n_tokens", "n_ctx", "size"),
    [(100, None, 512), (255, None, 512), (256, None, 768), (5700, None, 6000), (1 << 31, None, 6000),
     (100, 300, 300)],
)  # fmt: skip
def test_a_context_for_sequences_of_a_known_length(
    store: ModelStore, n_tokens: int, n_ctx: int | None, size: int
) -> None:
    """At least a block remains for drafts; it is never larger than the default."""
    path, options = store.path("llama", Recipe(n_context=6000)), ModelOptions(n_ctx=n_ctx, threads=1)
    with LlamaModel(path, options, longest=lambda _: n_tokens) as model:
        assert model.context_size == size
        assert model.options == options


def test_a_smaller_context_has_the_same_rotary_factors(tmp_path: Path) -> None:
    """llama.cpp chooses them by the size of the context, so that the text would depend on it."""
    path, scores = write_longrope(tmp_path / "model.gguf", Recipe(n_context=6000), 1000), []
    for longest, size in ((None, 6000), (lambda _: 100, 1001)):
        with LlamaModel(path, ModelOptions(threads=1), longest=longest) as model:
            assert model.context_size == size
            scores.append(model.forward(request(40))[0].copy())
    assert (scores[0] == scores[1]).all()


def test_the_contexts_of_all_sequences_have_the_same_size(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if less memory is free when the second sequence starts."""
    model = opened("jamba", Recipe(n_context=6000))
    model.forward(request(3), number=0)
    monkeypatch.setattr(resources, "available_bytes", lambda: 4 << 20)
    model.forward(request(3), number=1)
    assert model.cache_use()[1] == 2 * model.context_size == 12_000


def test_a_context_for_one_sequence_has_no_more_cells(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server for eight sequences of 8,192 tokens made eight contexts of 66,048 cells."""
    sizes: list[int] = []
    make = lib.llama_init_from_model

    def noted(*arguments: Any) -> Any:
        made = make(*arguments)
        sizes.append(lib.llama_n_ctx(made))
        return made

    monkeypatch.setattr(lib, "llama_init_from_model", noted)
    opened("jamba", n_ctx=256, n_cells=2048).forward(request(3))
    assert set(sizes) == {256}


def test_cells_for_several_sequences(opened: OpenModel) -> None:
    """`n_cells` is for all sequences together, `n_ctx` for each."""
    model = opened(n_ctx=256, n_cells=700)
    assert model.context_size == 256
    assert full(model, [(number, request(250, number)) for number in range(4)]) == [3]
    with pytest.raises(ValueError, match="257 tokens do not fit a context of 256"):
        model.prepare([(0, request(257), 0)])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"head_length": 48, "n_kv_heads": 1, "n_layers": 3}),
        ("gemma3", {"head_length": 48}),
        ("gemma4", {}),
        ("mamba", {}),
        ("jamba", {"n_layers": 4}),
        ("lfm2", {}),
        ("deepseek2", {}),
        ("qwen35", {}),
        ("step35", {}),
    ],
)
def test_the_size_of_a_token_in_the_cache(opened: OpenModel, kind: str, changes: dict[str, Any]) -> None:
    """Compared with llama.cpp's own size, which adds 12 bytes in each of at most two caches."""
    model = opened(kind, Recipe(**changes))
    expected = model.weights.kv_bytes_per_token(ModelOptions())
    assert expected <= model.try_memory().bytes_per_token <= expected + 24


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"n_ctx": 1}, "n-ctx must be from 2 to 2147483647, got 1"),
        ({"n_ctx": 1 << 31}, "got 2147483648"),
        ({"n_ctx": 2**32 + 512}, "got 4294967808"),  # it silently became 512
        ({"gpu_layers": -1}, "gpu-layers must be >= 0"),
        ({"threads": 0}, "threads must be from 1 to 512, got 0"),
        ({"threads": 513}, "got 513"),
        ({"flash_attention": "perhaps"}, "flash-attn must be one of auto, on, off"),
        ({"cache_type_k": "q9"}, "cache types must be among f32, f16"),
        ({"cache_type_v": "q9"}, "cache types must be among f32, f16"),
        ({"flash_attention": "off", "cache_type_v": "q8_0"}, "q8_0 needs flash attention"),
        ({"n_cells": 1}, "n_cells must be from 2"),
        ({"max_scored": 0}, "max_scored must be >= 1, got 0"),
    ],
)
def test_options_are_checked(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ModelOptions(**wrong)


def test_a_model_is_not_used_after_a_fork(opened: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model, here = opened(), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    with pytest.raises(ClosedError, match="opened before a fork; open it in the child"):
        model.forward(request(4))


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("llama", {"flash_attention": "off"}, 512),
        ("llama", {"flash_attention": "on", "cache_type_v": "bf16"}, 512),
        ("llama", {"flash_attention": "on"}, 63),  # by llama.cpp; our attention has one order
        ("llama", {}, 63),
        ("mamba", {"flash_attention": "off"}, 0),
    ],
)
def test_the_width_up_to_which_a_prompt_changes_no_logits_of_rounds(
    opened: OpenModel, kind: str, options: dict[str, Any], expected: int
) -> None:
    if expected == 63 and runtime.kernels().level is not None:
        expected = 512
    assert opened(kind, n_ctx=600, **options).max_chunked_prefill == expected


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_small_context_refuses_what_is_longer(opened: OpenModel, kind: str) -> None:
    model, other = opened(kind, n_ctx=10, **EXACT), opened(kind, **EXACT)
    for wanted in (request(10, n_logits=4), request(9), request(3, 1, draft=text(7))):
        assert_same(model.forward(wanted), fresh(other, wanted), TOLERANCE[kind])
    for wanted in (request(11), request(8, draft=text(3))):
        with pytest.raises((ValueError, ContextFullError), match="10"):
            model.forward(wanted)


SMALLEST = """
import sys
from pathlib import Path
import numpy as np
from llamaspec import FixedLength, ModelOptions, open_pair
path = Path(sys.argv[1])
for n_target, n_draft in [*((n, 64) for n in (2, 3, 5, 9)), *((64, n) for n in (2, 3, 5, 9))]:
    with open_pair(path, path, target_options=ModelOptions(n_ctx=n_target, threads=1),
                   draft_options=ModelOptions(n_ctx=n_draft, threads=1, max_scored=16)) as pair:
        assert (pair.target.context_size, pair.draft.context_size) == (n_target, n_draft)
        texts = []
        for prompt in ([5], [5, 6, 7, 8]):
            if len(prompt) < n_target:
                stream = pair.stream(np.array(prompt, dtype=np.int32), seed=1, max_tokens=40,
                                     policy=FixedLength(4))
                texts.append(len(stream.run().tokens))
        print(n_target, n_draft, texts)
"""


@pytest.mark.parametrize("kind", ["lfm2", "jamba", "llama"])
def test_the_smallest_contexts_of_target_and_draft(store: ModelStore, kind: str) -> None:
    """2 to 9 tokens aborted the process with LFM2, so this runs in a child process."""
    answer = python(SMALLEST, store.path(kind))
    assert (answer.code, answer.stderr) == (0, "")
    assert answer.stdout.splitlines() == [
        *(f"{n} 64 {[n - 1] if n < 5 else [n - 1, n - 4]}" for n in (2, 3, 5, 9)),
        *(f"64 {n} [40, 40]" for n in (2, 3, 5, 9)),
    ]


@pytest.mark.parametrize("size", [4095, 4096, 200_000])
def test_long_metadata_is_whole(store: ModelStore, tmp_path: Path, size: int) -> None:
    """A chat template above 64 KiB was cut off."""
    template = "é" + "x" * (size - 5) + "end"
    assert len(template.encode()) == size
    path = with_template(store.path(), tmp_path / "model.gguf", template)
    with LlamaModel(path, ModelOptions(threads=1)) as model:
        assert model.metadata("tokenizer.chat_template") == template
        assert model.metadata("general.name") == "tiny llama"
