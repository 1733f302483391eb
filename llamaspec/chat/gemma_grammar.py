"""JSON schemas as rules for Gemma 4's own notation: {key:<|"|>text<|"|>,other:[1,true]}.

llguidance knows schemas of JSON only, so objects, lists and texts are written out here; numbers and the like
are still its own. Keys come in the order in which the family's templates write them, and objects that name
their properties have no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamaspec.errors import PromptError

Json = Any  # what json.loads makes

_QUOTE = '<|"|>'
_BARE_KEY = re.compile(r"[A-Za-z0-9_.$-]+")
_SCALARS = ("number", "integer", "boolean", "null")
_UNDERSTOOD = {
    "type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum",
    "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions", "minLength", "maxLength",
    "x-guidance",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "nullable", "$id", "$comment", "deprecated", "readOnly", "writeOnly",
}  # fmt: skip


def gemma_rules(name: str, schema: Mapping[str, Json], mark: Callable[[str], str]) -> list[str]:
    """The rule `name` and those that it needs.

    Parameters
    ----------
    name : str
    schema : dict
        Of an object; what is not known of it is left aside, unless x-guidance says that it is not lenient.
    mark : callable
        Writes a text into a rule, control tokens in it as such.

    Raises
    ------
    PromptError
        Something is not known, or a reference leads nowhere.
    """
    rules = _Rules(name, schema, mark)
    rules.define(name, schema)
    return rules.lines


class _Rules:
    def __init__(self, prefix: str, root: Mapping[str, Json], mark: Callable[[str], str]) -> None:
        self.lines: list[str] = []
        self._prefix, self._root, self._quote = prefix, root, mark(_QUOTE)
        is_token = self._quote.startswith("<[")
        self._text_end = "" if is_token else r"<\|\"\|>"
        self._is_lenient = root.get("x-guidance", {}).get("lenient", True)
        self._guidance = {"x-guidance": root["x-guidance"]} if "x-guidance" in root else {}
        self._defined: dict[str, str] = {}  # rules of references
        self._n = 0

    def define(self, rule: str, schema: Json) -> None:
        """Add a rule for the values of a schema."""
        self.lines.append(f"{rule}: {self._value(schema)}")

    def _new(self, schema: Json) -> str:
        self._n += 1
        rule = f"{self._prefix}_{self._n}"
        self.define(rule, schema)
        return rule

    def _value(self, schema: Json) -> str:
        """What a value of a schema looks like, as one side of a rule."""
        if not isinstance(schema, Mapping):
            return self._anything()
        if not self._is_lenient and (unknown := schema.keys() - _UNDERSTOOD):
            raise PromptError(f"in calls of this model {min(unknown)} of a schema is not supported")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "const" in schema:
            return self._literal(schema["const"])
        if isinstance(schema.get("enum"), list):
            return " | ".join(map(self._literal, schema["enum"]))
        if schema.get("allOf"):
            return self._value(self._all_of(schema))
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return " | ".join(map(self._new, choices))
        kinds = schema.get("type") or _implied(schema)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if schema.get("nullable"):
            kinds = [*kinds, "null"]
        return " | ".join(self._of_kind(kind, schema) for kind in kinds)

    def _of_kind(self, kind: Json, schema: Mapping[str, Json]) -> str:
        if kind == "string":
            return self._text(schema)
        if kind in _SCALARS:
            kept = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
            return f"%json {json.dumps({**self._guidance, **kept, 'type': kind})}"
        if kind == "array":
            return self._list(schema)
        return self._object(schema) if kind == "object" else self._anything()

    def _text(self, schema: Mapping[str, Json]) -> str:
        """A text, whose end is the next quote."""
        self._n += 1
        rule = f"{self._prefix}_{self._n}"
        lazy = "[lazy]" if self._text_end else ""
        self.lines.append(f"{rule}{lazy}: /{any_text(schema)}{self._text_end}/")
        return f"{self._quote} {rule}" + ("" if self._text_end else f" {self._quote}")

    def _list(self, schema: Mapping[str, Json]) -> str:
        item, least, most = (
            self._new(schema.get("items")),
            schema.get("minItems") or 0,
            schema.get("maxItems"),
        )
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        items = f'"[" {item} {more} "]"'
        return items if least else f'("[]" | {items})'

    def _object(self, schema: Mapping[str, Json]) -> str:
        properties = schema.get("properties") or {}
        if not properties:
            values = schema.get("additionalProperties", True)
            if values is False:
                return '"{}"'
            entry = f'/{_BARE_KEY.pattern}/ ":" {self._new(values)}'
            return f'("{{}}" | "{{" {entry} ("," {entry})* "}}")'
        required = schema.get("required") or ()
        entries = [
            (f'{self._key(key)} ":" {self._new(properties[key])}', key in required)
            for key in sorted(properties, key=str.lower)
        ]
        return f'"{{" {self._entries(entries)} "}}"'

    def _entries(self, entries: Sequence[tuple[str, bool]]) -> str:
        """Entries with commas between those that are there; the rule for all of them."""
        first = rest = '""'
        for entry, is_required in reversed(entries):
            self._n += 1
            begin, more = f"{self._prefix}_{self._n}_first", f"{self._prefix}_{self._n}_more"
            self.lines += [
                f"{begin}: {entry} {rest}" + ("" if is_required else f" | {first}"),
                f'{more}: "," {entry} {rest}' + ("" if is_required else f" | {rest}"),
            ]
            first, rest = begin, more
        return first

    def _key(self, key: str) -> str:
        quoted = json.dumps(key, ensure_ascii=False)
        return quoted if _BARE_KEY.fullmatch(key) else f"{self._quote} {quoted} {self._quote}"

    def _literal(self, value: Json) -> str:
        """One value and no other."""
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value, ensure_ascii=False)} {self._quote}"
        if isinstance(value, list):
            return " ".join(['"["', ' "," '.join(map(self._literal, value)), '"]"'])
        if isinstance(value, Mapping):
            entries = (f'{self._key(key)} ":" {self._literal(value[key])}' for key in value)
            return " ".join(['"{"', ' "," '.join(entries), '"}"'])
        return json.dumps(json.dumps(value))

    def _anything(self) -> str:
        rule = f"{self._prefix}_any"
        if rule not in self._defined:
            self._defined[rule] = rule
            scalar = json.dumps({"type": list(_SCALARS)})
            entry = f'/{_BARE_KEY.pattern}/ ":" {rule}'
            self.lines += [
                f"{rule}: {self._text({})} | {rule}_json | {rule}_list | {rule}_object",
                f"{rule}_json: %json {scalar}",
                f'{rule}_list: "[]" | "[" {rule} ("," {rule})* "]"',
                f'{rule}_object: "{{}}" | "{{" {entry} ("," {entry})* "}}"',
            ]
        return rule

    def _reference(self, reference: Json) -> str:
        """The rule of what a schema refers to, which may refer to itself."""
        if reference not in self._defined:
            found = self._found(str(reference))
            self._n += 1
            rule = self._defined[reference] = f"{self._prefix}_{self._n}_ref"
            self.define(rule, found)
        return self._defined[reference]

    def _found(self, reference: str) -> Mapping[str, Json]:
        """What a reference leads to."""
        found: Json = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found.get(part) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping) or not reference.startswith("#"):
            raise PromptError(f"a schema refers to {reference[:100]!r}, which is not there")
        return found

    def _all_of(self, schema: Mapping[str, Json]) -> Mapping[str, Json]:
        """A schema with what it must also be."""
        merged = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            also = self._found(str(part["$ref"])) if "$ref" in part else part
            merged = {
                **merged,
                **also,
                "properties": {**merged.get("properties", {}), **also.get("properties", {})},
                "required": [*merged.get("required", ()), *also.get("required", ())],
            }
        return merged


def any_text(schema: Mapping[str, Json]) -> str:
    """A regular expression for texts of the length that a schema wants."""
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    return f"(?s:.{{{least},{'' if most is None else most}}})" if least or most is not None else "(?s:.*)"


def _implied(schema: Mapping[str, Json]) -> str | None:
    """The type of a schema that does not say."""
    return "object" if "properties" in schema else "array" if "items" in schema else None
