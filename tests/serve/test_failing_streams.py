"""Streams that fail after they have begun end with the error that the clients of their API understand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from anthropic.types import ErrorResponse
from openai.types import ErrorObject

from llamaspec import EvaluationError, ModelFileError
from patience import PATIENCE, until
from serving import Gate, Served, parse_events
from shelf import NAMES, Shelf, several

MODEL = NAMES[0]
HI = [{"role": "user", "content": "Hello"}]
LONG = 200  # tokens


def of_openai(text: str) -> Any:
    *parts, (name, last) = parse_events(text)
    assert name is None
    assert all("error" not in data for _, data in parts)
    return ErrorObject.model_validate(last["error"]).message


def of_responses(text: str) -> Any:
    """The first event must be `response.created`, and events are numbered, or OpenAI's client fails."""
    events = parse_events(text)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[0][0] == "response.created"
    name, last = events[-1]
    assert name == last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["id"] == events[0][1]["response"]["id"]
    return last["response"]["error"]["message"]


def of_anthropic(text: str) -> Any:
    name, last = parse_events(text)[-1]
    assert name == last["type"] == "error"
    return ErrorResponse.model_validate(last).error.message


def of_ollama(text: str) -> Any:
    *parts, last = map(json.loads, text.splitlines())
    assert all(part["done"] is False for part in parts)
    return last["error"]


APIS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "/v1/chat/completions": ({"messages": HI, "max_tokens": LONG}, of_openai),
    "/v1/completions": ({"prompt": "Hello", "max_tokens": LONG}, of_openai),
    "/v1/responses": ({"input": "Hello", "max_output_tokens": LONG}, of_responses),
    "/v1/messages": ({"messages": HI, "max_tokens": LONG}, of_anthropic),
    "/api/chat": ({"messages": HI, "options": {"num_predict": LONG}}, of_ollama),
    "/api/generate": ({"prompt": "Hello", "options": {"num_predict": LONG}}, of_ollama),
    "/completion": ({"prompt": "Hello", "n_predict": LONG}, of_openai),
}


def never_loads(_: Shelf) -> None:
    """Its gate stays closed."""


def is_damaged(shelf: Shelf) -> None:
    shelf.faults[MODEL] = ModelFileError("it is damaged")


def has_a_bug(shelf: Shelf) -> None:
    shelf.faults[MODEL] = RuntimeError("a secret of ours")


def waits(_: Served) -> None:
    pass


def stops(server: Served) -> None:
    server.stop()


def cannot_evaluate(server: Served) -> None:
    target = server.service.pair.target

    def evaluate(*_: object) -> None:
        raise EvaluationError("llama.cpp could not evaluate")

    target.evaluate = evaluate  # type: ignore[method-assign,assignment]


def is_unloaded(server: Served) -> None:
    server.service.pair._thread._seat.leave()


@contextmanager
def streaming(server: Served, clients: ThreadPoolExecutor) -> Iterator[dict[str, Future[str]]]:
    """Ask every API for a stream; enter the block once all have begun."""
    begun = []

    def stream(path: str, body: dict[str, Any]) -> str:
        asked = {**body, "stream": True, "model": MODEL}
        with server.client.stream("POST", path, json=asked) as answer:
            assert answer.status_code == 200, answer.read()
            begun.append(path)
            return answer.read().decode()

    streams = {path: clients.submit(stream, path, body) for path, (body, _) in APIS.items()}
    until(lambda: len(begun) == len(APIS) or any(each.done() for each in streams.values()))
    yield streams


def check(streams: dict[str, Future[str]], message: str) -> None:
    told = {path: APIS[path][1](stream.result(PATIENCE)) for path, stream in streams.items()}
    assert {path: each for path, each in told.items() if message not in each} == {}


@pytest.mark.parametrize(
    ("fault", "then", "message", "settings"),
    [
        (never_loads, waits, "loading the model took too long", {"request_timeout": 0.05}),
        (never_loads, stops, "the server is stopping", {}),
        (is_damaged, waits, f"{MODEL} cannot be loaded", {}),
        (has_a_bug, waits, "internal error: RuntimeError", {}),
    ],
)
def test_while_the_model_is_loading(
    shelf: Shelf,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Shelf], None],
    then: Callable[[Served], None],
    message: str,
    settings: dict[str, Any],
) -> None:
    """Once, `/v1/responses` had another API's error, and at the time limit no API had one."""
    monkeypatch.setattr("llamaspec.serve.loading.SILENT_SECONDS", 0.0)
    fault(shelf)
    gate = shelf.gates[MODEL] = threading.Event()  # so that all streams begin before it fails
    with (
        ThreadPoolExecutor(len(APIS)) as clients,
        several(shelf, **settings) as server,
        streaming(server, clients) as streams,
    ):
        if MODEL in shelf.faults:
            gate.set()
        then(server)
        check(streams, message)


@pytest.mark.parametrize(
    ("then", "message", "settings"),
    [
        (waits, "the answer took too long", {"request_timeout": 0.05}),
        (stops, "the server is stopping", {"grace_seconds": 0.0}),
        (cannot_evaluate, "the model could not be evaluated", {}),
        (is_unloaded, "the model was unloaded", {}),
    ],
)
def test_while_the_model_answers(
    shelf: Shelf,
    monkeypatch: pytest.MonkeyPatch,
    then: Callable[[Served], None],
    message: str,
    settings: dict[str, Any],
) -> None:
    """Once, answers of a model that was unloaded looked complete."""
    with ThreadPoolExecutor(len(APIS)) as clients, several(shelf, parallel=len(APIS), **settings) as server:

        async def load() -> None:  # without a time limit
            model = await server.models.named(MODEL)
            with server.models.loader.using(model) as use:
                await use.service()

        asyncio.run_coroutine_threadsafe(load(), server.loop).result(PATIENCE)
        gate = Gate(server.service.pair, monkeypatch, n_free=20)
        with streaming(server, clients) as streams:
            then(server)
            if then is not waits and then is not stops:
                gate.open()
            check(streams, message)
            gate.open()
