"""Grammars that make a model's tool calls match the schemas of the tools, in the format of its family.

The grammars are Lark in llguidance's dialect: `%json` for arguments, `<[7]>` for token 7. Unless a call is
forced, the model may write any text, and is constrained only once it begins a call.
tests/chat/test_tool_grammar.py runs the grammars in llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from llamaspec.chat.families import GEMMA4, HARMONY, NAME, QUOTED_NAME, QWEN_XML, AnswerFormat
from llamaspec.chat.messages import Json
from llamaspec.chat.xml_values import as_text, choices, escaped, quoted, text_rules, types_of
from llamaspec.sampling.schemas import compilable

_ANYTHING = r"/(?s:.*)/"


def tool_grammar(
    answer_format: AnswerFormat,
    tools: Sequence[Mapping[str, Json]],
    controls: Mapping[str, int],
    *,
    is_forced: bool = False,
    is_parallel: bool = True,
    thinking: bool = False,
) -> str | None:
    """Return the grammar of an answer whose calls match the tools; None if the format of calls is unknown.

    There must be a tool, in OpenAI's form. Marks in `controls`, the vocabulary's control tokens, are tokens;
    others are text. `is_forced`: the answer must be a call. `is_parallel`: several calls are allowed, if the
    family writes several. `thinking`: the prompt ends with the mark that opens reasoning. Gemma 4's arguments
    are well-formed but may not match the schema, because its notation is not JSON.
    """
    has_channels = {"<|channel|>", "<|message|>", "<|start|>"} <= controls.keys()
    if answer_format.calls is None or (answer_format.calls is HARMONY and not has_channels):
        return None
    return _Grammar(answer_format, controls, thinking).of_calls(tools, is_forced, is_parallel)


def answer_grammar(
    answer_format: AnswerFormat, schema: Mapping[str, Json], controls: Mapping[str, int], *, thinking: bool
) -> str:
    """Return the grammar of reasoning followed by JSON of a schema; parameters as in `tool_grammar`."""
    return _Grammar(answer_format, controls, thinking).of_answer(schema)


class _Grammar:
    """Collects the rules of one grammar."""

    def __init__(self, answer_format: AnswerFormat, controls: Mapping[str, int], is_thinking: bool) -> None:
        self._controls = controls
        self._format = answer_format
        self._is_thinking = is_thinking
        self._rules: list[str] = []

    def of_calls(self, tools: Sequence[Mapping[str, Json]], is_forced: bool, is_parallel: bool) -> str:
        is_harmony = self._format.calls is HARMONY
        start = self._channels(is_forced) if is_harmony else self._around_calls(is_forced, is_parallel)
        self._rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, tool in enumerate(tools):
            function = tool.get("function", tool)
            self._call(i, str(function["name"]), {"type": "object", **(function.get("parameters") or {})})
        if self._format.calls is GEMMA4:
            self._gemma_values()
        return "\n".join([f"start: {start}", *self._rules])

    def of_answer(self, schema: Mapping[str, Json]) -> str:
        if self._format.calls is HARMONY:
            self._channels(False)
            start = f'analysis? {self._mark("<|channel|>")} "final" {self._mark("<|message|>")} answer'
        else:
            start = f"{self._reasoning()}answer"
        return "\n".join([f"start: {start}", *self._rules, f"answer: {_json(schema)}"])

    def _mark(self, *texts: str) -> str:
        """Return texts as a part of a rule, with control tokens as tokens: "a" <[7]> "b"."""
        spellings = sorted(filter(None, self._controls), key=len, reverse=True)
        pattern = "|".join(map(re.escape, spellings)) or r"(?!)"
        parts = [part for text in texts for part in re.split(f"({pattern})", text) if part]
        return " ".join(
            f"<[{self._controls[part]}]>" if part in self._controls else quoted(part) for part in parts
        )

    def _around_calls(self, is_forced: bool, is_parallel: bool) -> str:
        """Return the start rule of a family without channels."""
        calls = self._format.calls
        assert calls is not None
        many = f" ({calls.between_calls} call)*" if is_parallel and calls.between_calls is not None else ""
        is_parallel = is_parallel and calls.between_pairs is not None
        body = f"call{many} {self._mark(*calls.closing)}".strip()
        think = self._reasoning()
        if is_forced:
            one = f"{self._mark(*calls.opening)} {body}".strip()
            return f"{think}{one} ({calls.between_pairs} {one})*" if is_parallel else f"{think}{one}"
        if not calls.opening:  # a call is the whole answer
            self._rules.append(r"TEXT: /[^{\s](?s:.*)/")
            return f"{think}(TEXT | {body})?"
        mark, *others = calls.opening
        without = "" if mark in self._controls else f" & ~/(?s:.*){escaped(mark)}(?s:.*)/"
        one = " ".join(filter(None, [self._up_to(mark, "begin"), self._mark(*others), body]))
        self._rules.append(f"TAIL: {_ANYTHING}{without}")
        return f"{think}({one})* TAIL" if is_parallel else f"{think}(TAIL | {one})"

    def _channels(self, is_forced: bool) -> str:
        """Return the start rule of harmony; the prompt ends with <|start|>assistant."""
        channel, message = self._mark("<|channel|>"), self._mark("<|message|>")
        self._rules += [
            f"TEXT: {_ANYTHING}",
            f'again: {self._mark("<|end|>", "<|start|>")} "assistant"',
            f'analysis: {channel} "analysis" {message} TEXT again',
            f'preamble: {channel} "commentary" {message} TEXT again',
            f'final: {channel} "final" {message} TEXT',
        ]
        return "analysis? preamble? call" if is_forced else "analysis? (final | preamble? call)"

    def _reasoning(self) -> str:
        """Return the part of the start rule for reasoning."""
        reasoning = self._format.reasoning
        if reasoning is None:
            return ""
        self._rules.append(r"SPACE: /\s{1,8}/")
        thought = f"{self._up_to(reasoning.closing, 'thought')} SPACE?"
        opening = self._mark(reasoning.opening.strip())
        return f"{thought} " if self._is_thinking else f"({opening} {thought})? "

    def _up_to(self, mark: str, name: str) -> str:
        """Return the part of a rule for any text up to a mark, and the mark."""
        if mark in self._controls:
            # The parser also ends reasoning and Gemma's texts at a mark that is spelled with ordinary tokens.
            without = f" & ~/(?s:.*){escaped(mark)}(?s:.*)/" if name in ("thought", "quoted") else ""
            self._rules.append(f"{name.upper()}: {_ANYTHING}{without}")
            return f"{name.upper()} {self._mark(mark)}"
        self._rules.append(f"{name}[lazy]: /(?s:.*){escaped(mark)}/")
        return name

    def _call(self, i: int, name: str, schema: Mapping[str, Json]) -> None:
        """Add the rule `call_i` and those that it needs. No part of a name becomes a control token."""
        calls = self._format.calls
        assert calls is not None
        names = {NAME: quoted(name), QUOTED_NAME: quoted(quoted(name))}
        parts = [names.get(part) or self._mark(part) for part in calls.before_call]
        parts += [f"arguments_{i}", *([quoted(calls.after_call)] if calls.after_call else [])]
        self._rules.append(f"call_{i}: {' '.join(parts)}")
        if calls is QWEN_XML:
            self._parameters(i, schema)
        elif calls is GEMMA4:
            self._rules.append(f"arguments_{i}: object")
        else:
            self._rules.append(f"arguments_{i}: {_json(schema)}")

    def _parameters(self, i: int, schema: Mapping[str, Json]) -> None:
        """Add `arguments_i`: Qwen's parameters in tags, in the order of the schema; any if it has none."""
        if "properties" not in schema:
            self._rules += [
                f"arguments_{i}: any_{i}*",
                f"any_{i}: {self._mark('<parameter=')} /[\\w.-]{{1,64}}/ {quoted('>' + chr(10))} value_{i}",
                *text_rules(f"value_{i}", {}),
            ]
            return
        required, more, end = schema.get("required") or (), quoted(">\n"), "\n</parameter>\n"
        shared = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
        parts = []
        for j, (key, inner) in enumerate((schema.get("properties") or {}).items()):
            rule, inner = f"value_{i}_{j}", inner if isinstance(inner, Mapping) else {}
            values = choices(inner)
            if "string" in types_of(inner) and values is None:
                self._rules += text_rules(rule, inner)
            else:
                value = " | ".join(quoted(as_text(value)) for value in values or ())
                value = f"({value})" if value else _json({**inner, **shared})
                self._rules += [f"{rule}_json: {value}", f"{rule}: {rule}_json {quoted(end)}"]
            part = f"{self._mark('<parameter=')} {quoted(key)} {more} {rule}"
            parts.append(part if key in required else f"({part})?")
        self._rules.append(f"arguments_{i}: {' '.join(parts) or quoted('')}")

    def _gemma_values(self) -> None:
        """Add `object`: any object in Gemma 4's notation, {key:<|"|>text<|"|>,other:[1,true]}."""
        mark = '<|"|>'
        self._rules += [
            'object: "{" (entry ("," entry)*)? "}"',
            r'entry: /[^{}\[\],:<>"\s]+/ ":" value',
            'value: text | object | "[" (value ("," value)*)? "]" | scalar',
            'scalar: %json {"type": ["number", "boolean", "null"]}',
            f"text: {self._mark(mark)} {self._up_to(mark, 'quoted')}",
        ]


def _json(schema: Mapping[str, Json]) -> str:
    """Return the part of a rule for JSON of a schema."""
    return f"%json {json.dumps(compilable(dict(schema)))}"
