"""One line for each request: text for people, JSON for programs. Never keys, never texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timezone
from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamaspec.errors import printable
from llamaspec.serve.settings import LogFormat

Write = Callable[[str], None]
LONGEST_PATH = 200  # characters


class RequestLog:
    """Writes a line when an answer has been sent.

    Parameters
    ----------
    app : ASGI application
    write : callable
        Takes a line.
    log_format : str
        text or json.
    """

    def __init__(self, app: ASGIApp, write: Write, log_format: LogFormat) -> None:
        self._app, self._write, self._log_format = app, write, log_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI wants it."""
        begin, status = monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._write(self._line(scope, status, monotonic() - begin))

    def _line(self, scope: Scope, status: int, seconds: float) -> str:
        client = (scope.get("client") or ("-",))[0]
        path = printable(scope["path"])[:LONGEST_PATH]
        if self._log_format == "text":
            return f"{client} {scope['method']} {path} {status} {seconds:.3f} s"
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": time, "client": client, "method": scope["method"], "path": path, "status": status}
        return json.dumps({**line, "seconds": round(seconds, 6)})
