"""ASGI middleware: Host and Origin checks, API keys, and the log line of each request.

A server on a loopback address answers only requests that name this machine in `Host`. Otherwise a web page
whose name resolves to 127.0.0.1 (DNS rebinding) could use it. tests/serve/test_security.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from time import monotonic
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamaspec.errors import printable
from llamaspec.serve import LogFormat, ServeSettings
from llamaspec.serve.errors import RequestError, error_response

Write = Callable[[str], None]
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
_PAGE_MODULES = ("page", "client", "dom", "markdown", "speed", "store", "timeline", "view")
PAGE_FILES = {"/": "index.html"} | {
    f"/{name}": name
    for name in ("page.css", "vendor/markdown-it.umd.min.js", *(f"{name}.js" for name in _PAGE_MODULES))
}
PUBLIC_PATHS = frozenset({*PAGE_FILES, "/health", "/v1/health"})  # need no key
LONGEST_PATH = 200  # characters in the log
WORK = "llamaspec.work"  # in the scope of a request: a function that returns what was computed for it


class Guard:
    """Refuses requests from other hosts or origins, and without a key."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        try:
            self._check(scope)
        except RequestError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers, settings = Headers(scope=scope), self._settings
        host = headers.get("host", "")
        if settings.is_local and _host_name(host) not in LOCAL_NAMES | {settings.host}:
            raise RequestError(403, "this server only answers this machine; use http://127.0.0.1")
        origin, allowed = headers.get("origin", f"http://{host}"), settings.cors_origins
        if origin.partition("://")[2] != host and origin not in allowed and "*" not in allowed:
            raise RequestError(403, "pages from other origins are not allowed; see --cors-origin")
        if settings.keys and scope["path"] not in PUBLIC_PATHS and scope["method"] != "OPTIONS":
            key = _key(headers)
            if key is None or not settings.knows_key(key):
                raise RequestError(401, "a valid API key is needed", code="invalid_api_key")


def _host_name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if ":" in host else host


def _key(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


class RequestLog:
    """Writes one line for each response: no keys, no query, no text from clients."""

    def __init__(self, app: ASGIApp, write: Write, log_format: LogFormat) -> None:
        self._app, self._write, self._log_format = app, write, log_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        begin, status = monotonic(), 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._write(self._line(scope, status, monotonic() - begin))

    def _line(self, scope: Scope, status: int, seconds: float) -> str:
        client = (scope.get("client") or ("-",))[0]
        path = printable(scope["path"])[:LONGEST_PATH]
        text = f"{client} {scope['method']} {path} {status} {seconds:.3f} s"
        fields = {"client": client, "method": scope["method"], "path": path, "status": status}
        fields["seconds"] = round(seconds, 6)
        if (work := scope.get(WORK)) is not None:
            fields |= (done := work())
            text += f": {_in_words(done)}"
        return log_line(text, self._log_format, fields)


def _in_words(work: Mapping[str, Any]) -> str:
    """The work of a request, for people."""
    parts = [f"{work['prompt_tokens']} prompt tokens ({work['cached_tokens']} cached)"]
    parts.append(f"{work['generated_tokens']} generated")
    if (speed := work["tokens_per_second"]) is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if (speedup := work["speedup_estimate"]) is not None:
        parts.append(f"{speedup:.2f}× with drafts (estimate)")
    return ", ".join([*parts, *(["cancelled"] if work["cancelled"] else [])])


def log_line(text: str, log_format: LogFormat, fields: Mapping[str, Any] | None = None) -> str:
    """Return a line of the log: the text, or JSON with the time and `fields` (default: the text)."""
    if log_format == "text":
        return text
    time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"time": time, **({"message": text} if fields is None else fields)})
