"""The application: the endpoints of all APIs, access control, the log, and the server that runs them.

A server without keys answers only requests that name it in `Host`. Otherwise a web page whose domain resolves
to its address (DNS rebinding) could use it. With keys, any name and any origin are fine.
tests/serve/test_security.py.

On SIGTERM or Ctrl-C the server refuses new requests. Running requests have a grace period to finish; then
they end with an error that says so. tests/serve/test_stopping.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamaspec.errors import LlamaspecError
from llamaspec.serve import (
    ServeSettings,
    anthropic,
    embeddings,
    llama_server,
    ollama,
    ollama_models,
    openai_chat,
    openai_compaction,
    openai_responses,
    status,
)
from llamaspec.serve.bodies import ModelBody, parse_body
from llamaspec.serve.connections import BACKLOG, Connection
from llamaspec.serve.http_errors import RequestError, error_response
from llamaspec.serve.loading import with_loaded
from llamaspec.serve.log import MODEL, Write, response_line
from llamaspec.serve.models import Models
from llamaspec.serve.paths import with_plain_paths
from llamaspec.serve.served_model import AnyService, ModelSource
from llamaspec.serve.service import CLIENT_LEFT, FINAL_SECONDS, OWNER, Endpoint, in_time

POLL_SECONDS = 0.05  # between two looks whether the last request has ended
Handler = Callable[[Request], Awaitable[Response]]

ENDPOINTS = (
    *openai_chat.ENDPOINTS,
    *openai_responses.ENDPOINTS,
    *openai_compaction.ENDPOINTS,
    *anthropic.ENDPOINTS,
    *ollama.ENDPOINTS,
    *ollama_models.ENDPOINTS,
    *llama_server.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *status.ENDPOINTS,
)
_PAGE = Path(__file__).with_name("page")
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_PAGE_FILES = {"/": _PAGE / "index.html"} | {
    f"/{path.relative_to(_PAGE).as_posix()}": path
    for path in _PAGE.rglob("*")
    if path.suffix in (".css", ".js")
}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",  # no string becomes HTML
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_app(models: Models) -> ASGIApp:
    """Return the ASGI application."""
    settings = models.settings
    routes = [Route(url, _file_handler(path)) for url, path in _PAGE_FILES.items()]
    for endpoint in ENDPOINTS:
        method = endpoint.method or ("GET" if endpoint.body is None else "POST")
        routes.append(Route(endpoint.path, _EndpointApp(models, endpoint), methods=[method]))
    middleware = [
        Middleware(with_plain_paths, known=KNOWN_PATHS),
        Middleware(_logging, models=models),
        Middleware(_access_control, settings=settings),
    ]
    if settings.cors_origins:
        origins, methods = settings.cors_origins, ("GET", "POST")
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=("*",))
        middleware.insert(2, cors)
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _routing_error})


def _file_handler(path: Path) -> Handler:
    """Return the handler of a file of the web page."""
    content, media_type = path.read_bytes(), _MEDIA_TYPES[path.suffix]

    async def answer(_: Request) -> Response:
        return Response(content, headers=_PAGE_HEADERS, media_type=media_type)

    return answer


class _EndpointApp:
    """Checks the body of a request, calls the endpoint, and turns exceptions into responses.

    The model that the request names stays loaded until the response has been sent.
    """

    def __init__(self, models: Models, endpoint: Endpoint) -> None:
        self._models, self._endpoint = models, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive, send)
        with contextlib.ExitStack() as stack:
            try:
                response = await self._answer(http, stack)
            except ClientDisconnect:
                response = Response(status_code=CLIENT_LEFT)
            except Exception as error:  # noqa: BLE001  # the client gets the error; the server continues
                self._models.log.fault(error)
                response = error_response(scope["path"], error)
            await response(scope, receive, send)

    async def _answer(self, http: Request, stack: contextlib.ExitStack) -> Response:
        models, endpoint = self._models, self._endpoint
        if endpoint.body is None:
            return await endpoint.handler(models, http)
        body = await parse_body(http, endpoint.body, models.settings)
        if endpoint.is_general:
            return await endpoint.handler(models, http, body)
        assert isinstance(body, ModelBody)
        model = await models.find(body.model, endpoint.kinds)
        http.scope[MODEL] = model.name
        if (unloaded := body.unloaded(model.name)) is not None:
            await models.loader.unload(model)
            return JSONResponse(unloaded)
        models.check_kind(model, endpoint.kinds)
        use = stack.enter_context(models.loader.using(model, body.idle_seconds))

        async def handler(service: AnyService) -> Response:
            return await in_time(endpoint.handler(service, http, body), http, models.settings.request_timeout)

        return await with_loaded(models, use, http, body, handler, endpoint.failure)


async def _routing_error(http: Request, error: Exception) -> Response:
    """Return the response to a request with a wrong path or method, in the form of the API."""
    assert isinstance(error, HTTPException)
    path, headers = http.scope["path"], dict(error.headers or {})
    if "Allow" in headers:
        message = f"wrong method; this path takes {headers['Allow']}"
    else:
        message = "there is nothing at this path; see docs/server.md"
    response = error_response(path, RequestError(error.status_code, message))
    response.headers.update(headers)
    return response


# Access.

PUBLIC_PATHS = frozenset({*_PAGE_FILES, "/health", "/v1/health"})  # for which no key is needed


def _access_control(app: ASGIApp, settings: ServeSettings) -> ASGIApp:
    """Return middleware that refuses requests for other hosts, from other origins, or without a key."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check_access(scope, settings)
        except RequestError as error:
            await error_response(scope["path"], error)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


