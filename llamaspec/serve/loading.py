"""Answers to requests whose model is not loaded yet.

A stream begins after a second, with comments until its model is loaded, so that its client sees that the
server works on it. If the model is loaded sooner, or nothing is streamed, the status of the response tells
about every error. tests/serve/test_models.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llamaspec.serve.bodies import ModelBody
from llamaspec.serve.http_errors import RequestError
from llamaspec.serve.models import Models
from llamaspec.serve.ollama import LOADING_SINCE, OllamaForm
from llamaspec.serve.response_forms import Form
from llamaspec.serve.served_model import AnyService, ServedModel, Use
from llamaspec.serve.service import CLIENT_LEFT, EventStream, while_connected

SILENT_SECONDS = 1.0  # before the stream begins
Handler = Callable[[AnyService], Awaitable[Response]]
Failure = Callable[[str, ModelBody, Exception], bytes]  # see `Endpoint`


async def with_loaded(
    models: Models, use: Use, http: Request, body: ModelBody, handler: Handler, failure: Failure
) -> Response:
    """Load a model if necessary, and return the response of the handler.

    `failure` ends a stream that has begun. If the client leaves, the request stops waiting.
    """
    if use.is_admitted:
        return await handler(await use.service())
    http.scope[LOADING_SINCE] = time.monotonic_ns()
    loading = asyncio.ensure_future(use.service())
    if body.is_streamed:
        await asyncio.wait({loading}, timeout=SILENT_SECONDS)
        if not loading.done():
            end = partial(failure, use.model.name, body)
            return _begun_stream(models, use.model, http, loading, handler, end)
    timeout = models.settings.request_timeout
    try:
        service = await while_connected(asyncio.wait_for(loading, timeout), http.receive)
    except asyncio.TimeoutError:
        raise _too_late() from None
    return Response(status_code=CLIENT_LEFT) if service is None else await handler(service)


def _too_late() -> RequestError:
    return RequestError(504, "loading the model took too long; see --request-timeout", code="timeout")


def _begun_stream(
    models: Models,
    model: ServedModel,
    http: Request,
    loading: asyncio.Future[AnyService],
    handler: Handler,
    failed: Callable[[Exception], bytes],
) -> Response:
    """Return a stream that begins before its model is loaded."""
    path, timeout = http.scope["path"], models.settings.request_timeout
    is_ollama, begin = path.startswith("/api/"), http.scope[LOADING_SINCE] / 1e9
    deadline = math.inf if timeout is None else begin + timeout
    answer: Response | None = None

    def comment() -> bytes:
        if is_ollama:
            return OllamaForm(model.name, is_chat=path == "/api/chat").waiting()
        return f": loading {model.name}\n\n".encode()

    async def parts() -> AsyncIterator[bytes]:
        nonlocal answer
        try:
            while not loading.done():
                yield comment()
                left = deadline - time.monotonic()
                await asyncio.wait({loading}, timeout=min(left, models.settings.keep_alive_seconds))
                if not loading.done() and time.monotonic() >= deadline:
                    raise _too_late()
            answer = await handler(loading.result())
        except Exception as error:  # noqa: BLE001  # the client gets the error
            models.log.fault(error)
            yield failed(error)
            return
        if not isinstance(answer, StreamingResponse):
            yield bytes(answer.body) + b"\n"
            return
        async for part in answer.body_iterator:
            yield part.encode() if isinstance(part, str) else bytes(part)

    def cancel() -> None:
        loading.cancel()
        if isinstance(answer, EventStream):
            answer.cancel()

    media_type = (OllamaForm if is_ollama else Form).media_type
    # Twice: to load the model, and to answer.
    return EventStream(parts(), media_type, cancel, None if timeout is None else 2 * timeout)
