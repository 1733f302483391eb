"""Tools in every API: calls match their schemas, and their results reach the template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from llamaspec import Pair, open_pair
from llamaspec.chat.messages import Message, ToolCall
from llamaspec.chat.notation import AnswerFormat, Reasoning
from llamaspec.engine.completion import Completion, StopReason, summarize
from llamaspec.serve.anthropic import CountTokensBody, MessagesBody
from llamaspec.serve.http_errors import RequestError
from llamaspec.serve.message_fields import ToolChoiceFields, ToolFields, tool_use
from llamaspec.serve.openai_chat import ChatBody
from llamaspec.serve.openai_responses import ResponsesBody
from patience import PATIENCE
from serve_soak import SCHEMA
from serve_soak import TEMPLATE as TALKER
from serving import TEMPLATE, Served, served
from tiny_models import Recipe, write_llama
from tiny_vocabulary import BYTES

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER: Any = [{"role": "user", "content": "Which one?"}]
NAP: Any = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "nap", "parameters": NAP}},
]
CLAUDES: Any = [
    {"name": "find", "description": "Finds.", "input_schema": SCHEMA},
    {"name": "nap", "input_schema": NAP},
]
SCHEMAS = {"find": SCHEMA, "nap": NAP}
FORCED = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
          "max_tokens": 200, "reasoning_effort": "none"}  # fmt: skip


@pytest.fixture
def client(talker: Served) -> Any:
    with openai.OpenAI(
        base_url=f"{talker.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    ) as client:
        yield client


@pytest.fixture
def claude(talker: Served) -> Any:
    with anthropic.Anthropic(base_url=talker.url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def check(name: str, arguments: Any) -> None:
    jsonschema.validate(json.loads(arguments) if isinstance(arguments, str) else arguments, SCHEMAS[name])


def test_openai(client: Any) -> None:
    """A call, its result, and the next answer; whole and streamed."""
    for seed in range(4):
        choice = client.chat.completions.create(model="any", seed=seed, **FORCED).choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        check(call.function.name, call.function.arguments)
        with client.chat.completions.stream(model="any", seed=seed, **FORCED) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        (again,) = final.message.tool_calls
        assert (again.function.name, again.function.arguments) == (
            call.function.name,
            call.function.arguments,
        )
        parts = [event.arguments_delta for event in events
                 if event.type == "tool_calls.function.arguments.delta"]  # fmt: skip
        assert "".join(parts) == call.function.arguments
        assert len(parts) > 1
    result = {"role": "tool", "tool_call_id": call.id, "content": "the blue one"}
    asked = [*USER, choice.message.model_dump(exclude_none=True), result]
    more = client.chat.completions.create(model="any", messages=asked, tools=TOOLS, max_tokens=4, seed=1)
    assert more.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        (None, ("auto", False, False, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False, False, False)),
        ({"type": "any"}, ("required", False, True, False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", False, True, True)),
        ({"type": "tool", "name": "nap"}, ("nap", True, True, False)),
        ({"type": "none"}, ("none", False, False, True)),
    ],
)
def test_tool_choice_of_anthropic(choice: Any, asked: tuple[str, bool, bool, bool]) -> None:
    body: Any = {"messages": USER, "tools": CLAUDES, "tool_choice": choice}
    use = CountTokensBody.model_validate(body).chat_request().tool_use
    assert (use.choice, use.is_named, use.is_forced, use.is_parallel) == asked
    assert [tool["function"]["name"] for tool in use.offered] == (
        [] if asked[0] == "none" else ["find", "nap"]
    )
    assert not use.strict
    body["tools"] = [CLAUDES[0], {**CLAUDES[1], "strict": True}]
    assert CountTokensBody.model_validate(body).chat_request().tool_use.strict == {"nap"}


def test_anthropic(claude: Any) -> None:
    usual = {"model": "any", "max_tokens": 200, "messages": USER, "tools": CLAUDES,
             "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
             "thinking": {"type": "disabled"}, "extra_body": {"seed": 3}}  # fmt: skip
    answer = claude.messages.create(**usual)
    (call,) = answer.content
    assert (answer.stop_reason, call.type) == ("tool_use", "tool_use")
    check(call.name, call.input)
    with claude.messages.stream(**usual) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        (again,) = stream.get_final_message().content
    assert json.loads("".join(parts)) == again.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "blue"}]}
    asked = [*USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    more = claude.messages.create(model="any", max_tokens=4, messages=asked, tools=CLAUDES)
    assert more.stop_reason == "max_tokens"


class Thing(BaseModel):
    name: Literal["cup", "hat"]
    size: Literal[1, 2, 3]


def test_the_clients_parse_answers_with_a_schema(client: Any, claude: Any) -> None:
    """With their own helpers, which send pydantic's schemas."""
    shaped = client.chat.completions.parse(
        model="any", messages=USER, response_format=Thing, seed=1, max_tokens=300, reasoning_effort="none",
            )  # fmt: skip
    assert isinstance(shaped.choices[0].message.parsed, Thing)
    response = client.responses.parse(
        model="any", input="Hi", text_format=Thing, max_output_tokens=300, reasoning={"effort": "none"},
        extra_body={"seed": 1},
    )  # fmt: skip
    assert isinstance(response.output_parsed, Thing)
    parsed = claude.messages.parse(
        model="any", max_tokens=300, messages=USER, output_format=Thing, thinking={"type": "disabled"},
        extra_body={"seed": 1},
    )  # fmt: skip
    assert isinstance(parsed.parsed_output, Thing)


