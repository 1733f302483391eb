"""What the server says about itself: health, models, metrics, properties; and its tokenizer.

tests/serve/test_status.py.
"""

from __future__ import annotations

from typing import Annotated, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.serve.bodies import Fields, refused
from llamaspec.serve.errors import RequestError
from llamaspec.serve.service import Endpoint, Service


class TokenizeBody(Fields):
    """Text to tokenize."""

    content: str
    add_special: bool | None = None
    parse_special: Annotated[bool | None, refused("text is never read as control tokens here")] = None
    with_pieces: bool | None = None


class DetokenizeBody(Fields):
    """Tokens to turn into text."""

    tokens: list[int]


async def _health(service: Service, _: Request) -> Response:
    if service.queue.is_stopping:
        return JSONResponse({"status": "stopping"}, 503)
    return JSONResponse({"status": "ok"})


async def _models(service: Service, _: Request) -> Response:
    # Codex reads `models`, and asks again if it is missing. An entry would replace its own instructions.
    return JSONResponse({"object": "list", "data": [_model_object(service)], "models": []})


async def _model(service: Service, http: Request) -> Response:
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


async def _metrics(service: Service, _: Request) -> Response:
    running, n_waiting = service.queue.sequences()
    n_used, size = service.pair.target.cache_use()
    text = service.metrics.text(len(running), n_waiting, n_used, size, service.pair.target.store.n_bytes)
    return Response(text, media_type="text/plain; version=0.0.4")


async def _props(service: Service, _: Request) -> Response:
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


async def _tokenize(service: Service, _: Request, body: TokenizeBody) -> Response:
    vocabulary = service.builder.vocabulary
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


async def _detokenize(service: Service, _: Request, body: DetokenizeBody) -> Response:
    builder = service.builder
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
