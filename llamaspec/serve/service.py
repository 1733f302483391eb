"""What the endpoints share: the model, the queue, and how a request becomes an answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llamaspec.engine.events import Completion
from llamaspec.pair import Pair
from llamaspec.serve.answers import Answer
from llamaspec.serve.constraints import Constraints, Shape
from llamaspec.serve.deltas import Deltas, Whole, deltas, wholes
from llamaspec.serve.faults import RequestError
from llamaspec.serve.fields import Fields, SamplingFields
from llamaspec.serve.jobs import Job, Manner
from llamaspec.serve.metrics import Metrics
from llamaspec.serve.prompts import Prompts
from llamaspec.serve.questions import Question, answerable
from llamaspec.serve.row_queue import RowQueue
from llamaspec.serve.settings import ServeSettings
from llamaspec.serve.sse import EventStream, gone
from llamaspec.values import TokenArray

F = TypeVar("F", bound=Fields)
T = TypeVar("T")
Events = Callable[[Deltas], AsyncIterator[bytes]]
Form = Callable[[Sequence[Whole]], dict[str, Any]]

# Strings, the last of which may be cut off, and brackets outside of them.
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
CLIENT_LEFT = 499  # nobody sees it but the log


@dataclass(eq=False)
class Service:
    """One model, served."""

    pair: Pair
    settings: ServeSettings
    prompts: Prompts
    queue: RowQueue
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds

    @cached_property
    def constraints(self) -> Constraints:
        """Compiled constraints."""
        return Constraints(self.pair)

    async def manner(self, shape: Shape | None) -> Manner:
        """The manner of a text that is only continued."""
        return Manner(constraint=None if shape is None else await self.constraints.compiled(shape))

    async def asked(self, question: Question) -> tuple[TokenArray, Manner]:
        """The prompt of a question to a chat model, and the manner of the answer."""
        return await answerable(question, self.prompts, self.constraints)

    @cached_property
    def model_name(self) -> str:
        """How answers name the model."""
        return self.settings.alias or self.pair.target.path.stem

    def jobs(
        self,
        prompts: Sequence[TokenArray],
        fields: SamplingFields,
        *,
        n: int = 1,
        max_tokens: int | None = None,
        stops: tuple[str, ...] = (),
        seed: int,
        manner: Manner,
        n_logprobs: int | None = None,
    ) -> list[Job]:
        """A row for each prompt and choice; choice i of a prompt has the seed + i.

        Raises
        ------
        RequestError
            These are more rows than can run at once, or a token id is not of the vocabulary.
        """
        if len(prompts) * n > self.settings.parallel:
            raise RequestError(
                400,
                f"n: {len(prompts) * n} texts at once, this server runs {self.settings.parallel}",
                field="n",
            )
        fields.check_tokens(self.pair.target.vocabulary_size)
        ends = self.pair.target.vocabulary.ends if fields.ignore_eos else ()
        sampling, drafting = fields.sampling(ends), fields.drafting()
        return [
            Job(
                prompt=prompt,
                sampling=sampling,
                seed=seed + i,
                max_tokens=_at_most(max_tokens, self.prompts.room(prompt)),
                stops=stops,
                drafting=drafting,
                manner=manner,
                n_logprobs=n_logprobs,
            )
            for prompt in prompts
            for i in range(n)
        ]

    async def respond(
        self,
        request: Request,
        jobs: Sequence[Job],
        *,
        stream: bool,
        events: Events,
        form: Form,
    ) -> Response:
        """The answer to a request: whole, or as it is made.

        Parameters
        ----------
        request : Request
        jobs : sequence of Job
        stream : bool
        events : callable
            Puts deltas into the API's events; what goes wrong is raised into it.
        form : callable
            Puts whole rows into the API's object.
        """
        answer = self.queue.submit(jobs)
        timeout = self.settings.request_timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        of = deltas(answer, deadline, self.settings.keep_alive_seconds)
        if stream:
            return EventStream(events(of), answer.close, deadline)
        return await self._whole(request, answer, wholes(of, len(jobs)), form)

    async def _whole(
        self, request: Request, answer: Answer, rows: Awaitable[Sequence[Whole]], form: Form
    ) -> Response:
        making = asyncio.ensure_future(rows)
        leaving = asyncio.ensure_future(gone(request.receive))
        try:
            await asyncio.wait({making, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not making.done():
                return Response(status_code=CLIENT_LEFT)
            return JSONResponse(form(making.result()))
        finally:
            answer.close()
            for task in (making, leaving):
                task.cancel()
            await asyncio.gather(making, leaving, return_exceptions=True)

    def stop_string(self, completion: Completion, stops: Sequence[str]) -> str | None:
        """The stop string that ended a text, if one did."""
        written = self.prompts.written(completion.tokens)
        at = len(completion.text)
        return next((stop for stop in stops if written.startswith(stop, at)), None)


def _at_most(wanted: int | None, room: int) -> int:
    """Tokens to write; -1 and None: as many as there is room for."""
    return room if wanted is None or wanted < 0 else min(wanted, room)


async def body_of(request: Request, kind: type[F]) -> F:
    """The body of a request, understood.

    Raises
    ------
    RequestError
        It is too deep.
    ValidationError
        It is something else.
    """
    body = await request.body()
    limit: int = request.app.state.service.settings.limits.json_depth
    if depth(body) > limit:
        raise RequestError(413, f"the body is nested deeper than {limit} levels")
    return kind.model_validate_json(body)


def depth(body: bytes) -> int:
    """How deep the brackets of JSON are nested."""
    deepest = level = 0
    for found in _TOKENS.finditer(body):
        if (first := found[0][:1]) in b"[{":
            level += 1
            deepest = max(deepest, level)
        elif first in b"]}":
            level -= 1
    return deepest
