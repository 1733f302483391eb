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
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "Why?"}]
LIMITS = {"max_tokens": N, "max_output_tokens": N}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {**LIMITS, "messages": USER, "chat_template_kwargs": {"enable_thinking": True}},
    RESPONSES: {**LIMITS, "input": "Why?", "enable_thinking": True},
    MESSAGES: {**LIMITS, "messages": USER, "enable_thinking": True},
}
BUDGETS: dict[str, dict[str, Any]] = {
    CHAT: {"thinking_budget_tokens": BUDGET},
    RESPONSES: {"thinking_budget_tokens": BUDGET},
    MESSAGES: {"thinking": {"type": "enabled", "budget_tokens": BUDGET}},
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


def told(path: str, answer: dict[str, Any]) -> tuple[str, str, int]:
    """Return the reasoning, the text, and the number of reasoning tokens."""
    usage = answer["usage"]
    if path == CHAT:
        message = answer["choices"][0]["message"]
        thought = usage["completion_tokens_details"]["reasoning_tokens"]
        return message.get("reasoning_content", ""), message["content"], thought
    if path == RESPONSES:
        parts = {item["type"]: item["content"][0]["text"] for item in answer["output"]}
        thought = usage["output_tokens_details"]["reasoning_tokens"]
        return parts.get("reasoning", ""), parts["message"], thought
    parts = {block["type"]: block.get("thinking") or block.get("text") for block in answer["content"]}
    return parts.get("thinking", ""), parts["text"], usage["output_tokens_details"]["thinking_tokens"]


@pytest.mark.parametrize("path", ASKED)
def test_it_is_separated_and_cut_off_as_in_chat(talker: Served, expected: tuple[str, str], path: str) -> None:
    answer = talker.post(path, {**ASKED[path], **BUDGETS[path], "seed": SEED}).json()
    assert told(path, answer) == (*expected, BUDGET)


@pytest.mark.parametrize(
    ("path", "off"),
    [
        (CHAT, {"chat_template_kwargs": None, "enable_thinking": False}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"reasoning_effort": "none"}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
    ],
)
def test_switched_off(talker: Served, path: str, off: dict[str, Any]) -> None:
    answer = talker.post(path, {**ASKED[path], **off, "seed": SEED}).json()
    reasoning, text, thought = told(path, answer)
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
