"""Schemas of clients: one that does not compile affects no other, and descriptions change nothing."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from llamaspec import Pair
from llamaspec.sampling.schemas import subschemas, without_prose
from serve_soak import TEMPLATE as TALKER
from serving import Served, served

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER: Any = [{"role": "user", "content": "Which one?"}]
BAD = {"type": "string", "pattern": "(?=x)y"}  # llguidance does not support this expression
INNER = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"anyOf": [{"type": "null"}, BAD]}}}
HELD = {"type": "object", "properties": {"size": {"enum": [1, 2, 3]}}, "required": ["size"],
        "additionalProperties": False}  # fmt: skip
SILENT = TALKER.replace("if tools", "if tools and false")  # the prompt does not depend on the tools
QWEN = f"{{# <tool_call> <function= <parameter= #}}{TALKER}"


def tool(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def call_of(server: Served, name: str, tools: Any, seed: int = 1) -> Any:
    """Return the function of a forced call."""
    choice = {"type": "function", "function": {"name": name}} if name else "required"
    body = {"messages": USER, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False,
            "max_tokens": 250, "reasoning_effort": "none", "seed": seed}  # fmt: skip
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    return call["function"]


# Schemas that do not compile.


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHAT, {"messages": USER,
                "response_format": {"type": "json_schema", "json_schema": {"schema": INNER}}},
         "response_format.json_schema.schema.properties.b.anyOf.1"),
        (TEXT, {"prompt": "a", "json_schema": {"items": BAD}}, "json_schema.items"),
        (TEXT, {"prompt": "a", "json_schema": BAD}, "json_schema"),
        (TEXT, {"prompt": "a", "json_schema": {"properties": {"a": {"items": {"$ref": "#"}}, "b": BAD}}},
         "json_schema.properties.b"),
        (TEXT, {"prompt": "a", "json_schema": {"$defs": {"x": BAD}, "items": {"$ref": "#/$defs/x"}}},
         "json_schema.$defs.x"),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "schema": INNER}}},
         "text.format.schema.properties.b.anyOf.1"),
    ],
)  # fmt: skip
def test_the_wrong_part_of_a_schema_is_named(server: Served, path: str, body: Any, place: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == place


def test_a_schema_with_many_parts_is_searched_in_few_steps(
    server: Served, demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, each part took a compilation, which were seconds for a schema within the limits."""
    properties = {**{f"p{i}": {"type": "boolean"} for i in range(1000)}, "bad": BAD}
    compiled, compile_schema = list[object](), demo.json_schema

    def counted(schema: Any) -> Any:
        compiled.append(schema)
        return compile_schema(schema)

    monkeypatch.setattr(demo, "json_schema", counted)
    answer = server.post(TEXT, {"prompt": "a", "json_schema": {"properties": properties}})
    assert answer.json()["error"]["param"] == "json_schema.properties.bad"
    assert len(compiled) < 20


@pytest.mark.parametrize("template", [TALKER, QWEN], ids=["hermes", "qwen-xml"])
def test_one_schema_that_does_not_compile_affects_no_other(demo: Pair, template: str) -> None:
    """Once, no schema was enforced then, and nothing was logged."""
    tools = [tool("held", HELD), tool("wrong", INNER), tool("also", HELD)]
    with served(demo, template=template) as server:
        for seed in range(3):
            called = call_of(server, "", tools, seed)
            if called["name"] != "wrong":
                jsonschema.validate(json.loads(called["arguments"]), HELD)
        assert call_of(server, "wrong", tools)["arguments"].startswith("{")
        told = [line for line in server.log if "cannot be enforced" in line]
        assert len(told) == 1
        assert "wrong (parameters.properties.b.anyOf.1: " in told[0]
        strict = [tools[0], tool("wrong", INNER, strict=True)]
        error = server.post(CHAT, {"messages": USER, "tools": strict}).json()["error"]
        assert error["param"] == "tools"
        assert "wrong: parameters.properties.b.anyOf.1" in error["message"]
        strict = [tool("held", HELD, strict=True), tools[1]]
        jsonschema.validate(json.loads(call_of(server, "held", strict)["arguments"]), HELD)


