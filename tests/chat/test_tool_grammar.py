"""Grammars of tool calls, in llguidance: they accept right calls and refuse wrong ones."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.chat import families
from llamaspec.chat.messages import message_of
from llamaspec.chat.notation import INDEX, NAME, QUOTED_NAME, AnswerFormat, CallFormat, Pairs, Reasoning
from llamaspec.chat.parse import AnswerParser
from llamaspec.chat.tool_grammar import answer_grammar, tool_grammar
from notations import DERIVED

llguidance = pytest.importorskip("llguidance")

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
THINK = Reasoning("<think>", "</think>", "\n\n")
MARKS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|start|>",
    "<|end|>",
    "<|constrain|>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<|calls_begin|>", "<|call_begin|>", "<|call_end|>",
]  # fmt: skip


class Bytes:
    """A vocabulary of bytes and control tokens."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, controls: list[str]) -> None:
        self.controls = {text: 257 + i for i, text in enumerate(controls)}
        self.tokens = [*(bytes([i]) for i in range(256)), b"</s>", *(text.encode() for text in controls)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def tokenize(self, text: str) -> list[int]:
        found: list[int] = []
        while text:
            mark = next((mark for mark in self.controls if text.startswith(mark)), None)
            found += [self.controls[mark]] if mark else list(text[0].encode())
            text = text[len(mark) if mark else 1 :]
        return found


def accepts(
    answer_format: AnswerFormat, text: str, marks: list[str], choice: Any = "auto", **options: Any
) -> bool:
    """`choice`: auto, required, or the name of a tool."""
    words, is_named = Bytes(marks), choice not in ("auto", "required")
    tools = [tool for tool in TOOLS if not is_named or tool["function"]["name"] == choice]  # type: ignore[index]
    grammar = tool_grammar(answer_format, tools, words.controls, is_forced=choice != "auto", **options)
    assert grammar is not None
    return matches(grammar, words, text)


def matcher_of(grammar: str, words: Bytes) -> Any:
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words))
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), (grammar, matcher.get_error())
    return matcher


def matches(grammar: str, words: Bytes, text: str) -> bool:
    matcher = matcher_of(grammar, words)
    tokens = words.tokenize(text)
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    assert matcher.consume_tokens(tokens)
    return bool(matcher.is_accepting())


HERMES = AnswerFormat(families.HERMES)
PARIS = '{"city": "Paris"}'
ONE = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n{}</function>\n</tool_call>"
NOW = "<tool_call>\n<function=now>\n{}</function>\n</tool_call>"  # its schema names no parameters
DAYS = "<parameter=days>\n{}\n</parameter>\n"
UNIT = "<parameter=unit>\n{}\n</parameter>\n"
Q = '<|"|>'
GEMMA = "<|tool_call>call:weather{{{}}}<tool_call|>"
GEMMA_PARIS = GEMMA.format(f"city:{Q}Paris{Q}")


