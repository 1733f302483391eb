"""The application: routes, the server's own status, its description, and the process that serves it.

On SIGTERM or Ctrl-C no more requests are taken, running answers have a grace time, and then end with an error
that says so. tests/serve/test_status.py, tests/serve/test_stopping.py.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from types import FrameType
from typing import Any

import uvicorn
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llamaspec.chat.template import ChatTemplate
from llamaspec.errors import LlamaspecError
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.serve import ServeSettings, anthropic, openai_chat, openai_responses
from llamaspec.serve.bodies import Fields, RequestError, error_response, not_supported
from llamaspec.serve.metrics import Metrics
from llamaspec.serve.requests import RequestBuilder
from llamaspec.serve.scheduling import RequestQueue
from llamaspec.serve.security import PAGE_FILES, Guard, RequestLog, Write
from llamaspec.serve.service import CLIENT_LEFT, Service, parse_body, service_of

FINAL_SECONDS = 10  # after the grace time, for answers to end with their error
Handler = Callable[[Request], Awaitable[Response]]


# What the server tells about itself.


class TokenizeBody(Fields):
    """A text."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Fields):
    """Token ids."""

    tokens: list[int]


async def health(http: Request) -> Response:
    """Whether requests are taken."""
    if service_of(http).queue.is_stopping:
        return JSONResponse({"status": "stopping"}, 503)
    return JSONResponse({"status": "ok"})


async def models(http: Request) -> Response:
    """The one model."""
    return JSONResponse({"object": "list", "data": [_model(service_of(http))]})


async def model(http: Request) -> Response:
    """The model by its name."""
    service = service_of(http)
    if http.path_params["name"] != service.model_name:
        message = "there is no such model; see /v1/models"
        raise RequestError(404, message, field="model", code="model_not_found")
    return JSONResponse(_model(service))


def _model(service: Service) -> dict[str, Any]:
    target = service.pair.target
    sizes = {
        "n_vocab": target.vocabulary_size,
        "n_ctx": target.context_size,
        "n_ctx_train": target.trained_context_size,
    }
    about = {"id": service.model_name, "object": "model", "created": service.created}
    return {**about, "owned_by": "llamaspec", "meta": sizes}


async def metrics(http: Request) -> Response:
    """Counters and gauges for Prometheus."""
    service = service_of(http)
    running, n_waiting = service.queue.sequences()
    n_used, size = service.pair.cache_use()
    text = service.metrics.text(
        {
            "num_requests_running": len(running),
            "num_requests_waiting": n_waiting,
            "kv_cache_usage_perc": n_used / size,
            "kv_cache_tokens": n_used,
        }
    )
    return Response(text, media_type="text/plain; version=0.0.4")


async def props(http: Request) -> Response:
    """The models, their sizes, and the load."""
    service = service_of(http)
    pair, (running, n_waiting) = service.pair, service.queue.sequences()
    return JSONResponse(
        {
            "model_alias": service.model_name,
            "model_path": pair.target.path.name,
            "model_description": pair.target.description,
            "draft": None if pair.draft is None else pair.draft.description,
            "drafts": [model.description for model in pair.draft_models],
            "total_slots": service.settings.parallel,
            "default_generation_settings": {"n_ctx": pair.target.context_size},
            "has_chat_template": service.builder.template is not None,
            "speculative": {
                "sources": sorted(source.value for source in pair.sources),
                "rule": DEFAULT_RULE,
                "draft_length_by_rows": service.metrics.draft_length_by_rows(),
            },
            "rows": {"running": len(running), "waiting": n_waiting},
        }
    )


async def tokenize(http: Request) -> Response:
    """A text as token ids."""
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


async def detokenize(http: Request) -> Response:
    """Token ids as text; what is not UTF-8 becomes U+FFFD."""
    body, builder = await parse_body(http, DetokenizeBody), service_of(http).builder
    builder.check_token_ids(body.tokens, "tokens")
    text = b"".join(map(builder.vocabulary.piece, body.tokens)).decode(errors="replace")
    return JSONResponse({"content": text})


