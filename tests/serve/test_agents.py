"""Requests as Codex and Claude Code send them, shortened."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamaspec import Pair
from llamaspec.chat.messages import Message, ToolCall
from llamaspec.chat.template import ChatTemplate
from llamaspec.serve.bodies import without_half_pairs
from llamaspec.serve.http_errors import RequestError
from llamaspec.serve.openai_responses import ResponsesBody
from llamaspec.serve.response_forms import arguments_of
from serve_soak import TEMPLATE as TALKER
from serving import Served, served

RESPONSES, CHAT, MESSAGES = "/v1/responses", "/v1/chat/completions", "/v1/messages"
ITEM_DONE = "response.output_item.done"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + TALKER
)


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


CODEX: dict[str, Any] = {  # as codex-cli 0.169 sends the second request of a turn
    "model": "any",
    "input": [
        text("developer", "You are a coding agent."),
        text("developer", "<skills_instructions>"),
        text("user", "<environment_context>"),
        text("user", "List the files."),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "function_call", "status": "completed", "id": "fc_1", "name": "exec_command",
         "arguments": '{"cmd": "ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "a.txt\n"},
        text("developer", "Now be brief."),
        text("user", "Go on."),
    ],
    "tools": [
        function("exec_command"),
        {"type": "namespace", "name": "multi_agent_v1", "description": "", "tools": [function("spawn")]},
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "grammar"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "local\x1b[2Jshell"},
    ],
    "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": "auto"},
    "store": False, "stream": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "01a2",
    "client_metadata": {"x-codex-window-id": "01a2:0"}, "max_output_tokens": 4, "seed": 1,
}  # fmt: skip


def test_codex(demo: Pair) -> None:
    """Tools that are not functions are left out, and logged once, without control characters."""
    with served(demo, template=STRICT) as server:
        for _ in range(2):
            answer = server.post(RESPONSES, CODEX)
            assert answer.status_code == 200, answer.text
        told = [line for line in server.log if "left out" in line]
        assert told == [
            "left out of requests: tool custom apply_patch, tool local\\x1b[2Jshell, "
            "tool web_search; only functions can be called"
        ]
        json_tool = {"type": "custom", "custom": {"name": "apply_patch"}}
        chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": [json_tool], "max_tokens": 2}
        assert server.post(CHAT, chat).status_code == 200


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


TALK = [Message("system", "one"), Message("system", "two"), Message("user", "u"), Message("system", "three"),
        Message("assistant", "a")]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TALKER, [Message("system", "one\n\ntwo"), *TALK[2:]]),
        (STRICT, [Message("system", "one\n\ntwo\n\nthree"), TALK[2], TALK[4]]),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
         [Message("user", "one\n\ntwo\n\nthree\n\nu"), TALK[4]]),
    ],
    ids=["takes it", "refuses it", "drops it"],
)  # fmt: skip
def test_system_messages_become_one(source: str, expected: list[Message]) -> None:
    """A later one stays in its place if the template accepts that, so that the cached prefix stays valid."""
    accepted = ChatTemplate(source, "<s>", "</s>").accepted
    assert accepted.messages(TALK) == expected
    assert accepted.messages(TALK[2:3]) == TALK[2:3]


OTHERS = [  # parts that come from another server, and that clients send on
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result"}]},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "s2", "content": {"stdout": "x"}},
    {"type": "mcp_tool_use", "id": "s3", "name": "y", "server_name": "z", "input": {}},
    {"type": "compaction", "content": None},
    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
]


@pytest.mark.parametrize("path", [MESSAGES, CHAT])
def test_parts_from_another_server_are_left_out_of_an_answer(talker: Served, path: str) -> None:
    said = {"role": "assistant", "content": [*OTHERS, {"type": "text", "text": "Done."}]}
    messages = [{"role": "user", "content": "Hi."}, said, {"role": "user", "content": "Go on."}]
    plain = [messages[0], {"role": "assistant", "reasoning_content": "Hm.", "content": "Done."}, messages[2]]
    answers = [talker.post(path, {"messages": each, "max_tokens": 1}) for each in (messages, plain)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert len({_n_read(answer.json()["usage"]) for answer in answers}) == 1


def _n_read(usage: dict[str, Any]) -> int:
    """Return the tokens of a prompt, in any API."""
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
    return sum(usage.get(name, 0) for name in names)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_refusal_in_an_answer_is_its_text(path: str, talker: Served) -> None:
    asked, answered = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "No."}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    name = "messages" if path == CHAT else "input"
    bodies = [{name: [asked, said, asked]} for said in (refused, answered)]
    limits = {"max_tokens": 1, "max_output_tokens": 1}
    assert len({_n_read(talker.post(path, body | limits).json()["usage"]) for body in bodies}) == 1


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
@pytest.mark.parametrize("stream", [False, True])
def test_tools_in_a_namespace_are_called_by_both_names(talker: Served, is_item: bool, stream: bool) -> None:
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
    if stream:
        items = [data["item"] for name, data in talker.events(RESPONSES, body) if name == ITEM_DONE]
    else:
        items = talker.post(RESPONSES, body).json()["output"]
    (item,) = items
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


def test_a_number_that_is_too_large_for_json_is_null() -> None:
    """A schema allows 1e999, which is read as infinity. Once, the answer was an internal error."""
    assert arguments_of('{"a": 1e999, "b": [NaN, {"c": -1e999}], "d": 1}') == {
        "a": None,
        "b": [None, {"c": None}],
        "d": 1,
    }


def test_half_of_an_emoji_in_arguments_loses_no_argument(talker: Served) -> None:
    """A model may write it, and clients send it back."""
    written = r'{"cmd": "ls", "text": "\ud83d"}'
    assert arguments_of(written) == {"cmd": "ls", "text": "\ufffd"}
    assert arguments_of(written[:-3]) == {"cmd": "ls"}
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": written}}
    messages = [
        {"role": "user", "content": "Run."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a"},
    ]
    answer = talker.post(CHAT, {"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
