"""Grammars that hold a model to the schemas of its tools, in its family's own format of calls.

The text is Lark in llguidance's dialect: `%json` for arguments, `<[7]>` for token 7. tool_choice "required"
forces a call; "auto" lets the model write text, and constrains a call once it begins.
tests/chat/test_tool_grammar.py asks llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from llamaspec.chat.escaping import Json
from llamaspec.chat.families import GEMMA4, HARMONY, NAME, QUOTED_NAME, QWEN_XML, AnswerFormat
from llamaspec.errors import PromptError

ToolChoice = str | Mapping[str, Json]  # auto, none, required, or OpenAI's naming of one function

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANYTHING = r"/(?s:.*)/"
_BARE_KEY = r"[A-Za-z0-9_.$-]+"
_SCALARS = ("number", "integer", "boolean", "null")
_HELD_BY_GEMMA = {
    "type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum",
    "const", "anyOf", "oneOf", "$ref", "$defs", "definitions", "minLength", "maxLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "nullable", "$id", "$comment", "deprecated",
    "readOnly", "writeOnly", "x-guidance",
}  # fmt: skip


def tool_grammar(
    answer_format: AnswerFormat,
    tools: Sequence[Mapping[str, Json]],
    tool_choice: ToolChoice = "auto",
    parallel: bool = True,
    *,
    thinking: bool = False,
    controls: Mapping[str, int] | None = None,
) -> str | None:
    """The grammar of an answer whose calls fit the tools; None where nothing is to be forced, or can be.

    Parameters
    ----------
    answer_format : AnswerFormat
    tools : sequence of dict
        In OpenAI's form.
    tool_choice : str or dict
        "auto", "required", "none", the name of a tool, or {"type": "function", "function": {"name": …}}.
    parallel : bool
        Several calls are allowed, where the family writes several.
    thinking : bool
        The prompt ends with the mark that opens reasoning.
    controls : dict of str to int
        The vocabulary's control tokens (`vocabulary.controls`): marks among them are tokens, others text.

    Raises
    ------
    PromptError
        The tool that was named is not among the tools, or a strict schema cannot be obeyed in this format.
    """
    chosen = _chosen(tools, tool_choice)
    controls = controls or {}
    has_channels = {"<|channel|>", "<|message|>", "<|start|>"} <= controls.keys()
    if not chosen or answer_format.calls is None or (answer_format.calls is HARMONY and not has_channels):
        return None
    grammar = _Grammar(answer_format, controls, thinking)
    return grammar.of_calls(chosen, is_forced=tool_choice != "auto", is_parallel=parallel)


def answer_grammar(
    answer_format: AnswerFormat,
    schema: Mapping[str, Json],
    *,
    thinking: bool = False,
    controls: Mapping[str, int] | None = None,
) -> str:
    """The grammar of reasoning and an answer that is JSON of a schema; parameters as of `tool_grammar`."""
    return _Grammar(answer_format, controls or {}, thinking).of_answer(schema)


def quoted(text: str) -> str:
    """A text in a rule."""
    return json.dumps(text, ensure_ascii=False)


def marked(text: str, controls: Mapping[str, int]) -> str:
    """A text in a rule, with the control tokens in it as tokens.

    Examples
    --------
    >>> marked("<|channel>thought", {"<|channel>": 7})
    '<[7]> "thought"'
    """
    spellings = sorted(filter(None, controls), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, spellings))})", text) if spellings else [text]
    return (
        " ".join(f"<[{controls[part]}]>" if part in controls else quoted(part) for part in parts if part)
        or '""'
    )


class _Grammar:
    """The rules of one grammar."""

    def __init__(self, answer_format: AnswerFormat, controls: Mapping[str, int], is_thinking: bool) -> None:
        self.controls = controls
        self._format = answer_format
        self._is_thinking = is_thinking
        self._rules: list[str] = []

    def of_calls(self, tools: Sequence[Mapping[str, Json]], *, is_forced: bool, is_parallel: bool) -> str:
        is_harmony = self._format.calls is HARMONY
        start = self._channels(is_forced) if is_harmony else self._around_calls(is_forced, is_parallel)
        self._rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, tool in enumerate(tools):
            function = tool.get("function", tool)
            schema = function.get("parameters") or _NO_PARAMETERS
            self._call(i, str(function["name"]), schema if "type" in schema else {"type": "object", **schema})
        return "\n".join([f"start: {start}", *self._rules])

    def of_answer(self, schema: Mapping[str, Json]) -> str:
        if self._format.calls is HARMONY:
            self._channels(False)
            start = f'analysis? {self._mark("<|channel|>")} "final" {self._mark("<|message|>")} answer'
        else:
            start = f"{self._reasoning()}answer"
        return "\n".join([f"start: {start}", *self._rules, f"answer: %json {json.dumps(schema)}"])

    def _mark(self, *texts: str) -> str:
        return " ".join(marked(text, self.controls) for text in texts)

    def _around_calls(self, is_forced: bool, is_parallel: bool) -> str:
        """What an answer consists of, in all families but harmony."""
        calls = self._format.calls
        assert calls is not None
        many = f" ({calls.between} call)*" if is_parallel and calls.between is not None else ""
        is_parallel = is_parallel and calls.again is not None
        body = f"call{many} {self._mark(*calls.closing)}".strip()
        think = self._reasoning()
        if is_forced:
            one = f"{self._mark(*calls.opening)} {body}".strip()
            return f"{think}{one} ({calls.again} {one})*" if is_parallel else f"{think}{one}"
        if not calls.opening:  # JSON as the whole answer
            self._rules.append(r"TEXT: /[^{\s](?s:.*)/")
            return f"{think}(TEXT | {body})?"
        mark, *others = calls.opening
        without = "" if mark in self.controls else f" & ~/(?s:.*){_escaped(mark)}(?s:.*)/"
        one = " ".join(filter(None, [self._up_to(mark, "begin"), self._mark(*others), body]))
        self._rules.append(f"TAIL: {_ANYTHING}{without}")
        return f"{think}({one})* TAIL" if is_parallel else f"{think}(TAIL | {one})"

    def _channels(self, is_forced: bool) -> str:
        """The messages of harmony, of which the prompt has begun the first."""
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
        """Reasoning before the answer."""
        reasoning = self._format.reasoning
        if reasoning is None:
            return ""
        self._rules.append(r"SPACE: /\s+/")
        thought = f"{self._up_to(reasoning.closing, 'thought')} SPACE?"
        return (
            f"{thought} " if self._is_thinking else f"({self._mark(reasoning.opening.strip())} {thought})? "
        )

    def _up_to(self, mark: str, name: str) -> str:
        """Any text up to a mark, and the mark."""
        if mark in self.controls:
            self._rules.append(f"{name.upper()}: {_ANYTHING}")
            return f"{name.upper()} {self._mark(mark)}"
        self._rules.append(f"{name}[lazy]: /(?s:.*){_escaped(mark)}/")
        return name

    def _call(self, i: int, name: str, schema: Mapping[str, Json]) -> None:
        """The rule `call_i`, and those that it needs. A name never becomes a control token."""
        calls = self._format.calls
        assert calls is not None
        names = {NAME: quoted(name), QUOTED_NAME: quoted(quoted(name))}
        parts = [names.get(part) or self._mark(part) for part in calls.before_call]
        parts += [f"arguments_{i}", *([quoted(calls.after_call)] if calls.after_call else [])]
        self._rules.append(f"call_{i}: {' '.join(parts)}")
        if calls is QWEN_XML:
            self._parameters(i, schema)
        elif calls is GEMMA4:
            self._rules += _GemmaRules(f"arguments_{i}", schema, self._mark('<|"|>')).lines
        else:
            self._rules.append(f"arguments_{i}: %json {json.dumps(schema)}")

    def _parameters(self, i: int, schema: Mapping[str, Json]) -> None:
        """`arguments_i`: Qwen's parameters between tags, in the order of the schema."""
        required, more, end = schema.get("required") or (), quoted(">\n"), "\n</parameter>\n"
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        parts = []
        for j, (key, inner) in enumerate((schema.get("properties") or {}).items()):
            rule, inner = f"value_{i}_{j}", inner if isinstance(inner, Mapping) else {}
            kinds, values = inner.get("type"), inner.get("enum", [])
            if "string" in (kinds if isinstance(kinds, list) else [kinds]) and "enum" not in inner:
                self._rules.append(f"{rule}[lazy]: /{_any_text(inner)}{_escaped(end)}/")
            else:
                value = " | ".join(quoted(v if isinstance(v, str) else json.dumps(v)) for v in values)
                value = f"({value})" if value else f"%json {json.dumps({**inner, **shared})}"
                self._rules += [f"{rule}_json: {value}", f"{rule}: {rule}_json {quoted(end)}"]
            part = f"{self._mark('<parameter=')} {quoted(key)} {more} {rule}"
            parts.append(part if key in required else f"({part})?")
        self._rules.append(f"arguments_{i}: {' '.join(parts) or quoted('')}")