def test_several_calls_of_one_answer(talker: Served) -> None:
    for seed in range(8):
        answer = talker.post(CHAT, {**FORCED, "parallel_tool_calls": True, "seed": seed, "max_tokens": 300})
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
        if len(calls) > 1:
            assert len({call["id"] for call in calls}) == len(calls)
            for call in calls:
                check(call["function"]["name"], call["function"]["arguments"])
            return
    pytest.fail("the model never called twice")


def test_calls_after_reasoning_that_was_cut_off(talker: Served) -> None:
    more = {"enable_thinking": True, "thinking_budget_tokens": 5, "reasoning_effort": None, "seed": 1}
    answer = talker.post(CHAT, {**FORCED, **more}).json()
    message = answer["choices"][0]["message"]
    free = talker.post(CHAT, {**FORCED, **more, "tool_choice": "auto"}).json()["choices"][0]["message"]
    assert message["reasoning_content"] == free["reasoning_content"]
    (call,) = message["tool_calls"]
    check(call["function"]["name"], call["function"]["arguments"])


UNKNOWN = "{{ tools | tojson }}{{ messages[-1].content }}"


def test_calls_in_an_unknown_format_are_text(demo: Pair) -> None:
    with served(demo, template=UNKNOWN) as server:
        answer = server.post(CHAT, {"messages": USER, "tools": TOOLS, "max_tokens": 5, "seed": 1})
        assert answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("template", [UNKNOWN, TEMPLATE], ids=["unknown format", "takes no tools"])
