"""Conversations as clients send them back: compacted, with images, with reasoning under another name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llamaspec import Pair
from llamaspec.chat.messages import Message, ToolCall
from llamaspec.serve.anthropic import MessagesBody
from llamaspec.serve.http_errors import RequestError
from llamaspec.serve.ollama import OllamaChatBody
from llamaspec.serve.openai_chat import ChatBody
from llamaspec.serve.openai_responses import ResponsesBody
from llamaspec.serve.shown_pictures import shown
from serving import served

# Gemma 2's: no system messages, and turns.
GEMMA2 = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '# ' + m.role + ': ' + m.content | trim + '\n' }}{% endfor %}# assistant:"""


def chat(*messages: Any) -> list[Message]:
    return list(ChatBody.model_validate({"messages": [*messages]}).chat_request().messages)


def messages_api(*messages: Any) -> list[Message]:
    body = {"messages": [*messages], "max_tokens": 1}
    return list(MessagesBody.model_validate(body).chat_request().messages)


def responses(*items: Any) -> list[Message]:
    return list(ResponsesBody.model_validate({"input": [*items]}).chat_request().messages)


def ollama(*messages: Any) -> list[Message]:
    return list(OllamaChatBody.model_validate({"messages": [*messages]}).chat_request().messages)


def told(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def seen(kind: str, text_kind: str = "text") -> dict[str, Any]:
    return told("user", [{"type": text_kind, "text": "See "}, {"type": kind, "source": {"data": "aGk="}}])


@pytest.mark.parametrize(
    ("api", "with_image", "kind"),
    [
        (chat, seen("image_url"), "image_url"),
        (chat, seen("input_audio"), "input_audio"),
        (messages_api, seen("document"), "document"),
        (responses, seen("input_file", "input_text"), "input_file"),
        (ollama, told("user", "See ") | {"images": ["aGk="]}, "image"),
    ],
)
def test_an_image_in_an_earlier_message(
    api: Callable[..., list[Message]], with_image: dict[str, Any], kind: str
) -> None:
    """Every later turn was refused, so that the session was lost."""
    found = api(with_image, told("assistant", "I cannot."), told("user", "Then not."))
    for sees in (False, True):  # the picture is none
        assert shown(found, sees=sees)[0][0].text == f"See [{kind} left out: not text]"
    with pytest.raises(RequestError, match="no images"):
        shown(api(told("user", "Hi"), with_image), sees=False)


def test_a_part_at_a_wrong_place_is_refused_everywhere() -> None:
    part = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
    with pytest.raises(RequestError):
        chat(told("assistant", [part]), told("user", "Hi"))


OTHERS = [  # parts that come from another server, and that clients send on
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result"}]},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "s2", "content": {"stdout": "x"}},
    {"type": "mcp_tool_use", "id": "s3", "name": "y", "server_name": "z", "input": {}},
    {"type": "compaction", "content": None},
    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
    {"type": "thinking", "signature": "x"},
]


@pytest.mark.parametrize("api", [chat, messages_api])
def test_parts_from_another_server_are_left_out_of_an_answer(api: Callable[..., list[Message]]) -> None:
    said = told("assistant", [*OTHERS, {"type": "text", "text": "Done."}])
    assert api(told("user", "Hi."), said)[1] == Message("assistant", "Done.", reasoning="Hm.")


@pytest.mark.parametrize("api", [chat, responses])
def test_a_refusal_in_an_answer_is_its_text(api: Callable[..., list[Message]]) -> None:
    refused = told("assistant", [{"type": "refusal", "refusal": "No."}])
    assert api(told("user", "Hi."), refused)[1] == Message("assistant", "No.")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_under_either_name(name: str) -> None:
    assert chat(told("user", "Hi"), told("assistant", "Yes") | {name: "Hm."})[1].reasoning == "Hm."


def test_reasoning_in_a_form_of_another_server_is_left_out() -> None:
    given = told("assistant", "Yes") | {"reasoning": {"id": "rs_1"}}
    assert chat(told("user", "Hi"), given)[1].reasoning is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"temp": 22}, '{"temp": 22}'),
        ([{"temp": 22}, {"temp": "–"}], '[{"temp": 22}, {"temp": "–"}]'),
        (["a", "b"], '["a", "b"]'),
        (22.5, "22.5"),
        (False, "false"),
        (None, ""),
        ({"type": "text", "text": "22"}, "22"),
        ([{"type": "text", "text": "2"}, {"type": "text", "text": "2"}], "22"),
        ({"type": "image_url"}, "[image_url left out: not text]"),
    ],
)
def test_a_result_of_any_form(content: Any, text: str) -> None:
    """Tools give objects, and many clients send them as they are. That was refused in every later turn."""
    hi = told("user", "Hi")
    results = {
        "chat": chat(hi, told("tool", content)),
        "ollama": ollama(hi, told("tool", content)),
        "messages": messages_api(
            told("user", {"type": "tool_result", "tool_use_id": "a", "content": content})
        ),
        "responses": responses(hi, {"type": "function_call_output", "call_id": "a", "output": content}),
    }
    assert {api: messages[-1].text for api, messages in results.items()} == dict.fromkeys(results, text)


