"""Requests of clients that are kept in `tests/serve/recorded/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "serve" / "recorded"


class Recorded(NamedTuple):
    """A request of a client, as `tests/serve/recorded/` has it."""

    about: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def recorded(client: str) -> list[Recorded]:
    """The requests of a client; `fields_of` names an earlier one, whose other fields a request repeats."""
    told = json.loads((FOLDER / f"{client}.json").read_text())
    found: list[Recorded] = []
    for i, each in enumerate(told["requests"]):
        shared = found[each["fields_of"]].body if "fields_of" in each else {}
        body = {**shared, **each["body"]}
        found.append(Recorded(each.get("about", f"request {i}"), each["path"], told.get("headers", {}), body))
    return found