def test_calls_can_be_forced_with_any_template(demo: Pair, template: str) -> None:
    """The answer is JSON by the schema, and the next request may have the call's result."""
    with served(demo, template=template) as server:
        for choice in ("required", {"type": "function", "function": {"name": "nap"}}):
            (told,) = server.post(CHAT, {**FORCED, "tool_choice": choice, "seed": 1}).json()["choices"]
            (call,) = told["message"]["tool_calls"]
            check(call["function"]["name"], call["function"]["arguments"])
            assert told["finish_reason"] == "tool_calls"
            result = {"role": "tool", "tool_call_id": call["id"], "content": "blue"}
            more = {"messages": [*USER, told["message"], result, *USER], "max_tokens": 4}
            assert server.post(CHAT, more).status_code == 200
        events = server.events(CHAT, {**FORCED, "tool_choice": choice, "seed": 1})
        parts = [
            call for _, data in events[:-1] for call in data["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
        claude = {"messages": USER, "tools": CLAUDES, "tool_choice": {"type": "any"}, "max_tokens": 200}
        (block,) = server.post(MESSAGES, claude).json()["content"]
        check(block["name"], block["input"])


def test_a_stop_string_after_a_mark_is_named(talker: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control tokens have text in answers if they are marks."""
    builder = talker.service.builder
    vocabulary = builder.vocabulary
    mark = vocabulary.text(vocabulary.eos).decode()
    monkeypatch.setattr(builder, "answer_format", AnswerFormat(None, Reasoning("<think>", mark)))
    written = vocabulary.tokenize(b"a stop b", add_special=False).tolist()
    text = mark + b"".join(map(vocabulary.piece, written)).decode().partition("stop")[0]
    done = Completion(text, (vocabulary.eos, *written), 1, StopReason.STOP, (), summarize([], 3), 0.0)
    assert builder.matched_stop(done, ["never", "stop"]) == "stop"


def test_all_apis_give_the_template_the_same_messages() -> None:
    expected = [
        Message("system", "Be brief."),
        Message("user", "Which?"),
        Message(
            "assistant",
            "Wait.",
            tool_calls=(ToolCall("a", "find", '{"name": "b"}'), ToolCall("c", "nap", "{}")),
            reasoning="Hm.",
        ),
        Message("tool", "blue", name="find", tool_call_id="a"),
        Message("tool", "slept", name="nap", tool_call_id="c"),
        Message("user", "So?"),
    ]
    chat = ChatBody.model_validate({"messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"name": "b"}'}},
            {"id": "c", "type": "function", "function": {"name": "nap", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "blue"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "slept"}]},
        {"role": "user", "content": "So?"},
    ]})  # fmt: skip
    claude = MessagesBody.model_validate({"max_tokens": 1, "system": "Be brief.", "messages": [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "a", "name": "find", "input": {"name": "b"}},
            {"type": "tool_use", "id": "c", "name": "nap", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "blue"},
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "slept"}]},
            {"type": "text", "text": "So?"}]},
    ]})  # fmt: skip
    response = ResponsesBody.model_validate({"instructions": "Be brief.", "input": [
        {"role": "user", "content": "Which?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "a", "name": "find", "arguments": '{"name": "b"}'},
        {"type": "function_call", "call_id": "c", "name": "nap", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "blue"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "slept"}]},
        {"role": "user", "content": "So?"},
    ]})  # fmt: skip
    for request in (chat, claude, response):
        assert list(request.chat_request().messages) == expected


def test_marks_that_are_user_defined_tokens(tmp_path: Path) -> None:
    """<tool_call> is user-defined in Qwen's files. Once, the grammar spelled it, as no model does."""
    words = BYTES.marked("<tool_call>", "</tool_call>")
    path = write_llama(tmp_path / "model.gguf", Recipe(vocabulary=words, n_context=2048))
    with open_pair(path) as pair, served(pair, template=TALKER) as server:
        choice = server.post(CHAT, {**FORCED, "seed": 1}).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        check(call["function"]["name"], call["function"]["arguments"])
        assert choice["finish_reason"] == "tool_calls"


def test_an_image_in_a_result_does_not_end_the_session() -> None:
    """A placeholder replaces it; in a user message an image is refused."""
    parts: Any = [{"type": "text", "text": "a.png: "}, {"type": "image", "source": {}}]
    called = {"type": "tool_use", "id": "a", "name": "find", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": parts}
    asked = [*USER, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    body = CountTokensBody.model_validate({"messages": asked})
    assert body.chat_request().messages[-1].text == "a.png: [image left out: not text]"
    body = CountTokensBody.model_validate({"messages": [{"role": "user", "content": parts}]})
    with pytest.raises(RequestError, match=r"messages\.0\.content\.1\.type"):
        body.chat_request()


GEMMA = "<|tool_call>call: <tool_call|>"


@pytest.mark.parametrize("marks", [GEMMA, "<tool_call> <function= <parameter="])
def test_calls_of_other_families_are_constrained(demo: Pair, marks: str) -> None:
    """The template shows the family. Gemma's arguments are only well-formed, even with `strict`."""
    tools = [{"type": "function", "function": {**each["function"], "strict": True}} for each in TOOLS]
    with served(demo, template=f"{{# {marks} #}}{TALKER}") as server:
        drafted, plain = (
            server.post(
                CHAT, {**FORCED, "tools": tools, "seed": 1, "speculative": {"enabled": enabled}}
            ).json()
            for enabled in (True, False)
        )
    choice = drafted["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    if marks == GEMMA:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    else:
        check(call["function"]["name"], call["function"]["arguments"])
    assert call["function"] == plain["choices"][0]["message"]["tool_calls"][0]["function"]
    assert drafted["timings"]["draft_n_accepted"] > 0


@pytest.mark.parametrize("nested", [True, False])
def test_allowed_tools_leave_the_others_out(nested: bool) -> None:
    """OpenAI's clients send the same tools in every request, and allow some of them."""
    named = [{"name": name, "parameters": {"type": "object"}} for name in ("read", "write")]
    tools = [ToolFields.model_validate({"function": each} if nested else each) for each in named]
    allowed = {
        "mode": "required",
        "tools": [{"type": "function", **({"function": {"name": "read"}} if nested else {"name": "read"})}],
    }
    given = {"type": "allowed_tools", **({"allowed_tools": allowed} if nested else allowed)}
    use = tool_use(tools, ToolChoiceFields.model_validate(given), None, nested=nested)
    assert [tool["function"]["name"] for tool in use.offered] == ["read"]
    assert (use.choice, use.is_named) == ("required", False)
    given = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
    with pytest.raises(RequestError, match="allows no function"):
        tool_use(tools, ToolChoiceFields.model_validate(given), None, nested=nested)
