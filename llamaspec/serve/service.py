"""The state that all endpoints share, and how responses are sent: whole or as a stream.

If a client leaves, its sequences end. A slow client pauses only its own sequences.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from contextlib import suppress
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from llamaspec.chat.template import ChatTemplate
from llamaspec.errors import LlamaspecError, printable
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.measure.reasons import pair_verdict
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.serve import ServeSettings
from llamaspec.serve.bodies import Fields, GenerationBody
from llamaspec.serve.constraints import Prompt
from llamaspec.serve.errors import as_request_error
from llamaspec.serve.forms import Form, collected
from llamaspec.serve.requests import ChatRequest, RequestBuilder
from llamaspec.serve.scheduling import RequestQueue
from llamaspec.values import TokenArray, n_common

T = TypeVar("T")
Write = Callable[[str], object]
MAX_LOGGED = 64  # names in a line of the log
MAX_NAME = 200  # characters of a name in the log
FINAL_SECONDS = 10  # for the last events of a response, after its time has ended
CLIENT_LEFT = 499  # HTTP status, seen only in the log
WORK = "llamaspec.work"  # key of a request's scope: a function that returns figures for the log
OWNER = "llamaspec.owner"  # key of a request's scope: the API key that it came with


class Endpoint(NamedTuple):
    """A path and its handler. Without a body, it answers GET, otherwise POST."""

    path: str
    handler: Callable[..., Awaitable[Response]]  # (service, HTTP request, body if there is one)
    body: type[Fields] | None = None


class Service:
    """A pair, and what the endpoints share to serve it. `write` receives the lines of the log."""

    def __init__(
        self,
        pair: Pair,
        policy: LengthPolicy,
        template: ChatTemplate | None,
        settings: ServeSettings,
        write: Write,
    ) -> None:
        self.pair, self.settings, self._write = pair, settings, write
        self.builder = RequestBuilder(pair, template)
        self.queue = RequestQueue(pair, policy, settings.parallel, settings.max_queue)
        self.verdict = pair_verdict(pair)  # the speed-up measured by earlier runs, in words
        self.created = int(time.time())  # Unix seconds
        self._prefixes = PrefixWatch(pair.target.vocabulary)
        self._logged: set[str] = set()  # names that the log has named

    @property
    def model_name(self) -> str:
        """The model's name in responses."""
        return self.settings.alias or self.pair.target.path.stem

    def log(self, message: str, fields: Mapping[str, Any] | None = None) -> None:
        """Write one line to the log, whatever the message contains.

        In a JSON log the line has the time and `fields`; without fields, the message.
        """
        line = printable(message)
        if self.settings.log_format == "json":
            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            line = json.dumps({"time": now, **({"message": line} if fields is None else fields)})
        self._write(line)

    def log_fault(self, error: Exception) -> None:
        """Log an error that is the server's own, in one line; for a bug, with its place in the code."""
        if as_request_error(error).status != HTTPStatus.INTERNAL_SERVER_ERROR:
            return
        if isinstance(error, LlamaspecError):
            self.log(f"error: {error}")
            return
        # The message may contain text from the client.
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.name}, {Path(place.filename).name} line {place.lineno}"
        self.log(f"internal error: {type(error).__name__} in {where}; please report it")

    def _log_once(self, message: str, names: Set[str]) -> None:
        """Log one line with those names that the log has not named yet."""
        if new := names - self._logged:
            self._logged = set(new) if len(self._logged) > MAX_LOGGED else self._logged | new
            self.log(message.format(", ".join(name[:MAX_NAME] for name in sorted(new)[:MAX_LOGGED])))

    async def chat(self, request: ChatRequest) -> Prompt:
        """Return the prompt of a conversation; log unsupported parts once, and a prefix that changed."""
        left_out = {*request.left_out, *(f"tool {tool}" for tool in request.tool_use.left_out)}
        self._log_once("left out of requests: {}; only functions can be called", left_out)
        prompt = await self.builder.chat(request)
        free = "schemas that cannot be enforced: {}; the arguments of these tools may be any object"
        self._log_once(free, set(prompt.not_enforced))
        if (difference := self._prefixes.compare(prompt.tokens)) is not None:
            self.log(difference)
        return prompt

    async def respond(
        self, http: Request, body: GenerationBody, prompts: Sequence[Prompt], form: Form
    ) -> Response:
        """Generate the answers and return the response; an empty one if the client has left meanwhile."""
        jobs = await self.builder.jobs(prompts, body, http.scope.get(OWNER, ""))
        if await http.is_disconnected():
            return Response(status_code=CLIENT_LEFT)
        submission, timeout = self.queue.submit(jobs), self.settings.request_timeout
        http.scope[WORK] = submission.work
        events = submission.events(timeout, self.settings.keep_alive_seconds)
        if body.stream:
            parts = form.stream(events, self.log_fault)
            return EventStream(parts, form.media_type, submission.cancel, timeout)
        try:
            answers = await _while_connected(collected(events, len(jobs)), http.receive)
        finally:
            submission.cancel()
        return Response(status_code=CLIENT_LEFT) if answers is None else JSONResponse(form.whole(answers))


