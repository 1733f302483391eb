"""Runs the application on a socket until the server is told to stop, and stops it in order.

First no more requests are taken, then running answers have a grace time, then they end with an error that
says so. tests/serve/test_stopping.py.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from llamaspec.chat.template import ChatTemplate
from llamaspec.errors import LlamaspecError
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.serve.app import make_app
from llamaspec.serve.decoder import Decoder
from llamaspec.serve.logs import Write
from llamaspec.serve.metrics import Metrics
from llamaspec.serve.prompts import Prompts
from llamaspec.serve.room import Room
from llamaspec.serve.row_queue import RowQueue
from llamaspec.serve.service import Service
from llamaspec.serve.settings import ServeSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

LAST_SECONDS = 10  # after the grace time, for answers to say that they end


def open_socket(settings: ServeSettings) -> socket.socket:
    """The socket to listen on; bound before models are loaded, so that a port in use is known at once.

    Raises
    ------
    LlamaspecError
        It cannot be had.
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
    """Where a server on a socket is found."""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def serving(
    pair: Pair,
    policy: LengthPolicy,
    template: ChatTemplate | None,
    settings: ServeSettings,
    write: Write,
) -> Iterator[tuple[ASGIApp, Service]]:
    """The application over an open pair; its decode thread ends afterwards."""
    metrics = Metrics()
    prompts = Prompts(pair.target, template)
    context_size = pair.target.context_size
    room = Room(max(pair.target.options.n_cells or 0, context_size), context_size)
    queue = RowQueue(settings.parallel, settings.max_queue, metrics)
    decoder = Decoder(pair, policy, metrics, queue, room)
    service = Service(pair, settings, prompts, queue, metrics)
    try:
        yield make_app(service, write), service
    finally:
        decoder.close()


def make_server(app: ASGIApp, service: Service, ready: Callable[[], None]) -> Server:
    """A server that is to be run on a socket, until SIGTERM, Ctrl-C or the loss of a worker.

    `ready` is told when it accepts.
    """
    grace = service.settings.grace_seconds
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        h11_max_incomplete_event_size=64 << 10,
        timeout_graceful_shutdown=int(grace) + LAST_SECONDS,
    )
    return Server(config, service.queue, grace, ready)


class Server(uvicorn.Server):
    """uvicorn's, which leaves signals and the queue in order."""

    def __init__(
        self, config: uvicorn.Config, queue: RowQueue, grace_seconds: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._queue, self._grace_seconds, self._ready = queue, grace_seconds, ready
        self._grace: threading.Timer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept requests, and say so."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop in order."""
        self._queue.stop()
        self._grace = threading.Timer(self._grace_seconds, self._queue.end)
        self._grace.daemon = True
        self._grace.start()
        try:
            await super().shutdown(sockets)
        finally:
            self._grace.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let signals stop the server, and nothing more: what is open is still to be closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops; a second one ends the running answers at once."""
        if self.should_exit:
            threading.Thread(target=self._queue.end, daemon=True).start()
        self.should_exit = True
