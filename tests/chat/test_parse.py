"""Parsing answers: recorded ones of each family, split at every place, and malformed ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import notations
from llamaspec.chat import families
from llamaspec.chat.families import recognize
from llamaspec.chat.incoming import MAX_HEADER
from llamaspec.chat.messages import (
    ArgumentsDelta,
    CallDelta,
    ContentDelta,
    Delta,
    Message,
    ToolCall,
    message_of,
)
from llamaspec.chat.notation import AnswerFormat, CallFormat, Reasoning
from llamaspec.chat.parse import AnswerParser
from notations import DERIVED

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
EDIT = {
    "type": "object",
    "properties": {
        "file": {"type": "string"},
        "line": {"type": ["string", "null"]},
        "tags": {"type": "array"},
        "mode": {"enum": ["a", "b"]},
        "size": {"enum": [1, "1"]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "edit", "parameters": EDIT}},
    {"type": "function", "function": {"name": "now"}},
]
THINK = Reasoning("<think>", "</think>", "\n\n")
FORMATS = {
    "qwen3": AnswerFormat(families.HERMES, THINK),
    "qwen-coder": AnswerFormat(families.QWEN_XML),
    "llama": AnswerFormat(families.LLAMA3),
    "mistral": AnswerFormat(families.MISTRAL),
    "ministral": AnswerFormat(families.MISTRAL_ARGS, Reasoning("[THINK]", "[/THINK]")),
    "gemma4": AnswerFormat(families.GEMMA4, Reasoning("<|channel>thought\n", "<channel|>")),
    "gpt-oss": AnswerFormat(families.HARMONY, families.CHANNELS),
    "deepseek-r1": AnswerFormat(None, THINK),
    "qwen3.5": AnswerFormat(families.QWEN_XML, THINK),
    "gemma3": AnswerFormat(families.GEMMA3),
    **DERIVED,
    "plain": AnswerFormat(),
}


def parsed(name: str, pieces: Iterable[str], **options: Any) -> list[Delta]:
    """Return all deltas, with ids counted and neighbours of one kind joined."""
    parser = AnswerParser(FORMATS[name], options.pop("tools", TOOLS), **options)
    found: list[Delta] = []
    for delta in [*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()]:
        last = found[-1] if found else None
        if isinstance(delta, CallDelta):
            found.append(replace(delta, id=str(delta.index)))
        elif last is not None and not isinstance(last, CallDelta) and type(last) is type(delta):
            found[-1] = replace(last, text=last.text + delta.text)
        else:
            found.append(delta)
    return found


def answer(content: str = "", *calls: tuple[str, Any], thought: str | None = None) -> Message:
    made = (ToolCall(str(i), name, json.dumps(given)) for i, (name, given) in enumerate(calls))
    return Message("assistant", content, tool_calls=tuple(made), reasoning=thought)


def normal(message: Message) -> Message:
    """Return the message with arguments as `json.dumps` writes them."""
    calls = (ToolCall(c.id, c.name, json.dumps(json.loads(c.arguments))) for c in message.tool_calls)
    return Message("assistant", message.text, tool_calls=tuple(calls), reasoning=message.reasoning)


PARIS, BOTH = ("weather", {"city": "Paris"}), ("weather", {"city": "Paris", "days": 2})
# From the families' own templates and documentation, and llama.cpp's tests of real models.
RECORDED: dict[str, tuple[str, str, Message]] = {
    "qwen3": (
        "qwen3",
        '<think>\nThe user asks.\n</think>\n\nLet me look.\n<tool_call>\n{"name": "weather", "arguments": '
        '{"city": "Paris"}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        answer("Let me look.", PARIS, ("now", {}), thought="The user asks."),
    ),
    "a mark inside a string": (
        "qwen3",
        '<tool_call>\n{"name": "edit", "arguments": {"file": "a \\"}</tool_call> b\\\\"}}\n</tool_call>',
        answer("", ("edit", {"file": 'a "}</tool_call> b\\'})),
    ),
    "qwen2.5-coder, in a fence": (
        "qwen3",
        'So:\n```json\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Paris"\n  }\n}\n'
        '{"name": "now", "arguments": {}}\n```',
        answer("So:", PARIS, ("now", {})),
    ),
    "qwen2.5-coder, nothing around it": (
        "qwen3",
        '{"name": "weather", "arguments": {"city": "Paris"}}',
        answer("", PARIS),
    ),
    "a fence without a call": (
        "qwen3",
        '```json\n{"name": "Bob", "arguments": {}}\n```\n```\n{"name": "now"}\n```python',
        answer('```json\n{"name": "Bob", "arguments": {}}\n```\n```\n{"name": "now"}\n```python'),
    ),
    "thinking ends without end": ("qwen3", "<think>\nOn and on \n", answer("", thought="On and on")),
    "a mark later in the text": ("qwen3", "Use <think> tags.", answer("Use <think> tags.")),
    "a call while thinking is none": (
        "qwen3",
        "<think>Say <tool_call>{}</think>Done",
        answer("Done", thought="Say <tool_call>{}"),
    ),
    "qwen3-coder": (
        "qwen-coder",
        "I'll write it.\n\n<tool_call>\n<function=edit>\n<parameter=file>\n#include <a.h>\n\"q\" \\ é\n\n"
        "</parameter>\n<parameter=line>\n12\n</parameter>\n<parameter=tags>\n[\"x\", 1]\n</parameter>\n"
        "<parameter=mode>\nb\n</parameter>\n<parameter=size>\n1\n</parameter>\n</function>\n</tool_call>",
        answer(
            "I'll write it.",
            ("edit", {"file": '#include <a.h>\n"q" \\ é\n', "line": "12", "tags": ["x", 1], "mode": "b",
            "size": 1}),
        ),
    ),
    "qwen3-coder, null and what is no list": (
        "qwen-coder",
        "<tool_call>\n<function=edit>\n<parameter=line>\nnull\n</parameter>\n<parameter=tags>\nx, y\n"
        "</parameter>\n<parameter=new>\n[]</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=now>\n"
        "</function>\n</tool_call>",
        answer("", ("edit", {"line": None, "tags": "x, y", "new": []}), ("now", {})),
    ),
    "qwen3-coder without its first mark": (
        "qwen-coder",
        "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        answer("", PARIS),
    ),
    "llama 3.1": ("llama", '{"name": "weather", "parameters": {"city": "Paris"}}', answer("", PARIS)),
    "llama 3.2": (
        "llama",
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}; '
        '{"type": "function", "name": "now", "parameters": {}}',
        answer("", PARIS, ("now", {})),
    ),
    "llama, JSON that is no call": (
        "llama",
        ' {"name": "Bob", "parameters": {"age": 3}} is JSON',
        answer(' {"name": "Bob", "parameters": {"age": 3}} is JSON'),
    ),
    "mistral nemo": (
        "mistral",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, '
        '{"name": "now", "arguments": {}}]',
        answer("", PARIS, ("now", {})),
    ),
    "mistral small 3.2": (
        "ministral",
        '[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{"city": "Paris"}',
        answer("", PARIS),
    ),
    "ministral 3": (
        "ministral",
        '[THINK]Think of [TOOL_CALLS]now[ARGS]{} first.[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Paris", '
        '"days": 2}[TOOL_CALLS]now[ARGS]{}',
        answer("", BOTH, ("now", {}), thought="Think of [TOOL_CALLS]now[ARGS]{} first."),
    ),
    "gemma 4": (
        "gemma4",
        "<|channel>thought\nI'm\nthinking<channel|>Let me look.<|tool_call>call:weather{city:"
        "<|\"|>Paris<|\"|>,"
        'days:2}<tool_call|><|tool_call>call:edit{tags:[<|"|>a "b"\n'
        '<|"|>,{x:true,y:-1.5e10}],line:null}<tool_call|>',
        answer(
            "Let me look.",
            BOTH,
            ("edit", {"tags": ['a "b"\n', {"x": True, "y": -1.5e10}], "line": None}),
            thought="I'm\nthinking",
        ),
    ),
    "gemma 4, a word without quotes": (
        "gemma4",
        '<|tool_call>call:weather{city:Paris}<tool_call|><|tool_call>call:now{}<tool_call|>',
        answer("", PARIS, ("now", {})),
    ),
    "gpt-oss": (
        "gpt-oss",
        "<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>final"
        "<|message|>Hello,\nyou",
        answer("Hello,\nyou", thought="I'm\nthinking"),
    ),
    "gpt-oss, a preamble and a call": (
        "gpt-oss",
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look it "
        "up.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>',
        answer("I look it up.", PARIS, thought="Look."),
    ),
    "gpt-oss, the recipient first": (
        "gpt-oss",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}',
        answer("", PARIS),
    ),
    "gpt-oss, a bare name, another prefix": (
        "gpt-oss",
        "<|channel|>commentary to=weather <|constrain|>json<|message|>{\"city\": \"Paris\"}<|call|><|start|>"
        "assistant<|channel|>commentary to=tools.now<|message|>{}<|call|>",
        answer("", PARIS, ("now", {})),
    ),
    "gpt-oss, nobody's tool": (
        "gpt-oss",
        "<|channel|>commentary to=python <|constrain|>code<|message|>print()",
        answer("print()"),
    ),
    "a call while thinking, which ends": (
        "qwen3",
        '<think>I look.\n<tool_call>\n{"name": "edit", "arguments": {"file": "</tool_call>"}}\n</tool_call>\n'
        "Then more.\n</think>\n\nDone",
        answer("Done", ("edit", {"file": "</tool_call>"}), thought="I look.Then more."),
    ),
    "calls while thinking, which does not end": (
        "qwen3.5",
        "<think>I look.\n\n<tool_call>\n<function=edit>\n<parameter=file>\na.py\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        answer("", ("edit", {"file": "a.py"}), ("now", {}), thought="I look."),
    ),
    "no complete call while thinking": (
        "qwen3.5",
        "<think><tool_call>\n<function=other>\n</function>\n</tool_call> <tool_call>\n<function=now>\n"
        "</think>Hm",
        answer(
            "Hm",
            thought="<tool_call>\n<function=other>\n</function>\n</tool_call> <tool_call>\n<function=now>",
        ),
    ),
    "reasoning ends twice": (
        "qwen3",
        "<think>a</think>\n\n</think>\nb</think>\n`</think>` or\n```\n</think>\n```\nc </think> d</think>",
        answer("b\n`</think>` or\n```\n</think>\n```\nc </think> d", thought="a"),
    ),
    "without reasoning, nothing ends it": ("qwen3", "a</think>\nb", answer("a</think>\nb")),
    "glm": (
        "glm",
        "Look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call><tool_call>now\n</tool_call>",
        answer("Look.", BOTH, ("now", {})),
    ),
    "glm, without line breaks": (
        "glm",
        "<tool_call>edit<arg_key>file</arg_key><arg_value>a\n</arg_value> b</arg_value>"
        "<arg_key>tags</arg_key><arg_value>[1]</arg_value></tool_call>",
        answer("", ("edit", {"file": "a\n</arg_value> b", "tags": [1]})),
    ),
    "kimi": (
        "kimi",
        'Look.<|calls_begin|><|call_begin|>functions.weather:0<|argument_begin|>{"city": "Paris"}<|call_end|>'
        "<|call_begin|>functions.now:1<|argument_begin|>{}<|call_end|><|calls_end|>",
        answer("Look.", PARIS, ("now", {})),
    ),
    "deepseek 3.1": (
        "deepseek",
        '<｜calls▁begin｜><｜call▁begin｜>weather<｜sep｜>{"city": "Paris"}<｜call▁end｜>\n'
        "<｜call▁begin｜>now<｜sep｜>{}<｜call▁end｜><｜calls▁end｜>",
        answer("", PARIS, ("now", {})),
    ),
    "deepseek, the section stays open": (
        "deepseek",
        "<｜calls▁begin｜><｜call▁begin｜>now<｜sep｜>{}<｜call▁end｜> Done",
        answer("Done", ("now", {})),
    ),
    "deepseek 3.2": (
        "dsml",
        '<｜DSML｜calls>\n<｜DSML｜invoke name="edit">\n<｜DSML｜parameter name="tags" string="true">1'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="line" string="false">null</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜calls>",
        answer("", ("edit", {"tags": "1", "line": None})),
    ),
    "lfm2": (
        "lfm2",
        "<|call_start|>[weather(city='Paris', days=2), now()]<|call_end|>Done",
        answer("Done", BOTH, ("now", {})),
    ),
    "lfm2, values of Python": (
        "lfm2",
        """<|call_start|>[edit(file="a)], \\"b'", tags=[True, {'x': (None,)}], mode=b)]<|call_end|>""",
        answer("", ("edit", {"file": "a)], \"b'", "tags": [True, {"x": [None]}], "mode": "b"})),
    ),
    "lfm2, no call": ("lfm2", "<|call_start|>[now(1)] [x]", answer("<|call_start|>[now(1)] [x]")),
    "gemma 3": ("gemma3", "I look.\n```tool_code\nnow()\n```", answer("I look.", ("now", {}))),
    "gemma 3, a list": ("gemma3", '[weather(city="Paris"), now()]', answer("", PARIS, ("now", {}))),
    "gemma 3, no call": ("gemma3", "[a list] f(x=1)", answer("[a list] f(x=1)")),
    "minimax": (
        "minimax",
        '<m:call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</m:call>',
        answer("", PARIS, ("now", {})),
    ),
    "command r": (
        "command-r",
        '<|ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        answer("", PARIS, ("now", {})),
    ),
    "nemotron, another tool": (
        "nemotron",
        '<TOOLCALL>[{"name": "x", "arguments": {}}]</TOOLCALL>',
        answer('<TOOLCALL>[{"name": "x", "arguments": {}}]</TOOLCALL>'),
    ),
    "deepseek r1": ("deepseek-r1", "<think>\nHm.\n</think>\n\n42", answer("42", thought="Hm.")),
    "plain": ("plain", " <think>x</think> <tool_call>{}  ", answer(" <think>x</think> <tool_call>{}  ")),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), RECORDED.values(), ids=RECORDED)
