"""Grammars for calls of tools, asked of llguidance: right calls pass, wrong ones do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamaspec.chat import families
from llamaspec.chat.families import AnswerFormat, Reasoning
from llamaspec.chat.parse import AnswerParser, message_of
from llamaspec.chat.tool_grammar import answer_grammar, marked, tool_grammar
from llamaspec.errors import PromptError

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
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>",
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
    words = Bytes(marks)
    grammar = tool_grammar(answer_format, TOOLS, choice, controls=words.controls, **options)
    assert grammar is not None
    return matches(grammar, words, text)


def matches(grammar: str, words: Bytes, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words))
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
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
    "as OpenAI names it": (HERMES, {"type": "function", "function": {"name": "now"}}, [OTHER], [ONE, ""]),
    "thinking": (
        AnswerFormat(families.HERMES, THINK),
        "required",
        [ONE, f"<think>\nHm.\n</think>\n\n{ONE}"],
        ["<think>\nHm.\n</think>\n\nHello", f"<think>Hm. {ONE}"],
    ),
    "qwen-xml": (
        AnswerFormat(families.QWEN_XML),
        "required",
        [
            XML.format(""),
            XML.format(DAYS.format(3) + UNIT.format("C")),
            XML.replace("Paris", "a\n\nb<c>").format(""),
        ],
        [XML.format(DAYS.format("three")), XML.format(UNIT.format("K")), XML.format("x"), "Hello"],
    ),
    "qwen-xml, auto": (
        AnswerFormat(families.QWEN_XML),
        "auto",
        ["Hello", "So: " + XML.format("")],
        [XML.format(DAYS.format("three"))],
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
            GEMMA.format(""),
            GEMMA.format("city:1"),
            GEMMA.format(f"city:{Q}Paris{Q},"),
            GEMMA.format(f"city:{Q}Paris{Q},unit:{Q}K{Q}"),
            GEMMA.format(f"city:{Q}Paris{Q},days:1.5"),
            GEMMA.format("days:1"),
            GEMMA_PARIS.replace("weather", "other"),
            GEMMA_PARIS[:-5],
        ],
    ),
    "gemma4, auto": (
        AnswerFormat(families.GEMMA4),
        "auto",
        ["Hello", f"So: {GEMMA_PARIS}."],
        [f"So: {GEMMA.format('')}"],
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
    "mistral-args, auto": (
        AnswerFormat(families.MISTRAL_ARGS),
        "auto",
        ["Hello", f"So: [TOOL_CALLS]weather[ARGS]{PARIS}"],
        ["[TOOL_CALLS]weather[ARGS]{}"],
    ),
}
SPECIAL_ONLY: dict[str, tuple[AnswerFormat, Any, list[str], list[str]]] = {
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
def test_what_a_grammar_accepts(
    answer_format: AnswerFormat, choice: Any, right: list[str], wrong: list[str], marks: list[str]
) -> None:
    for text in right:
        assert accepts(answer_format, text, marks, choice), text
    for text in wrong:
        assert not accepts(answer_format, text, marks, choice), text


@pytest.mark.parametrize(
    ("answer_format", "choice", "right", "wrong"), SPECIAL_ONLY.values(), ids=SPECIAL_ONLY
)
def test_harmony(answer_format: AnswerFormat, choice: Any, right: list[str], wrong: list[str]) -> None:
    test_what_a_grammar_accepts(answer_format, choice, right, wrong, MARKS)


def test_what_is_accepted_is_parsed() -> None:
    """The two halves of a format agree."""
    for answer_format, choice, right, _ in [*CASES.values(), *SPECIAL_ONLY.values()]:
        for text in right if choice != "auto" else ():
            parser = AnswerParser(answer_format, TOOLS)
            found = message_of([*parser.feed(text), *parser.finish()])
            assert found.tool_calls
            assert found.text == ""
            for call in found.tool_calls:
                json.loads(call.arguments)


@pytest.mark.parametrize("marks", [[], MARKS], ids=["text", "tokens"])
def test_one_call_where_several_are_not_wanted(marks: list[str]) -> None:
    for choice in ("auto", "required"):
        assert accepts(HERMES, ONE, marks, choice, parallel=False)
        assert not accepts(HERMES, f"{ONE}\n{OTHER}", marks, choice, parallel=False)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_prompt_has_opened_the_reasoning(choice: str) -> None:
    thinks = AnswerFormat(families.HERMES, THINK)
    assert accepts(thinks, f"Hm. <tool_call>\n</think>\n\n{ONE}", [], choice, thinking=True)
    assert not accepts(thinks, f"Hm.\n</think>\n\n{ONE.replace('city', 'town')}", [], choice, thinking=True)


def test_where_nothing_is_forced() -> None:
    assert tool_grammar(HERMES, TOOLS, "none") is None
    assert tool_grammar(HERMES, [], "auto") is None
    assert tool_grammar(AnswerFormat(), TOOLS, "required") is None
    assert tool_grammar(AnswerFormat(families.HARMONY, families.CHANNELS), TOOLS, "required") is None
    with pytest.raises(PromptError, match="names other, which is not among the tools"):
        tool_grammar(HERMES, TOOLS, "other")


def test_of_two_marks_the_longer_is_written() -> None:
    controls = {"[CALL]": 1, "[CALL]s": 2, "]": 3}
    assert marked("a[CALL]s[CALL]b]", controls) == '"a" <[2]> <[1]> "b" <[3]>'
    assert marked("", controls) == '""'


def test_arguments_are_an_object_whatever_a_schema_leaves_out() -> None:
    tools = [{"function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}]
    grammar = tool_grammar(HERMES, tools, "required", controls={})
    assert grammar is not None
    assert matches(grammar, Bytes([]), ONE)
    assert not matches(grammar, Bytes([]), ONE.replace(PARIS, "[1]"))
    assert not matches(grammar, Bytes([]), ONE.replace('"Paris"', "1"))


def test_names_and_schemas_of_all_kinds() -> None:
    odd = {
        "properties": {'a"\né': {"$ref": "#/$defs/n"}},
        "required": ['a"\né'],
        "$defs": {"n": {"type": "integer"}},
    }
    tools = [{"function": {"name": 'x"é/\\', "parameters": odd}}]
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes(MARKS)))
    for calls in families.FORMATS:
        grammar = tool_grammar(AnswerFormat(calls), tools, "required", controls=Bytes(MARKS).controls)
        if grammar is not None:
            matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
            assert not matcher.is_error(), (calls, matcher.get_error())


FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


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
            ["5", "Hm</think>", "a</think>b"],
        ),
        (
            AnswerFormat(families.HARMONY, families.CHANNELS),
            False,
            [f"{FINAL}5", f"{ANALYSIS}{FINAL}5"],
            ["5", ANALYSIS, f"{FINAL}a", f"{ANALYSIS}5"],
        ),
    ],
)
def test_json_behind_reasoning(
    answer_format: AnswerFormat, thinking: bool, right: list[str], wrong: list[str], marks: list[str]
) -> None:
    words = Bytes(marks if answer_format.calls is None else MARKS)  # harmony's are always tokens
    schema = {"type": "integer"}
    grammar = answer_grammar(answer_format, schema, thinking=thinking, controls=words.controls)
    assert all(matches(grammar, words, text) for text in right)
    assert not any(matches(grammar, words, text) for text in wrong)


def gemma(value: Any) -> str:
    """As Gemma's template writes it."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    if isinstance(value, dict):
        entries = (f"{key}:{gemma(value[key])}" for key in sorted(value, key=str.lower))
        return f"{{{','.join(entries)}}}"
    return json.dumps(value)


