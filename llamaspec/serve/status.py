"""Endpoints that tell of the server and its model, and the tokenizer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.sampling.parameters import Sampling
from llamaspec.serve.answers import Run
from llamaspec.serve.faults import RequestError, not_supported
from llamaspec.serve.fields import Fields
from llamaspec.serve.service import Service, body_of


class TokenizeRequest(Fields):
    """A text."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Fields):
    """Token ids."""

    tokens: list[int]


async def health(request: Request) -> Response:
    """Whether requests are taken."""
    if _service(request).queue.is_stopping:
        return JSONResponse({"status": "stopping"}, 503)
    return JSONResponse({"status": "ok"})


async def models(request: Request) -> Response:
    """The one model."""
    return JSONResponse({"object": "list", "data": [_model(_service(request))]})


async def model(request: Request) -> Response:
    """The model by its name."""
    service = _service(request)
    if request.path_params["name"] != service.model_name:
        raise RequestError(
            404, "there is no such model; see /v1/models", field="model", code="model_not_found"
        )
    return JSONResponse(_model(service))


async def metrics(request: Request) -> Response:
    """Counters and gauges for Prometheus."""
    service = _service(request)
    running, n_waiting = service.queue.rows()
    used, size = service.pair.cache_use()
    gauges = {
        "num_requests_running": ("Rows that run.", float(len(running))),
        "num_requests_waiting": ("Rows that wait for a place.", float(n_waiting)),
        "kv_cache_usage_perc": ("Part of the target's KV cache that holds something, 0 to 1.", used / size),
        "kv_cache_tokens": ("Tokens that it holds.", float(used)),
    }
    return PlainTextResponse(service.metrics.text(gauges), media_type="text/plain; version=0.0.4")


async def props(request: Request) -> Response:
    """What the server is made of."""
    service = _service(request)
    pair, vocabulary = service.pair, service.pair.target.vocabulary
    running, n_waiting = service.queue.rows()
    return JSONResponse(
        {
            "model_alias": service.model_name,
            "model_path": pair.target.path.name,
            "model_description": pair.target.description,
            "draft": None if pair.draft is None else pair.draft.description,
            "drafts": [model.description for model in pair.draft_models],
            "total_slots": service.settings.parallel,
            "default_generation_settings": {"n_ctx": pair.target.context_size, "params": _defaults()},
            "has_chat_template": service.prompts.template is not None,
            "bos_token": _spelling(service, vocabulary.bos),
            "eos_token": _spelling(service, vocabulary.eos),
            "speculative": {
                "sources": sorted(source.value for source in pair.sources),
                "rule": DEFAULT_RULE,
                "draft_length_by_rows": service.metrics.draft_length_by_rows(),
            },
            "rows": {"running": len(running), "waiting": n_waiting},
            "modalities": {"vision": False, "audio": False},
        }
    )


async def slots(request: Request) -> Response:
    """The rows that run; never their text."""
    service = _service(request)
    running, _ = service.queue.rows()
    return JSONResponse(_slots(running, service))


async def tokenize(request: Request) -> Response:
    """A text as token ids."""
    service = _service(request)
    body = await body_of(request, TokenizeRequest)
    if body.parse_special:
        raise not_supported("parse_special", "text is never read as control tokens here")
    tokens = await run_in_threadpool(
        service.prompts.tokenize, body.content, add_special=bool(body.add_special)
    )
    ids = tokens.tolist()
    if not body.with_pieces:
        return JSONResponse({"tokens": ids})
    piece = service.pair.target.vocabulary.piece
    return JSONResponse({"tokens": [{"id": token, "piece": _piece(piece(token))} for token in ids]})


async def detokenize(request: Request) -> Response:
    """Token ids as text."""
    body = await body_of(request, DetokenizeRequest)
    return JSONResponse({"content": _service(request).prompts.detokenize(body.tokens)})


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _model(service: Service) -> dict[str, Any]:
    target = service.pair.target
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "llamaspec",
        "meta": {
            "n_vocab": target.vocabulary_size,
            "n_ctx": target.context_size,
            "n_ctx_train": target.trained_context_size,
        },
    }


def _slots(running: Sequence[Run], service: Service) -> list[dict[str, Any]]:
    n_ctx = service.pair.target.context_size
    rows: list[dict[str, Any]] = []
    for i in range(service.settings.parallel):
        run = running[i] if i < len(running) else None
        row: dict[str, Any] = {"id": i, "n_ctx": n_ctx, "is_processing": run is not None}
        if run is not None:
            rounds = [] if run.stream is None else list(run.stream.rounds)
            row |= {
                "n_prompt_tokens": len(run.job.prompt),
                "n_decoded": sum(round_.n_accepted + 1 for round_ in rounds),
                "n_draft": sum(round_.n_verified for round_ in rounds),
                "n_draft_accepted": sum(round_.n_accepted for round_ in rounds),
                "speculative": run.job.drafting.enabled,
                "is_paused": run.stream is not None and run.stream.is_paused,
            }
        rows.append(row)
    return rows


def _defaults() -> dict[str, Any]:
    usual = Sampling()
    return {
        "temperature": usual.temperature,
        "top_k": usual.top_k,
        "top_p": usual.top_p,
        "min_p": usual.min_p,
        "repeat_last_n": usual.penalty_window,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": None,
    }


def _spelling(service: Service, token: int) -> str:
    vocabulary = service.pair.target.vocabulary
    return vocabulary.text(token).decode("utf-8", errors="replace") if token >= 0 else ""


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
