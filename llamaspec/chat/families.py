"""How each family of models writes reasoning and tool calls.

A chat template renders earlier calls as the model was trained to write them, so its source shows the family.
`chat/parse.py` parses answers by these tables, and `chat/tool_grammar.py` makes grammars from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks around a model's reasoning."""

    opening: str
    closing: str
    after_closing: str = ""  # before the answer

    @property
    def cut(self) -> str:
        """The text that ends the reasoning once its budget is used up."""
        return f"\n{self.closing}{self.after_closing}"


@dataclass(frozen=True, slots=True, eq=False)
class CallFormat:
    """How a family of models writes tool calls.

    A grammar has `opening`, `before_call`, the arguments, `after_call` and `closing`. NAME stands for the
    tool's name, QUOTED_NAME for the name in JSON. The parser is less strict about spaces: it looks for one of
    `starts`, `header`, the arguments, and any of `endings`.
    """

    template_marks: tuple[str, ...]  # regular expressions; a template of the family matches all of them
    marks: tuple[str, ...]  # control tokens in most vocabularies
    before_call: tuple[str, ...]
    after_call: str = ""
    opening: tuple[str, ...] = ()  # marks before calls; none if a call is the whole answer
    closing: tuple[str, ...] = ()  # marks after calls
    between_calls: str | None = None  # inside one pair of marks, as Lark; None = only one call
    between_pairs: str | None = None  # of marks, as Lark; None = only one pair
    arguments: Literal["json", "xml", "gemma", "channels"] = "json"
    starts: tuple[str, ...] = ()  # marks; default: the first of `opening`
    header: str = ""  # regular expression with the group `name`
    endings: tuple[str, ...] = ()  # may follow the arguments
    separator: str = ""  # the ending after which another header follows
    known_only: bool = False  # a call of an unknown tool is content
    may_lack_marks: bool = False  # some models write only the JSON, perhaps in a fence


NAME = "{name}"
QUOTED_NAME = '"{name}"'
_JSON_HEADER = (
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]{1,256})"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The parts of an answer besides its content; None if a family has no such part."""

    calls: CallFormat | None = None
    reasoning: Reasoning | None = None

    def spelled(self, controls: Mapping[str, int]) -> dict[int, bytes]:
        """Return the control tokens that the parser must see: the argument `spelled` of `Pair.stream`."""
        marks = self.calls.marks if self.calls is not None else ()
        if self.reasoning is not None:
            marks = (*marks, self.reasoning.opening.strip(), self.reasoning.closing)
        # A mark may be a control token and a word, such as <|channel>thought.
        known = [text for text in controls if len(text) > 1 and any(text in mark for mark in marks)]
        return {controls[text]: text.encode() for text in known}

    def beginning(self, text: str, reasoning: str, prompt: bytes) -> list[tuple[str, bool]]:
        """Return the text of an answer to continue, in parts, each with whether it is a mark."""
        marks, is_thinking = self.reasoning, self.begins_thinking(prompt)
        if marks is None or prompt.rstrip().endswith(marks.closing.encode()):  # no reasoning follows
            return [(text, False)]
        parts: list[tuple[str, bool]] = []
        if self.calls is HARMONY:
            thought = [(marks.opening, True), (reasoning, False), (marks.cut, True)]
            parts = thought if reasoning else [(_FINAL, True)]
            parts = parts if text else []  # reasoning alone is not continued
        elif reasoning or is_thinking:
            parts = [("" if is_thinking else marks.opening, True), (reasoning, False)]
            parts += [(marks.cut if text else "", True)]
        return [*parts, (text, False)]

    def begins_thinking(self, prompt: bytes) -> bool:
        """Whether a rendered conversation ends with the mark that opens reasoning."""
        reasoning = self.reasoning
        return reasoning is not None and prompt.rstrip().endswith(reasoning.opening.strip().encode())