TREE = {
    "type": "object",
    "properties": {"Name": {"type": "string"}, "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["Name"],
}
# Schema of the parameter `a`, values that it takes, others.
SCHEMAS: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer", "minimum": 2, "maximum": 5}, [2, 5], [1, 6, "2", None]),
    ({"type": ["string", "null"], "maxLength": 3}, ["", "abc", None], ["abcd", 1]),
    ({"type": "string", "nullable": True}, ["x", None], [True]),
    ({"enum": ["b", 1, None, [True], {"k": "v"}]}, ["b", 1, None, [True], {"k": "v"}], ["c", 2, [False]]),
    ({"const": "x y"}, ["x y"], ["x"]),
    ({"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
     [[1.5], [1, -2e3]], [[], [1, 2, 3]]),
    ({"type": "array", "items": {"type": "string"}}, [[], ["[", "]"]], [[1], "x"]),
    ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    ({"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 2}]}, [True, "ab"], [1, "a"]),
    ({"$ref": "#/$defs/tree"}, [{"Name": "a"}, {"Name": "a", "below": [{"Name": "b", "below": []}]}],
     [{}, {"below": []}]),
    ({"type": "object"}, [{}, {"x": {"y": [1, "z", None]}, "w": True}], [1]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1}], [{"x": "y"}]),
    ({"type": "object", "additionalProperties": False}, [{}], [{"x": 1}]),
    ({"properties": {"p": {}, "q": {}, "r": {}}}, [{}, {"p": 1}, {"q": 1}, {"p": 1, "r": "x"}], [{"s": 1}]),
    ({}, [1, "x", None, [], [[{"k": "v"}]]], []),
]  # fmt: skip


@pytest.mark.parametrize("marks", [[], MARKS], ids=["text", "tokens"])
@pytest.mark.parametrize(("schema", "right", "wrong"), SCHEMAS)
def test_gemma_writes_what_a_schema_says_and_it_is_read(
    schema: Any, right: list[Any], wrong: list[Any], marks: list[str]
) -> None:
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": {"tree": TREE}}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    words, answer_format = Bytes(marks), AnswerFormat(families.GEMMA4)
    grammar = tool_grammar(answer_format, tools, "required", controls=words.controls)
    assert grammar is not None
    for value in right:
        text = f"<|tool_call>call:f{gemma({'a': value})}<tool_call|>"
        assert matches(grammar, words, text), text
        parser = AnswerParser(answer_format, tools)
        (call,) = message_of([*parser.feed(text), *parser.finish()]).tool_calls
        assert json.loads(call.arguments) == {"a": value}
    for value in wrong:
        assert not matches(grammar, words, f"<|tool_call>call:f{gemma({'a': value})}<tool_call|>"), value


def test_what_gemma_cannot_be_held_to() -> None:
    """Is left aside, but for strict tools."""
    schema: Any = {
        "properties": {"a": {"type": "string", "pattern": "^b+$"}},
        "x-guidance": {"lenient": True},
    }
    tools = [{"function": {"name": "f", "parameters": schema}}]
    assert tool_grammar(AnswerFormat(families.GEMMA4), tools) is not None
    schema["x-guidance"]["lenient"] = False
    with pytest.raises(PromptError, match="pattern of a schema is not supported"):
        tool_grammar(AnswerFormat(families.GEMMA4), tools)
    schema["properties"]["a"] = {"$ref": "#/nowhere"}
    with pytest.raises(PromptError, match="refers to '#/nowhere', which is not there"):
        tool_grammar(AnswerFormat(families.GEMMA4), tools)


def test_names_never_become_control_tokens() -> None:
    """They come from clients."""
    name = "<tool_call>"
    tools = [{"function": {"name": name, "parameters": {"properties": {name: {"type": "string"}}}}}]
    controls = {name: 7}
    for calls in families.FORMATS:
        grammar = tool_grammar(AnswerFormat(calls), tools, "required", False, controls=controls)
        if grammar is not None:
            assert grammar.count("<[7]>") == calls.opening.count(name)
