"""Vectors and ranks: `/v1/embeddings` of OpenAI, `/api/embed` of Ollama, `/v1/rerank` of Jina and Cohere.

Texts are evaluated as they come; prefixes that a model was trained with are the client's. What is unusual is
done as in llama-server. tests/serve/test_embeddings.py.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llamaspec.embedder import unit_vectors
from llamaspec.llama.file_facts import Kind
from llamaspec.serve.bodies import Fields, ModelBody, TokenIds, Whole, check_token_ids
from llamaspec.serve.embedding_service import EmbeddingService
from llamaspec.serve.http_errors import bad_field
from llamaspec.serve.ollama import LOADING_SINCE, KeptBody
from llamaspec.serve.response_forms import Data
from llamaspec.serve.service import CLIENT_LEFT, Endpoint
from llamaspec.values import Rows, TokenArray

MAX_TEXTS = 2048  # in a request, as in OpenAI's API
_VECTORS, _RANKS = frozenset({Kind.EMBEDDING}), frozenset({Kind.RANKING})

Input = str | Annotated[list[int | str | TokenIds], Field(fail_fast=True)]
Dimensions = Annotated[Whole, Field(ge=1)]


class EmbeddingsBody(ModelBody):
    """Texts to turn into vectors. With `content` in place of `input`, the response is llama-server's own."""

    input: Input | None = None
    content: Input | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    embd_normalize: Literal[2, -1] | None = None  # -1: vectors as the model gives them

    @property
    def field(self) -> str:
        """The field with the texts."""
        return "content" if self.input is None and self.content is not None else "input"


async def _embeddings(service: EmbeddingService, http: Request, body: EmbeddingsBody) -> Response:
    """Answer with one vector for each text."""
    given = getattr(body, body.field)
    if given in (None, [], ""):
        raise bad_field(body.field, "must not be empty")
    _check_dimensions(service, body.dimensions)
    texts = await run_in_threadpool(_tokenized, service, given, body.field)
    rows = await service.rows(http, texts, body.field)
    if rows is None:
        return Response(status_code=CLIENT_LEFT)

    def answer() -> Response:
        is_plain = body.embd_normalize == -1 and body.dimensions is None
        vectors = rows if is_plain else unit_vectors(rows, body.dimensions)
        if body.field == "content":
            return JSONResponse([{"index": i, "embedding": [row]} for i, row in enumerate(vectors.tolist())])
        written = map(_base64, vectors) if body.encoding_format == "base64" else vectors.tolist()
        data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(written)]
        return JSONResponse({**_head(service, texts), "data": data})

    return await run_in_threadpool(answer)


def _tokenized(service: EmbeddingService, given: str | Sequence[Any], field: str) -> list[TokenArray]:
    """Return the tokens of one text or of several, each of them given as text or as token ids."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    texts: Sequence[Any] = [given] if is_one else given
    if len(texts) > MAX_TEXTS:
        raise bad_field(field, f"has {len(texts)} texts; send at most {MAX_TEXTS} at once")
    for text in texts:
        if not isinstance(text, str):
            _check_tokens(service, text, field)
    return [service.embedder.tokens(text) for text in texts]


def _check_tokens(service: EmbeddingService, text: int | Sequence[int | str], field: str) -> None:
    if isinstance(text, int) or not all(isinstance(token, int) for token in text):
        raise bad_field(field, "must be a text, a list of texts, or a list of token ids")
    check_token_ids(cast("Sequence[int]", text), service.target.vocabulary, field)


def _check_dimensions(service: EmbeddingService, n: int | None) -> None:
    if n is not None and n > service.target.size:
        raise bad_field("dimensions", f"must be at most {service.target.size}")


def _base64(vector: Rows) -> str:
    """Write a vector as OpenAI does: its numbers as little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _head(service: EmbeddingService, texts: Sequence[TokenArray]) -> Data:
    n = sum(map(len, texts))
    usage = {"prompt_tokens": n, "total_tokens": n}
    return {"object": "list", "model": service.model_name, "usage": usage}


# Ollama


class OllamaVectorBody(KeptBody):
    """Fields of `/api/embed` and `/api/embeddings`; `options` has nothing that concerns vectors."""

    truncate: bool | None = None  # null: true
    dimensions: Dimensions | None = None

    @property
    def texts(self) -> list[str]:
        """The texts; none: the model is only loaded or unloaded."""
        return []

    def unloaded(self, model: str) -> Data | None:
        """Return the response if the request only unloads its model, otherwise None."""
        return None if self.texts or self.idle_seconds != 0 else {"model": model, "embeddings": []}


class EmbedBody(OllamaVectorBody):
    """One text or several."""

    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) and self.input else list(self.input or ())


