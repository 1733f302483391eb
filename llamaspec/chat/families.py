"""How each family of models writes reasoning and tool calls.

A chat template renders earlier calls as the model was trained to write them, so its text shows the family.
`chat/parse.py` reads answers with these tables, `chat/tool_grammar.py` writes grammars from them.
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
    empty_line: str = ""  # between the closing mark and the answer

    @property
    def cut(self) -> str:
        """The text that ends reasoning which exceeds its budget."""
        return f"\n{self.closing}{self.empty_line}"


@dataclass(frozen=True, slots=True, eq=False)
class CallFormat:
    """How a family of models writes tool calls.

    In a grammar, a call is `before_call`, its arguments and `after_call`; NAME stands for the tool's name,
    QUOTED_NAME for the name as JSON. The parser is less strict about spaces: a call is one of `starts`,
    `header`, the arguments, and any of `behind`.
    """

    template_marks: tuple[str, ...]  # regular expressions that all match a chat template of the family
    marks: tuple[str, ...]  # control tokens, if the vocabulary has them
    before_call: tuple[str, ...]
    after_call: str = ""
    opening: tuple[str, ...] = ()  # before calls; empty: a call is the whole answer
    closing: tuple[str, ...] = ()  # behind calls
    between: str | None = None  # between two calls in one pair of marks, as Lark; None: only one call
    again: str | None = None  # between two pairs of marks, as Lark; None: only one pair
    arguments: Literal["json", "xml", "gemma", "channels"] = "json"
    starts: tuple[str, ...] = ()  # default: the first of `opening`
    header: str = ""  # regular expression with the group `name`
    behind: tuple[str, ...] = ()
    separator: str = ""  # member of `behind` that another header follows
    known_only: bool = False  # a call of an unknown tool is content
    may_lack_marks: bool = False  # some models write the JSON alone, or in a fence


NAME = "{name}"
QUOTED_NAME = '"{name}"'
_JSON_HEADER = (
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]{1,256})"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The parts of an answer besides text; None if the family has none."""

    calls: CallFormat | None = None
    reasoning: Reasoning | None = None

    def spelled(self, controls: Mapping[str, int]) -> dict[int, bytes]:
        """Return the control tokens whose text the parser needs: `Pair.stream(spelled=…)`."""
        marks = self.calls.marks if self.calls is not None else ()
        if self.reasoning is not None:
            marks = (*marks, self.reasoning.opening.strip(), self.reasoning.closing)
        # <|channel>thought is a token and a word.
        known = [text for text in controls if len(text) > 1 and any(text in mark for mark in marks)]
        return {controls[text]: text.encode() for text in known}

    def begun(self, text: str, reasoning: str, prompt: bytes) -> list[tuple[str, bool]]:
        """Return what follows a prompt if an answer is continued: parts, each with whether it is a mark."""
        marks, is_thinking = self.reasoning, self.begins_thinking(prompt)
        if marks is None or prompt.rstrip().endswith(marks.closing.encode()):  # reasoning is over
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
    (r"<\|channel\|>", r"<\|message\|>", r"<\|start\|>"),
    ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"),
    ("<|channel|>", "commentary to=functions.", NAME, " ", "<|constrain|>", "json", "<|message|>"),
    arguments="channels",
)
GEMMA4 = CallFormat(
    (r"<\|tool_call>call:", r"<tool_call\|>"),
    ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ("call:", NAME),
    opening=("<|tool_call>",),
    closing=("<tool_call|>",),
    again="",
    arguments="gemma",
    header=r"call:(?P<name>[^{}<>]{1,256})\{",
    behind=("<tool_call|>",),
)
QWEN_XML = CallFormat(  # Qwen3-Coder, Qwen 3.5, Nemotron 3
    (r"<tool_call>", r"<function=", r"<parameter="),
    ("<tool_call>", "</tool_call>"),
    ("<function=", NAME, ">\n"),
    "</function>\n",
    opening=("<tool_call>", "\n"),
    closing=("</tool_call>",),
    again='"\\n"',
    arguments="xml",
    starts=("<tool_call>", "<function="),  # Qwen3-Coder sometimes leaves <tool_call> out
    header=r"(?:\s*<function=)?(?P<name>[^<>\s]{1,256})>",
    behind=("</tool_call>",),
    known_only=True,
)
HERMES = CallFormat(  # Hermes 2 and 3, Qwen 2.5 and 3
    (r"<tool_call>", r"</tool_call>", r'"arguments\\?"', r"^(?!(?s:.*)(<tool_calls>|</arg_key>))"),
    ("<tool_call>", "</tool_call>"),
    ('{"name": ', QUOTED_NAME, ', "arguments": '),
    "}",
    opening=("<tool_call>", "\n"),
    closing=("\n", "</tool_call>"),
    again='"\\n"',
    header=_JSON_HEADER,
    behind=("}", "</tool_call>"),
    may_lack_marks=True,  # Qwen2.5-Coder
)
MISTRAL_ARGS = CallFormat(  # Mistral Small 3.2, Devstral, Ministral 3
    (r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    (NAME, "[ARGS]"),
    opening=("[TOOL_CALLS]",),
    again="",
    header=r"\s*(?P<name>[^\s\[\]{}]{1,256})(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)",
)
MISTRAL = CallFormat(  # up to Nemo
    (r"\[TOOL_CALLS\]",),
    ("[TOOL_CALLS]",),
    ('{"name": ', QUOTED_NAME, ', "arguments": '),
    "}",
    opening=("[TOOL_CALLS]", "["),
    closing=("]",),
    between='", "',
    header=rf"\s*\[?{_JSON_HEADER}",
    behind=("}", "]", ","),
    separator=",",
)
LLAMA3 = CallFormat(  # Llama 3.1 to 3.3
    (r"<\|start_header_id\|>", r'"parameters": '),
    ("<|python_tag|>",),
    ('{"name": ', QUOTED_NAME, ', "parameters": '),
    "}",
    starts=("<|python_tag|>",),
    header=_JSON_HEADER,
    behind=("}", ";"),
    separator=";",
    known_only=True,
)
JSON_CALL = CallFormat(  # for a forced call if the family's own format is unknown
    (),
    (),
    ('{"name": ', QUOTED_NAME, ', "arguments": '),
    "}",
    header=_JSON_HEADER,
    behind=("}",),
    known_only=True,
)
FORMATS = (HARMONY, GEMMA4, QWEN_XML, HERMES, MISTRAL_ARGS, MISTRAL, LLAMA3)  # the first match counts


def recognize(template: str) -> AnswerFormat:
    """Return the format of a chat template's family."""
    calls = next((f for f in FORMATS if all(re.search(mark, template) for mark in f.template_marks)), None)
    if calls is HARMONY:
        return AnswerFormat(HARMONY, CHANNELS)
    return AnswerFormat(calls, next((found for found in _REASONING if found.closing in template), None))
