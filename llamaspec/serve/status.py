"""The state of the server: health, models, metrics, properties, slots. None of this loads a model.

Paths and fields are llama-server's and OpenAI's. tests/serve/test_status.py, tests/serve/test_models.py.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llamaspec.errors import printable
from llamaspec.llama.file_facts import file_facts
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.serve.metrics import Load
from llamaspec.serve.models import Models
from llamaspec.serve.request_queue import SequenceState
from llamaspec.serve.response_forms import Data
from llamaspec.serve.served_model import KIND_NAMES, AnyService, ServedModel
from llamaspec.serve.service import Endpoint, Service


async def _health(models: Models, _: Request) -> Response:
    if models.queue.is_stopping:
        return JSONResponse({"status": "stopping"}, 503)
    return JSONResponse({"status": "ok"})


async def _models(models: Models, _: Request) -> Response:
    listed = [_model_object(model) for model in await models.listed()]
    # Codex needs `models`: without it, it asks again and again. An entry would replace its own instructions.
    return JSONResponse({"object": "list", "data": listed, "models": []})


async def _model(models: Models, http: Request) -> Response:
    return JSONResponse(_model_object(await models.named(http.path_params["name"])))


def _model_object(model: ServedModel) -> Data:
    about: Data = {"id": model.name, "object": "model", "created": model.created, "owned_by": "llamaspec"}
    about |= {"type": KIND_NAMES[model.kind], "aliases": list(model.source.aliases)}
    about |= {"status": {"value": model.status.value}}
    if model.service is None:
        try:
            return {**about, "meta": {"n_ctx_train": file_facts(model.source.path).context_length}}
        except OSError:
            return about
    target = model.service.target
    sizes = {"n_vocab": target.vocabulary_size, "n_ctx": target.context_size}
    meta = {**sizes, "n_ctx_train": target.trained_context_size}
    # Names that clients of llama-server (`meta`), vLLM and OpenRouter look for.
    lengths = {"max_model_len": target.context_size, "context_length": target.context_size}
    return {**about, "meta": meta, **lengths}


def _generating(models: Models) -> list[tuple[ServedModel, Service]]:
    """Return the loaded models that generate text, with their services."""
    loaded = [(model, model.service) for model in models.loaded]
    return [(model, service) for model, service in loaded if isinstance(service, Service)]


async def _metrics(models: Models, _: Request) -> Response:
    loads, n_stored = {}, 0
    for model, service in _generating(models):
        target = service.target
        running, n_waiting = models.queue.sequences(service.runner)
        loads[model.name] = Load(len(running), n_waiting, *target.cache_use())
        n_stored = target.store.n_bytes  # of all models: they share one limit
    return Response(models.metrics.text(loads, n_stored), media_type="text/plain; version=0.0.4")


async def _props(models: Models, http: Request) -> Response:
    """Describe the server and one model: the one that the query names, or the last one used."""
    name = http.query_params.get("model")
    model = await models.named(name) if name else next(iter(models.loaded), None)
    running, n_waiting = models.queue.sequences()
    about: Data = {
        "total_slots": models.settings.parallel,
        "rows": {"running": len(running), "waiting": n_waiting},
    }
    if model is not None:
        about["model_alias"] = model.name
        about |= {} if model.service is None else _loaded(model.service)
    return JSONResponse(about)


def _loaded(service: AnyService) -> Data:
    target = service.target
    about: Data = {
        "model_path": printable(target.path.name),
        "model_description": target.description,
        "kernels": target.weights.kernels,
        "default_generation_settings": {"n_ctx": target.context_size},
    }
    if not isinstance(service, Service):
        return {**about, "pooling": service.target.pooling}
    pair = service.pair
    return {
        **about,
        "drafts": [model.description for model in pair.models[1:]],
        "modalities": {"vision": pair.target.projector is not None, "audio": False},
        "has_chat_template": service.builder.template is not None,
        "speculative": {
            "sources": sorted(source.value for source in pair.sources),
            "rule": DEFAULT_RULE,
            "draft_length_by_rows": service.runner.metrics.draft_length_by_rows(),
            "verdict": service.verdict,
        },
    }


async def _slots(models: Models, _: Request) -> Response:
    """List the places for running sequences, of all models."""
    slots = []
    for model, service in _generating(models):
        running, _n_waiting = models.queue.sequences(service.runner)
        n_ctx = service.target.context_size
        slots += [{"model": model.name, "n_ctx": n_ctx, **_slot(state)} for state in running]
    slots += [{"is_processing": False}] * (models.settings.parallel - len(slots))
    return JSONResponse([{"id": i, **slot} for i, slot in enumerate(slots)])


def _slot(state: SequenceState) -> Data:
    n_decoded = 0 if state.stream is None else state.stream.completion.summary.n_tokens
    return {
        "is_processing": True,
        "n_prompt_tokens": len(state.job.prompt.tokens),
        "next_token": [{"n_decoded": n_decoded}],
    }


ENDPOINTS = (
    Endpoint("/v1/models", _models, is_general=True),
    Endpoint("/v1/models/{name:path}", _model, is_general=True),
    Endpoint("/health", _health, is_general=True),
    Endpoint("/v1/health", _health, is_general=True),
    Endpoint("/metrics", _metrics, is_general=True),
    Endpoint("/props", _props, is_general=True),
    Endpoint("/slots", _slots, is_general=True),
)