# Routes.


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path, who answers, and the body that is expected: without one it is a GET."""

    path: str
    handler: Handler
    body: type[Fields] | None = None
    streams: bool = False
    media_type: str = "application/json"

    @property
    def method(self) -> str:
        """Of HTTP."""
        return "GET" if self.body is None else "POST"


ENDPOINTS = (
    Endpoint("/v1/chat/completions", openai_chat.chat_completions, openai_chat.ChatBody, streams=True),
    Endpoint("/v1/completions", openai_chat.completions, openai_chat.CompletionBody, streams=True),
    Endpoint("/v1/responses", openai_responses.responses, openai_responses.ResponsesBody, streams=True),
    Endpoint("/v1/messages", anthropic.messages, anthropic.MessagesBody, streams=True),
    Endpoint("/v1/messages/count_tokens", anthropic.count_tokens, anthropic.CountTokensBody),
    Endpoint("/v1/models", models),
    Endpoint("/v1/models/{name}", model),
    Endpoint("/tokenize", tokenize, TokenizeBody),
    Endpoint("/detokenize", detokenize, DetokenizeBody),
    Endpoint("/health", health),
    Endpoint("/v1/health", health),
    Endpoint("/metrics", metrics, media_type="text/plain"),
    Endpoint("/props", props),
)
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def make_app(service: Service, write: Write) -> ASGIApp:
    """The ASGI application; `write` takes the lines of the log."""
    settings, about = service.settings, JSONResponse(_openapi())
    routes = [
        *(Route(each.path, _answering(each.handler), methods=[each.method]) for each in ENDPOINTS),
        *(Route(path, _page_file(name)) for path, name in PAGE_FILES.items()),
        Route("/openapi.json", lambda _: about),
    ]
    middleware = [
        Middleware(RequestLog, write=write, log_format=settings.log_format),
        Middleware(Guard, settings=settings),
    ]
    if settings.cors_origins:
        origins, methods = settings.cors_origins, ("GET", "POST")
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=("*",))
        middleware.insert(1, cors)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _no_route})
    app.state.service = service
    return app


def _page_file(name: str) -> Handler:
    content = (files("llamaspec") / "serve" / "page" / name).read_bytes()
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]

    async def answer(_: Request) -> Response:
        return Response(content, headers=_PAGE_HEADERS, media_type=media_type)

    return answer


def _answering(handler: Handler) -> Handler:
    """A handler whose exceptions become responses."""

    async def answer(http: Request) -> Response:
        try:
            return await handler(http)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
        except Exception as error:  # noqa: BLE001  # the client is told; the process goes on
            return error_response(http.url.path, error)

    return answer


async def _no_route(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "there is nothing at this path; see /openapi.json", 405: "this path wants another method"}
    message = known.get(error.status_code, "this cannot be answered")
    response = error_response(http.url.path, RequestError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


def _openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document, made from the models that check requests."""
    bodies = [each.body for each in ENDPOINTS if each.body is not None]
    template = "#/components/schemas/{model}"
    references, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=template)
    error = {
        "type": "object",
        "properties": {"error": {"type": "object", "properties": {"message": {"type": "string"}}}},
        "required": ["error"],
    }
    paths = {
        each.path: {each.method.lower(): _operation(each, each.body and references[each.body, "validation"])}
        for each in ENDPOINTS
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "llamaspec", "version": version("llamaspec")},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": error},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint, schema: Any) -> dict[str, Any]:
    kinds = [endpoint.media_type, *(["text/event-stream"] if endpoint.streams else [])]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "summary": (endpoint.handler.__doc__ or "").strip().rstrip("."),
        "responses": {
            "200": {"description": "The answer.", "content": {kind: {} for kind in kinds}},
            "default": {"description": "What is wrong.", "content": error},
        },
    }
    if "{name}" in endpoint.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


# The process.


def open_socket(settings: ServeSettings) -> socket.socket:
    """The socket to listen on; bound before models are loaded, so that a port in use is known at once.

    Raises
    ------
    LlamaspecError
        It cannot be opened.
    """
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
        except BaseException:
            opened.close()
            raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise LlamaspecError(
            f"cannot use {settings.host} port {settings.port}: {reason}; give another --host or --port"
        ) from error
    return opened


def url_of(opened: socket.socket) -> str:
    """The URL of a server on a socket."""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def serving(
    pair: Pair, policy: LengthPolicy, template: ChatTemplate | None, settings: ServeSettings, write: Write
) -> Iterator[tuple[ASGIApp, Service]]:
    """The application over an open pair; its decode thread ends afterwards."""
    builder, counted = RequestBuilder(pair, template, settings.parallel), Metrics()
    queue = RequestQueue(pair, policy, counted, settings.parallel, settings.max_queue)
    service = Service(pair, settings, builder, queue, counted)
    try:
        yield make_app(service, write), service
    finally:
        queue.close()


class Server(uvicorn.Server):
    """Runs the application on a socket until SIGTERM or Ctrl-C; calls `ready` when it accepts requests."""

    def __init__(self, app: ASGIApp, service: Service, ready: Callable[[], None]) -> None:
        self._service, self._ready = service, ready
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                h11_max_incomplete_event_size=64 << 10,
                timeout_graceful_shutdown=int(service.settings.grace_seconds) + FINAL_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept requests, and say so."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse requests, and end those that run after the grace time."""
        queue = self._service.queue
        queue.stop()
        grace = threading.Timer(self._service.settings.grace_seconds, queue.end)
        grace.daemon = True
        grace.start()
        try:
            await super().shutdown(sockets)
        finally:
            grace.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but does not raise the signals again: the models are still to be closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops the server; a second one ends the running answers at once."""
        if self.should_exit:
            threading.Thread(target=self._service.queue.end, daemon=True).start()
        self.should_exit = True
