"""Send random requests of many clients over all APIs while one client misbehaves, in one way after the other.

\b
    python scripts/serve_misbehaving.py                   # 10,000 requests of 50 clients
    python scripts/serve_misbehaving.py --only silent --requests 1000

The server has the embedded pair. First the clients are alone; then one client misbehaves beside them. One
JSON object goes to stdout: for each way the statuses of the others, a histogram of their seconds, and how
many were late. A request is late if it took more than twice the time of the slowest one of its kind alone,
and a chunk of a prompt. The exit code is 1 if a request failed. With --in-time it is also 1 if one was late;
then nothing else may run on the machine.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import click

from llamaspec.values import WAIT_SECONDS
from serve_soak import CHAT, MESSAGES, RESPONSES, TEXT, Client, Tally, rows_left, server

HONEST = (
    "canary", "chat", "text", "shaped", "calling", "thinking", "anthropic", "response", "ollama", "native",
    "forging",
)  # fmt: skip
FINE = {"200", "429"}  # of an honest request: the queue may be full
EDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # seconds, of the histogram
Address = tuple[str, int]
Outcome = tuple[Tally, list[tuple[str, float]]]  # with the kind and the seconds of each request


def http(path: str, body: str | bytes | Mapping[str, Any], *, more: int = 0) -> bytes:
    """Return a request; it announces `more` bytes than it has."""
    content = body.encode() if isinstance(body, str) else body
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content) + more}\r\n\r\n"
    return head.encode() + content


def many(item: str, n_bytes: int = 7_000_000) -> str:
    """Return a JSON list of `n_bytes`."""
    return "[" + ",".join([item] * (n_bytes // (len(item) + 1))) + "]"


STREAM = http(TEXT, {"prompt": "def f(", "max_tokens": 400, "stream": True, "ignore_eos": True})
LARGE = (
    http(CHAT, '{"messages": [], "logit_bias": ' + many("[15,1]") + "}"),
    http(CHAT, '{"messages": [], "chat_template_kwargs": {"a": [' + many("1") + "]}}"),
    http(TEXT, '{"prompt": ' + many('"a"') + "}"),
    http(TEXT, '{"prompt": ' + many("[1]") + "}"),
    http(RESPONSES, '{"input": ' + many("{}") + "}"),
    http(MESSAGES, '{"max_tokens": 1, "messages": ' + many("{}") + "}"),
    http("/tokenize", {"content": "a b " * 1_700_000, "with_pieces": True}),
    http("/detokenize", '{"tokens": ' + many("9") + "}"),
)
ODD = (
    http(CHAT, "[" * 100_000),
    http(CHAT, '{"messages": [{"role": "user", "content": "\\ud800\\u0000"}], "max_tokens": 1e999}'),
    http(CHAT, {"messages": [{"role": "user", "content": "Z" * 27_000}]}),
    http(TEXT, {"prompt": "a", "seed": -(1 << 63), "logit_bias": {"9" * 200: -100}, "max_tokens": 2}),
    http(TEXT, {"prompt": "a", "json_schema": {"pattern": "(a|b|ab)*" * 30 + "c{1,5000}"}, "max_tokens": 2}),
    http("/api/chat", {"messages": [{"role": "tool", "content": "a"}], "keep_alive": 0}),
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    b"GET /" + b"a" * 200_000,
)


class Offender:
    """One client that misbehaves until `is_over` is set."""

    def __init__(self, address: Address, seed: int = 0) -> None:
        self.is_over = threading.Event()
        self._address, self._random = address, random.Random(seed)

    def silent(self) -> None:
        """Open connections, and send nothing."""
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(self._connected())
            self.is_over.wait(5)

    def halting(self) -> None:
        """Send a part of a header or of a body, and no more."""
        with ExitStack() as stack:
            for _ in range(20):
                connection = stack.enter_context(self._connected())
                connection.sendall(STREAM[: self._random.randint(1, len(STREAM) - 1)])
            self.is_over.wait(5)

    def trickling(self) -> None:
        """Send a body byte by byte."""
        with self._connected() as connection:
            for i in range(len(STREAM)):
                connection.sendall(STREAM[i : i + 1])
                if self.is_over.wait(0.05):
                    return

    def unread(self) -> None:
        """Ask for long streams, and read nothing."""
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(self._connected()).sendall(STREAM)
            self.is_over.wait(5)

    def sipping(self) -> None:
        """Ask for a long stream, and read it byte by byte."""
        with self._connected() as connection:
            connection.sendall(STREAM)
            while connection.recv(1) and not self.is_over.wait(0.1):
                pass

    def vanishing(self) -> None:
        """Leave at a random moment of a request or of its answer."""
        with self._connected() as connection:
            connection.sendall(STREAM)
            self.is_over.wait(self._random.random() / 5)

    def resetting(self) -> None:
        """Leave with a reset while the prompt is processed."""
        with self._connected() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.sendall(http(TEXT, {"prompt": "def f( x " * 60, "seed": 1}))
            self.is_over.wait(self._random.random() / 20)

    def large(self) -> None:
        """Send the largest bodies."""
        self._exchange(self._random.choice(LARGE))

    def odd(self) -> None:
        """Send what is no HTTP, no JSON, or hardly a request."""
        self._exchange(self._random.choice(ODD))

    def greedy(self) -> None:
        """Ask for as many answers as the server allows, all of full length."""
        self._exchange(http(TEXT, {"prompt": "def f(", "n": 4, "ignore_eos": True, "max_tokens": -1}))

    def pipelined(self) -> None:
        """Send many requests without waiting for an answer."""
        self._exchange(http(TEXT, {"prompt": "a", "max_tokens": 1}) * 50)

    def _connected(self) -> socket.socket:
        return socket.create_connection(self._address, 60)

    def _exchange(self, data: bytes) -> None:
        with self._connected() as connection:
            connection.settimeout(2)
            connection.sendall(data)
            while connection.recv(1 << 16) and not self.is_over.is_set():
                pass


WAYS: tuple[str, ...] = tuple(name for name in vars(Offender) if not name.startswith("_"))


def misbehave(offender: Offender, way: str) -> None:
    """Misbehave in one way until it is over; the server may close connections at any time."""
    while not offender.is_over.is_set():
        with suppress(OSError):
            getattr(offender, way)()


class HonestClient(Client):
    """A client whose requests are all right; it notes how long each took."""

    def __init__(self, url: str, seed: int, tally: Tally, kinds: Sequence[str] = HONEST) -> None:
        super().__init__(url, seed, tally)
        self._kinds = [getattr(self, kind) for kind in kinds]
        self.seconds: list[tuple[str, float]] = []

    def ask_one(self) -> None:
        """Send one request."""
        begin, kind = time.monotonic(), self._random.choice(self._kinds)
        self._count(kind)
        self.seconds.append((kind.__name__, time.monotonic() - begin))


def drive(url: str, n_clients: int, n_requests: int, seed: int) -> Outcome:
    """Send requests of honest clients."""
    tally = Tally()

    def work(i: int) -> list[tuple[str, float]]:
        client = HonestClient(url, seed + i, tally)
        for _ in range(n_requests // n_clients):
            client.ask_one()
        client.close()
        return client.seconds

    with ThreadPoolExecutor(n_clients) as clients:
        return tally, [each for seconds in clients.map(work, range(n_clients)) for each in seconds]


def histogram(seconds: Sequence[float]) -> dict[str, int]:
    """Return how many requests took less than each edge, and not less than the one before."""
    counts = Counter(next((f"<{edge:g}" for edge in EDGES if each < edge), "more") for each in seconds)
    return {name: counts[name] for name in (*(f"<{edge:g}" for edge in EDGES), "more") if counts[name]}


def beside(url: str, way: str | None, n_clients: int, n_requests: int, seed: int) -> Outcome:
    """Send requests of honest clients while one other misbehaves in some way, or while there is none."""
    address = urlsplit(url)
    offender = Offender((address.hostname or "", address.port or 80), seed)
    other = threading.Thread(target=misbehave, args=(offender, way))
    if way is not None:
        other.start()
    outcome = drive(url, n_clients, n_requests, seed)
    offender.is_over.set()
    if way is not None:
        other.join()
    return outcome


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--requests", type=click.IntRange(1), default=10_000, show_default=True, help="In all.")
@click.option("--clients", type=click.IntRange(1, 64), default=50, show_default=True)
@click.option("--only", type=click.Choice(WAYS), multiple=True, help="Misbehave only so.")
@click.option("--in-time", is_flag=True, help="Fail if a request was late.")
@click.option("--seed", type=int, default=1, show_default=True)
def main(requests: int, clients: int, only: Sequence[str], in_time: bool, seed: int) -> None:
    ways, slowest = (None, *(only or WAYS)), dict[str, float]()
    report: dict[str, Any] = {}
    with server() as (url, process):
        for way in ways:
            tally, seconds = beside(url, way, clients, -(-requests // len(ways)), seed)
            if way is None:
                for kind, each in seconds:
                    slowest[kind] = max(slowest.get(kind, 0.0), each)
            n_late = sum(each > 2 * slowest.get(kind, each) + WAIT_SECONDS for kind, each in seconds)
            left, statuses = rows_left(url), dict(tally.statuses)
            failed = bool(tally.wrong or statuses.keys() - FINE or left or (in_time and n_late))
            found = {
                "failed": failed,
                "statuses": statuses,
                "late": n_late,
                "wrong": tally.wrong,
                "left": left,
            }
            report[way or "alone"] = found | {"seconds": histogram([each for _, each in seconds])}
            click.echo(f"{way or 'alone'}: {json.dumps(report[way or 'alone'])}", err=True)
        is_alive = process.is_running()
    print(json.dumps(report))
    sys.exit(0 if is_alive and not any(found["failed"] for found in report.values()) else 1)


if __name__ == "__main__":
    main()