def test_recorded_answers(name: str, text: str, expected: Message) -> None:
    assert normal(message_of(parsed(name, [text]))) == expected
    assert normal(message_of(parsed(name, text))) == expected  # character by character


@settings(deadline=None)
@given(st.sampled_from(sorted(RECORDED)), st.data())
def test_every_split_gives_the_same(which: str, data: st.DataObject) -> None:
    name, text, _ = RECORDED[which]
    text = text[: data.draw(st.integers(0, len(text)))]  # also cut off
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parsed(name, pieces) == parsed(name, [text])


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=", "<parameter=city>", "</parameter>", "</function>",
    "<think>", "</think>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call>call:", "<tool_call|>", '<|"|>',
    "<|channel|>",
    "<|message|>", "<|start|>assistant", "<|end|>", " to=functions.now", "analysis", "{", "}", "[", "]",
    '"', ":", ",", ";", "```", "json",
    '"name": "now"', '"arguments": ', '"parameters": {}', "now", "\n", " ", "\\", "x", "12", "null", ">",
    "x" * 300, " " * 70,
    "[/THINK]", "[THINK]", "\ud800", "`",
    "<arg_key>", "</arg_value>", "<|calls_begin|>", "<|call_begin|>functions.now:0<|argument_begin|>", "{}",
    "<｜calls▁begin｜><｜call▁begin｜>now<｜sep｜>", "<｜call▁end｜>",
    "<m:call><invoke name=\"now\">", "</invoke>",
    "<|call_start|>[", "now(", "x=", ")", "'",
]  # fmt: skip


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.data())
def test_arbitrary_answers(name: str, fragments: list[str], data: st.DataObject) -> None:
    """There is no exception, every split gives the same, and no text outside calls is lost."""
    text = "".join(fragments)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = parsed(name, [text])
    assert parsed(name, pieces) == whole
    thinks = any(mark in text for mark in ("think>", "THINK]", "<|"))
    if not thinks and not any(isinstance(delta, CallDelta) for delta in whole):
        assert message_of(whole).text == text


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.booleans())
def test_deltas_know_their_place_in_the_answer(name: str, fragments: list[str], is_cut: bool) -> None:
    parser, text, end = AnswerParser(FORMATS[name], TOOLS), "".join(fragments), 0
    for delta in [*(d for piece in fragments for d in parser.feed(piece)), *parser.finish(is_cut=is_cut)]:
        if isinstance(delta, ContentDelta):
            assert end + len(delta.text) <= delta.end
            end = delta.end
            assert text[:end].endswith(delta.text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", '<tool_call>{"nam": "now"} oh'),
        ("qwen3", '<tool_call>{"name": "now"}</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": 3, "arguments": {}}'),
        ("qwen3", '<tool_call>{"name": "now", "arguments": [1]}'),
        ("qwen3", '<tool_call>{"name": "now", "arguments": "no JSON"}'),
        ("qwen3", '<tool_call>{"name": "'),
        ("qwen-coder", "<function=unknown>"),
        ("qwen-coder", "<tool_call>\n{}"),
        ("qwen-coder", "<function=" + "x" * 300 + ">"),
        ("llama", "<|python_tag|>import os"),
        ("llama", "{"),
        ("mistral", "[TOOL_CALLS] I cannot."),
        ("mistral", "[TOOL_CALLS][]"),
        ("ministral", "[TOOL_CALLS]now[CALL_ID]" + "1" * MAX_HEADER + "[ARGS]{}"),
        ("ministral", "[TOOL_CALLS][ARGS]{}"),
        ("ministral", "[TOOL_CALLS]now[ARGS]no object"),
        ("gemma4", "<|tool_call>now{}"),
        ("gemma4", "<|tool_call>call:{}"),
        ("gemma4", "<|tool_call>call:now"),
        ("gpt-oss", "<|channel|>final" + "x" * 600 + "<|message|>"),
    ],
)
def test_malformed_calls_are_content(name: str, text: str) -> None:
    assert parsed(name, [text]) == [ContentDelta(text)]
    assert parsed(name, text) == [ContentDelta(text)]


