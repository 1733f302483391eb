"""Stands between clients and the server: passes requests on and keeps what was asked and answered."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import httpx

_NOT_PASSED_ON = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}
_CALL_MARKS = (b"<tool_call>", b"</tool_call>")


@dataclass
class Exchange:
    """A request, and as much of its answer as there is yet."""

    path: str
    request: bytes
    status: int | None = None  # None: the answer has not begun
    is_stream: bool = False
    is_whole: bool = False
    answer: bytearray = field(default_factory=bytearray)

    @property
    def leaks(self) -> bool:
        """Whether marks of calls are text of the answer."""
        return any(mark in self.answer for mark in _CALL_MARKS)

    @property
    def has_call(self) -> bool:
        """Whether the answer calls a tool."""
        return b'"tool_calls":[{' in self.answer or b'"type":"function_call"' in self.answer

    @property
    def is_cut(self) -> bool:
        """Whether the limit of tokens ended the answer."""
        return b'"finish_reason":"length"' in self.answer or b'"reason":"max_output_tokens"' in self.answer

    @property
    def brings_result(self) -> bool:
        """Whether the request has the result of a call."""
        return b'"role":"tool"' in self.request or b'"function_call_output"' in self.request

    @property
    def overflows(self) -> bool:
        """Whether the request was too long for the context."""
        return b'"code":"context_length_exceeded"' in self.answer


class Change(NamedTuple):
    """How a request is changed: which tool the answer must call, and the limit of its tokens."""

    tool: str | None = None  # requests without tools are passed on as they are until one has tools
    max_tokens: int | None = None


class Relay(ThreadingHTTPServer):
    """Listens on a free port of this machine.

    `changes`: of the requests to come, each applies to one.
    """

    daemon_threads = True

    def __init__(self, server_url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server_url, self.exchanges = server_url, list[Exchange]()
        self.changes: list[Change] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def passed_on(self, path: str, body: bytes) -> bytes:
        """A request as the server gets it."""
        if not self.changes or not body:
            return body
        asked, (tool, max_tokens) = json.loads(body), self.changes[0]
        if tool is not None and not asked.get("tools"):
            return body
        del self.changes[0]
        is_chat = path.endswith("/chat/completions")
        if tool is not None:
            named = {"function": {"name": tool}} if is_chat else {"name": tool}
            asked |= {"tool_choice": {"type": "function", **named}, "parallel_tool_calls": False}
        if max_tokens is not None:
            asked["max_tokens" if is_chat else "max_output_tokens"] = max_tokens
        return json.dumps(asked).encode()


class _Handler(BaseHTTPRequestHandler):
    server: Relay

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        passed_on = self.server.passed_on(self.path, body)
        passed = {name: text for name, text in self.headers.items() if name.lower() not in _NOT_PASSED_ON}
        url, exchange = self.server.server_url + self.path, Exchange(self.path, body)
        self.server.exchanges.append(exchange)
        with httpx.stream(
            self.command, url, content=passed_on, headers=passed, timeout=None, trust_env=False
        ) as response:
            kind = response.headers.get("content-type", "")
            exchange.status, exchange.is_stream = response.status_code, kind.startswith("text/event-stream")
            self.send_response(response.status_code)
            self.send_header("content-type", kind)
            self.end_headers()
            with suppress(OSError):  # the client left
                for part in response.iter_bytes():
                    exchange.answer += part
                    self.wfile.write(part)
                exchange.is_whole = True

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass
