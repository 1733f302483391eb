"""The tools that a model may call, and which of them it means by what it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from llamaspec.chat.messages import Json, ToolCall, finite

_CUT_CALL = re.compile(
    r'\{\s*"name"\s*:\s*"(?P<name>[^"]+)"\s*,\s*"arguments"\s*:\s*(?P<arguments>\{.*)', re.DOTALL
)


class KnownTools:
    """The tools of one answer, in OpenAI's form."""

    def __init__(self, tools: Sequence[Mapping[str, Json]]) -> None:
        self.tools = tools
        functions = [tool.get("function", tool) for tool in tools]
        self.schemas: dict[str, Mapping[str, Json]] = {
            str(function["name"]): function.get("parameters") or {} for function in functions
        }

    def call_in(self, text: str, *, is_cut: bool) -> ToolCall | None:
        """Return JSON as a call of a known tool, perhaps a cut one; None if it is anything else."""
        try:
            found = finite(json.loads(text))
        except (ValueError, RecursionError):
            return self._cut_call_in(text) if is_cut else None
        if found.keys() != {"name", "arguments"} or not isinstance(found["arguments"], dict):
            return None
        name = self._named(str(found["name"]))
        if name is None:
            return None
        return ToolCall("", name, json.dumps(found["arguments"], ensure_ascii=False))

    def _cut_call_in(self, text: str) -> ToolCall | None:
        """Return the text as a call whose arguments have begun; None if it is anything else."""
        found = _CUT_CALL.match(text)
        name = None if found is None else self._named(found["name"])
        if found is None or name is None:
            return None
        return ToolCall("", name, found["arguments"])

    def _named(self, written: str) -> str | None:
        """Return the tool that a model means by a name, such as search-web by search_web; None if unclear."""
        plain = re.sub(r"\W", "_", written)
        known = [name for name in self.schemas if plain == re.sub(r"\W", "_", name)]
        return written if written in known else known[0] if len(known) == 1 else None

    def recipient(self, written: str) -> str | None:
        """Return the tool that functions.name, name or anything.name means; None if it is none."""
        known = [name for name in (written, written.partition(".")[2]) if name in self.schemas]
        is_function = self.schemas and re.match(r"functions\..", written)
        return known[0] if known else written.removeprefix("functions.") if is_function else None
