"""The application: routes, the server's own status, and the process that serves it.

On SIGTERM or Ctrl-C no more requests are taken, running answers have a grace time, and then end with an error
that says so. tests/serve/test_status.py, tests/serve/test_stopping.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from importlib.resources import files
from types import FrameType
from typing import Any, NamedTuple

import uvicorn
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
from llamaspec.serve import ServeSettings, anthropic, llama_server, ollama, openai_chat, openai_responses
from llamaspec.serve.bodies import Fields
from llamaspec.serve.errors import RequestError, error_response, not_supported
from llamaspec.serve.metrics import Metrics
from llamaspec.serve.prefixes import PrefixWatch
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


async def _health(http: Request) -> Response:
    if service_of(http).queue.is_stopping:
        return JSONResponse({"status": "stopping"}, 503)
    return JSONResponse({"status": "ok"})


async def _models(http: Request) -> Response:
    # Codex reads `models`, and asks again where it is missing. An entry would replace its own instructions.
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
    # The names that clients of llama-server (`meta`), vLLM and OpenRouter look for.
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
    lengths = service.metrics.draft_length_by_rows()
    about["speculative"] = {"sources": sources, "rule": DEFAULT_RULE, "draft_length_by_rows": lengths}
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


# Routes.


class Endpoint(NamedTuple):
    """A path, who answers, and the body that a POST has; without one it is a GET."""

    path: str
    handler: Handler
    body: type[Fields] | None = None


ENDPOINTS = (
    Endpoint("/v1/chat/completions", openai_chat.chat_completions, openai_chat.ChatBody),
    Endpoint("/v1/completions", openai_chat.completions, openai_chat.CompletionBody),
    Endpoint("/completion", llama_server.completion, llama_server.NativeCompletionBody),
    Endpoint("/infill", llama_server.infill, llama_server.InfillBody),
    Endpoint("/v1/responses", openai_responses.responses, openai_responses.ResponsesBody),
    Endpoint("/v1/messages", anthropic.messages, anthropic.MessagesBody),
    Endpoint("/v1/messages/count_tokens", anthropic.count_tokens, anthropic.CountTokensBody),
    Endpoint("/api/chat", ollama.chat, ollama.ChatBody),
    Endpoint("/api/generate", ollama.generate, ollama.GenerateBody),
    Endpoint("/api/show", ollama.show, ollama.ShowBody),
    Endpoint("/api/tags", ollama.tags),
    Endpoint("/api/ps", ollama.ps),
    Endpoint("/api/version", ollama.version),
    Endpoint("/v1/models", _models),
    Endpoint("/v1/models/{name:path}", _model),
    Endpoint("/tokenize", _tokenize, TokenizeBody),
    Endpoint("/detokenize", _detokenize, DetokenizeBody),
    Endpoint("/health", _health),
    Endpoint("/v1/health", _health),
    Endpoint("/metrics", _metrics),
    Endpoint("/props", _props),
)
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",  # no string becomes HTML
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def make_app(service: Service) -> ASGIApp:
    """The ASGI application."""
    settings = service.settings
    routes = [Route(path, _page_file(name)) for path, name in PAGE_FILES.items()]
    for path, handler, body in ENDPOINTS:
        routes.append(Route(path, _answering(handler), methods=["GET" if body is None else "POST"]))
    middleware = [
        Middleware(RequestLog, write=service.write, log_format=settings.log_format),
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
    known = {404: "there is nothing at this path; see docs/server.md", 405: "this path wants another method"}
    message = known.get(error.status_code, "this cannot be answered")
    response = error_response(http.url.path, RequestError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


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
    """The application over an open pair; what runs ends afterwards."""
    builder, counted = RequestBuilder(pair, template, settings.parallel), Metrics()
    queue = RequestQueue(pair, policy, counted, settings.parallel, settings.max_queue)
    prefixes = PrefixWatch(pair.target.vocabulary)
    service = Service(pair, settings, builder, queue, counted, prefixes, write)
    try:
        yield make_app(service), service
    finally:
        queue.end()


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
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse requests, and end those that run after the grace time."""
        queue = self._service.queue
        queue.stop()
        grace = asyncio.get_running_loop().call_later(self._service.settings.grace_seconds, queue.end)
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
            self._loop.call_soon_threadsafe(self._service.queue.end)
        self.should_exit = True
