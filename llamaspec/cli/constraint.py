"""A JSON schema or a grammar from the command line: a file, or the text itself."""

from __future__ import annotations

from pathlib import Path

from llamaspec.errors import ConstraintError
from llamaspec.pair import Pair
from llamaspec.protocols import Constraint
from llamaspec.sampling.constraint import MAX_TEXT


def make_constraint(pair: Pair, json_schema: str | None, grammar: str | None) -> Constraint | None:
    """What was asked for, if anything.

    Raises
    ------
    ConstraintError
        The file cannot be read, or what it says cannot be used.
    """
    if json_schema is not None:
        return pair.json_schema(_read(json_schema, json_schema.lstrip().startswith("{"), "JSON schema"))
    if grammar is not None:
        return pair.grammar(_read(grammar, any(mark in grammar for mark in ("\n", "::=", ": ")), "grammar"))
    return None


def _read(value: str, is_text: bool, kind: str) -> str:
    """The text itself, or what a file holds."""
    if is_text:
        return value
    try:
        with Path(value).open(encoding="utf-8") as file:
            return file.read(MAX_TEXT + 1)  # more is refused
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8 text"
        raise ConstraintError(
            f"cannot read the {kind} {value}: {reason}; name a readable file, or give the text itself"
        ) from error