def test_a_call_without_marks_may_misspell_the_only_tool() -> None:
    """The 1.5B coder calls search-web search_web."""
    for names, expected in ((["search-web"], ["search-web"]), (["search-web", "search.web"], [])):
        tools = [{"function": {"name": name}} for name in names]
        found = message_of(parsed("qwen3", ['{"name": "search_web", "arguments": {}}'], tools=tools))
        assert [call.name for call in found.tool_calls] == expected


@pytest.mark.parametrize(
    ("name", "text", "tags"),
    [
        ("qwen-coder", "<function=edit>\n<parameter=tags>\nNaN\n</parameter>\n</function>", "NaN"),
        ("gemma4", "<|tool_call>call:edit{tags:-Infinity}<tool_call|>", "-Infinity"),
        ("qwen3", '{"name": "edit", "arguments": {"tags": [1e999, NaN]}}', [None, None]),
    ],
)
def test_arguments_are_json_whatever_python_reads(name: str, text: str, tags: Any) -> None:
    """JSON has neither NaN nor Infinity; clients in other languages could not read the call."""
    (call,) = message_of(parsed(name, [text])).tool_calls
    assert json.loads(call.arguments, parse_constant=pytest.fail) == {"tags": tags}


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("qwen3", 'So: <tool_call>\n{"name": "no', "So:"),
        ("qwen3", "So: <tool_c", "So:"),
        ("qwen3", "a <", "a <"),
        ("qwen3", '```json\n{"name": "now", "argum', ""),
        ("qwen3", '```json\n{"name": "now"', ""),
        ("qwen-coder", "<tool_call>\n<function=no", ""),
        ("mistral", '[TOOL_CALLS][{"name', ""),
        ("ministral", "[TOOL_CALLS]no", ""),
        ("gemma4", "<|tool_call>call:no", ""),
        ("llama", '{"name": "Bob', '{"name": "Bob'),
    ],
)
def test_a_call_that_was_cut_is_not_content(name: str, text: str, shown: str) -> None:
    for pieces in ([text], list(text)):
        parser = AnswerParser(FORMATS[name], TOOLS)
        found = message_of(
            [*(d for piece in pieces for d in parser.feed(piece)), *parser.finish(is_cut=True)]
        )
        assert (found.text.rstrip(), found.tool_calls) == (shown, ())


