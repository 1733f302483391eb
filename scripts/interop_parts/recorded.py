"""Requests of clients that are kept in `tests/serve/recorded/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

LONG = "one two three four. " * 2000  # fits the context of a scripted server once, not twice
FOLDER = Path(__file__).resolve().parents[2] / "tests" / "serve" / "recorded"


class Recorded(NamedTuple):
    """A request of a client, as `tests/serve/recorded/` has it."""

    about: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    overflows: bool  # whether it is too long for a scripted server


def recorded(client: str) -> list[Recorded]:
    """The requests of a client; `fields_of` names an earlier one, whose other fields a request repeats.

    "(long text)" stands for `LONG`.
    """
    told = json.loads((FOLDER / f"{client}.json").read_text().replace("(long text)", LONG))
    found: list[Recorded] = []
    for i, each in enumerate(told["requests"]):
        shared = found[each["fields_of"]].body if "fields_of" in each else {}
        body = {**shared, **each["body"]}
        about, headers, overflows = (
            each.get("about", f"request {i}"),
            told.get("headers", {}),
            "overflows" in each,
        )
        found.append(Recorded(about, each["path"], headers, body, overflows))
    return found
