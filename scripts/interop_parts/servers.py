"""`llamaspec serve` with real models, or with answers that are given: then all of it runs but the model.

A given answer is the text that a model of the Hermes family would write, letter by letter: it is parsed and
sent as any other. Requests for which none is given are answered by the embedded pair.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from llamaspec import AutoLength, ModelOptions, open_pair
from llamaspec.chat.parse import AnswerParser
from llamaspec.chat.template import ChatTemplate
from llamaspec.engine.generation import Completion, StopReason
from llamaspec.engine.statistics import summarize
from llamaspec.opening import demo_draft, demo_target
from llamaspec.serve import ServeSettings
from llamaspec.serve.app import Server, open_socket, serving, url_of
from llamaspec.serve.requests import Job
from llamaspec.serve.scheduling import Event, Finished, RequestQueue, Submission
from serve_soak import TEMPLATE

ROOT = Path(__file__).resolve().parents[2]
LETTERS = 4  # of a token, about
N_CTX = 1 << 14  # agents have long instructions, and one conversation is to be too long


def call(name: str, **arguments: Any) -> str:
    """A call of a tool as a Hermes model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Cut(str):
    """An answer that is ended by the limit."""


def cut(answer: str) -> Cut:
    """An answer whose limit comes in the middle of its last quotation."""
    return Cut(answer.rpartition('"')[0][:-1])


class Script:
    """The answers to come; behind the last one it is said again. None: the model answers."""

    def __init__(self) -> None:
        self._answers: list[str] | None = None
        self._with_tools = True

    def begin(self, answers: Sequence[str] | None, *, with_tools: bool = True) -> None:
        """From now on these; `with_tools`: to requests that offer tools, others are greeted."""
        self._answers, self._with_tools = None if answers is None else list(answers), with_tools

    def next(self, has_tools: bool) -> str | None:
        """The answer to a request."""
        if self._answers is None:
            return None
        if self._with_tools and not has_tools:
            return "Hello."
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def _events(text: str, job: Job) -> Iterator[Event]:
    parser = AnswerParser(job.parameters.answer_format, job.parameters.tools)
    for letter in text:
        yield from parser.feed(letter)
    yield from parser.finish()
    reason = StopReason.LIMIT if isinstance(text, Cut) else StopReason.END
    n_tokens = len(text) // LETTERS + 1
    figures = summarize([], n_tokens)
    yield Finished(Completion(text, (1,) * n_tokens, len(job.prompt), reason, (), figures, 0.0), None)


@contextmanager
def scripted_server(script: Script, template: str = TEMPLATE) -> Iterator[str]:
    """The URL of a server in a thread of this process, with a chat template that knows tools."""
    settings, is_ready = ServeSettings(port=0), threading.Event()
    usual = RequestQueue.submit

    def submit(queue: RequestQueue, jobs: Sequence[Job]) -> Submission:
        text = script.next(bool(jobs[0].parameters.tools))
        if text is None:
            return usual(queue, jobs)
        submission = Submission(jobs, queue, time.monotonic())
        submission.send(submission.states[0], *_events(text, jobs[0]))
        return submission

    options = ModelOptions(n_ctx=N_CTX, n_cells=N_CTX)
    with (
        patch.object(RequestQueue, "submit", submit),
        open_pair(demo_target(), demo_draft(), target_options=options, draft_options=options) as pair,
        open_socket(settings) as opened,
        serving(
            pair, AutoLength(), ChatTemplate.of(pair.target, template), settings, lambda _: None
        ) as served,
    ):
        server = Server(*served, is_ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
        thread.start()
        is_ready.wait()
        try:
            yield url_of(opened)
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def real_server(target: Path, draft: Path | None, n_ctx: int) -> Iterator[str]:
    """The URL of `llamaspec serve` with real models."""
    options = ["--port", "0", "--n-ctx", str(n_ctx), "--ctx-per-request", str(n_ctx), "--target", str(target)]
    options += [] if draft is None else ["--draft", str(draft)]
    command = [sys.executable, "-m", "llamaspec", "serve", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    try:
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "is served at" in line:
                break
        else:
            raise click.ClickException(f"llamaspec serve ended: {''.join(lines[-3:]).strip()}")
        threading.Thread(target=lambda: all(process.stderr or ()), daemon=True).start()
        yield lines[-1].split()[-1]
    finally:
        process.terminate()
        process.wait(60)