@pytest.mark.parametrize("before", ["", "```json\n"])
@pytest.mark.parametrize("name", ["now", "later"])
def test_a_call_without_marks_that_was_cut_is_an_incomplete_call(before: str, name: str) -> None:
    """All of it was lost. A call of another name is left out still."""
    for pieces in ([text := f'{before}{{"name": "{name}", "arguments": {{"a": "b {{'], list(text)):
        parser = AnswerParser(FORMATS["qwen3"], TOOLS)
        found = message_of(
            [*(d for piece in pieces for d in parser.feed(piece)), *parser.finish(is_cut=True)]
        )
        calls = [(call.name, call.arguments) for call in found.tool_calls]
        assert (found.text, calls) == ("", [("now", '{"a": "b {')] if name == "now" else [])


def test_half_a_mark_after_a_call_is_not_content() -> None:
    for mark in ("</tool_c", "\n<tool_ca"):
        parser = AnswerParser(FORMATS["qwen3"], TOOLS)
        deltas = parser.feed('<tool_call>\n{"name": "now", "arguments": {}}' + mark)
        found = message_of([*deltas, *parser.finish(is_cut=True)])
        assert (found.text, len(found.tool_calls)) == ("", 1)


def test_text_after_a_broken_call_is_content() -> None:
    broken = '<tool_call>{"name": "now", "arguments": {} oh no'
    assert parsed("qwen3", [broken]) == [
        CallDelta(0, "0", "now"),
        ArgumentsDelta(0, "{}"),
        ContentDelta("oh no"),
    ]
    unclosed = '<tool_call>{"name": "now", "arguments": {}\n</tool_call>\n<tool_call>'
    calls = message_of(parsed("qwen3", [unclosed + '{"name": "now", "arguments": {}}'])).tool_calls
    assert len(calls) == 2


