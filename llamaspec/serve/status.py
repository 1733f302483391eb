"""What the server says about itself: health, models, metrics, properties; and its tokenizer.

tests/serve/test_status.py.
"""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.serve.bodies import Fields, parse_body
from llamaspec.serve.errors import RequestError, not_supported
from llamaspec.serve.service import Endpoint, Service, service_of


class TokenizeBody(Fields):
    """Text to tokenize."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Fields):
    """Tokens to turn into text."""

    tokens: list[int]


async def _health(http: Request) -> Response:
    if service_of(http).queue.is_stopping:
        return JSONResponse({"status": "stopping"}, 503)
    return JSONResponse({"status": "ok"})


async def _models(http: Request) -> Response:
    # Codex reads `models`, and asks again if it is missing. An entry would replace its own instructions.
    return JSONResponse({"object": "list", "data": [_model_object(service_of(http))], "models": []})


async def _model(http: Request) -> Response:
    service = service_of(http)
    if http.path_params["name"] != service.model_name:
        message = "there is no such model; see /v1/models"
        raise RequestError(404, message, field="model", code="model_not_found")
    return JSONResponse(_model_object(service))


def _model_object(service: Service) -> dict[str, Any]:
    target = service.pair.target
    about = {"id": service.model_name, "object": "model", "created": service.created}
    sizes = {"n_vocab": target.vocabulary_size, "n_ctx": target.context_size}
    meta = {**sizes, "n_ctx_train": target.trained_context_size}
    # Names that clients of llama-server (`meta`), vLLM and OpenRouter look for.
    lengths = {"max_model_len": target.context_size, "context_length": target.context_size}
    return {**about, "owned_by": "llamaspec", "meta": meta, **lengths}


async def _metrics(http: Request) -> Response:
    service = service_of(http)
    running, n_waiting = service.queue.sequences()
    n_used, size = service.pair.target.cache_use()
    text = service.metrics.text(len(running), n_waiting, n_used, size, service.pair.target.store.n_bytes)
    return Response(text, media_type="text/plain; version=0.0.4")


async def _props(http: Request) -> Response:
    service = service_of(http)
    pair, (running, n_waiting) = service.pair, service.queue.sequences()
    about = {
        "model_alias": service.model_name,
        "model_path": pair.target.path.name,
        "model_description": pair.target.description,
        "drafts": [model.description for model in pair.draft_models],
        "total_slots": service.settings.parallel,
        "default_generation_settings": {"n_ctx": pair.target.context_size},
        "has_chat_template": service.builder.template is not None,
        "rows": {"running": len(running), "waiting": n_waiting},
    }
    sources = sorted(source.value for source in pair.sources)
    about["speculative"] = {
        "sources": sources,
        "rule": DEFAULT_RULE,
        "draft_length_by_rows": service.metrics.draft_length_by_rows(),
        "verdict": service.verdict,
    }
    return JSONResponse(about)


async def _tokenize(http: Request) -> Response:
    body, vocabulary = await parse_body(http, TokenizeBody), service_of(http).builder.vocabulary
    if body.parse_special:
        raise not_supported("parse_special", "text is never read as control tokens here")
    content, special = body.content.encode(), bool(body.add_special)
    ids = (await run_in_threadpool(vocabulary.tokenize, content, add_special=special)).tolist()
    if body.with_pieces:
        return JSONResponse({"tokens": [{"id": i, "piece": _piece(vocabulary.piece(i))} for i in ids]})
    return JSONResponse({"tokens": ids})


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def _detokenize(http: Request) -> Response:
    body, builder = await parse_body(http, DetokenizeBody), service_of(http).builder
    builder.check_token_ids(body.tokens, "tokens")
    text = b"".join(map(builder.vocabulary.piece, body.tokens)).decode(errors="replace")
    return JSONResponse({"content": text})


ENDPOINTS = (
    Endpoint("/v1/models", _models),
    Endpoint("/v1/models/{name:path}", _model),
    Endpoint("/tokenize", _tokenize, TokenizeBody),
    Endpoint("/detokenize", _detokenize, DetokenizeBody),
    Endpoint("/health", _health),
    Endpoint("/v1/health", _health),
    Endpoint("/metrics", _metrics),
    Endpoint("/props", _props),
)
