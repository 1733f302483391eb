"""Server-sent events: an answer that is written while it is made, and ends when the client leaves.

A reader that is slow stops only its own answer: nothing more is taken from its rows until it reads on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamaspec.serve.deltas import Silence

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def event(data: Any, name: str | None = None) -> bytes:
    """One event; JSON has no line breaks of its own."""
    line = f"event: {name}\n" if name is not None else ""
    return f"{line}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def comment(silence: Silence) -> bytes:
    """A sign of life, which clients ignore."""
    if silence.n_read is None:
        return b": waiting\n\n"
    return f": prompt {silence.n_read}/{silence.n_to_read}\n\n".encode()


class EventStream(Response):
    """Sends events until they end, the client leaves, or the time is up.

    Parameters
    ----------
    events : async iterator of bytes
        Raises nothing: what goes wrong becomes an event.
    close : callable
        Told when no more is wanted, however that came.
    deadline : float, optional
        By `time.monotonic`: for readers that take nothing more.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], deadline: float | None
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._close, self._deadline = events, close, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI wants it."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(gone(receive))
        left = None if self._deadline is None else max(0.0, self._deadline - monotonic()) + 1.0
        try:
            await asyncio.wait({sending, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            for task in (sending, leaving):
                if not task.done():
                    task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled() and sending.exception() is not None:
            with suppress(OSError):  # the client left while it was written to
                sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
