"""Pictures in sequences: the same logits as llama.cpp's own helper, however they are cached or drafted."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib
from llama_cpp import mtmd_cpp as mtmd

from llamaspec.errors import EvaluationError, ModelFileError
from llamaspec.length.fixed import FixedLength
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.pictures import Picture, Pixels
from llamaspec.pair import Pair
from llamaspec.sampling.filters import Sampling
from llamaspec.values import (
    FIRST_OF_PICTURE,
    PICTURE,
    TARGET,
    Copying,
    ForwardRequest,
    Logits,
    TokenArray,
    before_picture,
)
from tiny_models import write_gemma3, write_llama, write_qwen2vl
from tiny_projectors import write_projector

KINDS: dict[str, Callable[[Path], Path]] = {
    "mlp": write_llama, "qwen2vl_merger": write_qwen2vl, "gemma3": write_gemma3,
}  # fmt: skip


def picture(seed: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 255, (60, 140, 3), dtype=np.uint8)


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    folder = tmp_path_factory.mktemp("pictures")
    path = KINDS[request.param](folder / "model.gguf")
    projector = write_projector(folder / "mmproj.gguf", request.param)
    model = LlamaModel(path, ModelOptions(n_ctx=512, threads=2, projector=projector))
    yield model
    model.close()


def tokens_of(model: LlamaModel, *parts: bytes | Pixels) -> tuple[TokenArray, tuple[Picture, ...]]:
    assert model.projector is not None
    return model.projector.tokenize(parts, [True] * len(parts), model.batch_size)


def reference(model: LlamaModel, *parts: bytes | Pixels) -> Logits:
    """Return the logits after a prompt as llama.cpp's helper evaluates it, in a context of its own."""
    assert model.projector is not None
    pointer = model.projector._handle.pointer
    text = b"".join(part if isinstance(part, bytes) else mtmd.mtmd_default_marker() for part in parts)
    images = [part for part in parts if not isinstance(part, bytes)]
    bitmaps = (ctypes.c_void_p * len(images))()
    for i, image in enumerate(images):
        data = image.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmaps[i] = mtmd.mtmd_bitmap_init(image.shape[1], image.shape[0], data)
    given = mtmd.mtmd_input_text(text, len(text), False, True)
    chunks = mtmd.mtmd_input_chunks_init()
    assert mtmd.mtmd_tokenize(pointer, chunks, ctypes.byref(given), bitmaps, len(images)) == 0
    parameters = lib.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 512
    context = lib.llama_init_from_model(model.weights.pointer, parameters)
    n_past = lib.llama_pos()
    status = mtmd.mtmd_helper_eval_chunks(pointer, context, chunks, 0, 0, 512, True, ctypes.byref(n_past))
    assert status == 0
    logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (model.vocabulary_size,)).copy()
    lib.llama_free(context)
    mtmd.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        mtmd.mtmd_bitmap_free(bitmap)
    return logits[None]


def test_the_logits_are_those_of_llama_cpp(opened: LlamaModel) -> None:
    parts = (b"Look at ", picture(1), b" and at ", picture(2), b". They")
    tokens, pictures = tokens_of(opened, *parts)
    assert len(pictures) == 2
    assert (tokens >= PICTURE).sum() == sum(len(each.ids) for each in pictures)
    opened.forget()
    found = opened.forward(ForwardRequest(TARGET, tokens)).copy()
    np.testing.assert_allclose(found, reference(opened, *parts), atol=2e-2)


def test_a_cached_prefix_changes_nothing_and_cuts_no_picture(opened: LlamaModel) -> None:
    first, kept = tokens_of(opened, b"Look at ", picture(1), b" and at ", picture(2), b". They")
    other, held = tokens_of(opened, b"Look at ", picture(1), b" and at ", picture(3), b". They differ")
    opened.forget()
    alone = opened.forward(ForwardRequest(TARGET, other)).copy()
    opened.forget()
    opened.forward(ForwardRequest(TARGET, first))
    common = int((first[: len(other)] != other[: len(first)]).argmax())
    assert opened.n_cached(other) == common
    n = int((other >= PICTURE).argmax()) + 2  # inside the first picture
    changed = other.copy()
    changed[n:] = other[-1]
    assert opened.n_cached(changed) <= n
    np.testing.assert_allclose(opened.forward(ForwardRequest(TARGET, other)), alone, atol=1e-4)
    for end in (len(other) - 1, common):  # rolled back behind and to the second picture
        part = opened.forward(ForwardRequest(TARGET, other[:end])).copy()
        opened.forget()
        np.testing.assert_allclose(part, opened.forward(ForwardRequest(TARGET, other[:end])), atol=1e-4)
    assert (len(kept), len(held)) == (2, 2)


def test_a_draft_changes_no_text(opened: LlamaModel, tmp_path: Path) -> None:
    tokens, pictures = tokens_of(opened, b"Look at ", picture(1), b" and at ", picture(1), b". They are")
    texts = []
    with LlamaModel(write_llama(tmp_path / "draft.gguf"), ModelOptions(n_ctx=512, threads=2)) as draft:
        for other in (None, draft):
            opened.forget()
            pair = Pair(opened, other, copying=Copying.OFF if other is None else Copying.ON)
            for sampling in (Sampling(temperature=0.0), Sampling(temperature=1.0, repeat_penalty=1.1)):
                policy = FixedLength(0 if other is None else 4)
                stream = pair.stream(tokens, sampling=sampling, seed=3, max_tokens=40, policy=policy)
                texts.append(stream.run().tokens)
            pair.close()
    assert texts[:2] == texts[2:]
    assert pictures


def test_several_sequences_share_a_picture(opened: LlamaModel) -> None:
    prompts = [tokens_of(opened, b"Look at ", picture(1), b" and " + word) for word in (b"one", b"two")]
    pair = Pair(opened)
    opened.forget()

    def run(*chosen: int) -> list[tuple[int, ...]]:
        streams = [
            pair.stream(prompts[i][0], sampling=Sampling(temperature=1.0), seed=i, max_tokens=20)
            for i in chosen
        ]
        return [stream.run().tokens for stream in streams]

    alone = [*run(0), *run(1)]
    opened.forget()
    assert run(0, 1) == alone
    pair.close()
    assert opened.recover() is None


def test_no_part_of_a_prompt_ends_inside_a_picture() -> None:
    tokens = np.array([1, 2, FIRST_OF_PICTURE, PICTURE, PICTURE + 5, 3], dtype=np.int32)
    assert ForwardRequest(TARGET, tokens).prefill(3).n_tokens == 5
    assert [before_picture(tokens, n) for n in range(7)] == [0, 1, 2, 2, 2, 5, 6]


def test_a_picture_that_was_dropped_is_asked_for(opened: LlamaModel) -> None:
    tokens, _ = tokens_of(opened, b"Look at ", picture(9), b" and")
    assert opened.projector is not None
    opened.projector._kept.clear()
    del _
    opened.forget()
    with pytest.raises(EvaluationError, match="send it again"):
        opened.forward(ForwardRequest(TARGET, tokens))


def test_a_file_that_is_no_projector_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="is no projector"):
        LlamaModel(path, ModelOptions(n_ctx=64, threads=2, projector=path))