# Format, choice, right answers, wrong ones.
CASES: dict[str, tuple[AnswerFormat, Any, list[str], list[str]]] = {
    "hermes": (
        HERMES,
        "required",
        [ONE, OTHER, f"{ONE}\n{OTHER}"],
        ["", "Hello", f"So: {ONE}", ONE.replace("city", "town"), ONE.replace('"Paris"', "1"), ONE[:-3]],
    ),
    "hermes, auto": (
        HERMES,
        "auto",
        ["", "Hello", f"So: {ONE}", f"{ONE}\n{OTHER}", f"a{ONE}b{OTHER}c"],
        [ONE.replace("city", "town"), "<tool_call>hm", f"So: {ONE[:-12]}", ONE.replace("weather", "other")],
    ),
    "hermes, named": (HERMES, "now", [OTHER], [ONE, ""]),
    "thinking": (
        AnswerFormat(families.HERMES, THINK),
        "required",
        [ONE, f"<think>\nHm.\n</think>\n\n{ONE}"],
        ["<think>\nHm.\n</think>\n\nHello", f"<think>Hm. {ONE}"],
    ),
    "thinking does not end, auto": (
        AnswerFormat(families.HERMES, THINK),
        "auto",
        [f"<think>Hm. {ONE}", "<think>Hm.</think>Hello"],
        [f"<think>Hm.</think>{ONE.replace('city', 'town')}"],
    ),
    "keywords": (
        DERIVED["lfm2"],
        "required",
        [
            '<|call_start|>[weather(city="Paris", days=2), now()]<|call_end|>',
            '<|call_start|>[weather(city="Paris", unit="C")]<|call_end|>',
        ],
        ["<|call_start|>[weather(days=2)]<|call_end|>", '<|call_start|>[weather(city="Paris",)]<|call_end|>'],
    ),
    "kimi": (
        DERIVED["kimi"],
        "required",
        [
            f"<|calls_begin|><|call_begin|>functions.weather:0<|argument_begin|>{PARIS}<|call_end|>"
            "<|call_begin|>functions.now:1<|argument_begin|>{}<|call_end|><|calls_end|>",
        ],
        ["<|calls_begin|><|call_begin|>functions.weather:0<|argument_begin|>{}<|call_end|><|calls_end|>"],
    ),
    "qwen-xml": (
        AnswerFormat(families.QWEN_XML),
        "required",
        [
            XML.format(""),
            XML.format(DAYS.format(3) + UNIT.format("C")),
            XML.replace("Paris", "a\n\nb<c>").format(""),
            NOW.format(""),
            NOW.format("<parameter=zone>\nCET\n</parameter>\n"),
        ],
        [XML.format(DAYS.format("three")), XML.format(UNIT.format("K")), XML.format("x"), "Hello"],
    ),
    "llama": (
        AnswerFormat(families.LLAMA3),
        "required",
        [f'{{"name": "weather", "parameters": {PARIS}}}'],
        ['{"name": "weather", "parameters": {}}', "Hello"],
    ),
    "llama, auto": (
        AnswerFormat(families.LLAMA3),
        "auto",
        [f'{{"name": "weather", "parameters": {PARIS}}}', "Hello {", ""],
        ['{"name": "weather", "parameters": {}}', "{}"],
    ),
    "any": (
        AnswerFormat(families.JSON_CALL, THINK),
        "required",
        [
            f'{{"name": "weather", "arguments": {PARIS}}}',
            '<think>Hm.</think>{"name": "now", "arguments": {}}',
        ],
        ['{"name": "weather", "arguments": {}}', '{"name": "other", "arguments": {}}', "Hello"],
    ),
    "mistral": (
        AnswerFormat(families.MISTRAL),
        "required",
        [
            f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}]',
            f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, '
            '{"name": "now", "arguments": {}}]',
        ],
        ["[TOOL_CALLS][]", "Hello"],
    ),
    "gemma4": (
        AnswerFormat(families.GEMMA4, Reasoning("<|channel>thought\n", "<channel|>")),
        "required",
        [
            GEMMA_PARIS,
            GEMMA.format(f'city:{Q}a, {{b}}: "c"{Q},days:-3,unit:{Q}C{Q}'),
            f"<|channel>thought\nHm.<channel|>{GEMMA_PARIS}<|tool_call>call:now{{}}<tool_call|>",
        ],
        [
            "Hello",
            GEMMA.format("city"),
            GEMMA.format("city:Paris"),
            GEMMA.format(f"city:{Q}Paris{Q},"),
            GEMMA.format("tags:[1"),
            GEMMA_PARIS.replace("weather", "other"),
            GEMMA_PARIS[:-5],
        ],
    ),
    "mistral-args": (
        AnswerFormat(families.MISTRAL_ARGS, Reasoning("[THINK]", "[/THINK]")),
        "required",
        [
            f"[TOOL_CALLS]weather[ARGS]{PARIS}",
            "[THINK]Hm[/THINK][TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}",
        ],
        ["[TOOL_CALLS]weather[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}"],
    ),
    "gpt-oss": (
        AnswerFormat(families.HARMONY, families.CHANNELS),
        "required",
        [
            f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to="
            "functions.now <|constrain|>json<|message|>{}",
        ],
        [
            "<|channel|>final<|message|>Hello",
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}",
        ],
    ),
    "gpt-oss, auto": (
        AnswerFormat(families.HARMONY, families.CHANNELS),
        "auto",
        ["<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello"],
        ["<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}"],
    ),
}


@pytest.mark.parametrize("marks", [[], MARKS], ids=["text", "tokens"])
@pytest.mark.parametrize(("answer_format", "choice", "right", "wrong"), CASES.values(), ids=CASES)
def test_the_language_of_each_grammar(
    answer_format: AnswerFormat, choice: Any, right: list[str], wrong: list[str], marks: list[str]
) -> None:
    marks = MARKS if answer_format.calls is families.HARMONY else marks  # harmony's are always tokens
    for text in right:
        assert accepts(answer_format, text, marks, choice), text
    for text in wrong:
        assert not accepts(answer_format, text, marks, choice), text


