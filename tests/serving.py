"""A real server with the embedded pair, in a thread of this process or in its own process."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from command import ENTRY, environment
from llamaspec import FixedLength, ModelOptions, Pair, Sampling, open_pair
from llamaspec.chat.messages import Message
from llamaspec.chat.template import ChatTemplate
from llamaspec.protocols import LengthPolicy
from llamaspec.serve import ServeSettings
from llamaspec.serve.app import Server, make_app, open_socket, serving, url_of
from llamaspec.serve.models import Models
from llamaspec.serve.served_model import open_source
from llamaspec.serve.service import Service
from patience import PATIENCE, until

TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"
CONTEXT = 512  # tokens of one request
PLAIN = {"temperature": 0.0}


class Gate:
    """Stops a pair after `n_free` more evaluations, so that no request can end too soon."""

    def __init__(self, pair: Pair, patch: pytest.MonkeyPatch, n_free: int = 0) -> None:
        self.n_evaluations, self._n_free = 0, n_free
        self._open = threading.Event()
        self._evaluate = pair.target.evaluate
        patch.setattr(pair.target, "evaluate", self._held)

    def open(self) -> None:
        """Let the pair evaluate."""
        self._open.set()

    def _held(self, *batch: Any) -> Any:
        if self.n_evaluations >= self._n_free:
            self._open.wait(PATIENCE)
        self.n_evaluations += 1
        return self._evaluate(*batch)


@dataclass
class Served:
    """A running server."""

    url: str
    models: Models
    log: list[str]
    client: httpx.Client
    stop: Callable[[], None] = field(repr=False)
    n_connections: Callable[[], int] = field(repr=False)
    in_loop: Callable[[Callable[[], object]], object] = field(repr=False)  # calls it in the event loop
    loop: asyncio.AbstractEventLoop = field(repr=False)

    @property
    def service(self) -> Service:
        """The loaded model of a server that has one."""
        (model,) = self.models.loaded
        assert isinstance(model.service, Service)
        return model.service

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """Post JSON."""
        return self.client.post(path, json=body, **more)

    def events(self, path: str, body: Mapping[str, Any]) -> list[tuple[str | None, Any]]:
        """Return the events of a stream with their names, without comments."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)

    @contextmanager
    def sent(self, path: str, body: Mapping[str, Any]) -> Iterator[None]:
        """Send a request; close the connection at the end of the block without reading."""
        address, content = urlsplit(self.url), json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection((address.hostname, address.port), PATIENCE) as connection:
            connection.sendall((head + content).encode())
            yield

    def lose_client(self, path: str, body: Mapping[str, Any], gate: Gate) -> None:
        """Close the connection of a running request, and wait for the end of its sequence."""
        with self.sent(path, body):
            until(lambda: self.n_running() == 1)
            (running,), _ = self.service.queue.sequences()
        until(lambda: running.submission.is_cancelled)
        gate.open()
        until(lambda: self.n_running() == 0)

    def n_running(self) -> int:
        """Return the number of running sequences."""
        return len(self.service.queue.sequences()[0])


def parse_events(text: str) -> list[tuple[str | None, Any]]:
    """Parse server-sent events; [DONE] stays a string."""
    events: list[tuple[str | None, Any]] = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            data = fields["data"]
            events.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return events


def counters(text: str) -> dict[str, float]:
    """Return Prometheus' metrics of a server with one model, by name and label, without that of the model."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    found = {}
    for name, _, value in lines:
        plain = re.sub(',?model_name="[^"]*"', "", name).replace("{,", "{").replace("{}", "")
        found[plain.removeprefix("llamaspec:")] = float(value)
    return found


def open_demo(files: tuple[Path, Path | str], n_cells: int = 4 * CONTEXT) -> Pair:
    """Open the embedded pair with logits that are the same at every batch width."""
    options = ModelOptions(n_ctx=CONTEXT, n_cells=n_cells, threads=1, cache_type_v="bf16")
    return open_pair(*files, target_options=options, draft_options=options)


@contextmanager
def served(
    pair: Pair, policy: LengthPolicy | None = None, *, template: str | None = TEMPLATE, **settings: Any
) -> Iterator[Served]:
    """Serve a pair on a free port, in a thread."""
    log: list[str] = []
    config = ServeSettings(port=0, **settings)
    of = None if template is None else ChatTemplate.of(pair.target, template)
    opened = open_socket(config)
    source = open_source(pair, policy or FixedLength(3), of, config.alias)
    with opened, serving(source, config, log.append) as models, serve(models, opened, log) as running:
        yield running


@contextmanager
def serve(models: Models, opened: socket.socket, log: list[str]) -> Iterator[Served]:
    """Run a server in a thread."""
    is_ready = threading.Event()
    with opened:
        server = Server(make_app(models), models, is_ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
        url = url_of(opened)
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()

        try:
            assert is_ready.wait(PATIENCE)
            with httpx.Client(base_url=url, timeout=PATIENCE) as client:
                n_connections = lambda: len(server.server_state.connections)  # noqa: E731
                in_loop = server.loop.call_soon_threadsafe
                yield Served(url, models, log, client, stop, n_connections, in_loop, server.loop)
        finally:
            stop()


def said(pair: Pair, prompt: str, seed: int, n: int, temperature: float = 0.8) -> str:
    """Return the completion of a prompt by the Python API, alone and without drafts."""
    sampling = Sampling(temperature=temperature)
    stream = pair.stream(prompt, sampling=sampling, seed=seed, max_tokens=n, policy=FixedLength(0))
    return stream.run().text


def answered(pair: Pair, message: str, seed: int, n: int) -> str:
    """Return the answer to a message by the Python API."""
    text = ChatTemplate.of(pair.target, TEMPLATE).render([Message("user", message)]).text
    return said(pair, text.decode(), seed, n)


@dataclass
class Process:
    """`llamaspec serve` in its own process."""

    popen: subprocess.Popen[str]
    lines: list[str]
    url: str

    def ended(self) -> int:
        """Wait for the end; return the exit code."""
        return self.popen.wait(PATIENCE)


@contextmanager
def process(
    *arguments: str, env: Mapping[str, str] | None = None, entry: Sequence[str] = ENTRY
) -> Iterator[Process]:
    """Start `llamaspec serve` and wait until it is ready; kill it at the end of the block."""
    command = [*entry, "serve", "--port", "0", "--threads", "1", "-k", "2", *arguments]
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(env))
    lines: list[str] = []
    served_at = threading.Event()

    def read() -> None:
        assert popen.stderr is not None
        for line in popen.stderr:
            lines.append(line.rstrip("\n"))
            if "served at" in line:
                served_at.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        until(lambda: served_at.is_set() or popen.poll() is not None)
        assert served_at.is_set(), lines
        url = next(line for line in lines if "served at" in line).rpartition(" ")[2]
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        yield Process(popen, lines, url)
    finally:
        popen.kill()
        popen.wait()
        reader.join(PATIENCE)
        assert popen.stderr is not None
        popen.stderr.close()
