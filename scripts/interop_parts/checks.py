"""What the checks of all SDKs share; they run in the SDK's own environment, so nothing else is imported."""

from __future__ import annotations

import json
from collections.abc import Callable

ASKED = "Add 20 and 22."
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "enum": [20, 21]}, "b": {"type": "integer", "enum": [22]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"name": "math.add-two", "description": "Adds two numbers.", "parameters": SCHEMA}
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="


def expect(condition: bool, otherwise: str) -> None:
    """RuntimeError if a condition does not hold."""
    if not condition:
        raise RuntimeError(otherwise)


def run(*checks: Callable[[], None]) -> None:
    """Run each check; print its name, and what went wrong."""
    for check in checks:
        try:
            check()
            wrong = None
        except Exception as error:  # noqa: BLE001  # whatever a client raises is the result
            wrong = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"check": check.__name__.replace("_", " "), "wrong": wrong}), flush=True)
