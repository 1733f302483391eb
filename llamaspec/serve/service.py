"""The state that all endpoints share, and how a response is sent: whole, or as server-sent events.

A response ends when the client leaves. A slow reader pauses only its own sequences.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from llamaspec.errors import printable
from llamaspec.pair import Pair
from llamaspec.serve import ServeSettings
from llamaspec.serve.bodies import Fields, json_depth, without_half_pairs
from llamaspec.serve.constraints import GenerationParameters
from llamaspec.serve.deltas import Answer, Deltas, TextDelta, answers_of, deltas_of, work_of
from llamaspec.serve.errors import RequestError, openai_error
from llamaspec.serve.metrics import Metrics
from llamaspec.serve.prefixes import PrefixWatch
from llamaspec.serve.requests import ChatRequest, GenerationRequest, RequestBuilder
from llamaspec.serve.scheduling import Finished, PromptProgress, RequestQueue
from llamaspec.serve.security import WORK, Write, log_line
from llamaspec.values import TokenArray

F = TypeVar("F", bound=Fields)
T = TypeVar("T")
MAX_TOLD = 64  # names in a line of the log
MAX_NAME = 200  # characters of each
CLIENT_LEFT = 499  # seen by the log only


class Form(ABC):
    """The objects of one API for one request, and its events."""

    media_type = "text/event-stream"

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The response."""

    @abstractmethod
    def _add(self, index: int, delta: TextDelta) -> bytes:
        """The events of a delta of a sequence."""

    @abstractmethod
    def _finish(self, index: int, end: Finished) -> bytes:
        """The last events of a sequence."""

    def _begin(self) -> bytes:
        """The events before anything is generated."""
        return b""

    def _end(self) -> bytes:
        """The events after all sequences have ended."""
        return b""

    def _keep_alive(self, index: int, progress: PromptProgress) -> bytes:
        """A sign of life, which clients ignore."""
        if progress.n_read is None:
            return b": waiting\n\n"
        return f": prompt {progress.n_read}/{progress.n_to_read}\n\n".encode()

    def _error(self, exception: Exception) -> bytes:
        """The event of an error."""
        return event(openai_error(exception))

    def refusal(self, exception: Exception) -> Response:
        """A stream that ends before anything is generated."""
        return Response(self._begin() + self._error(exception), media_type=self.media_type)

    async def events(self, of: Deltas) -> AsyncIterator[bytes]:
        """The response as events; an exception becomes the last one."""
        yield self._begin() or self._keep_alive(0, PromptProgress())
        try:
            async for index, delta in of:
                if isinstance(delta, PromptProgress):
                    yield self._keep_alive(index, delta)
                elif isinstance(delta, Finished):
                    yield self._finish(index, delta)
                else:
                    yield self._add(index, delta)
        except Exception as exception:  # noqa: BLE001  # the client is told
            yield self._error(exception)
            return
        yield self._end()


@dataclass(eq=False)
class Service:
    """One pair, served."""

    pair: Pair
    settings: ServeSettings
    builder: RequestBuilder
    queue: RequestQueue
    metrics: Metrics
    prefixes: PrefixWatch
    write: Write  # lines of the log
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    _told: set[str] = field(default_factory=set)  # what was left out of requests

    @property
    def model_name(self) -> str:
        """The model's name in answers."""
        return self.settings.alias or self.pair.target.path.stem

    def tell(self, message: str) -> None:
        """One line in the log, whatever the message contains."""
        self.write(log_line(printable(message), self.settings.log_format))

    def _tell_once(self, message: str, names: Set[str]) -> None:
        """One line for those of the names that were not told yet."""
        if new := names - self._told:
            self._told = set(new) if len(self._told) > MAX_TOLD else self._told | new
            self.tell(message.format(", ".join(name[:MAX_NAME] for name in sorted(new)[:MAX_TOLD])))

    async def chat(self, request: ChatRequest) -> tuple[TokenArray, GenerationParameters]:
        """As `RequestBuilder.chat`; the log is told once what cannot be obeyed, and what broke the prefix."""
        left_out = {*request.left_out, *(f"tool {tool}" for tool in request.tool_use.left_out)}
        self._tell_once("left out of requests: {}; only functions can be called", left_out)
        prompt, parameters = await self.builder.chat(request)
        not_held = "schemas that cannot be enforced: {}; the arguments of these tools may be any object"
        self._tell_once(not_held, set(parameters.not_held))
        if (broken := self.prefixes.compare(prompt)) is not None:
            self.tell(broken)
        return prompt, parameters

    async def respond(
        self, http: Request, requests: Sequence[GenerationRequest], form: Form, stream: bool | None
    ) -> Response:
        """Generate, and answer in the form of an API; nothing if the client has left meanwhile."""
        if await http.is_disconnected():
            return Response(status_code=CLIENT_LEFT)
        submission, timeout = self.queue.submit(requests), self.settings.request_timeout
        http.scope[WORK] = partial(work_of, submission)
        deadline = None if timeout is None else time.monotonic() + timeout
        deltas = deltas_of(submission, deadline, self.settings.keep_alive_seconds)
        if stream:
            return EventStream(form.events(deltas), form.media_type, submission.cancel, deadline)
        try:
            answers = await _while_connected(answers_of(deltas, len(requests)), http.receive)
        finally:
            submission.cancel()
        return Response(status_code=CLIENT_LEFT) if answers is None else JSONResponse(form.whole(answers))


def service_of(http: Request) -> Service:
    """The service that a request is for."""
    service: Service = http.app.state.service
    return service


async def parse_body(http: Request, kind: type[F]) -> F:
    """The checked body of a request; RequestError or ValidationError if it is wrong."""
    encoding = http.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise RequestError(415, f"the body is compressed ({encoding}); send it as it is")
    body, limit = await http.body(), service_of(http).settings.json_depth
    if json_depth(body, limit) > limit:
        raise RequestError(413, f"the body is nested deeper than {limit} levels")
    return kind.model_validate_json(without_half_pairs(body))


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event; JSON has no line breaks of its own."""
    line = f"event: {name}\n" if name is not None else ""
    return f"{line}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def arguments_of(text: str) -> dict[str, Any]:
    """Arguments of a call as an object; if the answer was cut, as much as there is, as Anthropic's client."""
    try:
        found = from_json(without_half_pairs((text or "{}").encode()), allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class EventStream(StreamingResponse):
    """Sends events until they end, the client leaves, or the deadline (`time.monotonic`) has passed.

    `cancel` is called at the end, whatever it is.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        media_type: str,
        cancel: Callable[[], None],
        deadline: float | None,
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type=media_type)
        self._cancel, self._deadline = cancel, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        # The events end at the deadline; a second later also for a client that does not read.
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic()) + 1.0
        try:
            with suppress(OSError, ClientDisconnect, asyncio.TimeoutError):
                await asyncio.wait_for(super().__call__(scope, receive, send), left)
        finally:
            self._cancel()


async def _while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of `work`; None if the client leaves before."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
