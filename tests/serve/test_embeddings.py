"""Models that make vectors or scores, in the APIs of OpenAI, llama-server, Ollama, Jina, Cohere and TEI."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamaspec import ModelOptions, open_embedder
from llamaspec.cli.model_options import ModelChoice, ModelChoices
from llamaspec.cli.offered_models import served_models
from llamaspec.cli.served_models import Serving
from llamaspec.opening import Drafting
from llamaspec.serve import ServeSettings, embedding_service
from llamaspec.serve.app import open_socket
from llamaspec.serve.embedding_service import EmbeddingService
from llamaspec.values import Copying
from model_store import ModelStore
from patience import PATIENCE, until
from serving import Served, counters, serve
from shelf import OPTIONS
from tiny_models import Recipe
from tiny_vocabulary import WORD_PIECE

TEXTS = ["hello the world", "the man in the moon"]
VECTORS, EMBED, OLD, RERANK = "/v1/embeddings", "/api/embed", "/api/embeddings", "/v1/rerank"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(store: ModelStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    words = Recipe(vocabulary=WORD_PIECE)
    for kind, recipe in (("bert", words), ("qwen3-rank", None), ("qwen3-embedding", None), ("llama", None)):
        (folder / f"{kind}.gguf").symlink_to(store.path(kind, recipe))
    return folder


@contextmanager
def serving(folder: Path, *targets: str, **settings: Any) -> Iterator[Served]:
    """Serve a folder, or the models in it that are named."""
    named = [str(folder / f"{each}.gguf") for each in targets]
    choice = ModelChoice("".join(named[:1]), None, False, Copying.OFF, False, OPTIONS, OPTIONS)
    config, log = ServeSettings(port=0, memory_bytes=1 << 40, **settings), list[str]()
    choices = ModelChoices(choice, None, tuple((None, each) for each in named))
    serving = Serving(Drafting(draft_length=2), parallel=2)
    models = served_models(choices, None if targets else folder, serving, config, log.append)
    try:
        if models.any_name:
            models.open_now()
        with serve(models, open_socket(config), log) as server:
            yield server
    finally:
        models.close()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder) as running:
        yield running


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """The vectors of the texts by the Python API: [2, 64]."""
    with open_embedder(folder / "bert.gguf", options=ModelOptions(threads=1)) as embedder:
        return embedder.embed(TEXTS)


def answer(server: Served, path: str, body: dict[str, Any], model: str | None = "bert") -> Any:
    found = server.post(path, {"model": model, **body})
    assert found.status_code == 200, found.text
    return found.json()


def refused(server: Served, path: str, body: dict[str, Any]) -> str:
    found = server.post(path, body)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    return str(error if path.startswith("/api") else error["message"])


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-3)  # llama.cpp's attention rounds


def test_vectors_in_openai_s_form(server: Served, expected: Any) -> None:
    more = {"encoding_format": "float", "user": "me", "input_type": "query"}
    whole = answer(server, VECTORS, {"input": TEXTS, **more})
    assert [whole["object"], whole["model"]] == ["list", "bert"]
    assert [(each["object"], each["index"]) for each in whole["data"]] == [("embedding", 0), ("embedding", 1)]
    close([each["embedding"] for each in whole["data"]], expected)
    tokens = [answer(server, "/tokenize", {"content": text, "add_special": True})["tokens"] for text in TEXTS]
    n = sum(map(len, tokens))
    assert whole["usage"] == {"prompt_tokens": n, "total_tokens": n}
    for path in ("/embeddings", "/v1/v1/embeddings/"):
        packed = answer(server, path, {"input": tokens, "encoding_format": "base64"})["data"]
        close([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in packed], expected)
    for one in (TEXTS[0], tokens[0], [TEXTS[0]], [tokens[0]]):
        (only,) = answer(server, VECTORS, {"input": one})["data"]
        close(only["embedding"], expected[0])
    (short,) = answer(server, VECTORS, {"input": TEXTS[0], "dimensions": 3.0})["data"]
    close(short["embedding"], expected[0, :3] / np.linalg.norm(expected[0, :3]))


def test_vectors_in_llama_server_s_form(server: Served, expected: Any) -> None:
    (only,) = answer(server, "/embedding", {"content": TEXTS[0]})
    close(only["embedding"], [expected[0]])
    (raw,) = answer(server, "/embedding", {"content": TEXTS[0], "embd_normalize": -1})
    (row,) = raw["embedding"]
    assert not np.isclose(np.linalg.norm(row), 1)
    close(row / np.linalg.norm(row), expected[0])


def test_vectors_in_ollama_s_form(server: Served, expected: Any) -> None:
    more = {"options": {"num_ctx": 9}, "keep_alive": "5m", "truncate": True}
    whole = answer(server, EMBED, {"input": TEXTS, **more}, "bert:latest")
    close(whole["embeddings"], expected)
    assert whole["prompt_eval_count"] > 0 <= whole["load_duration"] <= whole["total_duration"]
    close(answer(server, EMBED, {"input": TEXTS[1]})["embeddings"], expected[1:])
    close(answer(server, OLD, {"prompt": TEXTS[0], **more})["embedding"], expected[0])
    assert np.shape(answer(server, EMBED, {"input": TEXTS, "dimensions": 5})["embeddings"]) == (2, 5)


def test_a_text_that_is_too_long(server: Served) -> None:
    long = "the " * 600
    told = refused(server, VECTORS, {"model": "bert", "input": [TEXTS[0], long]})
    assert told.startswith("input: ")
    assert "the request (602 tokens) exceeds the available context size (256 tokens)" in told
    assert "602 tokens" in refused(server, EMBED, {"model": "bert", "input": long, "truncate": False})
    whole = answer(server, EMBED, {"input": long})
    assert whole["prompt_eval_count"] == 256
    close(whole["embeddings"], answer(server, EMBED, {"input": "the " * 254})["embeddings"])  # with its end


def test_ranks(server: Served) -> None:
    documents = ["a moon", "the world", "hello"]
    body = {"query": "who?", "documents": documents}
    whole = answer(server, RERANK, body, "qwen3-rank")
    assert [whole["object"], whole["model"]] == ["list", "qwen3-rank"]
    order = [each["index"] for each in whole["results"]]
    scores = [each["relevance_score"] for each in whole["results"]]
    assert sorted(order) == [0, 1, 2]
    assert scores == sorted(scores, reverse=True)
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] > 0
    as_objects = {**body, "documents": [{"text": each} for each in documents], "return_documents": True}
    for path in ("/rerank", "/v1/reranking"):
        (best,) = answer(server, path, {**as_objects, "top_n": 1}, "qwen3-rank")["results"]
        assert best == {**whole["results"][0], "document": {"text": documents[order[0]]}}
    tei = answer(server, "/rerank", {"query": "who?", "texts": documents, "return_text": True}, "qwen3-rank")
    expected = [
        {"index": i, "score": score, "text": documents[i]} for i, score in zip(order, scores, strict=True)
    ]
    assert tei == expected


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (VECTORS, {}, "input: must not be empty"),
        (VECTORS, {"input": []}, "input: must not be empty"),
        (VECTORS, {"input": ["a", []]}, "input: must not contain an empty text"),
        (VECTORS, {"input": [1, 159]}, "input: token ids must be from 0 to 158"),
        (VECTORS, {"input": [{"text": "a"}]}, "input"),
        (
            VECTORS,
            {"input": ["a", 1]},
            "input: must be a text, a list of texts, or a list of token ids",
        ),
        (VECTORS, {"input": ["a"] * 2049}, "2048"),
        (VECTORS, {"input": "a", "dimensions": 65}, "dimensions: must be at most 64"),
        (VECTORS, {"input": "a", "dimensions": 0}, "dimensions"),
        (VECTORS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBED, {"input": [1]}, "input"),
        (EMBED, {"input": "a", "keep_alive": "soon"}, "keep_alive: must be a number of seconds"),
        (RERANK, {"query": "a", "model": "qwen3-rank"}, "documents must be given"),
        (RERANK, {"query": "a", "documents": [], "model": "qwen3-rank"}, "documents"),
        (RERANK, {"query": "a", "documents": ["a"], "top_n": 0, "model": "qwen3-rank"}, "top_n"),
    ],
)
def test_bad_requests(server: Served, path: str, body: dict[str, Any], told: str) -> None:
    assert told in refused(server, path, {"model": "bert", **body})


@pytest.mark.parametrize(
    ("path", "model", "told"),
    [
        (VECTORS, "llama", "is a model that generates text, but this needs an embedding model: use bert, "),
        (EMBED, "qwen3-rank", "qwen3-rank is a reranker, but this needs an embedding model"),
        (RERANK, "bert", "bert is an embedding model, but this needs a reranker: use qwen3-rank"),
        (CHAT, "bert", "bert is an embedding model, but this needs a model that generates text: use llama"),
        ("/api/generate", "qwen3-rank", "this needs a model that generates text: use llama"),
        ("/infill", "bert", "this needs a model that generates text: use llama"),
    ],
)  # fmt: skip
def test_a_model_of_another_kind(server: Served, path: str, model: str, told: str) -> None:
    body = {"input": "a", "query": "a", "documents": ["a"], "messages": HI, "prompt": "a"}
    infill = {"input_prefix": "a", "input_suffix": "a"}
    assert told in refused(server, path, {**body, **infill, "model": model})


def test_without_a_name_the_last_model_of_the_kind_answers(server: Served) -> None:
    assert answer(server, TEXT, {"prompt": "a", "max_tokens": 1}, "llama")["model"] == "llama"
    assert answer(server, VECTORS, {"input": "a"})["model"] == "bert"
    assert answer(server, TEXT, {"prompt": "a", "max_tokens": 1}, None)["model"] == "llama"
    assert answer(server, VECTORS, {"input": "a"}, None)["model"] == "bert"
    body = {"query": "a", "documents": ["b"]}  # there is only one
    assert answer(server, RERANK, body, None)["model"] == "qwen3-rank"


def test_a_server_says_how_to_offer_a_model_of_the_kind(folder: Path) -> None:
    with serving(folder, "llama") as server:
        told = refused(server, VECTORS, {"model": "any", "input": "a"})
        assert "this server has none; offer one with --target or --models-dir" in told
    with serving(folder, "bert") as server:
        assert answer(server, VECTORS, {"input": "a"}, "any")["model"] == "bert"
        assert "generates text: this server has none" in refused(server, CHAT, {"messages": HI})


def test_such_models_are_listed_loaded_and_unloaded_as_others(folder: Path) -> None:
    with serving(folder) as server:
        kinds = {each["id"]: each["type"] for each in server.client.get("/v1/models").json()["data"]}
        assert kinds == {"bert": "embedding", "qwen3-embedding": "embedding", "qwen3-rank": "rerank",
                         "llama": "completion"}  # fmt: skip
        for _ in ("not loaded", "loaded"):
            assert server.post("/api/show", {"model": "bert"}).json()["capabilities"] == ["embedding"]
            answer(server, VECTORS, {"input": "a"})
        assert "bert:latest" in [each["name"] for each in server.client.get("/api/tags").json()["models"]]
        (loaded,) = server.client.get("/api/ps").json()["models"]
        assert (loaded["name"], loaded["context_length"]) == ("bert:latest", 256)
        (model,) = server.models.loaded
        assert model.n_bytes > model.source.path.stat().st_size
        assert server.client.get("/props").json()["pooling"] == "mean"
        assert len(server.client.get("/slots").json()) == server.models.settings.parallel
        n_tokens = answer(server, VECTORS, {"input": "a"})["usage"]["total_tokens"]
        assert counters(server.client.get("/metrics").text)["prompt_tokens_total"] == 3 * n_tokens
        assert any(f"POST {VECTORS} 200" in line and "bert: 1 text, 3 tokens" in line for line in server.log)
        assert answer(server, EMBED, {"keep_alive": 0}) == {"model": "bert", "embeddings": []}
        assert server.models.loaded == []
        assert answer(server, OLD, {}) == {"embedding": []}
        assert [each.name for each in server.models.loaded] == ["bert"]


def test_clients_that_leave_and_clients_that_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_service, "N_TOGETHER", 1)
    gate, body = threading.Event(), {"model": "bert", "input": TEXTS}
    with serving(folder, "bert", max_queue=0) as server:
        (model,) = server.models.loaded
        service = model.service
        assert isinstance(service, EmbeddingService)
        blocker = threading.Thread(target=service.embedder._thread.call, args=(lambda: gate.wait(PATIENCE),))
        blocker.start()
        with server.sent(VECTORS, body):
            until(lambda: service._n_requests == 1)
            full = server.post(VECTORS, body)
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            until(lambda: len(service.embedder._waiting) == 1)
            (waiting,) = service.embedder._waiting
        until(lambda: service._n_requests == 0)
        assert waiting.is_cancelled
        gate.set()
        blocker.join(PATIENCE)
        answer(server, VECTORS, {"input": TEXTS})
        assert waiting.n_done == 0
