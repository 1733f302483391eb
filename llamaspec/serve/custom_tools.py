"""Custom tools of `/v1/responses`, whose input is a text instead of JSON, such as Codex's `apply_patch`.

For the model such a tool is a function with one argument. A grammar of its input becomes a pattern of that
argument, and is a part of the description. tests/serve/test_custom_tools.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llamaspec.errors import ConstraintError
from llamaspec.sampling.lark import lark_pattern
from llamaspec.serve.bodies import without_half_pairs
from llamaspec.serve.message_fields import CustomFormat, ToolFields

CUSTOM = "custom"  # type of these tools
_INPUT = "input"  # the argument
_HOW = f"Give the text as the argument `{_INPUT}`."
_BEGIN = re.compile(rf'\s*\{{\s*"{_INPUT}"\s*:\s*"')
# Whole characters of a JSON string, without the first half of a surrogate pair at their end.
_WHOLE = re.compile(r'(?:[^"\\]|\\[^u]|\\u[0-9a-fA-F]{4})*(?<!\\u[dD][89abAB][0-9a-fA-F]{2})')


def as_function(tool: ToolFields) -> ToolFields:
    """Return the function that a custom tool is for the model; any other tool as it is."""
    if tool.type != CUSTOM:
        return tool
    form, description = tool.format, f"{tool.description or ''}\n\n{_HOW}"
    if form is not None and form.definition:
        description += f" It must match this {form.syntax} grammar:\n{form.definition}"
    changed = {"type": "function", "description": description.strip(), "parameters": input_schema()}
    return tool.model_copy(update=changed)


def input_schema(form: CustomFormat | None = None) -> dict[str, Any]:
    """Return the schema of a custom tool's arguments; ConstraintError if its format is no pattern."""
    text = {"type": "string"}
    if form is not None and form.definition and form.type == "grammar":
        text["pattern"] = f"^{_pattern(form.syntax, form.definition)}$"
    return {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }


def _pattern(syntax: str | None, definition: str) -> str:
    if syntax == "lark":
        return lark_pattern(definition)
    if syntax == "regex":
        return f"(?:{definition})"
    raise ConstraintError("its syntax is unknown; use lark or regex")


def as_arguments(text: str) -> str:
    """Return the arguments of a call of a custom tool, as the model wrote them."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


class InputReader:
    """Reads the input of a custom tool out of the JSON of its arguments, while they arrive."""

    def __init__(self) -> None:
        self._left, self._is_begun = "", False

    def feed(self, arguments: str) -> str:
        """Return the part of the input that a part of the arguments completes."""
        self._left += arguments
        if not self._is_begun:
            begin = _BEGIN.match(self._left)
            if begin is None:
                return ""
            self._is_begun, self._left = True, self._left[begin.end() :]
        whole = _WHOLE.match(self._left)
        assert whole is not None
        self._left = self._left[whole.end() :]
        text = without_half_pairs(whole[0].encode()).decode()
        return str(json.loads(f'"{text}"', strict=False))

    def finish(self) -> str:
        """Return the rest of the input: all of the arguments if they are not as they should be."""
        return "" if self._is_begun else self._left
