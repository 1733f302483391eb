"""Conversations as a chat template can take them: a template for each probe, in the words of real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chat_models import say, session
from llamaspec import Pair
from llamaspec.chat.accepted import PROBE_TOOL
from llamaspec.chat.messages import Message, ToolCall
from llamaspec.chat.template import ChatTemplate

# All of these were refused, or lost the text of a message without a word.
LENIENT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
GEMMA2 = """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<' + m.role + '>' + m.content | trim }}{% endfor %}"""
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + LENIENT
)
LOSES_SYSTEM = (
    "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
QWEN35 = (
    """{% set ns = namespace(found=false) %}{% for m in messages if m.role == 'user' %}
{%- set ns.found = true %}{% endfor %}
{%- if not ns.found %}{{ raise_exception('No user query found in messages.') }}{% endif %}"""
    + LENIENT
)
LLAMA31 = (
    """{% set rest = messages | rejectattr('role', 'eq', 'system') | list %}
{%- if tools is not none and (rest | length == 0 or rest[0].role != 'user') %}
{{- raise_exception('Cannot put tools in the first user message when there is none!') }}{% endif %}
"""
    + LENIENT
)
MISTRAL = """{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}
{%- set messages = messages[1:] %}{% endif %}{% set ns = namespace(index=0) %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
NEMO = """{% if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set messages = messages[1:] %}{% endif %}{% for m in messages %}<{{ m.role }}>
{%- if loop.last and m.role == 'user' and system is defined %}{{ system + ': ' }}{% endif %}
{{- m.content if not m.tool_calls }}{% endfor %}"""
PARTS = """{% for m in messages %}<{{ m.role }}>
{%- for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endfor %}"""
PARTS_OF_USERS = """{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content[0]['text'] }}
{%- else %}{{ m.content + '' }}{% endif %}{% endfor %}"""

# As Ministral's: no empty answer, and only short ids.
SHORT_IDS = (
    """{% macro check(id) %}{% if id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{% endmacro %}
{%- for m in messages %}{% for call in m.tool_calls or [] %}{{ check(call.id) }}{% endfor %}
{%- if m.role == 'tool' %}{{ check(m.tool_call_id) }}{% endif %}
{%- if m.role == 'assistant' and not (m.content or m.tool_calls) %}{{ raise_exception('empty') }}{% endif %}
{%- endfor %}"""
    + MISTRAL
)
GPT_OSS = """{% set ns = namespace(call=none) %}{% for m in messages %}
{%- if m.tool_calls %}{% set ns.call = m.tool_calls[0].function.name %}{% endif %}
{%- if m.role == 'tool' and ns.call is none %}
{{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}
{%- endif %}<{{ m.role }}>{{ ns.call + ':' if m.role == 'tool' }}{{ m.content }}{% endfor %}"""

SYSTEM, USER, ANSWER = Message("system", "s"), Message("user", "u"), Message("assistant", "a")
CALL = Message("assistant", "c", tool_calls=(ToolCall("abcdefghi", "probe", "{}"),))
RESULT = Message("tool", "r", name="probe", tool_call_id="abcdefghi")
LOST = Message("tool", "r", tool_call_id="another")


@pytest.mark.parametrize(
    ("source", "messages", "written"),
    [
        (LENIENT, [SYSTEM], "<system>s"),
        (LENIENT, [SYSTEM, CALL, RESULT], "<system>s<assistant>c<tool>r"),
        (LENIENT, [SYSTEM, USER, USER, SYSTEM], "<system>s<user>u<user>u<system>s"),
        (LENIENT, [SYSTEM, SYSTEM, USER, SYSTEM], "<system>s\n\ns<user>u<system>s"),
        (LENIENT, [ANSWER, USER], "<assistant>a<user>u"),
        (ONE_SYSTEM, [SYSTEM, SYSTEM, USER, SYSTEM, ANSWER], "<system>s\n\ns\n\ns<user>u<assistant>a"),
        (GEMMA2, [SYSTEM], "<user>s"),
        (GEMMA2, [SYSTEM, USER], "<user>s\n\nu"),
        (GEMMA2, [SYSTEM, ANSWER, USER], "<user>s<assistant>a<user>u"),
        (GEMMA2, [USER, USER, SYSTEM, ANSWER, ANSWER, USER], "<user>s\n\nu\n\nu<assistant>a\n\na<user>u"),
        (GEMMA2, [ANSWER, USER], "<user><assistant>a<user>u"),
        (LOSES_SYSTEM, [SYSTEM, USER, SYSTEM, ANSWER], "<user>s\n\ns\n\nu<assistant>a"),
        (QWEN35, [SYSTEM], "<system>s<user>"),
        (QWEN35, [SYSTEM, CALL, RESULT], "<system>s<user><assistant>c<tool>r"),
        (QWEN35, [SYSTEM, ANSWER, USER], "<system>s<assistant>a<user>u"),
        (LLAMA31, [SYSTEM, CALL, RESULT], "<system>s<user><assistant>c<tool>r"),
        (MISTRAL, [SYSTEM, USER, CALL, RESULT, ANSWER, USER, USER],
         "<system>s<user>u<assistant>c<tool>r<assistant>a<user>u\n\nu"),
        (MISTRAL, [SYSTEM, ANSWER, ANSWER], "<system>s<user><assistant>a\n\na"),
        (MISTRAL, [USER, CALL, RESULT, CALL, RESULT, USER, USER],
         "<user>u<assistant>c<tool>r<assistant>c<tool>r<assistant>OK.<user>u\n\nu"),
        (MISTRAL, [USER, CALL, USER], "<user>u<assistant>c<assistant>OK.<user>u"),
        (LENIENT, [USER, CALL, RESULT, USER, LOST], "<user>u<assistant>c<tool>r<user>u<tool>r"),
        (GPT_OSS, [SYSTEM, LOST, USER], "<system>s<assistant><tool>tool:r<user>u"),
        (GPT_OSS, [USER, ANSWER, LOST, RESULT],
         "<user>u<assistant>a<assistant><tool>tool:r<assistant><tool>probe:r"),
        (GPT_OSS, [USER, CALL, replace(RESULT, tool_call_id=None)], "<user>u<assistant>c<tool>probe:r"),
        (NEMO, [SYSTEM, USER], "<user>s: u"),
        (NEMO, [SYSTEM, USER, CALL, RESULT], "<user>s\n\nu<assistant><tool>r"),
        (PARTS, [SYSTEM, USER, CALL, RESULT], "<system>s<user>u<assistant>c<tool>r"),
        (PARTS_OF_USERS, [SYSTEM, USER, CALL, RESULT], "<system>s<user>u<assistant>c<tool>r"),
    ],
)  # fmt: skip
def test_what_is_written(source: str, messages: list[Message], written: str) -> None:
    rendered = ChatTemplate(f"{source}{{# tools #}}", "<s>", "</s>").render(messages, [PROBE_TOOL])
    assert rendered.text.decode().replace("\n<", "<") == written


@pytest.mark.parametrize(
    ("called", "answered", "same"),
    [
        (["abcdefghi"], ["abcdefghi"], [0]),
        (["call_abc123DEF456"], ["call_abc123DEF456"], [0]),
        (["functions.f:0", "functions.f:1"], ["functions.f:1", "functions.f:0"], [1, 0]),
        (["", ""], ["", None], [0, 1]),
        (["call_1"], ["call_2"], [0]),
        ([], ["call_1"], []),
    ],
)
def test_ids_of_other_servers(called: list[str], answered: list[str | None], same: list[int]) -> None:
    """Mistral's templates refused a conversation for ever once it had the ids of another server."""
    calls = Message("assistant", "", tool_calls=tuple(ToolCall(each, "f", "{}") for each in called))
    results = [Message("tool", "r", tool_call_id=each) for each in answered]
    template = ChatTemplate(f"{SHORT_IDS}{{# tools #}}", "<s>", "</s>")
    given = [USER, *([calls] if called else []), *results]
    written = template.accepted.messages(given)
    ids = [call.id for each in written for call in each.tool_calls]
    result_ids = [each.tool_call_id or "" for each in written if each.role == "tool"]
    assert len({*ids}) == len(called)
    assert all(len(each) == 9 for each in (*ids, *result_ids))
    assert result_ids == [ids[i] for i in same] or not called
    assert "abcdefghi" in ids or "abcdefghi" not in called
    later = template.accepted.messages([*given, USER, *given[1:]])
    assert later[: len(written)] == written
    assert template.render([*given, USER]).text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_name_that_the_template_reads(name: str) -> None:
    source = f"{{% for m in messages %}}{{{{ m.content }}}}{{{{ m.{name} | default('') }}}}{{% endfor %}}"
    answer = Message("assistant", "a", reasoning="why")
    assert ChatTemplate(source, "", "").render([USER, answer]).text == b"uawhy"


def test_joined_messages_keep_everything() -> None:
    again = Message("assistant", "b", tool_calls=CALL.tool_calls, reasoning="why")
    accepted = ChatTemplate(GEMMA2, "", "").accepted
    assert accepted.messages([USER, CALL, again])[1] == Message(
        "assistant", "c\n\nb", tool_calls=(*CALL.tool_calls, *CALL.tool_calls), reasoning="why"
    )


def test_a_chat_with_such_a_template_keeps_its_system_prompt(pair: Pair) -> None:
    """The system prompt was refused."""
    template = ChatTemplate(GEMMA2, "<s>", "</s>")
    talk = session(pair, system="Be brief.", template=template, max_tokens=4)
    assert say(talk, "Hi")
    assert say(talk, "Again")
    assert [message.role for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("turn", "answer", "written"),
    [
        ("[INST] {{ m.content }} [/INST]| {{ m.content }}</s>", " a ", "[INST] u [/INST] a </s>"),
        ("[INST] {{ m.content }} [/INST]| {{ m.content }}</s>", "a", "[INST] u [/INST] a</s>"),
        ("[INST] {{ m.content }} [/INST]| {{ m.content | trim }} </s>", " a ", "[INST] u [/INST] a </s>"),
        ("[INST] {{ m.content }} [/INST]|{{ m.content }}</s>", " a", "[INST] u [/INST] a</s>"),
        ("# {{ m.content }}:|\n\n{{ m.content }}\n", "\n\n  a", "# u:\n\n  a\n"),
    ],
)
def test_a_space_before_an_answer_is_written_once(turn: str, answer: str, written: str) -> None:
    """Mistral's models begin an answer with the space that the template writes before it."""
    user, _, assistant = turn.partition("|")
    source = f"{{% for m in messages %}}{{% if m.role == 'user' %}}{user}{{% else %}}{assistant}{{% endif %}}"
    template = ChatTemplate(f"{source}{{% endfor %}}", "<s>", "</s>")
    rendered = template.render([USER, Message("assistant", answer), USER])
    assert rendered.text.decode() == written + user.replace("{{ m.content }}", "u")
