"""How a family of models writes reasoning and calls of tools, recognised from its chat template.

A template renders earlier calls just as the model was trained to write them, so its text tells the format.
Only marks: `chat/answers.py` reads by them, `chat/tool_grammar.py` forces them. tests/chat/test_formats.py
recognises the templates of published models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class CallFormat(str, Enum):
    """How a call of a tool is written."""

    HERMES = "hermes"  # <tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes 2 and 3, Qwen 2.5 and 3
    QWEN_XML = "qwen-xml"  # <tool_call><function=name><parameter=key>…: Qwen3-Coder, Qwen 3.5, Nemotron 3
    LLAMA3 = "llama3"  # {"name": …, "parameters": {…}}, perhaps behind <|python_tag|>: Llama 3.1 to 3.3
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]: Mistral up to Nemo
    MISTRAL_ARGS = "mistral-args"  # [TOOL_CALLS]name[ARGS]{…}: Mistral Small 3.2, Devstral, Ministral 3
    GEMMA4 = "gemma4"  # <|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>
    DEEPSEEK = "deepseek"  # <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜> in a section: V3.1
    DEEPSEEK_R1 = "deepseek-r1"  # the same with function<｜tool▁sep｜>name and a block ```json: V3, R1
    GLM = "glm"  # <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…: GLM 4.5 to 4.7
    KIMI = "kimi"  # <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}: Kimi K2
    HARMONY = "harmony"  # <|channel|>commentary to=functions.name<|message|>{…}<|call|>: gpt-oss


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Between which marks a model thinks."""

    opening: str
    closing: str
    empty_line: str = ""  # what stands between the closing mark and the answer

    @property
    def cut(self) -> str:
        """What ends thinking that goes on too long."""
        return f"\n{self.closing}{self.empty_line}"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What an answer consists of besides text; `None` is what the family does not have.

    Examples
    --------
    >>> AnswerFormat.of('… <tool_call>{"name": …, "arguments": …}</tool_call> … <think></think>').calls
    <CallFormat.HERMES: 'hermes'>
    """

    calls: CallFormat | None = None
    reasoning: Reasoning | None = None

    @classmethod
    def of(cls, template: str) -> AnswerFormat:
        """The format of a chat template's family."""
        if all(mark in template for mark in HARMONY_MARKS):
            return cls(CallFormat.HARMONY, HARMONY)
        calls = next(
            (calls for calls, marks in _CALLS if all(re.search(mark, template) for mark in marks)), None
        )
        reasoning = next((found for found in _REASONING if found.closing in template), None)
        return cls(calls, reasoning)

    @property
    def marks(self) -> frozenset[str]:
        """What control tokens of a vocabulary may say in an answer."""
        calls = _CALL_MARKS.get(self.calls, ()) if self.calls else ()
        reasoning = (self.reasoning.opening.strip(), self.reasoning.closing) if self.reasoning else ()
        return frozenset({*calls, *reasoning, *(HARMONY_MARKS if self.calls is CallFormat.HARMONY else ())})

    def spelled(self, controls: Mapping[str, int]) -> dict[int, bytes]:
        """The control tokens whose text an answer needs, for `Pair.stream(spelled=…)`.

        Parameters
        ----------
        controls : dict of str to int
            All control tokens of the vocabulary.
        """
        # <|channel>thought is a token and a word.
        known = [mark for mark in controls if len(mark) > 1 and any(mark in other for other in self.marks)]
        return {controls[mark]: mark.encode() for mark in known}

    def begins_thinking(self, prompt: bytes) -> bool:
        """Whether a rendered conversation ends with the mark that opens reasoning."""
        if self.reasoning is None or self.calls is CallFormat.HARMONY:
            return False
        return prompt.rstrip().endswith(self.reasoning.opening.strip().encode())


HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|start|>")
HARMONY = Reasoning(
    "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>"
)
_REASONING = (
    Reasoning("<think>", "</think>", "\n\n"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<seed:think>", "</seed:think>", "\n"),
    Reasoning("<|channel>thought\n", "<channel|>"),
)
# All of these must be found; in this order, for Qwen's XML stands in <tool_call>, too.
_CALLS: tuple[tuple[CallFormat, tuple[str, ...]], ...] = (
    (CallFormat.GEMMA4, (r"<\|tool_call>call:", r"<tool_call\|>")),
    (CallFormat.KIMI, (r"<\|tool_call_begin\|>", r"<\|tool_call_argument_begin\|>")),
    (CallFormat.DEEPSEEK_R1, (r"<｜tool▁call▁begin｜>", r"<｜tool▁sep｜>", r"```json")),
    (CallFormat.DEEPSEEK, (r"<｜tool▁call▁begin｜>", r"<｜tool▁sep｜>")),
    (CallFormat.GLM, (r"<tool_call>", r"</arg_key>(\s|\\n)*<arg_value>")),
    (CallFormat.QWEN_XML, (r"<tool_call>", r"<function=", r"<parameter=")),
    (CallFormat.HERMES, (r"<tool_call>", r"</tool_call>", r'"arguments\\?"', r"^(?!(?s:.*)<tool_calls>)")),
    (CallFormat.MISTRAL_ARGS, (r"\[TOOL_CALLS\]", r"\[ARGS\]")),
    (CallFormat.MISTRAL, (r"\[TOOL_CALLS\]",)),
    (CallFormat.LLAMA3, (r"<\|start_header_id\|>", r'"parameters": ')),
)
_DEEPSEEK_MARKS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)  # fmt: skip
_CALL_MARKS: dict[CallFormat, tuple[str, ...]] = {
    CallFormat.HERMES: ("<tool_call>", "</tool_call>"),
    CallFormat.QWEN_XML: ("<tool_call>", "</tool_call>"),
    CallFormat.LLAMA3: ("<|python_tag|>",),
    CallFormat.MISTRAL: ("[TOOL_CALLS]",),
    CallFormat.MISTRAL_ARGS: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    CallFormat.GEMMA4: ("<|tool_call>", "<tool_call|>", '<|"|>'),
    CallFormat.DEEPSEEK: _DEEPSEEK_MARKS,
    CallFormat.DEEPSEEK_R1: _DEEPSEEK_MARKS,
    CallFormat.GLM: (
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ),
    CallFormat.KIMI: (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_end|>", "<|tool_call_argument_begin|>",
    ),
    CallFormat.HARMONY: ("<|constrain|>", "<|call|>", "<|end|>", "<|return|>"),
}  # fmt: skip