def test_without_tools_calls_are_text() -> None:
    for name, text, _ in RECORDED.values():
        assert message_of(parsed(name, [text], tools=())).tool_calls == ()
    text = '{"name": "now", "parameters": {}}'
    assert parsed("llama", [text], tools=()) == [ContentDelta(text)]


def test_the_prompt_has_opened_the_reasoning() -> None:
    found = message_of(parsed("qwen3", ["\nHm.\n</think>\n\nYes"], thinking=True))
    assert (found.reasoning, found.text) == ("Hm.", "Yes")


def test_reasoning_that_ends_within_its_mark_is_whole() -> None:
    for pieces in (["<think>Hm </thi"], "<think>Hm </thi"):
        found = message_of(parsed("qwen3", pieces))
        assert (found.reasoning, found.text) == ("Hm </thi", "")


def test_arguments_are_streamed() -> None:
    """A client can show a file while the model writes it."""
    parser = AnswerParser(FORMATS["qwen-coder"], TOOLS)
    parser.feed("<tool_call>\n<function=edit>\n<parameter=file>\nline 1\nli")
    assert parser.feed("ne 2\nline") == [ArgumentsDelta(0, "ne 2\\nline")]
    parser = AnswerParser(FORMATS["qwen3"], TOOLS)
    parser.feed('<tool_call>\n{"name": "edit", "arguments": {"file": "a')
    assert parser.feed("bc") == [ArgumentsDelta(0, "bc")]


