"""Several clients at once: each gets the completion that it would get alone, and none blocks the others."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamaspec import AutoLength, FixedLength, ModelOptions, Pair, Sampling, open_pair
from llamaspec.chat.answer_stream import AnswerStream
from llamaspec.chat.messages import ContentDelta
from llamaspec.engine.scheduler import Scheduler
from llamaspec.errors import PromptError
from llamaspec.length.costs import Costs
from llamaspec.serve.bodies import AnswerOptions, SpeculativeFields
from llamaspec.serve.constraints import Prompt
from llamaspec.serve.jobs import Job, Runner
from llamaspec.serve.metrics import Metrics, ModelMetrics
from llamaspec.serve.request_queue import (
    Event,
    Events,
    Finished,
    PromptProgress,
    RequestQueue,
    SequenceState,
    Submission,
)
from patience import PATIENCE, until
from serving import CONTEXT, Gate, Served, counters, said, served

TEXT = "/v1/completions"
PROMPTS = ["def f(", "import os\n", "class Stack:\n    def", "for i in range("]


def job(pair: Pair, prompt: str, seed: int, n: int, **options: Any) -> Job:
    tokens = pair.target.vocabulary.tokenize(prompt.encode())
    wanted = AnswerOptions(**options)
    runner = Runner(pair, FixedLength(3), ModelMetrics(Metrics(), "model"))
    return Job(runner, Prompt(tokens), Sampling(), seed, n, wanted)


@contextmanager
def decoding(pair: Pair, parallel: int = 4, max_queue: int = 64, **more: Any) -> Iterator[RequestQueue]:
    """Run a queue of requests to a pair."""
    queue = RequestQueue(parallel, max_queue, **more)
    try:
        yield queue
    finally:
        queue.end()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, PATIENCE)

    return asyncio.run(bounded())


async def read(answer: Submission, events: Events | None = None) -> list[str]:
    """Return the texts of all sequences of an answer; `events` are those that are left."""
    texts = [""] * len(answer.states)
    async for index, event in events or answer.events(None, PATIENCE):
        if isinstance(event, ContentDelta):
            texts[index] += event.text
        if isinstance(event, Finished):
            assert event.completion.text == texts[index]
    return texts


async def reached(condition: Any) -> None:
    await asyncio.to_thread(until, condition)


def test_many_clients_get_the_completions_that_they_would_get_alone(demo: Pair, alone: Pair) -> None:
    """More requests than run at once, some with drafts and some without, under the automatic length."""
    asked = [(prompt, seed) for prompt in PROMPTS for seed in range(3)]
    with served(demo, AutoLength(), parallel=3) as server:

        def ask(i: int) -> str:
            prompt, seed = asked[i]
            body = {"prompt": prompt, "seed": seed, "max_tokens": 30, "speculative": {"enabled": i % 4 != 0}}
            answer: str = server.post("/v1/completions", body).json()["choices"][0]["text"]
            return answer

        with ThreadPoolExecutor(len(asked)) as clients:
            texts = list(clients.map(ask, range(len(asked))))
    assert texts == [said(alone, prompt, seed, 30) for prompt, seed in asked]


def test_a_reader_that_stops_gives_its_place_to_others(demo: Pair, alone: Pair) -> None:
    """Once, as many of them as may run at once stopped everybody until the time limit of a request."""
    with decoding(demo, parallel=1) as queue:

        async def ask() -> list[list[str]]:
            slow = queue.submit([job(demo, "def f(", 1, 60, drafting=SpeculativeFields(enabled=False))])
            others = [queue.submit([job(demo, "import os", seed, 40)]) for seed in (2, 3)]
            texts = [await read(each) for each in others]
            running, n_waiting = queue.sequences()
            assert ([each.submission for each in running], n_waiting) == ([slow], 0)
            return [*texts, await read(slow)]

        texts = run(ask())
    assert texts[:2] == [[said(alone, "import os", seed, 40)] for seed in (2, 3)]
    assert texts[2:] == [[said(alone, "def f(", 1, 60)]]


def test_a_reader_that_returns_waits_for_a_place(demo: Pair, alone: Pair) -> None:
    """And a server that stops lets it finish."""
    with decoding(demo, parallel=1) as queue:

        async def ask() -> list[list[str]]:
            slow = queue.submit([job(demo, "def f(", 1, 60, drafting=SpeculativeFields(enabled=False))])
            other = queue.submit([job(demo, "import os", 2, 100)])
            events = other.events(None, PATIENCE)
            while await anext(events) == (0, PromptProgress(is_waiting=True)):
                pass  # until it has the place
            returning = asyncio.create_task(read(slow))
            await asyncio.sleep(0.05)
            n_read = len(slow.states[0].stream.rounds) if slow.states[0].stream is not None else 0
            await asyncio.sleep(0.05)
            assert slow.states[0].stream is not None
            assert len(slow.states[0].stream.rounds) == n_read < 60
            queue.stop()
            return [await read(other, events), await returning]

        assert run(ask()) == [[said(alone, "import os", 2, 100)], [said(alone, "def f(", 1, 60)]]


def test_readers_that_stop_leave_sequences_of_llama_cpp_to_others(
    demo_files: tuple[Path, Path], alone: Pair
) -> None:
    """A context holds a fixed number of them. Without, the answers of the others were empty."""
    plain = SpeculativeFields(enabled=False)
    options = ModelOptions(n_ctx=CONTEXT, n_cells=4 * CONTEXT, threads=1, cache_type_v="bf16", max_scored=2)
    with open_pair(demo_files[0], target_options=options) as pair, decoding(pair, parallel=2) as queue:

        async def ask() -> list[list[str]]:
            slow = [queue.submit([job(pair, "def f(", seed, 60, drafting=plain)]) for seed in (1, 2)]
            others = [queue.submit([job(pair, "import os", seed, 40, drafting=plain)]) for seed in (3, 4)]
            return [await read(each) for each in (*others, *slow)]

        texts = run(ask())
    asked = [("import os", 3, 40), ("import os", 4, 40), ("def f(", 1, 60), ("def f(", 2, 60)]
    assert texts == [[said(alone, prompt, seed, n)] for prompt, seed, n in asked]


@pytest.mark.parametrize("streams", [True, False])
def test_a_connection_that_breaks_frees_its_slot(
    demo: Pair, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    gate = Gate(demo, monkeypatch)
    with served(demo, log_format="json") as server:
        server.lose_client(TEXT, {"prompt": "x", "max_tokens": 400, "stream": streams}, gate)
        assert gate.n_evaluations <= 1
        metrics = counters(server.client.get("/metrics").text)
        until(lambda: any(json.loads(line).get("cancelled") for line in server.log))
    assert metrics['request_success_total{finished_reason="interrupt"}'] == 1


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_the_queue_costs_nothing(
    demo: Pair, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """One that leaves while its prompt is processed costs at most one evaluation."""
    gate = Gate(demo, monkeypatch)
    body = {"prompt": "x = 1\n" * 40, "max_tokens": 40, "seed": 1, "stream": streams}
    with served(demo, parallel=1) as server:
        with server.sent(TEXT, body):
            until(lambda: server.n_running() == 1)
            with server.sent(TEXT, {**body, "prompt": "never read"}):
                until(lambda: server.service.queue.sequences()[1] == 1)
            until(lambda: server.service.queue.sequences()[1] == 0)
        until(lambda: server.n_running() == 0)
        gate.open()
        demo.call(lambda: None)  # the compute thread has finished its work
        metrics = counters(server.client.get("/metrics").text)
    assert gate.n_evaluations <= 1
    assert metrics["generation_tokens_total"] == 0
    assert metrics['request_success_total{finished_reason="interrupt"}'] == 2


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_while_its_schema_is_compiled_costs_nothing(
    demo: Pair, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    gate, compiling, is_gone = Gate(demo, monkeypatch), threading.Event(), threading.Event()
    gate.open()
    with served(demo) as server:
        compile_ = demo.json_schema

        def slow(schema: Any) -> Any:
            compiling.set()
            assert is_gone.wait(PATIENCE)
            return compile_(schema)

        monkeypatch.setattr(demo, "json_schema", slow)
        with server.sent(TEXT, {"prompt": "a", "json_schema": {"type": "object"}, "stream": streams}):
            assert compiling.wait(PATIENCE)
        server.client.get("/health")  # the event loop has seen that the client left
        is_gone.set()
        until(lambda: any("POST" in line for line in server.log))
    assert gate.n_evaluations == 0
    assert " 499 " in server.log[-1]


def test_tokens_of_a_cancelled_request_are_counted(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(demo, monkeypatch, n_free=8)
    body = {"prompt": "def f(", "max_tokens": 400, "seed": 1, "stream": True}
    with served(demo) as server:
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            next(line for line in answer.iter_lines() if line.startswith("data: "))
        until(lambda: server.n_running() == 0)
        gate.open()
        metrics = counters(server.client.get("/metrics").text)
    assert metrics['request_success_total{finished_reason="interrupt"}'] == 1
    assert 0 < metrics["generation_tokens_total"] < 400


def test_a_full_queue_over_http(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(demo, monkeypatch)
    body = {"prompt": "def f(", "max_tokens": 5, "seed": 1}
    with served(demo, parallel=1, max_queue=0) as server, ThreadPoolExecutor(1) as clients:
        running = clients.submit(server.post, "/v1/completions", body)
        until(lambda: server.n_running() == 1)
        refused = server.post("/v1/completions", body)
        gate.open()
        assert running.result().status_code == 200
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"


def test_an_interactive_request_is_the_next_to_run(demo: Pair, alone: Pair) -> None:
    """One runs beside a full set of sequences; the next waits only for it."""
    with decoding(demo, parallel=1, max_queue=2) as queue:

        async def ask() -> tuple[list[Submission], list[str]]:
            chats = [queue.submit([job(demo, "def f(", seed, 30)]) for seed in (1, 2)]
            keys = [queue.submit([job(demo, "import os", seed, 10, is_interactive=True)]) for seed in (3, 4)]
            running, n_waiting = queue.sequences()
            assert ([state.submission for state in running], n_waiting) == ([chats[0], keys[0]], 2)
            asked = [*chats, *keys]
            return asked, [text for (text,) in await asyncio.gather(*map(read, asked))]

        (_, waiting, _, next_key), texts = run(ask())
    assert texts == [said(alone, "def f(", seed, 30) for seed in (1, 2)] + [
        said(alone, "import os", seed, 10) for seed in (3, 4)
    ]
    assert next_key.states[0].started_at < waiting.states[0].started_at


def test_a_failure_in_one_text_leaves_the_others_alone(demo: Pair, alone: Pair) -> None:
    """A sequence that cannot begin, and one whose stop strings raise while it is generated."""

    class Breaking(str):
        def startswith(self, *_: Any) -> bool:
            raise RuntimeError("broken on purpose")

    with decoding(demo) as queue:

        async def ask() -> list[str]:
            good = queue.submit([job(demo, "import os", 2, 40)])
            empty = queue.submit([replace(job(demo, "a", 1, 5), prompt=Prompt(np.empty(0, dtype=np.int32)))])
            broken = queue.submit([job(demo, "def f(", 1, 50, stops=(Breaking("never said"),))])
            with pytest.raises(PromptError, match="empty"):
                await read(empty)
            with pytest.raises(RuntimeError, match="broken on purpose"):
                await read(broken)
            return await read(good)

        assert run(ask()) == [said(alone, "import os", 2, 40)]


def test_a_failure_of_an_evaluation_is_reported_and_the_next_request_is_answered(
    demo: Pair, alone: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compute thread survives any exception."""
    step, faults = Scheduler.step, [RuntimeError("broken on purpose")]

    def broken(scheduler: Scheduler) -> bool:
        is_busy = step(scheduler)
        if faults and is_busy:
            raise faults.pop()
        return is_busy

    monkeypatch.setattr(Scheduler, "step", broken)
    with served(demo) as server:
        body = {"prompt": "def f(", "seed": 1, "max_tokens": 5}
        failed = server.post("/v1/completions", body)
        assert (failed.status_code, "purpose" in failed.text) == (500, False)
        text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert text == said(alone, "def f(", 1, 5)


