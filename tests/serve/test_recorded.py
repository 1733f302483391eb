"""Recorded requests of agents: each is answered, with a call in the form of its API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from interop_parts.server import Script, call, cut, scripted_server
from patience import PATIENCE
from serve_soak import TEMPLATE
from serving import parse_events

LONG = "one two three four. " * 2000  # fits the context of a scripted server once, not twice


class Recorded(NamedTuple):
    """A recorded request of a client."""

    about: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    overflows: bool  # whether it is too long for a scripted server


def recorded(client: str) -> list[Recorded]:
    """Return the requests of a client. `fields_of`: the index of an earlier one that has the missing fields.

    "(long text)" stands for `LONG`.
    """
    text = (Path(__file__).with_name("recorded") / f"{client}.json").read_text()
    told = json.loads(text.replace("(long text)", LONG))
    found: list[Recorded] = []
    for i, each in enumerate(told["requests"]):
        shared = found[each["fields_of"]].body if "fields_of" in each else {}
        about, headers = each.get("about", f"request {i}"), told.get("headers", {})
        body = {**shared, **each["body"]}
        found.append(Recorded(about, each["path"], headers, body, "overflows" in each))
    return found


AGENTS = ("aider", "claude-code", "codex", "opencode")
REQUESTS = [(name, request) for name in AGENTS for request in recorded(name)]
# As in Qwen's template: there is one system message, at the beginning, and arguments are an object.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% for name, _ in c.function.arguments | items %}{{ name }}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def http(script: Script) -> Iterator[httpx.Client]:
    with (
        scripted_server(script, template=STRICT + TEMPLATE) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        yield client


def texts(told: Any, key: str = "") -> str:
    """Return the text and the names of calls of an answer, in their order."""
    if isinstance(told, dict):
        return "".join(texts(value, name) for name, value in told.items())
    if isinstance(told, list):
        return "".join(texts(value, key) for value in told)
    return told if isinstance(told, str) and key in ("content", "text", "name") else ""


@pytest.mark.parametrize(
    ("name", "asked"), REQUESTS, ids=[f"{name}, {asked.about}" for name, asked in REQUESTS]
)
def test_requests_of_agents(http: httpx.Client, script: Script, name: str, asked: Recorded) -> None:
    tools = [tool.get("function", tool) for tool in asked.body.get("tools") or ()]
    names = [tool["name"] for tool in tools if {"parameters", "input_schema"} & tool.keys()]
    called = call(names[-1], a="é") if names else ""
    script.begin([f"<think>\nHm.\n</think>\n\nSo.{called}"], with_tools=False)
    answer = http.post(asked.path, json=asked.body, headers=asked.headers)
    if asked.overflows:
        assert '"code":"context_length_exceeded"' in answer.text
        assert ("event: response.failed" in answer.text) == (name == "codex")
        return
    assert answer.status_code == httpx.codes.OK, answer.text
    if "count_tokens" in asked.path:
        assert answer.json()["input_tokens"] > 0
        return
    events = parse_events(answer.text) if asked.body.get("stream") else [(None, answer.json())]
    told = texts([data for _, data in events])
    assert "So." in told
    assert "tool_call>" not in told
    assert not names or names[-1] in told


def test_codex_sends_a_cut_call_back_as_it_was(http: httpx.Client, script: Script) -> None:
    requests = {asked.about: asked for asked in recorded("codex")}
    first, later = requests["first turn"], requests["after a call that was cut"].body["input"]
    script.begin([cut(call("exec_command", cmd="echo hello > hello.txt"))])
    events = dict(parse_events(http.post(first.path, json=first.body).text))
    assert events["response.incomplete"]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    sent = events["response.output_item.done"]["item"]
    back = next(item for item in later if item["type"] == "function_call")
    for field in ("type", "status", "name", "arguments"):
        assert sent[field] == back[field]
