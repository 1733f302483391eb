"""The families of models whose notation of reasoning and tool calls is known.

A chat template renders earlier calls as the model was trained to write them, so its source shows the family.
The notation of any other template that renders calls is derived from what it writes (`chat/probe.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from llamaspec.chat.notation import (
    FINAL,
    NAME,
    QUOTED_NAME,
    AnswerFormat,
    CallFormat,
    Pairs,
    Reasoning,
)
from llamaspec.chat.probe import derived

_JSON_HEADER = (
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]{1,256})"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
CHANNELS = Reasoning("<|channel|>analysis<|message|>", "<|end|>", f"<|start|>assistant{FINAL}")
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
    between_pairs="\n",
    arguments="pairs",
    pairs=Pairs("<parameter=", ">\n", "\n</parameter>\n", ("</function>", "</tool_call>")),
    starts=("<tool_call>", "<function="),  # Qwen3-Coder sometimes omits <tool_call>
    header=r"(?:\s*<function=)?(?P<name>[^<>\s]{1,256})>",
    endings=("</function>", "</tool_call>"),
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
    between_pairs="\n",
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
    between_calls=", ",
    header=rf"\s*\[?{_JSON_HEADER}",
    endings=("}", "]", ","),
    separators=(",",),
)
LLAMA3 = CallFormat(  # Llama 3.1 to 3.3
    template_marks=(r"<\|start_header_id\|>", r'"parameters": '),
    marks=("<|python_tag|>",),
    before_call=('{"name": ', QUOTED_NAME, ', "parameters": '),
    after_call="}",
    starts=("<|python_tag|>",),
    header=_JSON_HEADER,
    endings=("}", ";"),
    separators=(";",),
    bare="{",
    known_only=True,
)
JSON_CALL = CallFormat(  # for a forced call of an unknown family
    marks=(),
    before_call=('{"name": ', QUOTED_NAME, ', "arguments": '),
    after_call="}",
    header=_JSON_HEADER,
    endings=("}",),
    bare="{",
    known_only=True,
)
LFM2 = CallFormat(
    template_marks=(r"<\|tool_list_start\|>",),
    marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    before_call=(NAME, "("),
    after_call=")",
    opening=("<|tool_call_start|>", "["),
    closing=("]", "<|tool_call_end|>"),
    between_calls=", ",
    arguments="pairs",
    pairs=Pairs("", "=", "", between=", ", is_keywords=True),
    header=r"\s*\[?\s*(?P<name>[\w.-]{1,256})\((?=\s*(?:\)|\w+\s*=))",
    endings=(")", "]", ",", "<|tool_call_end|>", "```"),
    separators=(",",),
    known_only=True,
)
GEMMA3 = replace(
    LFM2,
    template_marks=(r"<start_of_turn>",),
    marks=(),
    opening=("[",),
    closing=("]",),
    starts=("```tool_code",),
    bare="[",
)
FORMATS = (HARMONY, GEMMA4, QWEN_XML, HERMES, MISTRAL_ARGS, MISTRAL, LLAMA3)  # the first match is used
UNWRITTEN = (LFM2, GEMMA3)  # their templates often write no calls


def recognize(template: str) -> AnswerFormat:
    """Return how the family of a chat template writes answers."""
    calls = _known(FORMATS, template) or derived(template) or _known(UNWRITTEN, template)
    if calls is HARMONY:
        return AnswerFormat(HARMONY, CHANNELS)
    return AnswerFormat(calls, next((found for found in _REASONING if found.closing in template), None))


def _known(formats: Sequence[CallFormat], template: str) -> CallFormat | None:
    return next((f for f in formats if all(re.search(mark, template) for mark in f.template_marks)), None)
