"""Chat templates: refusals, the beginning of a conversation, tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_models import TEMPLATE
from command import invoke, naming
from llamaspec import ModelFileError, Pair, PromptError, open_pair
from llamaspec.chat.accepted import in_words
from llamaspec.chat.messages import Message, ToolCall
from llamaspec.chat.template import ChatTemplate, SpecialTokens
from llamaspec.errors import TemplateError


def refusal(template: str, messages: list[Message]) -> str:
    with pytest.raises(PromptError) as caught:
        ChatTemplate(template, "<s>", "</s>").render(messages)
    assert "\n" not in str(caught.value)
    return str(caught.value)


HELLO = Message("user", "hello")
NO_SYSTEM = "{{ raise_exception('No system role') if messages[0].role == 'system' }}"


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (
            NO_SYSTEM,
            [Message("system", "x"), HELLO],
            "refuses: No system role; leave the system prompt out",
        ),
        (
            "{{ raise_exception('Roles must\n alternate.') }}",
            [HELLO],
            "refuses: Roles must alternate; give another",
        ),
        ("{{ messages[7].content.x }}", [HELLO], "refuses: "),
        ("{{ 1 + 'a' }}", [HELLO], "refuses: unsupported operand"),
        ("{{ '' }}", [HELLO], "the chat template writes nothing, so the prompt is empty"),
        ("{% for %}", [HELLO], "the chat template is not valid: "),
    ],
)
def test_templates_that_refuse(template: str, messages: list[Message], says: str) -> None:
    assert says in refusal(template, messages)


def test_a_template_gets_the_model_s_own_ends(pair: Pair) -> None:
    template = ChatTemplate.of(pair.target, "{{ bos_token }}|{{ messages[0].content }}|{{ eos_token }}")
    rendered = template.render([HELLO])
    assert rendered.text == b"<s>|hello|</s>"
    assert rendered.specials == ((0, 3), (10, 14))


def test_a_model_without_a_template(talker: list[Path]) -> None:
    with open_pair(talker[1]) as plain, pytest.raises(ModelFileError, match="no chat template"):
        ChatTemplate.of(plain.target)
    for command in (["chat"], ["generate", "--chat", "hi"]):
        answer = invoke(*command, *naming(talker[1:]))
        assert answer.code == 1
        assert len(answer.complaints) == 1
        assert answer.complaints[0].endswith("(--target, --chat-template)")


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("{{ bos_token }}", "")])
def test_a_conversation_begins_once(pair: Pair, template: str) -> None:
    """Whether or not the template writes the beginning-of-text token."""
    words = pair.target.vocabulary
    tokens = words.begun(ChatTemplate(template, "<s>", "</s>").render([HELLO]).tokenize(words)).tolist()
    assert tokens.count(words.bos) == 1
    assert tokens[0] == words.bos


# Tools

SPECIAL = SpecialTokens(["<|im_start|>", "<|im_end|>", "<|tool|>", "</s>", "<|function|>", "<|object|>"])
SEEN = "{{ {'messages': messages, 'tools': tools, 'kwargs': [mood, enable_thinking]} | tojson }}"
# Tools, calls and results as in the templates of Qwen and gpt-oss.
TURNS = """\
{%- for tool in tools or [] %}<|tool|>{{ tool | tojson }}
{%- for name, field in tool.function.parameters.properties.items() %}
{{ name }}{{ '?' if name not in tool.function.parameters.required }}: {{ field.type }}
{%- if field.type == 'string' %} text{% endif %}{% endfor %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}
{{ m.reasoning_content | default('') }}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.id }} {{ call.function.name }}
{%- for key, value in call.function.arguments | items %}{{ key }}={{ value | tojson }}{% endfor %}{% endfor %}
{{- m.tool_call_id }}<|im_end|>
{% endfor %}{{ mood }}"""


def tool(name: str = "f", key: str = "city", about: str = "") -> dict[str, Any]:
    field = {"type": "string", "description": about, "enum": [about], "default": {"x": about}}
    schema = {"type": "object", "properties": {key: field}, "required": [key], f"x-{about}": about}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def talk(text: str) -> list[Message]:
    arguments = json.dumps({text: [text, {"k": text}], "n": 1})
    return [
        Message("user", text, name=text),
        Message("assistant", text, tool_calls=(ToolCall(text, text, arguments),), reasoning=text),
        Message("tool", text, name=text, tool_call_id=text),
    ]


def test_what_a_template_sees() -> None:
    template = ChatTemplate(SEEN, "", "", SPECIAL)
    messages = [
        Message("user", "Hi", name="Ann"),
        Message("assistant", "", tool_calls=(ToolCall("a1", "f", '{"city": "Paris"}'),), reasoning="Hm."),
        Message("assistant", "So", tool_calls=(ToolCall("a2", "f", "{oh"),), reasoning="Hm."),
        Message("tool", "rain", tool_call_id="a1", name="f"),
    ]
    kwargs = {"mood": ["calm", {"x": 1}], "enable_thinking": False}
    seen = json.loads(template.render(messages, [tool()], template_kwargs=kwargs).text)
    call = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": {"city": "Paris"}}}
    other = {"id": "a2", "type": "function", "function": {"name": "f", "arguments": {"arguments": "{oh"}}}
    assert seen["messages"] == [
        {"role": "user", "content": "Hi", "name": "Ann"},
        {
            "role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Hm.",
            "thinking": "Hm.",
        },
        {"role": "assistant", "content": "So", "tool_calls": [other], "reasoning_content": "Hm."},
        {"role": "tool", "content": "rain", "tool_call_id": "a1", "name": "f"},
    ]  # fmt: skip
    assert seen["tools"] == [tool()]
    assert seen["kwargs"] == [["calm", {"x": 1}], False]


def test_a_variable_may_have_any_name() -> None:
    """Once, `self` was refused with an error of Python."""
    kwargs = {"mood": "calm", "self": 1, "args": 2, "context": 3}
    assert ChatTemplate("{{ mood }}", "", "").render([], template_kwargs=kwargs).text == b"calm"


PARTS = [
    "<|im_end|>", "<|im_start|>system\n", "<|", "|>", "im_end", "tool", "function", "object", "x", " ",
    "</s>",
]  # fmt: skip
FORGED = st.lists(st.sampled_from(PARTS)).map("".join)


@settings(deadline=None)
@given(FORGED, FORGED)
def test_nothing_is_forged(text: str, name: str) -> None:
    template = ChatTemplate(TURNS, "", "</s>", SPECIAL)

    def rendered(text: str, name: str, template: ChatTemplate = template) -> Any:
        tools = [tool(name, name, text)]
        return template.render(talk(text), tools, template_kwargs={"mood": text})

    found = rendered(text, name)
    written = [found.text[a:b] for a, b in found.specials]
    assert written == [b"<|tool|>", *[b"<|im_start|>", b"<|im_end|>"] * 3]
    # The text itself is as the template renders the real words.
    plain = ChatTemplate(TURNS, "", "</s>", SpecialTokens(()))
    assert found.text == rendered(text, name, plain).text
    assert b": string text" in found.text


def test_whether_a_template_takes_tools() -> None:
    assert ChatTemplate(TURNS, "", "").takes_tools
    assert not ChatTemplate("{{ messages[0].content }} toolset", "", "").takes_tools


def test_endless_nesting() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    for arguments in ({"tools": [{"x": deep}]}, {"template_kwargs": {"x": deep}}):
        with pytest.raises(TemplateError, match="nested too deeply"):
            ChatTemplate(TURNS, "", "").render([], **arguments)
    call = ToolCall("1", "f", "[" * 100_000)
    template = ChatTemplate("{{ messages[0].tool_calls[0].id }} f{# tools #}", "", "")
    assert b"1 f" in template.render([Message("assistant", "", tool_calls=(call,))]).text


def test_a_conversation_in_words() -> None:
    """A template without tools gets calls and results as turns."""
    calls = (ToolCall("a", "find", '{"x": 1}'), ToolCall("b", "nap", "{oh"))
    said = [
        HELLO,
        Message("assistant", "Wait.", tool_calls=calls),
        Message("tool", "blue", name="find", tool_call_id="a"),
        Message("tool", "slept", name="nap", tool_call_id="b"),
        HELLO,
        Message("assistant", "a"),
        HELLO,
        HELLO,
    ]
    told, *rest = in_words(said, [tool()])
    assert told.text.endswith(f"{json.dumps(tool()['function'])}\n\nhello")
    written = '{"name": "find", "arguments": {"x": 1}}\n{"name": "nap", "arguments": {"arguments": "{oh"}}'
    assert rest == [
        Message("assistant", f"Wait.\n{written}"),
        Message("user", "blue\n\nslept\n\nhello"),
        *said[5:],
    ]
    assert in_words(said[5:], ()) == said[5:]
