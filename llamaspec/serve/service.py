"""A loaded model and how its responses are sent: whole or as a stream.

If a client leaves, its sequences end. A slow client pauses only its own sequences.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from llamaspec.chat.template import ChatTemplate
from llamaspec.llama.file_facts import Kind
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.measure.verdict import pair_verdict
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.sampling.filters import Sampling
from llamaspec.serve import ServeSettings
from llamaspec.serve.bodies import Fields, GenerationBody
from llamaspec.serve.constraints import Prompt
from llamaspec.serve.http_errors import openai_error
from llamaspec.serve.jobs import ChatRequest, RequestBuilder, Runner
from llamaspec.serve.log import WORK, ServerLog
from llamaspec.serve.metrics import ModelMetrics
from llamaspec.serve.request_queue import RequestQueue, too_late
from llamaspec.serve.response_forms import Form, collected, sse
from llamaspec.values import EVERYONE, TokenArray, n_common

T = TypeVar("T")
MAX_LOGGED = 64  # names in a line of the log
MAX_NAME = 200  # characters of a name in the log
FINAL_SECONDS = 10  # for the last events of a response, after its time has ended
CLIENT_LEFT = 499  # HTTP status, seen only in the log
OWNER = "llamaspec.owner"  # key of a request's scope: the API key that it came with
DEADLINE = "llamaspec.deadline"  # key of a request's scope: when its time is over, by `monotonic`


def _openai_failure(model: str, body: Fields, error: Exception) -> bytes:
    return sse(openai_error(error))


class Endpoint(NamedTuple):
    """A path and its handler. Without a body, it answers GET, otherwise POST.

    The first argument of the handler is the service of the model that the body names. If `is_general`, the
    endpoint needs no loaded model, and the argument is the `Models` of the server.
    """

    path: str
    handler: Callable[..., Awaitable[Response]]  # (service or models, HTTP request, body if there is one)
    body: type[Fields] | None = None
    is_general: bool = False
    method: str | None = None  # None: see above
    kinds: Set[Kind] = frozenset({Kind.TEXT})  # of models that it needs, if it needs one
    # The end of a stream that fails before its model is loaded: (name of the model, body, error) -> events.
    failure: Callable[[str, Any, Exception], bytes] = _openai_failure


@dataclass(frozen=True, slots=True, eq=False)
class OpenModel:
    """A model that has been loaded to be served."""

    pair: Pair
    policy: LengthPolicy
    template: ChatTemplate | None
    sampling: Sampling | None = None  # for requests that give none; None = llama.cpp's values
    reasoning_budget: int | None = None  # tokens, for requests that give none


class Service:
    """A loaded model, and what its endpoints share."""

    def __init__(
        self,
        model_name: str,
        opened: OpenModel,
        queue: RequestQueue,
        metrics: ModelMetrics,
        settings: ServeSettings,
        log: ServerLog,
    ) -> None:
        self.model_name = model_name  # in responses
        self.pair, self.queue, self.settings, self.log = opened.pair, queue, settings, log
        self.runner = Runner(opened.pair, opened.policy, metrics)
        self.builder = RequestBuilder(self.runner, opened.template, opened.sampling, opened.reasoning_budget)
        self.verdict = pair_verdict(opened.pair)  # the speed-up measured by earlier runs, in words
        self._prefixes = PrefixWatch(opened.pair.target.vocabulary)
        self._logged: set[str] = set()  # names that the log has named

    @property
    def target(self) -> LlamaModel:
        """The target."""
        return self.pair.target

    def _log_once(self, message: str, names: Set[str]) -> None:
        """Log one line with those names that the log has not named yet."""
        if new := names - self._logged:
            self._logged = set(new) if len(self._logged) > MAX_LOGGED else self._logged | new
            self.log.line(message.format(", ".join(name[:MAX_NAME] for name in sorted(new)[:MAX_LOGGED])))

    async def chat(self, request: ChatRequest) -> Prompt:
        """Return the prompt of a conversation; log unsupported parts once, and a prefix that changed."""
        left_out = {*request.left_out, *(f"tool {tool}" for tool in request.tool_use.left_out)}
        self._log_once("left out of requests: {}; only functions can be called", left_out)
        prompt = await self.builder.chat(request)
        free = "schemas that cannot be enforced: {}; the arguments of these tools may be any object"
        self._log_once(free, set(prompt.not_enforced))
        if (difference := self._prefixes.compare(prompt.tokens)) is not None:
            self.log.line(difference)
        return prompt

    async def respond(
        self, http: Request, body: GenerationBody, prompts: Sequence[Prompt], form: Form
    ) -> Response:
        """Generate the answers and return the response; an empty one if the client has left meanwhile."""
        scope = _scope_name(self.settings, http.scope.get(OWNER, ""), body.cache_salt)
        jobs = await self.builder.jobs(prompts, body, scope)
        if await http.is_disconnected():
            return Response(status_code=CLIENT_LEFT)
        deadline = http.scope.get(DEADLINE)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        submission = self.queue.submit(jobs)
        http.scope[WORK] = submission.work
        events = submission.events(timeout, self.settings.keep_alive_seconds)
        if body.stream:
            parts = form.stream(events, self.log.fault)
            return EventStream(parts, form.media_type, submission.cancel, timeout)
        try:
            answers = await while_connected(collected(events, len(jobs)), http.receive)
        finally:
            submission.cancel()
        return Response(status_code=CLIENT_LEFT) if answers is None else JSONResponse(form.whole(answers))


def _scope_name(settings: ServeSettings, key: str, salt: str | None) -> str:
    """Return the scope of a request: whose prefixes and answers it may reuse.

    With several keys, each key has its own; those of the shared key serve all. A salt divides a scope.
    """
    owner = key if len(settings.keys) > 1 else ""
    if salt is not None:
        return json.dumps([owner, salt])
    if not owner:
        return ""
    return EVERYONE if key == settings.shared_key else json.dumps([owner])


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
        self.cancel, self._timeout = cancel, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        left = None if self._timeout is None else self._timeout + FINAL_SECONDS
        try:
            with suppress(OSError, ClientDisconnect, asyncio.TimeoutError):
                await asyncio.wait_for(super().__call__(scope, receive, send), left)
        finally:
            self.cancel()


async def in_time(answer: Awaitable[Response], http: Request, timeout: float | None) -> Response:
    """Return the response of a handler; RequestError (504) if that takes too long, such as for tokenizing.

    A stream is returned before it begins. What it has left of the time is in the request's scope.
    """
    if timeout is not None:
        http.scope[DEADLINE] = time.monotonic() + timeout
    try:
        return await asyncio.wait_for(answer, timeout)
    except asyncio.TimeoutError:
        raise too_late() from None


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
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
