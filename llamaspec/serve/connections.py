"""Connections of the HTTP server, with the limits that uvicorn's protocol lacks.

A client has some seconds for a whole header, counted from the connection or from the last answer, and some to
take a part of an answer that the socket cannot hold. If there are too many connections, the one that has
waited longest for a request is closed: so idle ones never keep others out. Always h11, because httptools
loses the body of a request that asks for HTTP/2. tests/serve/test_connections.py.
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from llamaspec.serve import ServeSettings

N_FILES = 4096  # file descriptors to allow this process, if the system lets it
BACKLOG = 256  # connections that the event loop accepts at once


class Connection(H11Protocol):
    """A connection of one client."""

    def __init__(self, settings: ServeSettings, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._settings = settings
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self.idle_since = 0.0  # in the event loop's time: begin of the wait for the current request

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return getattr(self.cycle, "response_complete", True)  # there is no cycle before the first request

    @property
    def may_be_dropped(self) -> bool:
        """Whether the client has sent no whole request yet, and has taken the last answer."""
        return not self.flow.write_paused if self.is_idle else self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` if the socket does not take all at once
        self._watch_header()
        if len(self.connections) > self._settings.max_connections:
            open_ = cast("set[Connection]", self.connections)
            dropped = min((each for each in open_ if each.may_be_dropped), key=lambda each: each.idle_since)
            self.connections.discard(dropped)
            dropped.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        self._watch_header()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._watch_header()

    def pause_writing(self) -> None:
        """Give the client some time to take a part of the answer."""
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client has taken everything."""
        super().resume_writing()
        _cancel(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all timers."""
        _cancel(self._header_timer, self._write_timer)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection after its answer; at once if the request is not complete."""
        super().shutdown()
        if not self.is_idle and self.cycle.more_body:
            self.transport.close()

    def _watch_header(self) -> None:
        """Start the time for a header if no request is being answered; otherwise stop it."""
        if not self.is_idle:
            _cancel(self._header_timer)
            self._header_timer = None
        elif self._header_timer is None and not self.transport.is_closing():
            self.idle_since = self.loop.time()
            self._header_timer = self.loop.call_later(self._settings.header_seconds, self.transport.close)

    def _watch_reader(self, n_before: int) -> None:
        """Close the connection if the client takes nothing of `n_before` bytes for too long."""

        def check() -> None:
            n_left = self.transport.get_write_buffer_size()
            if n_left < n_before:
                self._watch_reader(n_left)
            else:
                self.transport.abort()

        self._write_timer = self.loop.call_later(self._settings.write_seconds, check)


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()


def raise_file_limit() -> int:
    """Let this process open more files, if the system does, and return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = N_FILES if hard == unlimited else min(N_FILES, hard)
    if soft != unlimited and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return N_FILES if soft == unlimited else soft
