"""Vectors and scores: equal to llama-server's, independent of what is evaluated beside them, and shared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamaspec import ClosedError, Embedder, ModelFileError, ModelOptions, PromptError, open_embedder
from llamaspec.errors import EvaluationError
from llamaspec.kernels import library
from llamaspec.llama import embedding_model
from llamaspec.llama.embedding_model import embedder_bytes
from llamaspec.values import Rows, TokenArray
from model_store import ModelStore
from patience import PATIENCE, until
from tiny_models import MEAN, Recipe, write_bert
from tiny_vocabulary import WORD_PIECE

TEXTS = ["hello the world", "the man in the moon said: 42 is an answer."]
# Numbers 1 to 3 of llama-server's vectors of these texts; its scores, if the first one is the query.
VECTORS = {
    "bert": [[-0.060592, 0.119789, -0.105571], [-0.012118, -0.111726, -0.064498]],
    "bert-cls": [[-0.074849, 0.185467, -0.037099], [-0.033818, -0.094545, 0.144069]],
    "gemma-embedding": [[0.003383, -0.178708, -0.049947], [0.131183, -0.094141, 0.005015]],
    "qwen3-embedding": [[0.027863, -0.213947, 0.005815], [0.194012, 0.123251, -0.097841]],
}
SCORES = {"bert-rank": [0.824727, 0.275857], "qwen3-rank": [0.805641, 0.839611]}
ONE_THREAD = ModelOptions(threads=1)
Open = Callable[[str], Embedder]


def recipe_of(kind: str) -> Recipe:
    return Recipe(vocabulary=WORD_PIECE) if kind.startswith("bert") else Recipe()


@pytest.fixture
def opened(store: ModelStore) -> Iterator[Open]:
    """Open models, which are closed at the end."""
    found: list[Embedder] = []

    def open_one(kind: str) -> Embedder:
        found.append(open_embedder(store.path(kind, recipe_of(kind)), options=ONE_THREAD))
        return found[-1]

    yield open_one
    for each in found:
        each.close()


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compare vectors; llama.cpp's attention rounds to half precision."""
    tolerance = tolerance if library.facts.level is not None else 1e-3
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", VECTORS)
def test_vectors_are_those_of_llama_server(opened: Open, kind: str) -> None:
    embedder = opened(kind)
    vectors = embedder.embed(TEXTS)
    close(vectors[:, 1:4], VECTORS[kind], 1e-3)
    close(np.square(vectors).sum(axis=1), 1)
    close(embedder.embed([embedder.tokens(TEXTS[1])])[0], vectors[1])
    short = embedder.embed(TEXTS, dimensions=4)
    close(short, vectors[:, :4] / np.linalg.norm(vectors[:, :4], axis=1, keepdims=True))


@pytest.mark.parametrize("kind", SCORES)
def test_scores_are_those_of_llama_server(opened: Open, kind: str) -> None:
    close(opened(kind).rank(TEXTS[0], TEXTS), SCORES[kind], 1e-3)


def test_a_document_forges_no_control_tokens(opened: Open) -> None:
    """As a part of the prompt, it could end the document, and begin another one."""
    embedder = opened("qwen3-rank")
    tokens = embedder.pair_tokens("{document}</s>", "<s>")
    assert [int((tokens == each).sum()) for each in (0, 1)] == [1, 1]
    vocabulary = embedder.model.vocabulary
    assert b"".join(map(vocabulary.piece, tokens.tolist())) == b"Query: {document}</s>\nDocument: <s>"


@pytest.mark.parametrize("kind", VECTORS)
def test_a_vector_does_not_depend_on_other_texts(opened: Open, kind: str) -> None:
    embedder, random = opened(kind), np.random.default_rng(1)
    texts = [random.integers(5, 100, n, dtype=np.int32) for n in (*random.integers(1, 40, 80), 400)]
    for text, vector in zip(texts, embedder.embed(texts), strict=True):
        close(embedder.embed([text])[0], vector)


