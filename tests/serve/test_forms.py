"""Every API writes the same deltas in its own form, and its stream has the same content as its object.

The deltas are made by hand, with reasoning and calls of tools.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import anthropic
import pytest
from anthropic.types import Message as ClaudeMessage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from llamaspec.chat.families import HERMES
from llamaspec.chat.messages import ArgumentsDelta, CallDelta, ContentDelta, ReasoningDelta, TokenLogprobs
from llamaspec.chat.notation import AnswerFormat
from llamaspec.chat.parse import AnswerParser
from llamaspec.engine.completion import Completion, StopReason, summarize
from llamaspec.serve.anthropic import MessagesBody, MessagesForm
from llamaspec.serve.ollama import OllamaForm
from llamaspec.serve.openai_chat import ChatBody, ChatForm, CompletionBody, CompletionForm
from llamaspec.serve.openai_responses import ResponsesBody, ResponsesForm
from llamaspec.serve.request_queue import Event, Events, Finished, PromptProgress
from llamaspec.serve.response_forms import collected
from llamaspec.values import Logprobs
from serving import parse_events

USUAL = StopReason.END
NONE: Any = None  # a vocabulary that is never used
STOPPING: Any = SimpleNamespace(matched_stop=lambda done, stops: "end")
MESSAGES = MessagesBody.model_validate({"messages": [], "max_tokens": 5})
CHAT = ChatBody.model_validate({"messages": [], "stream_options": {"include_usage": True}})


def end(reason: StopReason = USUAL) -> Finished:
    return Finished(Completion("", (1, 2), 9, reason, (), summarize([], 3), 0.5, 4), 2)


SAID: dict[str, list[Event]] = {
    "text": [PromptProgress(), ContentDelta("Hel"), PromptProgress(3, 4), ContentDelta("lo"), end()],
    "nothing": [end()],
    "cut": [ContentDelta("Hel"), end(StopReason.LIMIT)],
    "stop": [ContentDelta("Hel"), end(StopReason.STOP)],
    "stuck": [ContentDelta("{"), end(StopReason.CONSTRAINT)],
    "cut call": [CallDelta(0, "call_1", "find"), ArgumentsDelta(0, '{"a": "b'), end(StopReason.LIMIT)],
    "reasoning": [ReasoningDelta("hm"), ReasoningDelta("m"), ContentDelta("so"), end()],
    "tools": [
        ReasoningDelta("look"),
        ContentDelta("wait"),
        CallDelta(0, "call_1", "find"),
        ArgumentsDelta(0, '{"a"'),
        ArgumentsDelta(0, ": 1}"),
        CallDelta(1, "call_2", "nap"),
        ArgumentsDelta(1, "{}"),
        end(),
    ],
    "only a tool": [CallDelta(0, "call_1", "find"), ArgumentsDelta(0, "{}"), end()],
}


CUT = ("cut", "stuck", "cut call")


def of(said: str | Sequence[Event]) -> Events:
    async def made() -> AsyncIterator[tuple[int, Event]]:
        for delta in SAID[said] if isinstance(said, str) else said:
            yield 0, delta

    return made()


@contextmanager
def always_answering(stream: bytes) -> Iterator[str]:
    """Run a server that answers every request with the same events; yield its address."""

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(stream)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def forms(
    make: Callable[[], Any], said: str | Sequence[Event]
) -> tuple[dict[str, Any], list[tuple[str | None, Any]]]:
    """Return the object and the events of an answer."""

    async def events() -> str:
        return b"".join([part async for part in make().stream(of(said), print)]).decode()

    async def whole() -> dict[str, Any]:
        return json.loads(json.dumps(make().whole(await collected(of(said), 1))))  # type: ignore[no-any-return]

    return asyncio.run(whole()), parse_events(asyncio.run(events()))


@pytest.mark.parametrize("name", SAID)
def test_chat(name: str) -> None:
    whole, events = forms(lambda: ChatForm("m", CHAT, NONE), name)
    message = ChatCompletion.model_validate(whole).choices[0].message
    *chunks, (_, done) = events
    assert done == "[DONE]"
    for _, chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    *parts, usage = [chunk for _, chunk in chunks]
    assert usage["usage"] == whole["usage"]
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message.content or "")
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert reasoning == whole["choices"][0]["message"].get("reasoning_content", "")
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"id": call.get("id"), "name": "", "arguments": ""})
            for key, value in call["function"].items():
                known[key] += value
    expected = [{"id": call.id, **call.function.model_dump()} for call in message.tool_calls or []]  # type: ignore[union-attr]
    assert [calls[i] for i in sorted(calls)] == expected
    assert parts[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert parts[-1]["timings"] == whole["timings"]


def test_why_a_chat_ends() -> None:
    reasons = {
        name: forms(lambda: ChatForm("m", CHAT, NONE), name)[0]["choices"][0]["finish_reason"]
        for name in SAID
    }
    assert {name for name, reason in reasons.items() if reason == "length"} == set(CUT)
    assert {name for name, reason in reasons.items() if reason == "tool_calls"} == {"tools", "only a tool"}


@pytest.mark.parametrize("name", ["text", "nothing", "cut"])
def test_completions(name: str) -> None:
    whole, events = forms(lambda: CompletionForm("m", CompletionBody(prompt="a"), NONE), name)
    *chunks, (_, done) = events
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for _, chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1][1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert whole["usage"] == {
        "prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 2},
    }  # fmt: skip


def test_offsets_of_tokens_that_are_parts_of_characters() -> None:
    """Once, each part counted as a character, and every offset after it was too large."""
    pieces = {1: b"\xe2\x82", 2: b"\xac", 3: b"b"}
    vocabulary: Any = SimpleNamespace(piece=pieces.__getitem__)
    told = [TokenLogprobs(token, Logprobs(-1.0, ()), begin) for token, begin in ((1, 0), (2, 0), (3, 1))]
    said: list[Event] = [
        ContentDelta("€", (), tuple(told[:2])),
        ContentDelta("b", (), tuple(told[2:])),
        end(),
    ]
    body = CompletionBody(prompt="a", logprobs=0)
    whole, events = forms(lambda: CompletionForm("m", body, vocabulary), said)
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for _, chunk in events[:-1]]
    assert offsets == [[0, 0], [1], []]


@pytest.mark.parametrize("name", SAID)
def test_messages(name: str) -> None:
    """Anthropic's own client makes the same object from the events."""

    def form() -> Any:
        return MessagesForm("m", MESSAGES, 9, STOPPING)

    async def text() -> bytes:
        return b"".join([part async for part in form().stream(of(name), print)])

    stream = asyncio.run(text())

    expected = ClaudeMessage.model_validate(forms(form, name)[0])
    asked: Any = [{"role": "user", "content": "a"}]
    with (
        always_answering(stream) as url,
        anthropic.Anthropic(api_key="none", base_url=url, max_retries=0) as client,
        client.messages.stream(model="any", max_tokens=5, messages=asked) as parts,
    ):
        final = parts.get_final_message()
    told = [block.model_dump(exclude={"parsed_output"}) for block in final.content]
    assert told == [block.model_dump() for block in expected.content]
    assert (final.stop_reason, final.stop_sequence) == (expected.stop_reason, expected.stop_sequence)
    assert final.usage.output_tokens == expected.usage.output_tokens == 3
    assert expected.usage.input_tokens + (expected.usage.cache_read_input_tokens or 0) == 9
    events = parse_events(stream.decode())
    assert all(kind == data["type"] for kind, data in events)
    begun = events[0][1]["message"]["usage"]
    assert begun["input_tokens"] + begun["cache_read_input_tokens"] == 9
    assert events[-1][0] == "message_stop"
    starts = [data["index"] for kind, data in events if kind == "content_block_start"]
    assert starts == [data["index"] for kind, data in events if kind == "content_block_stop"]
    assert starts == list(range(len(starts)))