@pytest.mark.parametrize(
    ("name", "begin", "more"),
    [
        ("qwen3", "<tool_call>", " "),
        ("qwen3", '<tool_call>{"name": "', "x"),
        ("qwen-coder", "<function=", "x"),
        ("ministral", "[TOOL_CALLS]", "x"),
        ("gpt-oss", "<|channel|>", "x"),
        ("llama", "{", "x"),
        ("plain", "", " "),
    ],
)
def test_text_that_is_not_a_call_is_shown_soon(name: str, begin: str, more: str) -> None:
    parser = AnswerParser(FORMATS[name], TOOLS)
    deltas = [delta for piece in (begin, *more * MAX_HEADER) for delta in parser.feed(piece)]
    assert message_of(deltas).text.startswith(begin)


# Families

THINKS = "{{- '<think>\\n\\n</think>\\n\\n' }}"
# Lines of published templates that show the family.
TEMPLATES = {
    "Qwen3": (
        "<tool_call>\\n{\\\"name\\\": <function-name>, \\\"arguments\\\": <args-json-object>}\\n</tool_call>"
        + THINKS,
        families.HERMES,
        "<think>",
    ),
    "Hermes": (
        "{{- '<tool_call>\\n{\"name\": \"' }}{{ '\", \"arguments\": ' }}</tool_call>",
        families.HERMES,
        None,
    ),
    "Qwen3-Coder": (
        "'\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' '<parameter=' + args_name '</tool_call>'",
        families.QWEN_XML,
        None,
    ),
    "Llama 3.1": (
        "'<|start_header_id|>assistant<|end_header_id|>' {{- '\"parameters\": ' }}",
        families.LLAMA3,
        None,
    ),
    "Nemo": ('{{- "[TOOL_CALLS][" }}', families.MISTRAL, None),
    "Ministral": (
        "'[TOOL_CALLS]' name + '[ARGS]' + arguments '[THINK]' '[/THINK]'",
        families.MISTRAL_ARGS,
        "[THINK]",
    ),
    "Gemma 4": (
        "'<|tool_call>call:' + name '}<tool_call|>' '<|channel>thought\\n<channel|>'",
        families.GEMMA4,
        "<|channel>thought\n",
    ),
    "gpt-oss": (
        '"<|start|>assistant<|channel|>analysis<|message|>" "<|end|>"',
        families.HARMONY,
        "<|channel|>analysis<|message|>",
    ),
    "DeepSeek R1": ("content.split('</think>')[-1]", None, "<think>"),
    "Gemma 3": ("<start_of_turn>", families.GEMMA3, None),
    "LFM2": ("<|tool_list_start|>", families.LFM2, None),
    "Apriel, a list": ('<tool_call></tool_call> <tool_calls>[{"arguments": 1}]</tool_calls>', None, None),
    "Llama 3, without tools": ("<|start_header_id|>", None, None),
}  # fmt: skip


