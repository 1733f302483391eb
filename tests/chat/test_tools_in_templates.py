"""Tools, calls and results reach a template as it expects them, and none of it becomes a control token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.chat.escaping import SpecialTokens
from llamaspec.chat.template import RESERVED, ChatTemplate, Message, TemplateError, ToolCall
from llamaspec.errors import PromptError

SPECIAL = SpecialTokens(["<|im_start|>", "<|im_end|>", "<|tool|>", "</s>", "<|function|>", "<|object|>"])
SEEN = "{{ {'messages': messages, 'tools': tools, 'kwargs': [mood, enable_thinking]} | tojson }}"
# As Qwen's and gpt-oss's templates go through tools, calls and results.
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
    other = {"id": "a2", "type": "function", "function": {"name": "f", "arguments": "{oh"}}
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


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_what_a_client_may_not_replace(name: str) -> None:
    with pytest.raises(PromptError, match=f"the template gets {name} from llamaspec"):
        ChatTemplate(TURNS, "", "").render([], template_kwargs={name: "x"})


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
    # The text itself is what the template makes of the real words.
    plain = ChatTemplate(TURNS, "", "</s>", SpecialTokens(()))
    assert found.text == rendered(text, name, plain).text
    assert b": string text" in found.text


def test_whether_tools_are_told() -> None:
    assert ChatTemplate(TURNS, "", "").takes_tools
    assert not ChatTemplate("{{ messages[0].content }} toolset", "", "").takes_tools


def test_what_is_nested_without_end() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    for arguments in ({"tools": [{"x": deep}]}, {"template_kwargs": {"x": deep}}):
        with pytest.raises(TemplateError, match="nested too deeply"):
            ChatTemplate(TURNS, "", "").render([], **arguments)
    call = ToolCall("1", "f", "[" * 100_000)
    assert (
        b"1 f"
        in ChatTemplate("{{ messages[0].tool_calls[0].id }} f", "", "")
        .render([Message("assistant", "", tool_calls=(call,))])
        .text
    )
