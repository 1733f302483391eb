"""Connections that send nothing, or half of a request, or take nothing of their answer."""

from __future__ import annotations

import json
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn.protocols.http.auto

from llamaspec import Pair
from llamaspec.serve.connections import raise_file_limit
from patience import PATIENCE, until
from serving import Gate, Served, process, served

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def request(path: str, body: Any) -> bytes:
    content = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return (head + content).encode()


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), PATIENCE) as connection:
        yield connection


def is_closed(connection: socket.socket) -> bool:
    """Wait for the end of a connection. The wait ends with an error if it stays open."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def all_of(connection: socket.socket) -> bytes:
    """Return one whole answer."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(1 << 16)
    head, _, body = answer.partition(b"\r\n\r\n")
    length = int(next(line for line in head.lower().split(b"\r\n") if b"content-length" in line)[15:])
    while len(body) < length:
        body += connection.recv(1 << 16)
    return body


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HEALTH + b"GET /health HTTP/1.1\r\nHost: "])
def test_a_header_must_arrive_in_time(demo: Pair, sent: bytes) -> None:
    """Once, such connections were never closed, and a few hundred kept all others out."""
    with served(demo, header_seconds=0.1) as server, connected(server.url) as connection:
        connection.settimeout(30)
        connection.sendall(sent)
        assert is_closed(connection)


def test_the_rest_of_a_body_does_not_keep_a_connection_open(demo: Pair) -> None:
    """Each byte after the answer once cancelled the time limit of kept connections."""
    with served(demo, header_seconds=0.3) as server, connected(server.url) as connection:
        connection.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nContent-Length: 1000\r\n\r\n"))
        all_of(connection)
        connection.sendall(b"x")
        connection.settimeout(30)
        assert is_closed(connection)


def test_a_request_that_runs_is_no_idle_connection(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(demo, monkeypatch)
    with (
        served(demo, header_seconds=0.05, max_connections=2) as server,
        connected(server.url) as asking,
        ExitStack() as stack,
    ):
        asking.sendall(request("/v1/completions", {"prompt": "def f(", "max_tokens": 4, "seed": 1}))
        until(lambda: server.n_running() == 1)
        idle = [stack.enter_context(connected(server.url)) for _ in range(4)]
        assert all(is_closed(each) for each in idle)
        gate.open()
        assert json.loads(all_of(asking))["choices"][0]["finish_reason"] == "length"


def test_idle_connections_keep_nobody_out(demo: Pair) -> None:
    """The one that has waited longest is closed."""
    with served(demo, header_seconds=PATIENCE, max_connections=4) as server, ExitStack() as stack:
        idle = [stack.enter_context(connected(server.url)) for _ in range(12)]
        assert all(is_closed(each) for each in idle[:8])
        assert server.client.get("/health").status_code == 200


def test_more_connections_than_files(demo_files: tuple[Path, Path]) -> None:
    """Once, nobody got an answer any more, and the log got megabytes of tracebacks a second."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256));"
    entry = [sys.executable, "-c", f"{few} from llamaspec.__main__ import main; main()"]
    with process(entry=entry) as server, ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(server.url))
        for _ in range(3):
            assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        assert len(server.lines) < 20


def test_the_limit_of_files_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert raise_file_limit() == min(4096, before[1] if before[1] >= 0 else 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def request_for_much(server: Served) -> tuple[bytes, int]:
    """Return a request for more than the buffers of the system hold, and the size of its answer."""
    vocabulary = server.service.builder.vocabulary
    token = max(range(vocabulary.size), key=lambda i: len(vocabulary.piece(i)))
    asks = request("/detokenize", {"tokens": [token] * 1_000_000})
    return asks, 1_000_000 * len(vocabulary.piece(token))


def test_a_client_that_takes_nothing_is_disconnected(demo: Pair) -> None:
    """Once, its connection stayed open for ever, with the answer in memory."""
    with served(demo, write_seconds=0.2) as server:
        asks, _ = request_for_much(server)
        with connected(server.url) as connection:
            connection.sendall(asks)
            until(lambda: any("/detokenize" in line for line in server.log))
            until(lambda: server.n_connections() == 0)


def test_a_client_that_takes_little_gets_all(demo: Pair) -> None:
    with served(demo, write_seconds=2.0, header_seconds=1.0) as server:
        asks, n = request_for_much(server)
        with connected(server.url) as connection:
            connection.sendall(asks)
            begin, n_taken = monotonic(), 0
            while part := connection.recv(1 << 20):
                n_taken += len(part)
                if monotonic() - begin < 4.0:
                    sleep(0.2)
    assert n_taken > n


def test_a_request_to_change_the_protocol_keeps_its_body(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java's client asks for HTTP/2. With httptools, which uvicorn prefers, such a body was lost."""
    monkeypatch.setattr(uvicorn.protocols.http.auto, "AutoHTTPProtocol", None)  # the choice of uvicorn
    asks = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQ"}
    with served(demo) as server:
        assert server.post("/tokenize", {"content": "a"}, headers=asks).json()["tokens"]