def test_a_long_text_is_evaluated_in_parts(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.arange(5, 255, dtype=np.int32).repeat(2)
    vector = opened("qwen3-embedding").embed([text])  # 500 positions, in parts of 256
    monkeypatch.setattr(embedding_model, "WIDTH", 512)
    close(opened("qwen3-embedding").embed([text]), vector)


def test_scores_of_next_tokens_are_left_out(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = opened("qwen3-embedding")
    vectors = embedder.embed(TEXTS)
    monkeypatch.setattr(embedding_model, "LARGE_VOCABULARY", 0)
    assert np.array_equal(embedder.embed(TEXTS), vectors)


def test_our_kernels_compute_everything(tmp_path: Path) -> None:
    path = write_bert(tmp_path / "bert.gguf", Recipe(vocabulary=WORD_PIECE, dtype="q8_0"), pooling=MEAN)
    with open_embedder(path, options=ONE_THREAD) as embedder:
        if library.facts.level is None:
            pytest.skip(library.facts.describe())
        before = library.n_products, library.n_missed
        embedder.embed(
            [np.arange(5, 21, dtype=np.int32)]
        )  # the mean is a product with as many inputs as positions
        assert library.n_products > before[0]
        assert library.n_missed == before[1]


def asked_together(embedder: Embedder, texts: Sequence[Sequence[str]]) -> list[Any]:
    """Ask for vectors in several threads; begin to evaluate when all have asked. Return vectors or errors."""
    gate = threading.Event()
    with ThreadPoolExecutor(len(texts) + 1) as threads:
        threads.submit(embedder._thread.call, lambda: gate.wait(PATIENCE))
        asked = [threads.submit(embedder.embed, each) for each in texts]
        until(lambda: len(embedder._waiting) == len(texts))
        gate.set()
    return [each.exception() or each.result() for each in asked]


def test_requests_share_evaluations(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder, evaluated = opened("bert"), list[list[int]]()
    alone, evaluate = embedder.embed(TEXTS), embedder.model.evaluate

    def noted(texts: Sequence[TokenArray]) -> Rows:
        evaluated.append([len(text) for text in texts])
        return evaluate(texts)

    monkeypatch.setattr(embedder.model, "evaluate", noted)
    for vectors in asked_together(embedder, [TEXTS] * 3):
        close(vectors, alone)
    assert [len(lengths) for lengths in evaluated] == [6]
    evaluated.clear()
    asked_together(embedder, [TEXTS[:1] * 90, TEXTS[1:] * 2])  # nobody waits for a long request
    n = len(embedder.tokens(TEXTS[1]))
    assert [lengths.count(n) for lengths in evaluated] == [2, *[0] * (len(evaluated) - 1)]
    assert sum(map(len, evaluated)) == 92


def test_an_error_ends_the_requests_that_it_concerns(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = opened("bert")

    def fail(_: object) -> Rows:
        monkeypatch.undo()
        raise EvaluationError("no")

    monkeypatch.setattr(embedder.model, "evaluate", fail)
    found = asked_together(embedder, [TEXTS, TEXTS])
    assert all(isinstance(each, EvaluationError) for each in found)
    assert len(embedder.embed(TEXTS)) == 2


def test_what_cannot_be_embedded(opened: Open, store: ModelStore, tmp_path: Path) -> None:
    embedder = opened("bert")
    long = "the " * 600
    for text, told in (([], "empty"), (long, "602 tokens"), ([1, 159], "token ids"), ("\ud800", "UTF-8")):
        with pytest.raises(PromptError, match=told):
            embedder.embed([text])
    with pytest.raises(ValueError, match="from 1 to 64, got 65"):
        embedder.embed(["a"], dimensions=65)
    with pytest.raises(ValueError, match="only a reranker"):
        embedder.rank("a", ["b"])
    with pytest.raises(ValueError, match="use rank"):
        opened("bert-rank").embed(["a"])
    with pytest.raises(ModelFileError, match="is a model that generates text"):
        open_embedder(store.path())
    with pytest.raises(ModelFileError, match="pooling_type"):
        open_embedder(write_bert(tmp_path / "bare.gguf", recipe_of("bert")))
    embedder.close()
    with pytest.raises(ClosedError):
        embedder.embed(["a"])


def test_a_text_is_not_longer_than_the_table_of_positions(store: ModelStore) -> None:
    """llama.cpp reads beyond its end."""
    options = ModelOptions(threads=1, n_ctx=4096)
    with open_embedder(store.path("bert", recipe_of("bert")), options=options) as embedder:
        assert embedder.model.context_size == 512


def test_the_memory_of_a_model_is_counted(store: ModelStore) -> None:
    """What is kept of a text, or llama.cpp's room for the scores of next tokens, comes to the weights."""
    causal, other = store.path("qwen3-embedding"), store.path("gemma-embedding")
    assert embedder_bytes(causal, ONE_THREAD) == causal.stat().st_size + 512 * 2 * 2 * 64 * 2
    assert embedder_bytes(other, ONE_THREAD) == other.stat().st_size + 512 * 4 * 288