def test_schemas_that_are_too_large_together(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest ones are not enforced."""
    large = {**HELD, "properties": {"size": {"enum": [1, *(f"{i:0100}" for i in range(200))]}}}
    tools = [*(tool(f"large_{i}", large) for i in range(4)), tool("held", HELD)]
    with served(demo, template=SILENT) as server:
        monkeypatch.setattr(server.service.builder, "check_size", lambda *_: None)
        for seed in range(3):
            called = call_of(server, "", tools, seed)
            if called["name"] == "held":
                jsonschema.validate(json.loads(called["arguments"]), HELD)
        told = [line for line in server.log if "cannot be enforced" in line]
        assert len(told) == 1
        assert "large_0 (" in told[0]
        assert "large_1" not in told[0]


@pytest.mark.parametrize("guidance", ["x", {"whitespace_pattern": "("}, {"never": 1}, None])
def test_options_of_llguidance_that_are_wrong(talker: Served, guidance: Any) -> None:
    """They affect one tool only, and are never an internal error."""
    tools = [tool("wrong", {**HELD, "x-guidance": guidance}), tool("held", HELD)]
    jsonschema.validate(json.loads(call_of(talker, "held", tools)["arguments"]), HELD)
    assert call_of(talker, "wrong", tools)["name"] == "wrong"
    answer = talker.post(TEXT, {"prompt": "a", "json_schema": {**HELD, "x-guidance": guidance}})
    assert answer.status_code in (200, 400)


# Descriptions.

WORDS = ("</parameter>", "<tool_call>", "\"quotes\" \\ and 'others'", "{{ 7 * 7 }}{% raw %}", "é\n" * 5_000)


def worded(schema: Any, words: str) -> Any:
    """Return a schema with a description, a title and the like in every part."""
    if not isinstance(schema, dict):
        return schema
    prose = {"description": words, "title": words, "default": words, "examples": [words], "$comment": words}
    inner = {
        key: {name: worded(each, words) for name, each in schema[key].items()}
        for key in ("properties", "$defs")
        if key in schema
    }
    return {**schema, **inner, **prose}


NAMED = {  # has keywords as names of properties
    "type": "object",
    "properties": {"description": {"type": "string", "enum": ["a"]}, "title": {"$ref": "#/$defs/default"}},
    "required": ["description", "title"],
    "additionalProperties": False,
    "$defs": {"default": {"const": {"title": 1}}},
}


@pytest.mark.parametrize("words", WORDS, ids=range(len(WORDS)))
def test_wording_never_changes_a_schema(words: str) -> None:
    for schema in (HELD, INNER, NAMED):
        assert without_prose(worded(schema, words)) == schema


def test_descriptions_do_not_count_as_schema(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 tools with descriptions of 1.6 KB each, and a response format with one of 70 KB."""
    long = "Says what it does. " * 84
    tools = [tool(f"f{i}", worded(HELD, long), description=long) for i in range(60)]
    with served(demo, template=SILENT) as server:
        monkeypatch.setattr(server.service.builder, "check_size", lambda *_: None)
        jsonschema.validate(json.loads(call_of(server, "f59", tools)["arguments"]), HELD)
        assert not any("cannot be enforced" in line for line in server.log)
        body = {"prompt": "a", "json_schema": worded(HELD, long * 45), "max_tokens": 100}
        answer = server.post(TEXT, body)
        assert answer.status_code == 200, answer.text[:200]
        jsonschema.validate(json.loads(answer.json()["choices"][0]["text"]), HELD)


def test_the_parts_of_a_schema() -> None:
    schema = {**NAMED, "not": HELD, "oneOf": [HELD, True], "items": False, "const": {"type": "x"}}
    assert [path for path, _ in subschemas(schema)] == [
        "properties.description", "properties.title", "$defs.default", "not", "oneOf.0",
    ]  # fmt: skip