class OldEmbedBody(OllamaVectorBody):
    """One text, for the older `/api/embeddings`."""

    prompt: str | None = None

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.prompt] if self.prompt else []


async def _ollama_rows(
    service: EmbeddingService, http: Request, body: OllamaVectorBody, field: str
) -> tuple[Rows | None, int]:
    """Return vectors of length 1, None if the client has left, and the number of tokens."""
    given = body.texts
    if not given:
        return np.empty((0, 0), dtype=np.float32), 0
    _check_dimensions(service, body.dimensions)
    texts = await run_in_threadpool(_tokenized, service, given, field)
    if body.truncate is not False:
        texts = [_truncated(service, text) for text in texts]
    rows = await service.rows(http, texts, field)
    return None if rows is None else unit_vectors(rows, body.dimensions), sum(map(len, texts))


def _truncated(service: EmbeddingService, text: TokenArray) -> TokenArray:
    """Return the tokens of a text without those that exceed the context; a mark at its end stays."""
    n, vocabulary = service.target.context_size, service.target.vocabulary
    if len(text) <= n:
        return text
    is_marked = text[-1] in (vocabulary.eos, vocabulary.sep)
    return np.concatenate([text[: n - 1], text[-1:]]) if is_marked else text[:n]


async def _embed(service: EmbeddingService, http: Request, body: EmbedBody) -> Response:
    """Answer with one vector for each text."""
    now = monotonic_ns()
    begin = http.scope.get(LOADING_SINCE) or now
    rows, n_tokens = await _ollama_rows(service, http, body, "input")
    if rows is None:
        return Response(status_code=CLIENT_LEFT)
    vectors = await run_in_threadpool(rows.tolist)
    durations = {"total_duration": monotonic_ns() - begin, "load_duration": now - begin}
    return JSONResponse({
        "model": service.model_name, "embeddings": vectors, **durations, "prompt_eval_count": n_tokens,
    })  # fmt: skip


async def _old_embed(service: EmbeddingService, http: Request, body: OldEmbedBody) -> Response:
    """Answer with the vector of a text."""
    rows, _ = await _ollama_rows(service, http, body, "prompt")
    if rows is None:
        return Response(status_code=CLIENT_LEFT)
    return JSONResponse({"embedding": [number for row in rows.tolist() for number in row]})


# Ranks


class Document(Fields):
    """A document as an object."""

    text: str


class RerankBody(ModelBody):
    """Documents to put in the order in which they answer a query. With `texts`, the API is that of TEI."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    top_n: Annotated[Whole, Field(ge=1)] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None  # TEI's name of it

    @model_validator(mode="after")
    def _has_documents(self) -> RerankBody:
        if self.documents is None and self.texts is None:
            raise ValueError("documents must be given")
        return self

    @property
    def given(self) -> list[str]:
        """The documents."""
        if self.documents is None:
            return list(self.texts or ())
        return [each if isinstance(each, str) else each.text for each in self.documents]


async def _rerank(service: EmbeddingService, http: Request, body: RerankBody) -> Response:
    """Answer with the documents' scores, the greatest first."""
    given = body.given
    field = "texts" if body.documents is None else "documents"

    def tokenized() -> list[TokenArray]:
        return [service.embedder.pair_tokens(body.query, each) for each in given]

    pairs = await run_in_threadpool(tokenized)
    rows = await service.rows(http, pairs, field)
    if rows is None:
        return Response(status_code=CLIENT_LEFT)
    order = np.argsort(-rows[:, 0], kind="stable")[: body.top_n].tolist()
    if body.documents is None:
        return JSONResponse([
            {"index": i, "score": float(rows[i, 0]), **({"text": given[i]} if body.return_text else {})}
            for i in order
        ])  # fmt: skip
    results = [{"index": i, "relevance_score": float(rows[i, 0]), **_shown(body, given[i])} for i in order]
    return JSONResponse({**_head(service, pairs), "results": results})


def _shown(body: RerankBody, document: str) -> Mapping[str, Any]:
    return {"document": {"text": document}} if body.return_documents else {}


ENDPOINTS = (
    Endpoint("/v1/embeddings", _embeddings, EmbeddingsBody, kinds=_VECTORS),
    Endpoint("/embedding", _embeddings, EmbeddingsBody, kinds=_VECTORS),
    Endpoint("/api/embed", _embed, EmbedBody, kinds=_VECTORS),
    Endpoint("/api/embeddings", _old_embed, OldEmbedBody, kinds=_VECTORS),
    Endpoint("/v1/rerank", _rerank, RerankBody, kinds=_RANKS),
    Endpoint("/v1/reranking", _rerank, RerankBody, kinds=_RANKS),
)