@pytest.mark.parametrize(("source", "calls", "opening"), TEMPLATES.values(), ids=TEMPLATES)
def test_families(source: str, calls: CallFormat | None, opening: str | None) -> None:
    found = recognize(source)
    assert found.calls is calls
    assert (found.reasoning.opening if found.reasoning else None) == opening


@pytest.mark.parametrize(
    "call",
    [
        "{{ c.function.name }} {{ c.function.arguments | tojson }}",  # no mark
        "<call>{{ c.function.arguments | tojson }}{{ c.function.name }}</call>",  # another order
        "<call>{{ c.function.name }}{% for k in c.function.arguments %}<k>{{ k }}</k>{% endfor %}</call>",
        "<call>{{ c.function.name[:6] }}{{ c.function.arguments | tojson }}</call>",
        "<call>{{ c.function.name }}{{ c.function.arguments | tojson | upper }}</call>",  # not read back
        "{{ raise_exception('no calls') }}",
        "{{ 'x' * 99999 }}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>",
    ],
)
def test_a_notation_that_cannot_be_derived_stays_text(call: str) -> None:
    assert recognize(notations.template("", call, "", "")).calls is None


def test_a_call_may_have_the_id_that_the_model_writes() -> None:
    """Kimi's template shows no name but the one in the id."""
    name, text, _ = RECORDED["kimi"]
    calls = message_of(AnswerParser(FORMATS[name], TOOLS).feed(text)).tool_calls
    assert [call.id for call in calls] == ["functions.weather:0", "functions.now:1"]


def test_the_tokens_of_an_answer() -> None:
    """Marks are spelled; the control tokens of turns are not."""
    controls = {
        "<|channel|>": 1,
        "<|message|>": 2,
        "<|start|>": 3,
        "<|end|>": 4,
        "<|im_start|>": 5,
        "<s>": 6,
        "": 7,
    }
    harmony = recognize(TEMPLATES["gpt-oss"][0]).spelled(controls)
    assert harmony == {1: b"<|channel|>", 2: b"<|message|>", 3: b"<|start|>", 4: b"<|end|>"}
    assert recognize("").spelled(controls) == {}
    gemma = recognize(TEMPLATES["Gemma 4"][0])
    assert gemma.spelled({"<|channel>": 1, "<channel|>": 2, "<eos>": 3}) == {
        1: b"<|channel>",
        2: b"<channel|>",
    }


@pytest.mark.parametrize(
    ("prompt", "thinks"),
    [
        (b"<|im_start|>assistant\n<think>\n", True),
        (b"<|im_start|>assistant\n<think>", True),
        (b"<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        (b"<|im_start|>assistant\n", False),
    ],
)
def test_whether_the_prompt_opens_the_reasoning(prompt: bytes, thinks: bool) -> None:
    assert recognize(THINKS).begins_thinking(prompt) is thinks
    assert not recognize(TEMPLATES["gpt-oss"][0]).begins_thinking(prompt)
    assert not AnswerFormat().begins_thinking(prompt)