_FINAL = "<|channel|>final<|message|>"
CHANNELS = Reasoning("<|channel|>analysis<|message|>", "<|end|>", f"<|start|>assistant{_FINAL}")
_REASONING = (
    Reasoning("<think>", "</think>", "\n\n"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<|channel>thought\n", "<channel|>"),
)
HARMONY = CallFormat(  # gpt-oss
    template_marks=(r"<\|channel\|>", r"<\|message\|>", r"<\|start\|>"),
    marks=("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"),
    before_call=(
        "<|channel|>",
        "commentary to=functions.",
        NAME,
        " ",
        "<|constrain|>",
        "json",
        "<|message|>",
    ),
    arguments="channels",
)
GEMMA4 = CallFormat(
    template_marks=(r"<\|tool_call>call:", r"<tool_call\|>"),
    marks=("<|tool_call>", "<tool_call|>", '<|"|>'),
    before_call=("call:", NAME),
    opening=("<|tool_call>",),
    closing=("<tool_call|>",),
    between_pairs="",
    arguments="gemma",
    header=r"call:(?P<name>[^{}<>]{1,256})\{",
    endings=("<tool_call|>",),
)
QWEN_XML = CallFormat(  # Qwen3-Coder, Qwen 3.5, Nemotron 3
    template_marks=(r"<tool_call>", r"<function=", r"<parameter="),
    marks=("<tool_call>", "</tool_call>"),
    before_call=("<function=", NAME, ">\n"),
    after_call="</function>\n",
    opening=("<tool_call>", "\n"),
    closing=("</tool_call>",),
    between_pairs='"\\n"',
    arguments="xml",
    starts=("<tool_call>", "<function="),  # Qwen3-Coder sometimes omits <tool_call>
    header=r"(?:\s*<function=)?(?P<name>[^<>\s]{1,256})>",
    endings=("</tool_call>",),
    known_only=True,
)
HERMES = CallFormat(  # Hermes 2 and 3, Qwen 2.5 and 3
    template_marks=(
        r"<tool_call>",
        r"</tool_call>",
        r'"arguments\\?"',
        r"^(?!(?s:.*)(<tool_calls>|</arg_key>))",
    ),
    marks=("<tool_call>", "</tool_call>"),
    before_call=('{"name": ', QUOTED_NAME, ', "arguments": '),
    after_call="}",
    opening=("<tool_call>", "\n"),
    closing=("\n", "</tool_call>"),
    between_pairs='"\\n"',
    header=_JSON_HEADER,
    endings=("}", "</tool_call>"),
    may_lack_marks=True,  # Qwen2.5-Coder
)
MISTRAL_ARGS = CallFormat(  # Mistral Small 3.2, Devstral, Ministral 3
    template_marks=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    before_call=(NAME, "[ARGS]"),
    opening=("[TOOL_CALLS]",),
    between_pairs="",
    header=r"\s*(?P<name>[^\s\[\]{}]{1,256})(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)",
)
MISTRAL = CallFormat(  # up to Nemo
    template_marks=(r"\[TOOL_CALLS\]",),
    marks=("[TOOL_CALLS]",),
    before_call=('{"name": ', QUOTED_NAME, ', "arguments": '),
    after_call="}",
    opening=("[TOOL_CALLS]", "["),
    closing=("]",),
    between_calls='", "',
    header=rf"\s*\[?{_JSON_HEADER}",
    endings=("}", "]", ","),
    separator=",",
)
LLAMA3 = CallFormat(  # Llama 3.1 to 3.3
    template_marks=(r"<\|start_header_id\|>", r'"parameters": '),
    marks=("<|python_tag|>",),
    before_call=('{"name": ', QUOTED_NAME, ', "parameters": '),
    after_call="}",
    starts=("<|python_tag|>",),
    header=_JSON_HEADER,
    endings=("}", ";"),
    separator=";",
    known_only=True,
)
JSON_CALL = CallFormat(  # for a forced call of an unknown family
    template_marks=(),
    marks=(),
    before_call=('{"name": ', QUOTED_NAME, ', "arguments": '),
    after_call="}",
    header=_JSON_HEADER,
    endings=("}",),
    known_only=True,
)
FORMATS = (HARMONY, GEMMA4, QWEN_XML, HERMES, MISTRAL_ARGS, MISTRAL, LLAMA3)  # the first match is used


def recognize(template: str) -> AnswerFormat:
    """Return how the family of a chat template writes answers."""
    calls = next((f for f in FORMATS if all(re.search(mark, template) for mark in f.template_marks)), None)
    if calls is HARMONY:
        return AnswerFormat(HARMONY, CHANNELS)
    return AnswerFormat(calls, next((found for found in _REASONING if found.closing in template), None))
