"""Reasoning: separate from the answer in every API, limited as in `chat`, and switched off."""

from __future__ import annotations

from typing import Any

import pytest

from llamaspec import Pair
from llamaspec.chat.answer_stream import AnswerStream
from llamaspec.chat.families import recognize
from llamaspec.chat.messages import Message, message_of
from llamaspec.chat.parse import AnswerParser
from llamaspec.chat.template import ChatTemplate
from llamaspec.serve.bodies import ReasoningFields
from serve_soak import TEMPLATE
from serving import Served

N, SEED, BUDGET = 40, 5, 9
HM = "Hm, that is odd."
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "Why?"}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        CHAT,
        {
            "messages": USER,
            "max_tokens": N,
            "thinking_budget_tokens": BUDGET,
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
    "responses": (
        RESPONSES,
        {
            "input": "Why?",
            "max_output_tokens": N,
            "enable_thinking": True,
            "thinking_budget_tokens": BUDGET,
        },
    ),
    "messages": (
        MESSAGES,
        {
            "messages": USER,
            "max_tokens": N,
            "enable_thinking": True,
            "thinking": {"type": "enabled", "budget_tokens": BUDGET},
        },
    ),
}


@pytest.fixture(scope="module")
def expected(alone: Pair) -> tuple[str, str]:
    """Reasoning and answer from the class that `chat` uses."""
    template = ChatTemplate.of(alone.target, TEMPLATE)
    answer_format = recognize(template.source)
    rendered = template.render([Message("user", "Why?")], template_kwargs={"enable_thinking": True})
    assert answer_format.begins_thinking(rendered.text)
    assert answer_format.reasoning is not None
    vocabulary = alone.target.vocabulary
    stream = AnswerStream(
        vocabulary.tokenize(rendered.text),
        N,
        lambda prompt, n: alone.stream(prompt, max_tokens=n, seed=SEED),
        AnswerParser(answer_format, thinking=True),
        vocabulary,
        BUDGET,
    )
    message = message_of(delta for deltas in stream for delta in deltas)
    assert message.reasoning
    assert message.text
    return message.reasoning, message.text


def told(name: str, answer: dict[str, Any]) -> tuple[str, str, int]:
    """Return the reasoning, the text, and the number of reasoning tokens."""
    usage = answer["usage"]
    if name == "chat":
        message = answer["choices"][0]["message"]
        thought = usage["completion_tokens_details"]["reasoning_tokens"]
        return message.get("reasoning_content", ""), message["content"], thought
    if name == "responses":
        parts = {item["type"]: item["content"][0]["text"] for item in answer["output"]}
        thought = usage["output_tokens_details"]["reasoning_tokens"]
        return parts.get("reasoning", ""), parts["message"], thought
    parts = {block["type"]: block.get("thinking") or block.get("text") for block in answer["content"]}
    return parts.get("thinking", ""), parts["text"], usage["output_tokens_details"]["thinking_tokens"]


@pytest.mark.parametrize("name", ASKED)
def test_it_is_separated_and_cut_off_as_in_chat(talker: Served, expected: tuple[str, str], name: str) -> None:
    path, body = ASKED[name]
    answer = talker.post(path, {**body, "seed": SEED}).json()
    assert told(name, answer) == (*expected, BUDGET)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("chat", {"chat_template_kwargs": None, "enable_thinking": False}),
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("chat", {"reasoning_effort": "none"}),
        ("responses", {"reasoning": {"effort": "none"}}),
        ("messages", {"thinking": {"type": "disabled"}}),
    ],
)
def test_switched_off(talker: Served, name: str, off: dict[str, Any]) -> None:
    path, body = ASKED[name]
    body = {key: value for key, value in body.items() if key != "thinking_budget_tokens"}
    reasoning, text, thought = told(name, talker.post(path, {**body, **off, "seed": SEED}).json())
    assert (reasoning, thought, bool(text)) == ("", 0, True)


@pytest.mark.parametrize(
    ("effort", "told"),
    [
        (None, {}),
        ("minimal", {"reasoning_effort": "low"}),
        ("medium", {"reasoning_effort": "medium"}),
        ("xhigh", {"reasoning_effort": "high"}),
        ("none", {"enable_thinking": False}),
    ],
)
def test_templates_get_the_effort(effort: str | None, told: dict[str, object]) -> None:
    assert ReasoningFields().reasoning_options(effort)[0] == told
    asked = {"reasoning_effort": "as the request says"}
    assert ReasoningFields(chat_template_kwargs=asked).reasoning_options(effort)[0] == {
        **told,
        **asked,
    }


def test_templates_get_earlier_reasoning(talker: Served) -> None:
    """It makes the same prompt in the form of each API."""
    counts = []
    question, more = {"role": "user", "content": "Why?"}, {"role": "user", "content": "And?"}
    for answer in (
        {"role": "assistant", "content": "So.", "reasoning_content": HM},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": HM, "signature": ""},
                                          {"type": "text", "text": "So."}]},
    ):  # fmt: skip
        body = {"messages": [question, answer, more]}
        counts.append(talker.post("/v1/messages/count_tokens", body).json()["input_tokens"])
    items = [
        question,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": HM}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
        more,
    ]  # fmt: skip
    usage = talker.post(RESPONSES, {"input": items, "max_output_tokens": 1}).json()["usage"]
    assert counts == [usage["input_tokens"]] * 2
    without = {"messages": [question, {"role": "assistant", "content": "So."}, more]}
    assert talker.post("/v1/messages/count_tokens", without).json()["input_tokens"] < counts[0]