def _check_access(scope: Scope, settings: ServeSettings) -> None:
    """Raise a RequestError if a request is not allowed; note its API key in the scope."""
    headers = Headers(scope=scope)
    if not settings.keys:
        _check_host_and_origin(headers.get("host", ""), headers.get("origin"), settings)
    elif scope["path"] not in PUBLIC_PATHS and scope["method"] != "OPTIONS":
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        given = (bearer, headers.get("x-api-key", ""))
        key = next(filter(settings.knows_key, given), None)
        if key is None:
            message = "a valid API key is needed; send Authorization: Bearer KEY"
            raise RequestError(401, message, code="invalid_api_key")
        scope[OWNER] = key


def _check_host_and_origin(host: str, origin: str | None, settings: ServeSettings) -> None:
    """Raise a RequestError if a page of a stranger may have sent the request.

    With a key, this need not be checked: such a page does not know the key. A proxy may pass on the name that
    its clients use in `Host`, or replace it, so that only the origin of the server's own page has it.
    """
    if not settings.knows_host(_host_name(host)):
        remedy = "use its address, --allowed-host NAME, or an API key"
        raise RequestError(403, f"the Host header does not name this server; {remedy}")
    if origin is None or "*" in settings.cors_origins or origin in settings.cors_origins:
        return
    name = origin.partition("://")[2].lower()
    if name != host.lower() and not settings.is_allowed_host(name):
        raise RequestError(403, "web pages of other origins are not allowed; see --cors-origin")


# An address in brackets, or a name; a port may follow.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::[0-9]*)?")


def _host_name(host: str) -> str:
    """Return the name in a Host header, without the port; empty if the header is malformed."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1]


# The log.

KNOWN_PATHS = frozenset({*_PAGE_FILES, *(endpoint.path for endpoint in ENDPOINTS)})


def _logging(app: ASGIApp, models: Models) -> ASGIApp:
    """Return middleware that logs one line for each response, without keys and text from clients."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        begin, status = monotonic(), 0

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_noting_status)
        finally:
            models.log.line(*response_line(scope, status, monotonic() - begin, KNOWN_PATHS))

    return answer


# The process.


def open_socket(settings: ServeSettings) -> socket.socket:
    """Open the socket to listen on. Call it before loading models: a port in use is then reported at once.

    Raises
    ------
    LlamaspecError
        The address cannot be used.
    """
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            # A second server on this port fails now, not after loading. Early clients wait.
            opened.listen()
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
    """Return the URL of a server on a socket."""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def serving(source: ModelSource, settings: ServeSettings, write: Write) -> Iterator[Models]:
    """Load the only model of a server, which answers requests with any name. It is freed with the block."""
    with contextlib.closing(Models(lambda: [source], settings, write, any_name=True)) as models:
        models.open_now()
        yield models


class Server(uvicorn.Server):
    """Runs the application on a socket until SIGTERM or Ctrl-C. Calls `ready` once it accepts requests."""

    def __init__(self, app: ASGIApp, models: Models, ready: Callable[[], None]) -> None:
        self._models, self._ready = models, ready
        self._next_fault_at = 0.0  # in the event loop's time
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                lifespan="off",
                http=cast("type[Connection]", partial(Connection, models.settings)),
                ws="none",
                backlog=BACKLOG,
                h11_max_incomplete_event_size=64 << 10,
                timeout_graceful_shutdown=FINAL_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests, and call `ready`."""
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._log_loop_fault)
        await super().startup(sockets)
        self._models.loader.start_clocks()
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests while running ones have their grace period; then close all connections."""
        models, queue = self._models, self._models.queue
        models.stop()
        seconds, running = models.settings.grace_seconds, queue.sequences()[0]
        if running:
            models.log.line(
                f"stopping: {len(running)} running, up to {seconds:g} s to finish; press Ctrl-C to end now"
            )
        grace = asyncio.get_running_loop().call_later(seconds, models.end)
        try:
            while queue.sequences()[0]:
                await asyncio.sleep(POLL_SECONDS)
            await super().shutdown(sockets)
        finally:
            grace.cancel()

    def _log_loop_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error outside all requests, such as a failed accept; at most one in a second."""
        if loop.time() >= self._next_fault_at:
            self._next_fault_at = loop.time() + 1.0
            error = context.get("exception") or RuntimeError(context["message"])
            if isinstance(error, OSError):
                self._models.log.line(f"error of a connection: {error.strerror or type(error).__name__}")
            else:
                self._models.log.fault(error)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn, but without raising the signals again: the models must still be closed.

        In a longer block, signals after the server's end do nothing.
        """
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
        """Stop the server at the first signal; end running requests at the second."""
        if self.should_exit and self.started and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._models.end)
        self.should_exit = True
