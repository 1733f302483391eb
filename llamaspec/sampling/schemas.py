"""JSON schemas: their parts, and what is left out or added before they become constraints.

tests/serve/test_schemas.py, tests/sampling/test_constraint.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard
from urllib.parse import unquote

from llamaspec.errors import ConstraintError

# The 64-bit integers, as llguidance can bound them. At temperature 0, a small model writes zeros without end.
SMALLEST, LARGEST = 1024 - 2**63, 2**63 - 1
# Keywords that do not affect validity; and keywords whose value is an object with names as keys.
_PROSE = frozenset(
    ("description", "title", "examples", "default", "deprecated", "readOnly", "writeOnly", "$schema",
     "$comment", "markdownDescription", "enumDescriptions")
)  # fmt: skip
_MAX_FORMS = 256  # of a schema
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
_NAMES = ("properties", "patternProperties", "dependentSchemas", "dependentRequired", "$defs", "definitions")


def without_prose(schema: Any, *, is_names: bool = False) -> Any:
    """Return a schema without descriptions and the like, which would count towards the grammar's size."""
    if isinstance(schema, list):
        return [without_prose(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if key in ("enum", "const") and not is_names
        else without_prose(value, is_names=key in _NAMES and not is_names)
        for key, value in schema.items()
        if is_names or key not in _PROSE
    }


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas in a schema, each with its path, such as `properties.a` or `anyOf.0`."""
    for key, value in schema.items():
        inner: Iterable[tuple[str, Any]] = ()
        if isinstance(value, dict) and key in _NAMES:
            inner = ((f"{key}.{name}", each) for name, each in value.items())
        elif isinstance(value, dict) and key not in ("const", "x-guidance"):
            inner = ((key, value),)
        elif isinstance(value, list) and key != "enum":
            inner = ((f"{key}.{i}", each) for i, each in enumerate(value))
        yield from ((path, each) for path, each in inner if isinstance(each, dict))


def forms(schema: Any, shared: Any) -> list[Mapping[str, Any]]:
    """Return plain schemas of which a value may match any: references and combinations are resolved.

    `shared` is the schema that contains this one. What takes too long to resolve is any value, {}.
    """
    return _forms(schema, shared, iter(range(_MAX_FORMS)))


def _forms(schema: Any, shared: Any, budget: Iterator[int]) -> list[Mapping[str, Any]]:
    if not isinstance(schema, Mapping) or next(budget, None) is None:
        return [{}]
    found: list[Mapping[str, Any]] = [{key: value for key, value in schema.items() if key not in _COMBINED}]
    parts = schema.get("allOf")
    several = [[part] for part in parts] if isinstance(parts, list) else []
    several += [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    if isinstance(schema.get("$ref"), str):
        several.append([_referenced(schema["$ref"], shared)])
    for alternatives in several:
        inner = [form for part in alternatives for form in _forms(part, shared, budget)]
        if len(found) * len(inner) > _MAX_FORMS:
            return [{}]
        found = [{**outer, **form} for outer in found for form in inner]
    return found


def _referenced(path: str, shared: Any) -> Any:
    """Return the part of a schema that a reference such as #/$defs/name means; None if there is none."""
    found = shared if path.startswith("#") else None
    for key in path.split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def compilable(schema: Any) -> Any:
    """Return a schema as llguidance can compile it.

    Objects have no other properties than the schema names, see `closed`. Integers have at most 19 digits,
    unless the schema bounds them itself. `uniqueItems` is left out, because no grammar can hold a text to it,
    and so are names of properties that may be any string.
    """
    return _compilable(closed(schema) if isinstance(schema, dict) else schema)


def _compilable(schema: Any, *, is_names: bool = False) -> Any:
    if isinstance(schema, list):
        return [_compilable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value
        if key in ("enum", "const") and not is_names
        else _compilable(value, is_names=key in _NAMES and not is_names)
        for key, value in schema.items()
        if is_names or not (key == "uniqueItems" or (key == "propertyNames" and value == {"type": "string"}))
    }
    if is_names:
        return found
    _check_exact([found.get("enum"), found.get("const")])
    types = found.get("type")
    kinds = types if isinstance(types, list) else [types]
    is_whole = "integer" in kinds and "number" not in kinds
    _narrow(found, is_whole=is_whole)
    if not is_whole or "enum" in found or "const" in found:
        return found
    low = _bounds(found, "minimum", "exclusiveMinimum")
    high = _bounds(found, "maximum", "exclusiveMaximum")
    if not low and all(bound > SMALLEST for bound in high):
        found["minimum"] = SMALLEST
    if not high and all(bound < LARGEST for bound in low):
        found["maximum"] = LARGEST
    return found


def _check_exact(value: Any) -> None:
    """Raise a ConstraintError if a value has an integer that llguidance would write with other digits."""
    if isinstance(value, int) and _written(value) != value:
        shown = f"{str(value)[:40]} is beyond 2^53"
        raise ConstraintError(f"the integer {shown} and cannot be enforced exactly; use a string instead")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_exact(inner)


def _written(value: int) -> Decimal | int | None:
    """Return an integer as llguidance writes it, which reads float64; None if it is too large for that."""
    try:
        near = float(value)
    except OverflowError:
        return None
    return int(near) if SMALLEST <= near < LARGEST else Decimal(repr(near))


def _narrow(schema: dict[str, Any], *, is_whole: bool) -> None:
    """Replace bounds beyond 2^53 by the next narrower ones that llguidance holds, which reads float64.

    It cannot add 1 to such a bound, so an exclusive bound of integers becomes an inclusive one.
    """
    for side, step, narrower, limit in (("inimum", 1, max, SMALLEST), ("aximum", -1, min, LARGEST)):
        inclusive, exclusive = f"m{side}", f"exclusiveM{side}"
        if is_whole and _is_large(schema.get(exclusive)):
            bound = schema.pop(exclusive) + step
            schema[inclusive] = narrower([bound, *_bounds(schema, inclusive)])
        for key in (inclusive, exclusive):
            if _is_large(bound := schema.get(key)):
                schema[key] = _inward(narrower(bound, limit) if is_whole else bound, step)


def _inward(bound: int, step: int) -> int:
    """Return the nearest float64 that is not before a bound, in the direction of `step`."""
    if bound in (SMALLEST, LARGEST):
        return bound
    near = float(max(min(bound, 10**300), -(10**300)))
    return int(math.nextafter(near, step * math.inf) if (int(near) - bound) * step < 0 else near)


def _is_large(bound: Any) -> TypeGuard[int]:
    return isinstance(bound, int) and abs(bound) >= 2**53


def _bounds(schema: Mapping[str, Any], *keys: str) -> list[float]:
    return [schema[key] for key in keys if isinstance(schema.get(key), int | float)]


# Objects without other properties.

_LISTS, _BRANCHES = ("allOf", "anyOf", "oneOf"), ("then", "else")  # of schemas for the same value
_DEFINITIONS = ("$defs", "definitions")
# What a schema says of an object beside the schemas that it is composed of.
_OWN = frozenset(
    ("properties", "required", "patternProperties", "additionalProperties", "unevaluatedProperties",
     "dependentRequired", "dependentSchemas", "propertyNames", "minProperties", "maxProperties", "not", "if",
     "then", "else")
)  # fmt: skip
_OPENERS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_UNFOLLOWED = ("$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef")
MAX_VISITED = 10_000  # schemas to visit for names; more than that leaves objects open


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have only the properties that it names, if it does not speak of others.

    Small models invent keys without end, so llama.cpp and Ollama do the same. An object that several schemas
    describe may have the properties that any of them names, so that `allOf` of two objects stays satisfiable.
    """
    return _Closing(schema).whole()


class _Closing:
    """Closes the objects of one schema."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._left = MAX_VISITED
        self._copies: dict[str, str] = {}  # reference -> name of an open copy of its schema
        self._waiting: list[str] = []  # references whose copies have to be made

    def whole(self) -> dict[str, Any]:
        if any(key in self._root for key in _UNFOLLOWED):
            return self._root
        found = self._part(self._root, is_alone=True)
        copies: dict[str, Any] = {}
        while self._waiting:
            reference = self._waiting.pop()
            part = {key: value for key, value in self._at(reference).items() if key not in _DEFINITIONS}
            copies[self._copies[reference]] = self._part(part, is_alone=False)
        defined = found.get("$defs")
        return found | {"$defs": (defined if isinstance(defined, dict) else {}) | copies} if copies else found

    def _any(self, schema: Any, *, is_alone: bool) -> Any:
        return self._part(schema, is_alone=is_alone) if isinstance(schema, dict) else schema

    def _part(self, schema: dict[str, Any], *, is_alone: bool) -> dict[str, Any]:
        """Close the objects inside a schema; the object itself if no other schema describes it."""
        parts = [key for key in (*_LISTS, "$ref") if key in schema]
        is_one = len(parts) == 1 and not _OWN.intersection(schema)
        if "allOf" in schema:
            is_one = is_one and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1
        found = {key: self._inner(key, value, is_alone and is_one) for key, value in schema.items()}
        if not is_alone or is_one or "additionalProperties" in schema or "unevaluatedProperties" in schema:
            return found
        own = found.get("properties", {})
        names = self._names(schema) if (parts or "properties" in schema) and isinstance(own, dict) else None
        if names is None or not (names or "properties" in schema):
            return found
        return found | {"properties": {name: {} for name in names} | own, "additionalProperties": False}

    def _inner(self, key: str, value: Any, is_alone: bool) -> Any:
        """Close what a keyword contains; `is_alone` is about parts that describe the same value."""
        if key == "$ref" and not is_alone and isinstance(value, str):
            return self._open_copy(value)
        if isinstance(value, dict):
            if key in _BRANCHES:
                return self._part(value, is_alone=False)
            if key in _NAMES:
                is_value = key != "dependentSchemas"
                return {name: self._any(each, is_alone=is_value) for name, each in value.items()}
            return value if key in ("const", "not", "if", "x-guidance") else self._part(value, is_alone=True)
        if isinstance(value, list) and key not in ("enum", "const"):
            is_alone = is_alone or key not in _LISTS
            return [self._any(each, is_alone=is_alone) for each in value]
        return value

    def _open_copy(self, reference: str) -> str:
        """Return a reference to the same schema, whose object is not closed."""
        if self._at(reference) is None:
            return reference
        if reference not in self._copies:
            self._copies[reference] = f"llamaspec-open-{len(self._copies)}"
            self._waiting.append(reference)
        return f"#/$defs/{self._copies[reference]}"

    def _at(self, reference: str) -> Any:
        """Return the schema that a reference names; None if it is not in this schema."""
        if not reference.startswith("#"):
            return None
        found: Any = self._root
        for key in filter(None, unquote(reference[1:]).split("/")):
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
            else:
                found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else None

    def _names(self, schema: dict[str, Any]) -> list[str] | None:
        """Return the properties that a schema and its parts name; None if its parts allow others."""
        names: dict[str, None] = {}
        waiting, seen = [schema], set[str]()
        while waiting:
            part = waiting.pop()
            self._left -= 1
            if self._left < 0 or (
                part is not schema and any(part.get(key) not in (None, False) for key in _OPENERS)
            ):
                return None
            if (properties := part.get("properties")) and isinstance(properties, dict):
                names |= dict.fromkeys(properties)
            if isinstance(part.get("required"), list):
                names |= dict.fromkeys(name for name in part["required"] if isinstance(name, str))
            inner = [each for key in _LISTS if isinstance(part.get(key), list) for each in part[key]]
            inner += [part.get(key) for key in _BRANCHES]
            if isinstance(part.get("dependentSchemas"), dict):
                inner += part["dependentSchemas"].values()
            if isinstance(reference := part.get("$ref"), str) and reference not in seen:
                seen.add(reference)
                if (referred := self._at(reference)) is None:
                    return None
                inner.append(referred)
            waiting += [each for each in reversed(inner) if isinstance(each, dict)]
        return list(names)