def test_accepted_answers_are_parsed() -> None:
    """The grammar and the parser of a format agree."""
    for answer_format, choice, right, _ in CASES.values():
        for text in right if choice != "auto" else ():
            parser = AnswerParser(answer_format, TOOLS)
            found = message_of([*parser.feed(text), *parser.finish()])
            assert found.tool_calls
            assert found.text == ""
            for call in found.tool_calls:
                json.loads(call.arguments)


@pytest.mark.parametrize("marks", [[], MARKS], ids=["text", "tokens"])
def test_one_call_if_several_are_not_wanted(marks: list[str]) -> None:
    for choice in ("auto", "required"):
        assert accepts(HERMES, ONE, marks, choice, is_parallel=False)
        assert not accepts(HERMES, f"{ONE}\n{OTHER}", marks, choice, is_parallel=False)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_prompt_has_opened_the_reasoning(choice: str) -> None:
    thinks = AnswerFormat(families.HERMES, THINK)
    assert accepts(thinks, f"Hm. <tool_call>\n</think>\n\n{ONE}", [], choice, thinking=True)
    assert not accepts(thinks, f"Hm.\n</think>\n\n{ONE.replace('city', 'town')}", [], choice, thinking=True)


def test_unknown_formats() -> None:
    assert tool_grammar(AnswerFormat(), TOOLS, {}, is_forced=True) is None
    assert tool_grammar(AnswerFormat(families.HARMONY, families.CHANNELS), TOOLS, {}, is_forced=True) is None


def test_names_and_schemas_of_all_kinds() -> None:
    odd = {
        "properties": {'a"\né': {"$ref": "#/$defs/n"}},
        "required": ['a"\né'],
        "$defs": {"n": {"type": "integer"}},
    }
    tools = [{"function": {"name": 'x"é/\\', "parameters": odd}}]
    for calls in FAMILIES.values():
        grammar = tool_grammar(AnswerFormat(calls), tools, Bytes(MARKS).controls, is_forced=True)
        assert grammar is not None
        assert matcher_of(grammar, Bytes(MARKS))


FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def test_reasoning_does_not_spell_its_end() -> None:
    """If the mark was a control token, text after a spelled mark counted as the answer, unconstrained."""
    words = Bytes(["<think>", "</think>"])
    grammar = answer_grammar(AnswerFormat(None, THINK), {"type": "integer"}, words.controls, thinking=True)
    matcher = matcher_of(grammar, words)
    assert matcher.validate_tokens([*b"Hm</think", words.controls["</think>"], *b"5"]) == 11
    assert matcher.validate_tokens([*b"Hm</think>"]) == 9


@pytest.mark.parametrize("marks", [[], ["<think>", "</think>", *MARKS]])
@pytest.mark.parametrize(
    ("answer_format", "thinking", "right", "wrong"),
    [
        (AnswerFormat(), False, ["5"], ["", "a", "5 5"]),
        (AnswerFormat(None, THINK), False, ["5", "<think>Hm: 1</think>\n\n5"], ["<think>Hm", "Hm</think>5"]),
        (
            AnswerFormat(None, THINK),
            True,
            ["Hm</think>\n\n5", "</think>5"],
            ["5", "Hm</think>", "a</think>b", "Hm</think>" + "\n" * 9 + "5"],  # endless whitespace
        ),
        (
            AnswerFormat(families.HARMONY, families.CHANNELS),
            False,
            [f"{FINAL}5", f"{ANALYSIS}{FINAL}5"],
            ["5", ANALYSIS, f"{FINAL}a", f"{ANALYSIS}5"],
        ),
    ],
)
def test_json_after_reasoning(
    answer_format: AnswerFormat, thinking: bool, right: list[str], wrong: list[str], marks: list[str]
) -> None:
    words = Bytes(marks if answer_format.calls is None else MARKS)  # harmony's are always tokens
    schema = {"type": "integer"}
    grammar = answer_grammar(answer_format, schema, words.controls, thinking=thinking)
    assert all(matches(grammar, words, text) for text in right)
    assert not any(matches(grammar, words, text) for text in wrong)


