"""Ollama's API for models: `/api/tags`, `/api/ps`, `/api/show`, `/api/version`, and those that change models.

Nothing here loads a model, because clients describe every model that they list. Models are downloaded only
with `--pull`, and never deleted. tests/serve/test_ollama.py, tests/serve/test_models.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from llamaspec.llama.file_facts import FileFacts, Kind, file_facts
from llamaspec.serve.bodies import Fields
from llamaspec.serve.http_errors import RequestError, ollama_error
from llamaspec.serve.models import Models, Pull
from llamaspec.serve.ollama import OllamaForm, time_of
from llamaspec.serve.request_queue import server_stopping
from llamaspec.serve.response_forms import Data, as_line
from llamaspec.serve.served_model import KIND_NAMES, ServedModel
from llamaspec.serve.service import Endpoint, Service

API_VERSION = "0.12.6"  # of Ollama; clients refuse versions without the features that they need
NEVER = "2318-01-01T00:00:00Z"

_PULLED = {"status": "success"}
# Of their own, because downloads may take all threads of a pool for hours.
_pullers = ThreadPoolExecutor(4, thread_name_prefix="llamaspec-pull")


class NameBody(Fields):
    """A request about a model."""

    model: str | None = None
    name: str | None = None  # the older name of the field


class PullBody(NameBody):
    """A request to download a model."""

    stream: bool | None = None


async def _version(*_: object) -> Response:
    """Return the version of the API."""
    return JSONResponse({"version": API_VERSION})


async def _tags(models: Models, _: Request) -> Response:
    """List the models."""
    listed = [model for model in await models.listed() if model.source.path.is_file()]
    await asyncio.to_thread(lambda: [_facts(model) for model in listed])  # reads each new file once
    return JSONResponse({"models": [_about(model) for model in listed]})


async def _ps(models: Models, _: Request) -> Response:
    """List the loaded models."""
    return JSONResponse({"models": [_loaded(model) for model in models.loaded]})


def _loaded(model: ServedModel) -> Data:
    assert model.service is not None
    left = model.seconds_left
    expires = NEVER if math.isinf(left) else time_of(time.time() + left)
    length = model.service.target.context_size
    return {**_about(model), "expires_at": expires, "size_vram": 0, "context_length": length}


async def _show(models: Models, _: Request, body: NameBody) -> Response:
    """Describe a model."""
    model = await models.find(body.model or body.name)
    facts = _facts(model)
    architecture = facts.architecture
    info: Data = {"general.architecture": architecture}
    info["general.basename"] = facts.basename or model.name  # VS Code shows it as the name
    info[f"{architecture}.context_length"] = facts.context_length
    for name in ("embedding_length", "block_count"):
        if value := getattr(facts, name):
            info[f"{architecture}.{name}"] = value
    template, able = facts.template, _abilities(model.kind, facts)
    if (service := model.service) is not None:
        target = service.target
        info["general.parameter_count"] = target.facts().n_parameters
        info[f"{architecture}.context_length"] = target.context_size
        if isinstance(service, Service):
            template = "" if service.builder.template is None else service.builder.template.source
            able = _true_abilities(service)
    about = _about(model)
    return JSONResponse({
        "license": "", "modelfile": "", "parameters": "", "system": "", "template": template,
        "modified_at": about["modified_at"], "model_info": info, "capabilities": able,
        "details": about["details"],
    })  # fmt: skip


def _true_abilities(service: Service) -> list[str]:
    """Return what a loaded model can do."""
    builder = service.builder
    able = ["completion", *(["tools"] if builder.takes_tools else [])]
    able += ["thinking"] if builder.answer_format.reasoning else []
    able += ["vision"] if service.pair.target.projector is not None else []
    return able + (["insert"] if builder.vocabulary.fim else [])


def _abilities(kind: Kind, facts: FileFacts) -> list[str]:
    """Return what a model seems to be able to do, by its kind and the text of its template."""
    if kind is not Kind.TEXT:
        return [KIND_NAMES[kind]]
    able = ["completion", *(["tools"] if "tools" in facts.template else [])]
    return able + (["thinking"] if "<think>" in facts.template else [])


def _about(model: ServedModel) -> Data:
    facts = _facts(model)
    family, size, quantization = facts.architecture, facts.size, facts.quantization
    if model.service is not None:
        described = model.service.target.description
        family, size, quantization = (*described.split(" ", 2), "", "", "")[:3]
    details = {"parent_model": "", "format": "gguf", "family": family, "families": [family],
               "parameter_size": size, "quantization_level": quantization}  # fmt: skip
    # Ollama's lists have names with a tag. Open WebUI adds the tag to a name before it looks it up.
    name = model.name if ":" in model.name else f"{model.name}:latest"
    return {"name": name, "model": name, "modified_at": time_of(model.created),
            "size": facts.n_bytes, "digest": facts.identity, "details": details}  # fmt: skip


def _facts(model: ServedModel) -> FileFacts:
    """Return the facts in a model's file; empty ones if it is gone, which hides no other model of a list."""
    with suppress(OSError):
        return file_facts(model.source.path)
    return FileFacts()


async def _refuse_to_delete(*_: Any) -> Response:
    raise RequestError(403, "this server deletes no models; use `llamaspec models remove`")


async def _pull(models: Models, _: Request, body: PullBody) -> Response:
    """Download a model, if that is allowed; otherwise say whether it is here."""
    name = body.model or body.name or ""
    if models.pull is None:
        try:
            await models.named(name)
        except RequestError as error:
            remedy = "this server downloads no models (--pull); use `llamaspec models pull`"
            raise RequestError(error.status, f"{error.message}; {remedy}") from error
        return JSONResponse(_PULLED)
    parts = _pulled(models, models.pull, name)
    if body.stream is not False:
        lines = (f"{as_line(part)}\n" async for part in parts)
        return StreamingResponse(lines, media_type=OllamaForm.media_type)
    last = [part async for part in parts][-1]
    return JSONResponse(last, HTTPStatus.BAD_GATEWAY if "error" in last else HTTPStatus.OK)


async def _pulled(models: Models, pull: Pull, name: str) -> AsyncIterator[Data]:
    """Download a model; yield the progress, and at last whether it is here. Goes on if the client leaves."""
    loop, news = asyncio.get_running_loop(), asyncio.Queue[Data]()

    def check() -> None:
        if models.queue.is_stopping:
            raise server_stopping()

    def work() -> None:
        check()  # it may have waited for others
        pull(name, on_pull)

    def on_pull(file: str, n_here: int, n_bytes: int) -> None:
        check()
        part = {"status": f"pulling {file}", "digest": file, "total": n_bytes, "completed": n_here}
        loop.call_soon_threadsafe(news.put_nowait, part)

    pulling = loop.run_in_executor(_pullers, work)
    pulling.add_done_callback(lambda _: news.put_nowait({}))
    yield {"status": "pulling manifest"}
    while part := await news.get():
        yield part
    try:
        await pulling
    except Exception as error:  # noqa: BLE001  # the client gets the error
        models.log.fault(error)
        yield ollama_error(error)
        return
    yield _PULLED


ENDPOINTS = (
    Endpoint("/api/show", _show, NameBody, is_general=True),
    Endpoint("/api/tags", _tags, is_general=True),
    Endpoint("/api/ps", _ps, is_general=True),
    Endpoint("/api/version", _version, is_general=True),
    Endpoint("/api/delete", _refuse_to_delete, NameBody, is_general=True, method="DELETE"),
    Endpoint("/api/pull", _pull, PullBody, is_general=True),
)
