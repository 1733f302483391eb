"""Who may ask what: the host that was meant, the page that asks, the key, and how much is read.

Plain ASGI around the application. A server for this machine only answers requests that were meant for it by
name: else a web page whose name leads here (DNS rebinding) could use it. tests/serve/test_security.py.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamaspec.serve.faults import RequestError, fault_response
from llamaspec.serve.settings import Limits, ServeSettings

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
PAGE_FILES = {"/": "index.html"} | {
    f"/{name}": name for name in ("page.css", "page.js", "markdown.js", "timeline.js")
}
OPEN_PATHS = frozenset({*PAGE_FILES, "/health", "/v1/health"})  # nothing of a person's is in them


class Guard:
    """Lets requests through that may pass.

    Parameters
    ----------
    app : ASGI application
    settings : ServeSettings
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI wants it."""
        try:
            self._check(scope)
        except RequestError as fault:
            await fault_response(scope["path"], fault)(scope, receive, send)
            return
        await self._app(scope, bounded(receive, self._settings.limits), send)

    def _check(self, scope: Scope) -> None:
        headers, settings = Headers(scope=scope), self._settings
        host = headers.get("host", "")
        if settings.is_local and _name(host) not in LOCAL_NAMES | {settings.host}:
            raise RequestError(403, "this server answers for this machine only; use http://127.0.0.1")
        origin = headers.get("origin")
        if origin is not None and not self._is_known(origin, host):
            raise RequestError(403, "pages of other origins may not ask; see --cors-origin")
        if settings.keys and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            given = _key(headers)
            if given is None or not settings.knows_key(given):
                raise RequestError(401, "a valid API key is needed", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > settings.limits.body_bytes:
            raise _too_large(settings.limits)

    def _is_known(self, origin: str, host: str) -> bool:
        allowed = self._settings.cors_origins
        return origin.partition("://")[2] == host or origin in allowed or "*" in allowed


def bounded(receive: Receive, limits: Limits) -> Receive:
    """The same body, unless it is too large or too slow.

    Raises
    ------
    RequestError
        When it is read: 413 or 408.
    """
    deadline = monotonic() + limits.body_seconds
    n_read, is_complete = 0, False

    async def receive_bounded() -> Message:
        nonlocal n_read, is_complete
        if is_complete:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - monotonic()))
        except asyncio.TimeoutError:
            seconds = limits.body_seconds
            raise RequestError(408, f"the body was not there after {seconds:g} seconds") from None
        n_read += len(message.get("body", b""))
        is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        if n_read > limits.body_bytes:
            raise _too_large(limits)
        return message

    return receive_bounded


def _too_large(limits: Limits) -> RequestError:
    return RequestError(413, f"the body is larger than {limits.body_bytes} bytes")


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if ":" in host else host


def _key(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")
