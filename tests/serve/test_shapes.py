"""Answers match their response format: in every API, whole and streamed."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from llamaspec import FixedLength, Pair, Sampling
from llamaspec.serve.constraints import MAX_COMPILED
from patience import PATIENCE, until
from serving import Served, served

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": (CHAT, {**HI, "response_format": OPENAI}),
    "schema in response_format": (
        CHAT,
        {**HI, "response_format": {"type": "json_object", "schema": SCHEMA}},
    ),
    "json_schema": (CHAT, {**HI, "json_schema": SCHEMA}),
    "completions": (TEXT, {"prompt": "x = ", "max_tokens": 200, "json_schema": SCHEMA}),
    "text.format": (
        RESPONSES,
        {"input": "Hi", "max_output_tokens": 200, "text": {"format": {**OPENAI, "schema": SCHEMA}}},
    ),
    "output_config": (
        MESSAGES,
        {**HI, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
}
COMPLETE = {"stop", "end_turn", "completed"}


def whole(path: str, answer: dict[str, Any]) -> tuple[str, str]:
    """Return the text of an answer, and why it ended."""
    if path == RESPONSES:
        return answer["output"][-1]["content"][0]["text"], answer["status"]
    if path == MESSAGES:
        return answer["content"][-1]["text"], answer["stop_reason"]
    (choice,) = answer["choices"]
    return choice["text"] if path == TEXT else choice["message"]["content"], choice["finish_reason"]


def streamed(path: str, events: list[tuple[str | None, Any]]) -> tuple[str, str]:
    if path == RESPONSES:
        return whole(path, events[-1][1]["response"])
    if path == MESSAGES:
        deltas = [data["delta"] for kind, data in events if kind == "content_block_delta"]
        stop = next(data["delta"]["stop_reason"] for kind, data in events if kind == "message_delta")
        return "".join(delta.get("text", "") for delta in deltas), stop
    choices = [data["choices"][0] for _, data in events[:-1]]
    texts = [choice["text"] if path == TEXT else choice["delta"].get("content", "") for choice in choices]
    return "".join(texts), choices[-1]["finish_reason"]


@pytest.mark.parametrize("way", WAYS)
def test_every_finished_answer_matches_the_schema(server: Served, way: str) -> None:
    path, body = WAYS[way]
    asked = {**body, "seed": 1, "temperature": 1.0}
    answer = server.post(path, asked)
    assert answer.status_code == 200, answer.text
    text, reason = whole(path, answer.json())
    assert reason in COMPLETE
    jsonschema.validate(json.loads(text), SCHEMA)
    assert streamed(path, server.events(path, asked)) == (text, reason)


def test_the_text_is_that_of_constrained_decoding_without_a_draft(server: Served, alone: Pair) -> None:
    path, body = WAYS["completions"]
    stream = alone.stream(
        "x = ", sampling=Sampling(), seed=3, max_tokens=200, policy=FixedLength(0),
        constraint=alone.json_schema(SCHEMA),
    )  # fmt: skip
    assert whole(path, server.post(path, {**body, "seed": 3}).json())[0] == stream.run().text


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_grammars_and_objects(server: Served, path: str, enabled: bool) -> None:
    """With a draft and without one."""
    body = {**HI, "prompt": "a", "seed": 1, "speculative": {"enabled": enabled}}
    text, reason = whole(path, server.post(path, {**body, "grammar": 'root ::= "yes" | "no"'}).json())
    assert (text in ("yes", "no"), reason) == (True, "stop")
    answer = server.post(path, {**body, "response_format": {"type": "json_object"}, "max_tokens": 400})
    text, reason = whole(path, answer.json())
    assert reason == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize("more", [{"thinking_budget_tokens": 6}, {"reasoning_effort": "none"}])
def test_after_reasoning(talker: Served, more: dict[str, Any]) -> None:
    path, body = WAYS["response_format"]
    thinking = {"enable_thinking": True} if "reasoning_effort" not in more else {}
    for seed in range(3):
        answer = talker.post(path, {**body, **thinking, **more, "seed": seed}).json()
        jsonschema.validate(json.loads(whole(path, answer)[0]), SCHEMA)
        thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert thought == more.get("thinking_budget_tokens", 0)


def test_a_format_together_with_tools_is_refused(talker: Served) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    error = talker.post(CHAT, {**HI, "tools": tools, "response_format": OPENAI}).json()["error"]
    assert error["param"] == "response_format"
    allowed = {**HI, "tools": tools, "tool_choice": "none", "response_format": OPENAI}
    answer = talker.post(CHAT, {**allowed, "seed": 1, "reasoning_effort": "none"}).json()
    jsonschema.validate(json.loads(whole(CHAT, answer)[0]), SCHEMA)


def test_a_schema_is_compiled_once(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = demo.json_schema

    def noted(schema: str) -> Any:
        compiled.append(schema)
        return compile_(schema)

    monkeypatch.setattr(demo, "json_schema", noted)
    with served(demo) as server:
        asked = {"prompt": "a", "json_schema": SCHEMA, "max_tokens": 1}
        for seed in range(3):
            server.post(TEXT, {**asked, "seed": seed})
        assert len(compiled) == 1
        for i in range(MAX_COMPILED):
            server.post(TEXT, {"prompt": "a", "grammar": f'root ::= "{i}"', "max_tokens": 1})
        server.post(TEXT, asked)
        assert len(compiled) == 2  # the first one has left the cache


def test_others_are_answered_while_a_schema_is_compiled(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, compile_ = threading.Event(), threading.Event(), demo.json_schema

    def slowly(schema: str) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        return compile_(schema)

    monkeypatch.setattr(demo, "json_schema", slowly)
    with served(demo) as server, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(server.post, TEXT, {"prompt": "a", "json_schema": SCHEMA, "max_tokens": 1})
        until(begun.is_set)
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert not asked.done()
        go_on.set()
        assert asked.result().status_code == 200
