"""A conversation that is too long is refused with the phrases by which clients recognize it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from serving import CONTEXT, Served

LONG = [{"role": "user", "content": "x = 1\n" * CONTEXT}]
HUGE = [{"role": "user", "content": "x" * 500_000}]  # too long to be tokenized
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def body(path: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        TEXT: {"prompt": messages[0]["content"]},
        RESPONSES: {"input": messages},
        MESSAGES: {"messages": messages, "max_tokens": 5},
    }.get(path, {"messages": messages})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("messages", [LONG, HUGE], ids=["long", "huge"])
@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_clients_of_openai_and_llama_server(
    server: Served, path: str, messages: list[dict[str, Any]], stream: bool
) -> None:
    if path == RESPONSES and stream:  # as in OpenAI's API, and the only form that Codex recognizes
        events = server.events(path, body(path, messages))
        assert [name for name, _ in events] == [
            "response.created", "response.in_progress", "response.failed",
        ]  # fmt: skip
        error = events[-1][1]["response"]["error"]
    else:
        answer = server.post(path, {**body(path, messages), "stream": stream})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["n_ctx"] == CONTEXT
        assert f"request ({error['n_prompt_tokens']} tokens)" in error["message"]
        assert error["n_prompt_tokens"] >= CONTEXT
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert "exceeds the available context size" in error["message"]
    assert ("estimated" in error["message"]) == (messages is HUGE)


@pytest.mark.parametrize("messages", [LONG, HUGE], ids=["long", "huge"])
def test_clients_of_anthropic(server: Served, messages: list[dict[str, Any]]) -> None:
    answer = server.post(MESSAGES, body(MESSAGES, messages))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    told = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert told is not None
    assert int(told[1]) > int(told[2]) == CONTEXT - 1