class EventStream(StreamingResponse):
    """Sends events until they end or the client leaves; calls `cancel` at the end in every case.

    The events themselves end after `timeout` seconds; a client that does not read them is disconnected later.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        media_type: str,
        cancel: Callable[[], None],
        timeout: float | None,
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type=media_type)
        self._cancel, self._timeout = cancel, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        left = None if self._timeout is None else self._timeout + FINAL_SECONDS
        try:
            with suppress(OSError, ClientDisconnect, asyncio.TimeoutError):
                await asyncio.wait_for(super().__call__(scope, receive, send), left)
        finally:
            self._cancel()


async def _while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Return the result of `work`; None if the client leaves first."""
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


N_PROMPTS = 16  # prompts to compare with
N_LOST = 128  # the fewest tokens processed again for which a line is logged
N_SHOWN = 24  # characters of an excerpt
RUN = 16  # tokens; so many in a row do not agree by chance
N_RUNS = 8  # runs of the old prompt that are searched for in the new one


class PrefixWatch:
    """Finds prompts that continue an earlier conversation but begin differently.

    A cached prompt is reused only up to the first token that differs: a prompt that begins with a time stamp
    is processed as a whole in each turn. Prompts are compared with prompts, so the result does not depend on
    what is still cached. tests/serve/test_prefixes.py.
    """

    def __init__(self, vocabulary: LlamaVocabulary) -> None:
        self._vocabulary = vocabulary
        self._prompts: deque[TokenArray] = deque(maxlen=N_PROMPTS)

    def compare(self, prompt: TokenArray) -> str | None:
        """Keep a prompt; if it continues an earlier one but begins differently, describe the difference."""
        n_shared = [n_common(each, prompt) for each in self._prompts]
        n = max(n_shared, default=len(prompt))
        before = self._prompts[n_shared.index(n)] if n_shared else prompt
        self._prompts.appendleft(prompt)
        n_lost = len(before) - n
        if n_lost < N_LOST or not _contains_most(prompt[n:], before[n:]):
            return None
        begin, old, new = (
            self._text(tokens) for tokens in (prompt[max(0, n - RUN) : n], before[n:], prompt[n:])
        )
        return (
            f'prefix differs at token {n:,} of {len(prompt):,}: after "{begin[-N_SHOWN:]}" came '
            f'"{old[:N_SHOWN]}", now "{new[:N_SHOWN]}"; {n_lost:,} tokens are processed again'
        )

    def _text(self, tokens: TokenArray) -> str:
        pieces = (
            self._vocabulary.piece(token) or self._vocabulary.text(token) for token in tokens[:RUN].tolist()
        )
        return b"".join(pieces).decode(errors="replace")


def _contains_most(new: TokenArray, old: TokenArray) -> bool:
    """Whether most of the old tokens are among the new ones, at any place."""
    places, content = np.linspace(RUN, len(old) - RUN, N_RUNS, dtype=int), new.tobytes()
    return 2 * sum(old[place : place + RUN].tobytes() in content for place in places) >= N_RUNS
