"""JSON schemas: their parts, and what is left out or added before they become constraints.

tests/serve/test_schemas.py, tests/sampling/test_constraint.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

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


def compilable(schema: Any, *, is_names: bool = False) -> Any:
    """Return a schema as llguidance can compile it.

    Its integers have at most 19 digits, unless it bounds them itself. `uniqueItems` is left out, because no
    grammar can hold a text to it, and so are names of properties that may be any string.
    """
    if isinstance(schema, list):
        return [compilable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value
        if key in ("enum", "const") and not is_names
        else compilable(value, is_names=key in _NAMES and not is_names)
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
