"""Grammars that make a model's tool calls match the schemas of the tools, in the format of its family.

The grammars are Lark in llguidance's dialect: `%json` for arguments, `<[7]>` for token 7. Unless a call is
forced, the model may write any text, and is constrained only once it begins a call.
tests/chat/test_tool_grammar.py runs the grammars in llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from llamaspec.chat.messages import Json
from llamaspec.chat.notation import INDEX, NAME, QUOTED_NAME, AnswerFormat, Pairs
from llamaspec.chat.xml_values import as_text, choices, escaped, quoted, text_rules, types_of
from llamaspec.sampling.schemas import compilable, forms

_ANYTHING = r"/(?s:.*)/"
_NOTHING = '""'
_PARTS = {INDEX: "/[A-Za-z0-9_]{1,9}/"}


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
    calls = answer_format.calls
    if calls is None or (calls.arguments == "channels" and not has_channels):
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
        self._arguments = "json" if answer_format.calls is None else answer_format.calls.arguments
        self._is_thinking = is_thinking
        self._rules: list[str] = []

    def of_calls(self, tools: Sequence[Mapping[str, Json]], is_forced: bool, is_parallel: bool) -> str:
        has_channels = self._arguments == "channels"
        start = self._channels(is_forced) if has_channels else self._around_calls(is_forced, is_parallel)
        self._rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, tool in enumerate(tools):
            function = tool.get("function", tool)
            self._call(i, str(function["name"]), {"type": "object", **(function.get("parameters") or {})})
        if self._arguments == "gemma":
            self._gemma_values()
        return "\n".join([f"start: {start}", *self._rules])

    def of_answer(self, schema: Mapping[str, Json]) -> str:
        if self._arguments == "channels":
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
        between, again = calls.between_calls, calls.between_pairs
        many = f" ({self._mark(between)} call)*" if is_parallel and between is not None else ""
        body = f"call{many} {self._mark(*calls.closing)}".strip()
        whole = f"{self._mark(*calls.opening)} {body}".strip()
        think = self._reasoning()
        if is_forced:
            more = f" ({self._mark(again)} {whole})*" if is_parallel and again is not None else ""
            return f"{think}{whole}{more}"
        if calls.bare:  # a call is the whole answer
            self._rules.append(f"TEXT: /[^{escaped(calls.bare)}\\s](?s:.*)/")
            return f"{think}(TEXT | {whole})?{self._unended()}"
        mark, *others = calls.opening
        without = "" if mark in self._controls else f" & ~/(?s:.*){escaped(mark)}(?s:.*)/"
        one = " ".join(filter(None, [self._up_to(mark, "begin"), self._mark(*others), body]))
        self._rules.append(f"TAIL: {_ANYTHING}{without}")
        is_several = is_parallel and again is not None
        return (
            f"{think}({one})* TAIL{self._unended()}"
            if is_several
            else f"{think}(TAIL | {one}){self._unended()}"
        )

    def _unended(self) -> str:
        """Return the alternative of reasoning without an end: some models call before they end it."""
        reasoning = self._format.reasoning
        if reasoning is None:
            return ""
        self._rules.append(f"UNENDED: {_ANYTHING} & ~/(?s:.*){escaped(reasoning.closing)}(?s:.*)/")
        return " | UNENDED" if self._is_thinking else f" | {self._mark(reasoning.opening.strip())} UNENDED"

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
        parts = {NAME: quoted(name), QUOTED_NAME: quoted(quoted(name)), **_PARTS}
        before = [parts.get(part) or self._mark(part) for part in calls.before_call]
        after = self._mark(calls.after_call)
        self._rules.append(f"call_{i}: {' '.join(filter(None, [*before, f'arguments_{i}', after]))}")
        if calls.pairs is not None:
            self._pairs(f"arguments_{i}", schema, calls.pairs)
        elif calls.arguments == "gemma":
            self._rules.append(f"arguments_{i}: object")
        else:
            self._rules.append(f"arguments_{i}: {_json(schema)}")

    def _pairs(self, rule: str, schema: Mapping[str, Json], pairs: Pairs) -> None:
        """Add a rule for arguments that are pairs, in the order of the schema; any if it has none."""
        begin, between = self._mark(pairs.before_key), self._mark(pairs.between)
        if "properties" not in schema:
            any_key = r"/[A-Za-z_]\w{0,63}/" if pairs.is_keywords else r"/[\w.-]{1,64}/"
            self._rules.append(
                f"{rule}_any: {begin} {any_key} {self._value(f'{rule}_value', {}, schema, pairs)}"
            )
            self._rules.append(f"{rule}: ({rule}_any ({between} {rule}_any)*)?")
            return
        required = schema.get("required") or ()
        # Of the pairs from one on: `more` follows an earlier pair, `first` none.
        more, first = "", ""
        several = list((schema.get("properties") or {}).items())
        for j, (key, inner) in reversed([*enumerate(several)]):
            value = self._value(f"{rule}_{j}", inner if isinstance(inner, Mapping) else {}, schema, pairs)
            self._rules.append(f"{rule}_pair_{j}: {begin} {quoted(key)} {value}")
            pair, is_required = f"{rule}_pair_{j}", key in required
            self._rules.append(
                f"{rule}_first_{j}: {pair} {more}{'' if is_required else f' | {first or _NOTHING}'}"
            )
            written = f"{between} {pair}".strip()
            self._rules.append(f"{rule}_more_{j}: {written if is_required else f'({written})?'} {more}")
            more, first = f"{rule}_more_{j}", f"{rule}_first_{j}"
        self._rules.append(f"{rule}: {first or _NOTHING}")

    def _value(self, rule: str, inner: Mapping[str, Json], schema: Mapping[str, Json], pairs: Pairs) -> str:
        """Add rules for a value up to its end; return it with what comes before it, as a part of a rule."""
        before, end = self._mark(pairs.before_value), self._mark(pairs.after_value)
        shared = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
        if pairs.is_keywords:
            self._rules.append(f"{rule}_json: {_json({**inner, **shared})}")
            return f"{before} {rule}_json"
        values = choices(inner, schema)
        texts = [as_text(value) for value in values or () if isinstance(value, str)]
        others = [as_text(value) for value in values or () if not isinstance(value, str)]
        alternatives = []
        if values is None and (not inner or "string" in types_of(inner, schema)):
            plain = [form for form in forms(inner, schema) if form.get("type") != "null"]
            has_token = any(text in pairs.after_value for text in self._controls)
            self._rules += text_rules(
                rule, plain[0] if len(plain) == 1 else {}, pairs, end if has_token else None
            )
            alternatives.append(f"{before} {rule}")
        elif values is None:
            others = [_json({**inner, **shared})]
        else:
            texts, others = ([quoted(text) for text in several] for several in (texts, others))
        json_before = self._mark(pairs.before_json) or before
        for kind, begin, written in (("text", before, texts), ("json", json_before, others)):
            if written:
                self._rules.append(f"{rule}_{kind}: {' | '.join(written)}")
                alternatives.append(f"{begin} {rule}_{kind} {end}")
        return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"

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
