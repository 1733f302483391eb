"""Answers to requests whose model is not loaded yet.

A stream begins after a second, with comments until its model is loaded, so that its client sees that the
server works on it. If the model is loaded sooner, or nothing is streamed, the status of the response tells
about every error. tests/serve/test_models.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llamaspec.serve.bodies import ModelBody
from llamaspec.serve.http_errors import RequestError, anthropic_error, error_response, openai_error
from llamaspec.serve.models import Models
from llamaspec.serve.ollama import OllamaForm
from llamaspec.serve.response_forms import sse
from llamaspec.serve.served_model import ServedModel
from llamaspec.serve.service import CLIENT_LEFT, EventStream, Service, while_connected

SILENT_SECONDS = 1.0  # before the stream begins
Handler = Callable[[Service], Awaitable[Response]]


async def with_loaded(
    models: Models, model: ServedModel, http: Request, body: ModelBody, handler: Handler
) -> Response:
    """Load a model if necessary, and return the response of the handler.

    Call it while using the model. If the client leaves, the request stops waiting.
    """
    if model.service is not None:
        return await handler(model.service)
    loading = asyncio.ensure_future(models.load(model))
    if body.is_streamed:
        await asyncio.wait({loading}, timeout=SILENT_SECONDS)
        if not loading.done():
            return _Stream(models, model, http.scope["path"], loading, handler).response()
    timeout = models.settings.request_timeout
    try:
        service = await while_connected(asyncio.wait_for(loading, timeout), http.receive)
    except asyncio.TimeoutError:
        raise RequestError(504, "loading the model took too long; see --request-timeout") from None
    return Response(status_code=CLIENT_LEFT) if service is None else await handler(service)


class _Stream:
    """A stream that begins before its model is loaded."""

    def __init__(
        self,
        models: Models,
        model: ServedModel,
        path: str,
        loading: asyncio.Future[Service],
        handler: Handler,
    ) -> None:
        self._models, self._model, self._path = models, model, path
        self._loading, self._handler = loading, handler
        self._answer: Response | None = None

    def response(self) -> Response:
        """Return the response that sends it."""
        is_ollama = self._path.startswith("/api/")
        media_type = OllamaForm.media_type if is_ollama else "text/event-stream"
        timeout = self._models.settings.request_timeout  # twice: to load the model, and to answer
        return EventStream(self._parts(), media_type, self._cancel, None if timeout is None else 2 * timeout)

    async def _parts(self) -> AsyncIterator[bytes]:
        seconds = self._models.settings.keep_alive_seconds
        try:
            yield self._comment()
            while not (await asyncio.wait({self._loading}, timeout=seconds))[0]:
                yield self._comment()
            answer = self._answer = await self._handler(self._loading.result())
        except Exception as error:  # noqa: BLE001  # the client gets the error
            self._models.log.fault(error)
            yield self._error(error)
            return
        if not isinstance(answer, StreamingResponse):
            yield bytes(answer.body) + b"\n"
            return
        async for part in answer.body_iterator:
            yield part.encode() if isinstance(part, str) else bytes(part)

    def _comment(self) -> bytes:
        if self._path.startswith("/api/"):
            return OllamaForm(self._model.name, is_chat=self._path == "/api/chat").waiting()
        return f": loading {self._model.name}\n\n".encode()

    def _error(self, error: Exception) -> bytes:
        if self._path.startswith("/api/"):
            return bytes(error_response(self._path, error).body) + b"\n"
        if self._path.startswith("/v1/messages"):
            return sse(anthropic_error(error), "error")
        return sse(openai_error(error))

    def _cancel(self) -> None:
        self._loading.cancel()
        if isinstance(self._answer, EventStream):
            self._answer.cancel()
