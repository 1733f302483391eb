"""Requests as Codex and Claude Code send them, shortened."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamaspec.chat.messages import Message, ToolCall
from llamaspec.serve.bodies import without_half_pairs
from llamaspec.serve.http_errors import RequestError
from llamaspec.serve.openai_responses import ResponsesBody
from llamaspec.serve.response_forms import arguments_of
from serving import Served

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"


def text(role: str, words: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {
        "type": "message",
        "id": f"msg_{words[:3]}",
        "role": role,
        "content": [{"type": kind, "text": words}],
    }


def function(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"],
                  "additionalProperties": False}  # fmt: skip
    return {
        "type": "function",
        "name": name,
        "description": "Runs.",
        "strict": False,
        "parameters": parameters,
    }


def test_tools_that_are_no_functions_are_left_out(talker: Served) -> None:
    """The log names them once, without control characters."""
    tools = [function("exec_command"), {"type": "web_search"}, {"type": "local\x1b[2Jshell"}]
    for _ in range(2):
        answer = talker.post(RESPONSES, {"input": "Hi", "tools": tools, "max_output_tokens": 2})
        assert answer.status_code == 200, answer.text
    assert [line for line in talker.log if "left out" in line] == [
        "left out of requests: tool local\\x1b[2Jshell, tool web_search; only functions can be called"
    ]
    nested = [{"type": "custom", "custom": {"name": "apply_patch"}}]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": nested, "max_tokens": 2}
    assert talker.post(CHAT, chat).status_code == 200


def test_items_of_a_codex_conversation() -> None:
    items = [
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": "*** Begin"},
        {"type": "local_shell_call", "id": "b", "call_id": None, "status": "completed",
         "action": {"type": "exec", "command": ["ls"]}},
        text("assistant", "Wait."),
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "Done"},
        {"type": "local_shell_call_output", "id": "b", "output": [{"type": "input_text", "text": "a.txt"}]},
        {"type": "tool_search_output", "call_id": "c", "output": {"strange": [1]}, "arguments": {"limit": 1}},
        {"type": "compaction", "encrypted_content": "gAAA"},
        text("assistant", "Both done."),
    ]  # fmt: skip
    request = ResponsesBody.model_validate({"input": items}).chat_request()
    calls = (ToolCall("a", "apply_patch", '{"input": "*** Begin"}'),
             ToolCall("b", "local_shell", '{"type": "exec", "command": ["ls"]}'))  # fmt: skip
    assert list(request.messages) == [
        Message("assistant", "Wait.", tool_calls=calls),
        Message("tool", "Done", name="apply_patch", tool_call_id="a"),
        Message("tool", "a.txt", name="local_shell", tool_call_id="b"),
        Message("assistant", "Both done."),
    ]
    assert request.left_out == ["item web_search_call", "item tool_search_output", "item compaction"]
    with pytest.raises(RequestError, match="must not be empty"):
        ResponsesBody.model_validate({"input": items[:1]}).chat_request()


def test_half_of_an_emoji_is_no_error(talker: Served) -> None:
    for word in ("cut \ud83d", "\ude00 cut", "\ud83d\ud83d\ude00", "\\\ud83d", "\ufffd"):
        body = json.dumps({"messages": [{"role": "user", "content": word}], "max_tokens": 1})
        answer = talker.client.post(CHAT, content=body)
        assert answer.status_code == 200, (body, answer.text)


def test_whole_characters_and_escaped_backslashes_stay() -> None:
    text = "\U0001f600 \\ud83d \\\\ud83d \n é"
    assert json.loads(without_half_pairs(json.dumps(text).encode())) == text
    assert (
        json.loads(without_half_pairs(rb'"\ud83d\ud83d\ude00\ude00\\ud83d"'))
        == "\ufffd\U0001f600\ufffd\\ud83d"
    )


@pytest.mark.parametrize("is_item", [False, True])
def test_tools_in_a_namespace_are_called_by_both_names(talker: Served, is_item: bool) -> None:
    """Codex sends the tools of an MCP server in a namespace: in `tools` or in an item."""
    spaces = [{"type": "namespace", "name": "mcp__files", "description": "d", "tools": [function("read")]}]
    asked: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "Read."}]
    if is_item:
        asked.insert(0, {"type": "additional_tools", "role": "developer", "tools": spaces})
    body = {
        "input": asked,
        "tools": [] if is_item else spaces,
        "tool_choice": {"type": "function", "name": "mcp__files__read"},
        "max_output_tokens": 200,
        "enable_thinking": False,
        "seed": 1,
    }
    (item,) = talker.post(RESPONSES, body).json()["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__files", "read")


def test_a_call_of_a_tool_in_a_namespace_comes_back() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    asked = ResponsesBody.model_validate(
        {
            "input": [
                text("user", "Read."),
                {**call, "namespace": "mcp__files__"},
                {**call, "namespace": "functions"},
            ]
        }
    )
    (_, answer) = asked.chat_request().messages
    assert [each.name for each in answer.tool_calls] == ["mcp__files__read", "read"]


def test_arguments_that_json_cannot_hold() -> None:
    """A schema allows 1e999, which is read as infinity, and a model may write half of an emoji."""
    assert arguments_of('{"a": 1e999, "b": [NaN, {"c": -1e999}], "d": 1}') == {
        "a": None,
        "b": [None, {"c": None}],
        "d": 1,
    }
    written = r'{"cmd": "ls", "text": "\ud83d"}'
    assert arguments_of(written) == {"cmd": "ls", "text": "\ufffd"}
    assert arguments_of(written[:-3]) == {"cmd": "ls"}