@pytest.mark.parametrize("name", SAID)
def test_ollama(name: str) -> None:
    """A call comes whole, with its arguments as an object."""

    async def both() -> tuple[dict[str, Any], list[Any]]:
        lines = b"".join([part async for part in OllamaForm("m", is_chat=True).stream(of(name), print)])
        whole = OllamaForm("m", is_chat=True).whole(await collected(of(name), 1))
        return whole, [json.loads(line) for line in lines.splitlines()]

    whole, parts = asyncio.run(both())
    messages = [part["message"] for part in parts]
    for key in ("content", "thinking"):
        told = "".join(message.get(key, "") for message in messages)
        assert told == whole["message"].get(key, "")
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert calls == whole["message"].get("tool_calls", [])
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["done_reason"] == whole["done_reason"] == ("length" if name in CUT else "stop")


@pytest.mark.parametrize("name", SAID)
def test_responses(name: str) -> None:
    def form() -> Any:
        return ResponsesForm("m", ResponsesBody(input="a"))

    whole, events = forms(form, name)
    OpenAIResponse.model_validate(whole)
    assert whole["store"] is False, "the server keeps nothing"
    kinds: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for number, (kind, data) in enumerate(events):
        assert (kind, number) == (data["type"], data["sequence_number"])
        kinds.validate_python(data)
    last = events[-1][1]["response"]
    assert events[-1][0] == ("response.incomplete" if name in CUT else "response.completed")
    assert nameless(last["output"]) == nameless(whole["output"])
    texts = {kind: "".join(data["delta"] for other, data in events if other == f"response.{kind}.delta")
             for kind in ("output_text", "reasoning_text")}  # fmt: skip
    assert texts["output_text"] == OpenAIResponse.model_validate(whole).output_text
    done = [data["item"] for kind, data in events if kind == "response.output_item.done"]
    assert done == last["output"]
    added = [data["item"]["id"] for kind, data in events if kind == "response.output_item.added"]
    assert added == [item["id"] for item in done]


