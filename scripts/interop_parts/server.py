"""A server in this process whose answers are given.

An answer is the text that a model of the Hermes family would generate. The server receives it letter by
letter, and parses and sends it like any other.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamaspec import AutoLength, ModelOptions, open_pair
from llamaspec.chat.messages import Delta
from llamaspec.chat.parse import AnswerParser
from llamaspec.chat.template import ChatTemplate
from llamaspec.engine.completion import Completion, StopReason, summarize
from llamaspec.pair import demo_draft, demo_target
from llamaspec.serve import ServeSettings
from llamaspec.serve.app import Server, make_app, open_socket, serving, url_of
from llamaspec.serve.jobs import Job
from llamaspec.serve.request_queue import Finished, RequestQueue, Submission
from llamaspec.serve.served_model import open_source
from serve_soak import TEMPLATE

LETTERS = 4  # of a token, about
N_CTX = 1 << 14  # an agent's instructions fit, the longest conversation does not


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as a Hermes model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Cut(str):
    """An answer that ends at the token limit."""


def cut(answer: str) -> Cut:
    """Cut an answer within its last quoted string."""
    return Cut(answer.rpartition('"')[0][:-1])


class Script:
    """The next answers; the last one is repeated."""

    def __init__(self) -> None:
        self._answers: list[str] = []
        self._with_tools = True

    def begin(self, answers: Sequence[str], *, with_tools: bool = True) -> None:
        """Replace the answers; if `with_tools`, a request that offers no tools is answered "Hello."."""
        self._answers, self._with_tools = list(answers), with_tools

    def next(self, has_tools: bool) -> str:
        """Return the answer to a request."""
        if self._with_tools and not has_tools:
            return "Hello."
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


@dataclass
class Exchange:
    """A request, and the part of its answer that was sent so far."""

    path: str
    request: bytes = b""
    status: int | None = None  # None until the answer begins
    is_stream: bool = False
    is_whole: bool = False
    answer: bytearray = field(default_factory=bytearray)

    @property
    def has_call(self) -> bool:
        """Whether the answer calls a tool."""
        return b'"tool_calls":[{' in self.answer or b'"type":"function_call"' in self.answer

    @property
    def brings_result(self) -> bool:
        """Whether the request contains the result of a tool call."""
        return b'"role":"tool"' in self.request or b'"function_call_output"' in self.request

    @property
    def overflows(self) -> bool:
        """Whether the request was too long for the context."""
        return b'"code":"context_length_exceeded"' in self.answer


class Recorder:
    """ASGI middleware that records requests and answers."""

    def __init__(self, app: ASGIApp, exchanges: list[Exchange]) -> None:
        self._app, self._exchanges = app, exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        exchange = Exchange(scope["path"])
        self._exchanges.append(exchange)

        async def received() -> Message:
            message = await receive()
            exchange.request += message.get("body", b"")
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                kind = dict(message["headers"]).get(b"content-type", b"")
                exchange.status, exchange.is_stream = message["status"], kind.startswith(b"text/event-stream")
            else:
                exchange.answer += message.get("body", b"")
                exchange.is_whole = not message.get("more_body", False)
            await send(message)

        await self._app(scope, received, sent)


def _deltas(text: str, job: Job) -> Iterator[Delta]:
    parser = AnswerParser(job.prompt.answer_format, job.prompt.tools)
    for letter in text:
        yield from parser.feed(letter)
    yield from parser.finish()


def _end(text: str, job: Job) -> Finished:
    reason = StopReason.LIMIT if isinstance(text, Cut) else StopReason.END
    n_tokens = len(text) // LETTERS + 1
    figures = summarize([], n_tokens)
    return Finished(Completion(text, (1,) * n_tokens, len(job.prompt.tokens), reason, (), figures, 0.0))


@contextmanager
def scripted_server(
    script: Script,
    exchanges: list[Exchange] | None = None,
    *,
    template: str = TEMPLATE,
) -> Iterator[str]:
    """Run a server in a thread and yield its URL; the server appends every request to `exchanges`."""
    settings, is_ready = ServeSettings(port=0), threading.Event()

    def submit(queue: RequestQueue, jobs: Sequence[Job]) -> Submission:
        text = script.next(bool(jobs[0].prompt.tools))
        submission = Submission(jobs, queue, time.monotonic())
        (state,) = submission.states
        state.last = _end(text, jobs[0])
        state.pending.extend(_deltas(text, jobs[0]))
        return submission

    options = ModelOptions(n_ctx=N_CTX, n_cells=N_CTX)
    with (
        patch.object(RequestQueue, "submit", submit),
        open_pair(demo_target(), demo_draft(), target_options=options, draft_options=options) as pair,
        open_socket(settings) as opened,
        serving(
            open_source(pair, AutoLength(), ChatTemplate.of(pair.target, template)), settings, lambda _: None
        ) as models,
    ):
        app = Recorder(make_app(models), [] if exchanges is None else exchanges)
        server = Server(app, models, is_ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
        thread.start()
        is_ready.wait()
        try:
            yield url_of(opened)
        finally:
            server.should_exit = True
            thread.join()