def test_messages_of_older_clients() -> None:
    """A single part instead of a list, the roles of data sets and of Llama 3, and calls without ids."""
    call = {"name": "f", "arguments": '{"a": 1}'}
    assert chat(
        told("human", {"type": "text", "text": "Hi"}),
        told("ai", None) | {"function_call": call},
        told("function", "22") | {"name": "f"},
        told("model", "22."),
        told("ipython", "23"),
        told("developer", "Go on."),
    ) == [
        Message("user", "Hi"),
        Message("assistant", "", tool_calls=(ToolCall("", "f", '{"a": 1}'),)),
        Message("tool", "22", name="f"),
        Message("assistant", "22."),
        Message("tool", "23", name="f"),
        Message("system", "Go on."),
    ]


def test_a_compacted_conversation(demo: Pair) -> None:
    """No user message is left, and the template wants one at the beginning."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [
        told("system", "Be brief."),
        told("assistant", "So far: nothing.") | {"tool_calls": [call]},
        told("tool", "Done.") | {"tool_call_id": "abcdefghi"},
    ]
    with served(demo, template=GEMMA2) as server:
        for messages in (talk, talk[:1]):
            answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
            assert answer.status_code == 200, answer.text


def test_a_reference_to_an_item_is_refused() -> None:
    """Its message was missing without a word."""
    with pytest.raises(RequestError, match="keeps no conversations"):
        responses({"type": "item_reference", "id": "msg_1"}, told("user", "Go on."))


def test_instructions_without_input() -> None:
    body = ResponsesBody.model_validate({"input": [], "instructions": "Write a haiku."})
    assert [message.text for message in body.chat_request().messages] == ["Write a haiku."]
    with pytest.raises(RequestError, match="must not be empty"):
        responses()


# As real templates list the fields of tools.
LISTING = """{% for tool in tools or [] %}{{ tool.function.name }}(
{%- for key, field in tool.function.parameters.properties.items() %}{{ key }}: {{ field.type }}{% endfor %})
{% endfor %}{% for m in messages %}# {{ m.role }}: {{ m.content }}
{% endfor %}# assistant:"""


def test_a_tool_without_properties(demo: Pair) -> None:
    """A template that lists properties refused it."""
    nothing = {"properties": None, "required": None}
    without: list[Any] = [{"type": "object"}, {"type": "object", **nothing}, {}, None]
    with served(demo, template=LISTING) as server:
        for parameters in without:
            function = {"name": "files/read.v1", "parameters": parameters, "strict": True}
            tools = [{"type": "function", "function": function}]
            body = {"messages": [told("user", "Hi")], "max_tokens": 3, "tools": tools}
            answer = server.post("/v1/chat/completions", {**body, "tool_choice": "required"})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "object", "additionalProperties": {"type": "string"}, "propertyNames": {"type": "string"}},
    ],
)
def test_a_format_with_keywords_that_say_little(demo: Pair, schema: dict[str, Any]) -> None:
    """Sets and dictionaries of pydantic; they were accepted in tools only."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [told("user", "Hi")], "max_tokens": 3, "response_format": wanted}
    with served(demo) as server:
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        schema["propertyNames"] = {"pattern": "^a"}
        if schema["type"] == "object":
            assert server.post("/v1/chat/completions", body).status_code == 400


def test_what_a_template_writes_is_limited_before_it_is_tokenized(
    demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that writes 16 MB cost 4 s in each request."""
    with served(demo, template="{{ messages[0].content }}{{ 'x ' * 4000000 }}") as server:
        monkeypatch.setattr(demo.target.vocabulary, "tokenize", lambda *_, **__: pytest.fail("tokenized"))
        body = {"messages": [told("user", "Hi")], "max_tokens": 2}
        answer, counted = (
            server.post(path, body) for path in ("/v1/chat/completions", "/v1/messages/count_tokens")
        )
    assert (answer.status_code, counted.status_code) == (400, 400)
    assert "exceeds the available context size" in answer.text
