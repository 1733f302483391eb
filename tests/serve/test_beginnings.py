"""Conversations that end with the beginning of an answer, and incomplete calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamaspec import Pair
from llamaspec.chat.template import ChatTemplate
from llamaspec.serve.anthropic import MessagesBody
from llamaspec.serve.openai_chat import ChatBody
from llamaspec.serve.openai_responses import ResponsesBody
from serve_soak import SCHEMA
from serve_soak import TEMPLATE as TALKER
from serving import TEMPLATE, Served, said, served

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# As in the templates of Qwen3-Coder and others: needs arguments as an object.
ITEMS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call><function={{ call.function.name }}>{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>{{ value }}</parameter>{% endfor %}</function></tool_call>"
    "{% endfor %}{% endfor %}{# tools #}<|assistant|>"
)
IN_TEXT = (
    ITEMS.partition("{% for key")[0]
    + "{{ '=' + call.function.arguments }}{% endfor %}{% endfor %}{# tools #}"
)
USER: dict[str, Any] = {"role": "user", "content": "def f(x):"}


def ended_with(last: str, **more: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": last}], "seed": 4, "max_tokens": 12, **more}


# Incomplete calls.

CUT = ['{"path": "a', "[1]", "null", "{} {}", '"x"', '{"a": "\\ud800"}', '{"a": ' + "[" * 300, "nonsense"]


def sessions_with(arguments: str) -> list[ChatBody | ResponsesBody | MessagesBody]:
    """Return the request after an incomplete call, in each API."""
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": arguments}}
    item = {"type": "function_call", "call_id": "a", "name": "find", "arguments": arguments}
    block = {"type": "tool_use", "id": "a", "name": "find", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "cut off"}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    talk = [USER, said, {"role": "tool", "tool_call_id": "a", "content": "cut off"}]
    items = [USER, item, {"type": "function_call_output", "call_id": "a", "output": "cut off"}]
    blocks = [USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    return [
        ChatBody.model_validate({"messages": talk}),
        ResponsesBody.model_validate({"input": items}),
        MessagesBody.model_validate({"messages": blocks, "max_tokens": 2}),
    ]


@pytest.mark.parametrize("source", [ITEMS, IN_TEXT], ids=["arguments as an object", "as text"])
def test_a_call_that_was_cut_does_not_end_the_session(source: str) -> None:
    """Once, the server refused every later request of a session with an incomplete call of its own."""
    template = ChatTemplate(source, "<s>", "</s>")
    for arguments in CUT:
        texts = {template.render(body.chat_request().messages).text for body in sessions_with(arguments)}
        assert len(texts) == 1
        assert b"cut off" in texts.pop()


def test_what_a_template_gets_of_a_cut_call() -> None:
    """The text of the call stays as it was, so that its tokens are cached."""
    template = ChatTemplate(TALKER, "<s>", "</s>")

    def rendered(arguments: str) -> str:
        return template.render(sessions_with(arguments)[0].chat_request().messages[:2]).text.decode()

    cut = '{"path": "a", "lines": [1, {"to": "b'
    assert f' find {cut}"}}]}}#' in rendered(cut)
    for text in ("[1]", "null", "nonsense"):
        assert f" find {json.dumps({'arguments': text})}#" in rendered(text)


def test_a_refusal_names_the_message(demo: Pair) -> None:
    no_blue = ITEMS.replace("{{ m.content }}", "{{ m.content or raise_exception('no text') }}")
    talk = [USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": ""}, USER]
    with served(demo, template=no_blue) as server:
        error = server.post(CHAT, {"messages": talk, "max_tokens": 2}).json()["error"]
        assert error["param"] == "messages.2"
        assert "no text" in error["message"]
        error = server.post(RESPONSES, {"instructions": "x", "input": talk}).json()["error"]
        assert error["param"] == "input.2"
        claude = server.post(MESSAGES, {"system": "x", "messages": talk, "max_tokens": 2}).json()
        assert claude["error"]["message"].startswith("messages.2: ")
    with served(demo, template="{{ 1 + 'a' }}") as server:
        assert server.post(CHAT, {"messages": talk}).json()["error"]["param"] == "messages"


# Beginnings of answers.


def prompt_of(text: str) -> str:
    return f"# user: {USER['content']}\n# assistant:{text}"


def test_a_full_last_message_is_continued(demo: Pair, server: Served) -> None:
    """Once, a second turn of the assistant began instead. The answer does not repeat its beginning."""
    begun = "\n    return x"
    expected = said(demo, prompt_of(begun), 4, 12)
    assert expected != said(demo, prompt_of(""), 4, 12)
    body = ended_with(begun)
    assert server.post(CHAT, body).json()["choices"][0]["message"]["content"] == expected
    chunks = server.events(CHAT, body)[:-1]
    assert "".join(data["choices"][0]["delta"].get("content", "") for _, data in chunks) == expected
    (block,) = server.post(MESSAGES, body).json()["content"]
    assert block["text"] == expected
    response = {"input": body["messages"], "seed": 4, "max_output_tokens": 12}
    assert server.post(RESPONSES, response).json()["output"][0]["content"][0]["text"] == expected
    count = server.post("/v1/messages/count_tokens", {"messages": body["messages"]}).json()["input_tokens"]
    assert count == server.post(CHAT, body).json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("last", ["", " \n", None, []])
def test_an_empty_last_message_is_dropped(server: Served, last: Any) -> None:
    usual = server.post(CHAT, ended_with("", messages=[USER])).json()
    dropped = server.post(CHAT, ended_with(last)).json()
    assert dropped["choices"] == usual["choices"]
    assert dropped["usage"]["prompt_tokens"] == usual["usage"]["prompt_tokens"]


def test_reasoning_that_has_begun_is_continued(demo: Pair) -> None:
    last = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    with served(demo, template=TEMPLATE + "<think>\n{# </think> #}") as server:
        (choice,) = server.post(CHAT, {**ended_with(""), "messages": [USER, last]}).json()["choices"]
    thought = said(demo, prompt_of("<think>\nHm"), 4, 12).partition("</think>")[0]
    assert choice["message"]["reasoning_content"].strip("\n") == thought.strip("\n")


def test_a_begun_answer_goes_on_with_a_call_but_not_in_a_format(talker: Served) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]
    forced = ended_with("Let me see.", tools=tools, tool_choice="required", max_tokens=200)
    (choice,) = talker.post(CHAT, forced).json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["find"]
    error = talker.post(CHAT, ended_with("a", response_format={"type": "json_object"})).json()["error"]
    assert error["param"] == "response_format"


# Cached tokens.


@pytest.mark.parametrize("n_part", [32, 512])  # the prompt is processed in several chunks, or in one
def test_the_first_event_has_the_number_of_cached_tokens(
    server: Served, n_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamaspec.engine.prefill_decode.PREFILL_PART", n_part)
    content = f"{n_part}: {'a b ' * 60}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "seed": 1}
    told = []
    for _ in range(2):
        events = server.events(MESSAGES, body)
        assert events[0][0] == "message_start"
        begun, ended = events[0][1]["message"]["usage"], events[-2][1]["usage"]
        counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert {name: begun[name] for name in counts} == {name: ended[name] for name in counts}
        told.append(begun["cache_read_input_tokens"])
    assert told[1] > told[0]


def test_messages_have_their_places() -> None:
    found = [message.place for message in sessions_with("{}")[0].chat_request().messages]
    assert found == ["messages.0", "messages.1", "messages.2"]
