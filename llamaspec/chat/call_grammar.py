"""One call of a tool as rules of a grammar, in the format of each family, and what stands around calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llamaspec.chat.formats import CallFormat
from llamaspec.chat.gemma_grammar import any_text, gemma_rules

Json = Any  # what json.loads makes

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Around:
    """What stands before, behind and between calls."""

    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    between: str | None = None  # two calls in one pair of marks, as Lark; None = there is one
    again: str | None = None  # two pairs of marks, as Lark; None = there is one


AROUND: dict[CallFormat, Around] = {
    CallFormat.HERMES: Around(("<tool_call>", "\n"), ("\n", "</tool_call>"), again='"\\n"'),
    CallFormat.QWEN_XML: Around(("<tool_call>", "\n"), ("</tool_call>",), again='"\\n"'),
    CallFormat.GLM: Around(("<tool_call>",), ("</tool_call>",), again='"\\n"?'),
    CallFormat.LLAMA3: Around(),
    CallFormat.MISTRAL: Around(("[TOOL_CALLS]", "["), ("]",), between='", "'),
    CallFormat.MISTRAL_ARGS: Around(("[TOOL_CALLS]",), again=""),
    CallFormat.GEMMA4: Around(("<|tool_call>",), ("<tool_call|>",), again=""),
    CallFormat.DEEPSEEK: Around(("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",), between=""),
    CallFormat.DEEPSEEK_R1: Around(("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",), between='"\\n"'),
    CallFormat.KIMI: Around(("<|tool_calls_section_begin|>",), ("<|tool_calls_section_end|>",), between=""),
}


class Marks:
    """Writes text into rules: control tokens as such, the rest in quotes.

    Examples
    --------
    >>> Marks({"<|channel>": 7})("<|channel>thought")
    '<[7]> "thought"'
    """

    def __init__(self, controls: Mapping[str, int]) -> None:
        self.controls = controls
        self._split = re.compile("|".join(map(re.escape, sorted(filter(None, controls), key=len)[::-1])))

    def __call__(self, text: str) -> str:
        """The text as a part of a rule."""
        parts, at = list[str](), 0
        for found in self._split.finditer(text) if self._split.pattern else ():
            parts += [quoted(text[at : found.start()])] if found.start() > at else []
            parts.append(f"<[{self.controls[found[0]]}]>")
            at = found.end()
        return " ".join([*parts, quoted(text[at:])] if at < len(text) or not parts else parts)

    def all(self, texts: Sequence[str]) -> str:
        """Several, one behind the other."""
        return " ".join(map(self, texts))


def call_rules(calls: CallFormat, i: int, name: str, schema: Mapping[str, Json], mark: Marks) -> list[str]:
    """The rules `call_i`, and those that it needs.

    Raises
    ------
    PromptError
        The schema is strict, and says what cannot be obeyed in this format.
    """
    arguments = f"arguments_{i}"
    json_rule = f"{arguments}: %json {json.dumps(schema)}"
    if calls is CallFormat.QWEN_XML:
        tags = _Tags(mark("<parameter="), quoted(">\n"), "\n</parameter>\n")
        begin, end = quoted(f"<function={name}>\n"), quoted("</function>\n")
        return [f"call_{i}: {begin} {arguments} {end}", *_tagged(i, schema, mark, tags)]
    if calls is CallFormat.GLM:
        line = '"\\n"?'
        middle = f"{mark('</arg_key>')} {line} {mark('<arg_value>')}"
        tags = _Tags(mark("<arg_key>"), middle, "</arg_value>", line)
        return [f"call_{i}: {quoted(name)} {line} {arguments}", *_tagged(i, schema, mark, tags)]
    if calls is CallFormat.GEMMA4:
        return [f"call_{i}: {quoted(f'call:{name}')} {arguments}", *gemma_rules(arguments, schema, mark)]
    if calls is CallFormat.HARMONY:
        constrain = f'{mark("<|constrain|>")} "json"' if "<|constrain|>" in mark.controls else '"json"'
        header = f"{mark('<|channel|>')} {quoted(f'commentary to=functions.{name} ')} {constrain}"
        return [f"call_{i}: {header} {mark('<|message|>')} {arguments}", json_rule]
    if calls in _WRAPPED:
        before, behind = _WRAPPED[calls]
        parts = [_named(before, name, mark), arguments, mark(behind) if behind else ""]
        return [f"call_{i}: {' '.join(filter(None, parts))}", json_rule]
    key = "parameters" if calls is CallFormat.LLAMA3 else "arguments"
    beginning = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return [f'call_{i}: {quoted(beginning)} {arguments} "}}"', json_rule]


# What stands before arguments in JSON, {} for the name and # for a number, and behind them.
_WRAPPED: dict[CallFormat, tuple[tuple[str, ...], str]] = {
    CallFormat.MISTRAL_ARGS: (("{}", "[ARGS]"), ""),
    CallFormat.DEEPSEEK: (("<｜tool▁call▁begin｜>", "{}", "<｜tool▁sep｜>"), "<｜tool▁call▁end｜>"),
    CallFormat.DEEPSEEK_R1: (
        ("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "{}", "\n```json\n"),
        "\n```<｜tool▁call▁end｜>",
    ),
    CallFormat.KIMI: (
        ("<|tool_call_begin|>", "functions.", "{}", ":", "#", "<|tool_call_argument_begin|>"),
        "<|tool_call_end|>",
    ),
}


def _named(parts: Sequence[str], name: str, mark: Marks) -> str:
    written = {"{}": quoted(name), "#": "/[0-9]+/"}
    return " ".join(written.get(part) or mark(part) for part in parts)


class _Tags(NamedTuple):
    """What stands around a parameter: Lark, but for the end of its value."""

    before: str  # its name
    between: str  # name and value
    end: str
    behind: str = ""


def _tagged(i: int, schema: Mapping[str, Json], mark: Marks, tags: _Tags) -> list[str]:
    """`arguments_i`: parameters between tags, in the order of the schema."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    rules, parts = list[str](), list[str]()
    for j, (key, inner) in enumerate(properties.items()):
        rule, inner = f"value_{i}_{j}", inner if isinstance(inner, Mapping) else {}
        kinds, values, end = inner.get("type"), inner.get("enum", []), f"{mark(tags.end)} {tags.behind}"
        if "string" in (kinds if isinstance(kinds, list) else [kinds]) and "enum" not in inner:
            if tags.end in mark.controls:
                rules.append(f"{rule}_text: /{any_text(inner)}/ {mark(tags.end)}")
            else:
                rules.append(f"{rule}_text[lazy]: /{any_text(inner)}{escaped(tags.end)}/")
            rules.append(f"{rule}: {rule}_text {tags.behind}")
        else:
            value = " | ".join(quoted(v if isinstance(v, str) else json.dumps(v)) for v in values)
            value = f"({value})" if value else f"%json {json.dumps({**inner, **shared})}"
            rules += [f"{rule}_json: {value}", f"{rule}: {rule}_json {end}"]
        part = f"{tags.before} {quoted(key)} {tags.between} {rule}"
        parts.append(part if key in required else f"({part})?")
    return [f"arguments_{i}: {' '.join(parts) or quoted('')}", *rules]


def quoted(text: str) -> str:
    """A text in a rule."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text in a regular expression."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")