@pytest.mark.parametrize("fails", ["completion", "metrics"])
def test_an_end_whose_figures_fail_is_reported(
    demo: Pair, alone: Pair, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Once, the client and all requests after it waited for ever if the figures of an end failed."""

    def fail(*_: object) -> None:
        raise IndexError("of a bug")

    with decoding(demo, parallel=1) as queue:

        async def ask() -> tuple[Any, list[str]]:
            with monkeypatch.context() as patch:
                first = queue.submit([job(demo, "def f(", 1, 5)])
                second = queue.submit([job(demo, "import os", 2, 5)])
                if fails == "completion":
                    patch.setattr(AnswerStream, "completion", property(fail))
                else:
                    patch.setattr(ModelMetrics, "ended", fail)
                told = (await asyncio.gather(read(first), return_exceptions=True))[0]
            return told, await read(second)

        told, after = run(ask())
    assert after == [said(alone, "import os", 2, 5)]
    if fails == "metrics":  # the client did not ask for metrics
        assert told == [said(alone, "def f(", 1, 5)]
    else:
        assert isinstance(told, IndexError)


def test_costs_are_read_by_the_compute_thread_alone(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, the event loop read them at the end of a sequence, while the compute thread changed them."""
    readers, seconds_of, policy = set[str](), Costs.seconds_of, AutoLength()

    def noted(costs: Costs, *widths: int) -> Any:
        if costs is policy.shared.costs:
            readers.add(threading.current_thread().name)
        return seconds_of(costs, *widths)

    monkeypatch.setattr(Costs, "seconds_of", noted)
    with served(demo, policy) as server:
        server.post("/v1/completions", {"prompt": "def f(", "max_tokens": 60, "seed": 1})
    assert readers == {"llamaspec-compute"}


def test_an_answer_that_takes_too_long_ends(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "def f(", "max_tokens": 500, "seed": 1}
    with served(demo, request_timeout=0.3) as server:
        gate = Gate(demo, monkeypatch)
        assert server.post("/v1/completions", body).status_code == 504
        gate.open()
        until(lambda: server.n_running() == 0)


@pytest.mark.parametrize("streams", [False, True])
def test_the_time_of_a_request_includes_that_of_tokenizing(
    demo: Pair, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """It began when the prompt was tokenized, however long that had taken."""
    is_over = threading.Event()
    vocabulary = type(demo.target.vocabulary)
    tokenize = vocabulary.tokenize

    def slowly(*text: Any, **how: Any) -> Any:
        is_over.wait(PATIENCE)
        return tokenize(*text, **how)

    with served(demo, request_timeout=0.3) as server:
        with monkeypatch.context() as patch:
            patch.setattr(vocabulary, "tokenize", slowly)
            for path in ("/v1/completions", "/tokenize"):
                body = {"prompt": "a", "content": "a", "max_tokens": 1, "stream": streams}
                answer = server.post(path, body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
            is_over.set()
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_tokenizing_leaves_less_time_for_the_answer(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []
    events = Submission.events

    def noted(self: Submission, timeout: float | None, keep_alive: float) -> Any:
        seen.append(timeout)
        return events(self, timeout, keep_alive)

    monkeypatch.setattr(Submission, "events", noted)
    for limit in (1e6, None):
        with served(demo, request_timeout=limit) as server:
            server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert seen[0] is not None
    assert 1e6 - PATIENCE < seen[0] < 1e6
    assert seen[1] is None


def test_a_completion_over_its_time_limit_ends_once_it_has_a_line(demo: Pair, alone: Pair) -> None:
    """An editor shows whole lines, however late."""
    hours = itertools.count(step=3600.0)
    with decoding(demo, clock=lambda: next(hours)) as queue:

        async def ask() -> list[list[str]]:
            limits = (1.0, 1e9, None)
            jobs = [job(demo, "import os", 2, 60, max_seconds=limit) for limit in limits]
            return [await read(queue.submit([each])) for each in jobs]

        (cut,), *whole = run(ask())
    text = said(alone, "import os", 2, 60)
    assert whole == [[text], [text]]
    assert text.startswith(cut)
    assert "\n" in cut
    assert len(cut) < len(text)


@pytest.mark.parametrize(("keep_alive", "n_signs"), [(0.01, 2), (PATIENCE, 1)])
def test_a_silent_stream_shows_signs_of_life(
    demo: Pair, monkeypatch: pytest.MonkeyPatch, keep_alive: float, n_signs: int
) -> None:
    """At once, in the queue, and while a prompt is processed."""
    gate = Gate(demo, monkeypatch)
    body = {"prompt": "x = 1\n" * 40, "max_tokens": 2}
    with served(demo, keep_alive_seconds=keep_alive, parallel=1) as server, ThreadPoolExecutor(1) as clients:
        running = clients.submit(server.post, "/v1/completions", body)
        until(lambda: server.n_running() == 1)
        with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(2 * n_signs)] == [": waiting", ""] * n_signs
            gate.open()
            rest = list(lines)
        assert running.result().status_code == 200
    later = [line for line in rest if line.startswith(": ") and line != ": waiting"]
    assert later[0] == ": working" or later[0].startswith(": prompt ")  # if it is quick
    assert any(line.startswith(": prompt ") for line in later)
    assert rest[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("has_room", [True, False])
def test_tokens_without_a_delta_do_not_stop_the_signs_of_life(has_room: bool) -> None:
    """Tokens arrive, but the call is not complete yet; or the sequence has no room in the KV cache."""
    nobody: Any = None

    class Silent:
        def fetch(self, state: SequenceState) -> list[Event]:
            return []

    async def first_two() -> list[tuple[int, Event]]:
        queue: Any = Silent()
        submission = Submission([nobody], queue, 0.0)
        (state,) = submission.states
        stream: Any = SimpleNamespace(is_swapped_out=not has_room)
        state.started_at, state.stream = 0.0, stream
        events = submission.events(None, 0.05)

        async def generate() -> None:
            while True:
                submission.news.set()
                await asyncio.sleep(0.001)

        generating = asyncio.create_task(generate())
        try:
            return [await anext(events) for _ in range(2)]
        finally:
            generating.cancel()

    assert run(first_two()) == [(0, PromptProgress()), (0, PromptProgress(is_waiting=not has_room))]


@pytest.mark.parametrize(
    ("path", "asked", "empty"),
    [
        ("/v1/completions", {"prompt": "y = 2\n" * 40}, {"text": ""}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "z = 3\n" * 40}]}, {"delta": {}}),
    ],
)
def test_the_progress_of_a_prompt(server: Served, path: str, asked: Any, empty: Any) -> None:
    """In llama-server's form."""
    for is_cached in (False, True):
        body = {**asked, "max_tokens": 2, "return_progress": True, "stream_options": {"include_usage": True}}
        chunks = [chunk for _, chunk in server.events(path, body) if chunk != "[DONE]"]
        told = [chunk for chunk in chunks if "prompt_progress" in chunk]
        (choice,), progress = told[-1]["choices"], told[-1]["prompt_progress"]
        assert choice.items() >= {"index": 0, "finish_reason": None, **empty}.items()
        n = chunks[-1]["usage"]["prompt_tokens"] - 1  # the last one belongs to the first round
        assert (progress["total"], progress["processed"]) == (n, n)
        assert (progress["cache"] == n) == is_cached
        assert progress["time_ms"] >= 0
    assert not any("prompt_progress" in chunk for _, chunk in server.events(path, {**asked, "max_tokens": 1}))
