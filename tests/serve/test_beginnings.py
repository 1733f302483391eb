"""Conversations that end with the beginning of an answer, incomplete calls, and reasoning without text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamaspec import Pair
from llamaspec.chat.template import ChatTemplate
from llamaspec.serve.openai_chat import ChatBody
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
# As in the templates of Gemma and Mistral: roles must alternate.
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"
)
USER: dict[str, Any] = {"role": "user", "content": "def f(x):"}


def ended_with(last: str, **more: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": last}], "seed": 4, "max_tokens": 12, **more}


# Incomplete calls.

CUT = ['{"path": "a', "[1]", "null", "{} {}", '"x"', '{"a": "\\ud800"}', '{"a": ' + "[" * 300, "nonsense"]


def sessions_with(arguments: str) -> dict[str, dict[str, Any]]:
    """Return the request after an incomplete call, in each API."""
    tool: dict[str, Any] = {"name": "find", "parameters": SCHEMA}
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": arguments}}
    item = {"type": "function_call", "call_id": "a", "name": "find", "arguments": arguments}
    block = {"type": "tool_use", "id": "a", "name": "find", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "cut off"}
    return {
        CHAT: {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a", "content": "cut off"},
            ],
            "tools": [{"type": "function", "function": tool}],
            "max_tokens": 2,
        },
        RESPONSES: {
            "input": [USER, item, {"type": "function_call_output", "call_id": "a", "output": "cut off"}],
            "tools": [{"type": "function", **tool}],
            "max_output_tokens": 2,
        },
        MESSAGES: {
            "messages": [
                USER,
                {"role": "assistant", "content": [block]},
                {"role": "user", "content": [result]},
            ],
            "tools": [{"name": "find", "input_schema": SCHEMA}],
            "max_tokens": 2,
        },
    }


@pytest.fixture(scope="module")
def items(demo: Pair) -> Any:
    with served(demo, template=ITEMS) as server:
        yield server


@pytest.mark.parametrize("arguments", CUT)
def test_a_call_that_was_cut_does_not_end_the_session(items: Served, arguments: str) -> None:
    """Once, the server refused every later request of a session with an incomplete call of its own."""
    for path, body in sessions_with(arguments).items():
        answer = items.post(path, body)
        assert answer.status_code == 200, answer.text


def test_templates_that_need_arguments_as_text(demo: Pair) -> None:
    concatenates = (
        ITEMS.partition("{% for key")[0] + "{{ '=' + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    with served(demo, template=f"{concatenates}{{# tools #}}<|assistant|>") as server:
        for arguments in CUT:
            assert server.post(CHAT, sessions_with(arguments)[CHAT]).status_code == 200


def test_what_a_template_gets_of_a_cut_call() -> None:
    """The text of the call stays as it was, so that its tokens are cached."""
    template = ChatTemplate(TALKER, "<s>", "</s>")

    def rendered(arguments: str) -> str:
        messages = ChatBody.model_validate(sessions_with(arguments)[CHAT]).chat_request().messages
        return template.render(messages[:2]).text.decode()

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


def test_an_empty_prompt_is_an_error(demo: Pair) -> None:
    with served(demo, template="{{ '' }}") as server:
        answer = server.post(CHAT, {"messages": [USER]})
        assert answer.status_code == 400
        assert "the prompt is empty" in answer.json()["error"]["message"]


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


def test_templates_that_insist_on_alternation(demo: Pair) -> None:
    with served(demo, template=TURNS) as server:
        for last in ("", "\n    return"):
            assert server.post(CHAT, ended_with(last)).status_code == 200
        two = [USER, *({"role": "assistant", "content": text} for text in ("a", "", "b"))]
        answer = server.post(CHAT, {**ended_with(""), "messages": two}).json()["choices"][0]["message"]
        assert answer["content"] == said(demo, prompt_of("a\n\nb"), 4, 12)
        alone = [{"role": "assistant", "content": "Once"}]
        assert server.post(CHAT, {**ended_with(""), "messages": alone}).status_code == 200


def test_a_begun_answer_never_becomes_a_control_token(demo: Pair, server: Served) -> None:
    end = demo.target.vocabulary.text(demo.target.vocabulary.eos).decode()
    usual, forged = (server.post(CHAT, ended_with(text)).json()["usage"] for text in ("a", f"a{end}"))
    assert forged["prompt_tokens"] > usual["prompt_tokens"] + 1


THINKS = TEMPLATE + "<think>\n{# </think> #}"


@pytest.mark.parametrize(
    ("said_before", "prompt"),
    [
        ({"content": "So"}, "<think>\n\n</think>\n\nSo"),
        ({"content": "So", "reasoning_content": "Hm"}, "<think>\nHm\n</think>\n\nSo"),
        ({"content": "", "reasoning_content": "Hm"}, "<think>\nHm"),
    ],
)
def test_an_answer_begun_behind_reasoning(demo: Pair, said_before: dict[str, str], prompt: str) -> None:
    with served(demo, template=THINKS) as server:
        last = {"role": "assistant", **said_before}
        (choice,) = server.post(CHAT, {**ended_with(""), "messages": [USER, last]}).json()["choices"]
    expected = said(demo, prompt_of(prompt), 4, 12).strip("\n")
    field = "content" if said_before["content"] else "reasoning_content"
    assert choice["message"][field].strip("\n") == expected.split("</think>")[0].strip("\n")


def test_a_begun_answer_goes_on_with_a_call_but_not_in_a_format(talker: Served) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]
    forced = ended_with("Let me see.", tools=tools, tool_choice="required", max_tokens=200)
    (choice,) = talker.post(CHAT, forced).json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["find"]
    error = talker.post(CHAT, ended_with("a", response_format={"type": "json_object"})).json()["error"]
    assert error["param"] == "response_format"


# Reasoning without text, and cached tokens.


def test_reasoning_without_text_is_accepted(talker: Served) -> None:
    """A block from another server may have only a signature."""
    thought = {"type": "thinking", "signature": "x"}
    talk = [USER, {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}, USER]
    answer = talker.post(MESSAGES, {"messages": talk, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


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
    request = ChatBody.model_validate(sessions_with("{}")[CHAT]).chat_request()
    assert [message.place for message in request.messages] == ["messages.0", "messages.1", "messages.2"]