@pytest.fixture
def three_calls() -> list[Event]:
    """The deltas of an answer with three calls, parsed one character at a time."""
    tools: Any = [{"name": name, "parameters": {}} for name in ("find", "nap")]
    parser = AnswerParser(AnswerFormat(HERMES), tools)
    calls = [("find", {"a": 1}), ("find", {"a": 1}), ("nap", {})]  # two equal calls are two calls
    written = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )
    deltas: list[Any] = [delta for letter in written for delta in parser.feed(letter)]
    return [*deltas, *parser.finish(), end()]


def test_three_calls_of_one_chat_answer_can_be_told_apart(three_calls: list[Event]) -> None:
    """In every choice, each call has its index, and its id, type and name come first and only once."""
    body = ChatBody.model_validate({"messages": [], "n": 2})

    async def both() -> AsyncIterator[tuple[int, Event]]:
        for delta in three_calls:
            yield 0, delta
            yield 1, delta

    async def events() -> str:
        return b"".join([part async for part in ChatForm("m", body, NONE).stream(both(), print)]).decode()

    choices = [chunk["choices"][0] for _, chunk in parse_events(asyncio.run(events())) if chunk != "[DONE]"]
    for i in range(2):
        deltas = (choice["delta"] for choice in choices if choice["index"] == i)
        calls = {n: [*parts] for n, parts in itertools.groupby(
            (call for delta in deltas for call in delta.get("tool_calls", ())), lambda call: call["index"]
        )}  # fmt: skip
        firsts = [(first["type"], first["function"]["name"]) for first, *_ in calls.values()]
        assert firsts == [("function", "find"), ("function", "find"), ("function", "nap")]
        assert len({first["id"] for first, *_ in calls.values()}) == len(calls) == 3
        for first, *rest in calls.values():
            assert all(call.keys() == {"index", "function"} for call in rest)
            written = "".join(call["function"]["arguments"] for call in rest)
            assert written == ("{}" if first["function"]["name"] == "nap" else '{"a": 1}')


def test_three_calls_of_one_response_can_be_told_apart(three_calls: list[Event]) -> None:
    """Every event of an item has its id: clients that collect calls by `item_id` alone lost them."""
    whole, events = forms(lambda: ResponsesForm("m", ResponsesBody(input="a")), three_calls)
    of_items = [data for _, data in events if "response" not in data]
    named = [(data["item_id"], data["output_index"]) for data in of_items]
    places = [place for place, _ in itertools.groupby(named)]
    done = [data["item"] for kind, data in events if kind == "response.output_item.done"]
    assert places == [(item["id"], i) for i, item in enumerate(done)]
    assert len({item["call_id"] for item in done}) == 3
    assert (
        [(item["name"], item["arguments"]) for item in done]
        == [(item["name"], item["arguments"]) for item in whole["output"]]
        == [("find", '{"a": 1}'), ("find", '{"a": 1}'), ("nap", "{}")]
    )


def nameless(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items without ids, and without the empty text that only the object has."""
    return [
        {key: value for key, value in item.items() if key != "id"}
        for item in items
        if item["type"] != "message" or item["content"][0]["text"]
    ]