class _GemmaRules:
    """Schemas in Gemma 4's notation, {key:<|"|>text<|"|>,other:[1,true]}; llguidance knows JSON only.

    Keys come in the order in which the family's templates write them, and objects that name their properties
    have no others. What is not known of a schema is left aside, unless its x-guidance says that it is not
    lenient.
    """

    def __init__(self, name: str, schema: Mapping[str, Json], quote: str) -> None:
        self.lines: list[str] = []
        self._prefix, self._root, self._quote = name, schema, quote
        self._guidance = {"x-guidance": schema["x-guidance"]} if "x-guidance" in schema else {}
        self._is_lenient = schema.get("x-guidance", {}).get("lenient", True)
        self._references: dict[str, str] = {}  # rules by what they define
        self._n = 0
        self.lines.append(f"{name}: {self._value(schema)}")

    def _name(self) -> str:
        self._n += 1
        return f"{self._prefix}_{self._n}"

    def _rule(self, schema: Json) -> str:
        name = self._name()
        self.lines.append(f"{name}: {self._value(schema)}")
        return name

    def _value(self, schema: Json) -> str:
        """What a value of a schema looks like, as the right side of a rule."""
        if not isinstance(schema, Mapping):
            return self._anything()
        if not self._is_lenient and (unknown := schema.keys() - _HELD_BY_GEMMA):
            raise PromptError(f"in calls of this model {min(unknown)} of a schema is not supported")
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values and isinstance(values, list):
            return " | ".join(map(self._literal, values))
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return " | ".join(map(self._rule, choices))
        kinds = schema.get("type") or (
            "object" if "properties" in schema else "array" if "items" in schema else None
        )
        kinds = kinds if isinstance(kinds, list) else [kinds]
        kinds = [*kinds, "null"] if schema.get("nullable") else kinds
        return " | ".join(self._of_kind(kind, schema) for kind in kinds)

    def _of_kind(self, kind: Json, schema: Mapping[str, Json]) -> str:
        if kind == "string":
            return self._text(_any_text(schema))
        if kind in _SCALARS:
            kept = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
            return f"%json {json.dumps({**self._guidance, **kept, 'type': kind})}"
        if kind == "array":
            least, most = schema.get("minItems") or 0, schema.get("maxItems")
            item = self._rule(schema.get("items"))
            if most == 0:
                return '"[]"'
            more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
            items = f'"[" {item} {more} "]"'
            return items if least else f'("[]" | {items})'
        return self._object(schema) if kind == "object" else self._anything()

    def _text(self, pattern: str) -> str:
        """A text, whose end is the next quote."""
        name = self._name()
        if self._quote.startswith("<["):  # a token, which no text contains
            self.lines.append(f"{name}: /{pattern}/")
            return f"{self._quote} {name} {self._quote}"
        self.lines.append(rf'{name}[lazy]: /{pattern}<\|"\|>/')
        return f"{self._quote} {name}"

    def _object(self, schema: Mapping[str, Json]) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if not properties:
            if schema.get("additionalProperties") is False:
                return '"{}"'
            entry = f'/{_BARE_KEY}/ ":" {self._rule(schema.get("additionalProperties"))}'
            return f'("{{}}" | "{{" {entry} ("," {entry})* "}}")'
        first = rest = '""'  # from a property on: where none came before it, and where some did
        for key in sorted(properties, key=str.lower, reverse=True):
            entry, name = f'{self._key(key)} ":" {self._rule(properties[key])}', self._name()
            optional = (f" | {first}", f" | {rest}") if key not in required else ("", "")
            self.lines += [
                f"{name}_first: {entry} {rest}{optional[0]}",
                f'{name}_more: "," {entry} {rest}{optional[1]}',
            ]
            first, rest = f"{name}_first", f"{name}_more"
        return f'"{{" {first} "}}"'

    def _key(self, key: str) -> str:
        return quoted(key) if re.fullmatch(_BARE_KEY, key) else f"{self._quote} {quoted(key)} {self._quote}"

    def _literal(self, value: Json) -> str:
        """One value and no other."""
        if isinstance(value, str):
            return f"{self._quote} {quoted(value)} {self._quote}"
        if isinstance(value, list):
            return " ".join(['"["', ' "," '.join(map(self._literal, value)), '"]"'])
        if isinstance(value, Mapping):
            entries = (f'{self._key(key)} ":" {self._literal(value[key])}' for key in value)
            return " ".join(['"{"', ' "," '.join(entries), '"}"'])
        return quoted(json.dumps(value))

    def _anything(self) -> str:
        rule = f"{self._prefix}_any"
        if rule not in self._references:
            self._references[rule] = rule
            value = self._of_kind("object", {"additionalProperties": None})
            scalar = json.dumps({"type": list(_SCALARS)})
            self.lines += [
                f"{rule}: {self._text('(?s:.*)')} | {rule}_scalar | {value} | {self._of_kind('array', {})}"
            ]
            self.lines.append(f"{rule}_scalar: %json {scalar}")
        return rule

    def _reference(self, reference: str) -> str:
        """The rule of what a schema refers to, which may refer to itself."""
        if reference not in self._references:
            found: Json = self._root
            for part in reference.removeprefix("#").split("/")[1:]:
                found = found.get(part) if isinstance(found, Mapping) else None
            if not isinstance(found, Mapping) or not reference.startswith("#"):
                raise PromptError(f"a schema refers to {reference[:100]!r}, which is not there")
            self._references[reference] = name = f"{self._name()}_ref"
            self.lines.append(f"{name}: {self._value(found)}")
        return self._references[reference]


def _any_text(schema: Mapping[str, Json]) -> str:
    """A regular expression for texts of the length that a schema wants."""
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    return f"(?s:.{{{least},{'' if most is None else most}}})" if least or most is not None else "(?s:.*)"


def _escaped(text: str) -> str:
    """A text in a regular expression."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def _chosen(tools: Sequence[Mapping[str, Json]], choice: ToolChoice) -> Sequence[Mapping[str, Json]]:
    """The tools that may be called."""
    if choice == "none":
        return ()
    if choice in ("auto", "required"):
        return tools
    name = choice if isinstance(choice, str) else choice.get("function", choice).get("name")
    chosen = [tool for tool in tools if tool.get("function", tool).get("name") == name]
    if not chosen:
        raise PromptError(f"tool_choice names {name}, which is not among the tools; name one of them")
    return chosen