def gemma(value: Any) -> str:
    """Return a value as Gemma's template writes it."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    if isinstance(value, dict):
        entries = (f"{key}:{gemma(value[key])}" for key in sorted(value, key=str.lower))
        return f"{{{','.join(entries)}}}"
    return json.dumps(value)


VALUES: list[Any] = [
    5, -2e3, None, True, "", 'a "b", {c}: [d]\n', [], [[1, "x"], {}], {"y": [1, "z", None]},
    {"k-1.$": {"é": 1}},
]  # fmt: skip


@pytest.mark.parametrize("marks", [[], MARKS], ids=["text", "tokens"])
@pytest.mark.parametrize("value", VALUES)
def test_every_value_of_gemma_is_parsed(value: Any, marks: list[str]) -> None:
    tools: list[Any] = [{"function": {"name": "f", "parameters": {}}}]
    words, answer_format = Bytes(marks), AnswerFormat(families.GEMMA4)
    grammar = tool_grammar(answer_format, tools, words.controls, is_forced=True)
    assert grammar is not None
    text = f"<|tool_call>call:f{gemma({'a': value, 'b': 1})}<tool_call|>"
    assert matches(grammar, words, text)
    assert not matches(grammar, words, text.replace(",b:1}<", ",b:1<"))
    parser = AnswerParser(answer_format, tools)
    (call,) = message_of([*parser.feed(text), *parser.finish()]).tool_calls
    assert json.loads(call.arguments) == {"a": value, "b": 1}


def test_names_never_become_control_tokens() -> None:
    """They come from clients."""
    name = "<tool_call>"
    tools = [{"function": {"name": name, "parameters": {"properties": {name: {"type": "string"}}}}}]
    for calls in families.FORMATS:
        grammar = tool_grammar(AnswerFormat(calls), tools, {name: 7}, is_forced=True, is_parallel=False)
        if grammar is not None:
            assert grammar.count("<[7]>") == calls.opening.count(name)


# What a grammar lets a model write, the parser reads

KINDS = ["a", "2", 1, None, "</parameter>"]
NOTE = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": KINDS},
    },
    "required": ["text", "kind"],
    "additionalProperties": False,
}
NOTES: list[Any] = [{"type": "function", "function": {"name": "note", "parameters": NOTE}}]
FAMILIES: dict[str, CallFormat] = {
    "harmony": families.HARMONY, "gemma4": families.GEMMA4, "qwen-xml": families.QWEN_XML,
    "hermes": families.HERMES, "mistral-args": families.MISTRAL_ARGS, "mistral": families.MISTRAL,
    "llama3": families.LLAMA3, "any": families.JSON_CALL, "gemma3": families.GEMMA3,
    **{name: found.calls for name, found in DERIVED.items() if found.calls is not None},
}  # fmt: skip
TRICKS = [
    *MARKS, "</parameter>", "<parameter=kind>", "</function>", "\n", "\n", "a", " ", '"', "\\", "}", "]",
    "<function=note>", "<|call|>", "<|return|>",
]  # fmt: skip


@functools.cache
def _matcher_of(family: str, marks: tuple[str, ...]) -> Any:
    words = Bytes([*marks])
    grammar = tool_grammar(AnswerFormat(FAMILIES[family]), NOTES, words.controls, is_forced=True)
    assert grammar is not None
    return matcher_of(grammar, words)


def written(family: str, text: str, kind: Any) -> tuple[str, str, str]:
    """Return a call as a model of the family writes it: what comes before its arguments, these, the rest."""
    calls = FAMILIES[family]
    names = {NAME: "note", QUOTED_NAME: '"note"', INDEX: "0"}
    before = "".join([*calls.opening, *(names.get(part, part) for part in calls.before_call)])
    arguments = {"text": text, "kind": kind}
    if calls.pairs is not None:
        spelled = calls.pairs.between.join(pair(calls.pairs, *each) for each in arguments.items())
    else:
        spelled = gemma(arguments) if calls.arguments == "gemma" else json.dumps(arguments)
    return before, spelled, calls.after_call + "".join(calls.closing)


def pair(pairs: Pairs, key: str, value: Any) -> str:
    """Return an argument as a model writes it."""
    if pairs.is_keywords:
        return f"{key}{pairs.before_value}{json.dumps(value)}"
    if isinstance(value, str):
        return f"{pairs.before_key}{key}{pairs.before_value}{value}{pairs.after_value}"
    before = pairs.before_json or pairs.before_value
    return f"{pairs.before_key}{key}{before}{json.dumps(value)}{pairs.after_value}"


@pytest.mark.parametrize("marks", [(), tuple(MARKS)], ids=["text", "tokens"])
@pytest.mark.parametrize("family", [*FAMILIES])
@given(text=st.lists(st.sampled_from(TRICKS), max_size=6).map("".join), kind=st.sampled_from(KINDS))
def test_what_the_grammar_writes_is_read(family: str, marks: tuple[str, ...], text: str, kind: Any) -> None:
    """print("</parameter>") became a broken call."""
    if family == "harmony":
        marks = tuple(MARKS)
    before, arguments, after = written(family, text, kind)
    words, matcher = Bytes([*marks]), _matcher_of(family, marks).deep_copy()
    pairs = FAMILIES[family].pairs
    begin, end = (Q, Q) if family == "gemma4" else ("", "")
    if pairs is not None and not pairs.is_keywords:
        begin, end = pairs.before_value, pairs.after_value
    spelled = list(arguments.encode())
    if begin:  # no part of the text is a token
        first, _, last = arguments.partition(f"{begin}{text}{end}")
        spelled = [*words.tokenize(first + begin), *text.encode(), *words.tokenize(end)]
        spelled += words.tokenize(last)
    tokens = [*words.tokenize(before), *spelled, *words.tokenize(after)]
    if matcher.try_consume_tokens(tokens) < len(tokens) or "\n</parameter>\n" in f"{text}\n":
        return
    parser = AnswerParser(AnswerFormat(FAMILIES[family]), NOTES)
    found = message_of([*parser.feed(before + arguments + after), *parser.finish()])
    assert [call.name for call in found.tool_calls] == ["note"]
    assert json.loads(found.tool_calls[0].arguments) == {"text": text, "kind": kind}


@pytest.mark.parametrize("family", [*FAMILIES])
@pytest.mark.parametrize("text", ['print("</parameter>")', "a</parameter>b\n</parameter> c", "</function>"])
def test_marks_may_be_written(family: str, text: str) -> None:
    before, arguments, after = written(family, text, "a")
    marks = tuple(MARKS)
    words, matcher = Bytes([*marks]), _matcher_of(family, marks).deep_copy()
    tokens = words.tokenize(before + arguments + after)
    assert matcher.try_consume_tokens(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": "on"}, ["on"], ["off", "o"]),
        ({"const": 3}, ["3"], ["4"]),
        ({"enum": ["a/b", 1]}, ["a/b", "1"], ["2"]),
        ({"type": "string", "maxLength": 3}, ["", "abc", "é\né"], ["abcd"]),
        ({"type": "string", "minLength": 2}, ["ab", "abc"], ["a"]),
        ({"type": "string", "pattern": "^a/[0-9]+$"}, ["a/12"], ["a/", "b", "a/1b"]),
        ({"type": "string", "pattern": "b"}, ["b", "abc"], ["a"]),
        ({"type": "string", "pattern": "^(on|off)$", "maxLength": 2}, ["on"], ["off", "x"]),
        ({"type": ["string", "null"], "maxLength": 1}, ["a"], ["ab"]),
        ({"$ref": "#/$defs/text"}, ["ab"], ["a", "1"]),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, ["ab"], ["a"]),
        ({"allOf": [{"$ref": "#/$defs/mode"}]}, ["on", "9007199254740993"], ["o", "9007199254740992"]),
    ],
)
def test_text_in_xml_is_held_to_its_schema(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    """Only "type" and "enum" were."""
    parameters: Any = {"type": "object", "properties": {"text": schema}, "required": ["text"]}
    parameters["$defs"] = {"text": {"type": "string", "minLength": 2}, "mode": {"enum": ["on", 2**53 + 1]}}
    tools: list[Any] = [{"function": {"name": "note", "parameters": parameters}}]
    words = Bytes([])
    grammar = tool_grammar(AnswerFormat(families.QWEN_XML), tools, words.controls, is_forced=True)
    assert grammar is not None
    call = "<tool_call>\n<function=note>\n<parameter=text>\n{}\n</parameter>\n</function>\n</tool_call>"
    for text in right:
        assert matches(grammar, words, call.format(text)), text
    for text in wrong:
        assert not matches(grammar, words, call.format(text)), text


@pytest.mark.parametrize("family", ["hermes", "qwen-xml", "harmony", "dsml", "lfm2"])
def test_integers_of_calls_end(family: str) -> None:
    """At temperature 0, a model wrote zeros up to the limit."""
    calls, words = FAMILIES[family], Bytes(MARKS)
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools: list[Any] = [{"function": {"name": "note", "parameters": parameters}}]
    grammar = tool_grammar(AnswerFormat(calls), tools, words.controls, is_forced=True)
    assert grammar is not None
    before, _, after = written(family, "", "")
    for n_digits, is_right in ((18, True), (30, False)):
        number = "1" * n_digits
        spelled = f'{{"n":{number}}}' if calls.pairs is None else pair(calls.pairs, "n", int(number))
        assert matches(grammar, words, before + spelled + after) is is_right
