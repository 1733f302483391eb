"""Stands between clients and the server: passes requests on and keeps what was asked and answered."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

_NOT_PASSED_ON = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}
_CALL_MARKS = (b"<tool_call>", b"</tool_call>")


@dataclass(frozen=True)
class Exchange:
    """A request, and as much of its answer as the client took."""

    path: str
    status: int
    request: bytes
    answer: bytearray
    is_stream: bool

    @property
    def leaks(self) -> bool:
        """Whether marks of calls are text of the answer."""
        return any(mark in self.answer for mark in _CALL_MARKS)


class Relay(ThreadingHTTPServer):
    """Listens on a free port of this machine."""

    daemon_threads = True

    def __init__(self, server_url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server_url, self.exchanges = server_url, list[Exchange]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Relay

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        passed = {name: text for name, text in self.headers.items() if name.lower() not in _NOT_PASSED_ON}
        url = self.server.server_url + self.path
        with httpx.stream(
            self.command, url, content=body, headers=passed, timeout=None, trust_env=False
        ) as response:
            kind, answer = response.headers.get("content-type", ""), bytearray()
            is_stream = kind.startswith("text/event-stream")
            exchange = Exchange(self.path, response.status_code, body, answer, is_stream)
            self.server.exchanges.append(exchange)
            self.send_response(response.status_code)
            self.send_header("content-type", kind)
            self.end_headers()
            with suppress(OSError):  # the client left
                for part in response.iter_bytes():
                    answer += part
                    self.wfile.write(part)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass
