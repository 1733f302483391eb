"""Values of arguments between marks: how a grammar lets a model write them, and how the parser reads them.

In Qwen's XML a value has a line of its own: <parameter=key>, the value, </parameter>. Text is not quoted, so
it ends where it looks like the end. Models that no grammar constrains sometimes omit the line breaks.
tests/chat/test_tool_grammar.py: what the grammar lets a model write, the parser reads.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

from llamaspec.chat.messages import Json, finite
from llamaspec.chat.notation import Pairs
from llamaspec.sampling.schemas import forms

Schema = Mapping[str, Json]

_NO_GROUPS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^()]", re.DOTALL)


def quoted(text: str) -> str:
    """Return a text as a JSON string, which is also a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def json_or_text(text: str, types: Iterable[str] = ()) -> str:
    """Return a text if it is JSON, otherwise as a string; scalars stay strings if `types` allow strings."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    kind = "null" if value is None else "array" if isinstance(value, list) else "object"
    is_scalar = isinstance(value, str | float | int)
    return text.strip() if "string" not in types or (kind in types and not is_scalar) else quoted(text)


def _refuse(constant: str) -> Json:
    """Refuse NaN and Infinity, which Python reads although they are no JSON."""
    raise ValueError(f"{constant} is no JSON")


def python_or_text(text: str) -> str:
    """Return a value of Python, such as True or ['a'], as JSON; otherwise as a string."""
    with suppress(ValueError):
        return json.dumps(json.loads(text, parse_constant=_refuse), ensure_ascii=False)
    try:
        return json.dumps(finite(ast.literal_eval(text)), ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return quoted(text)


def as_json(text: str, schema: Json, shared: Json) -> str:
    """Return a parameter's value as JSON: the choice that is spelled so, or what its type says."""
    for value in choices(schema, shared) or ():
        if text == as_text(value):
            return json.dumps(value, ensure_ascii=False)
    return json_or_text(text, types_of(schema, shared))


def types_of(schema: Json, shared: Json) -> set[str]:
    """Return the types that the schema of a parameter allows."""
    found = [form.get("type") for form in forms(schema, shared)]
    return {str(each) for types in found for each in (types if isinstance(types, list) else [types])}


def choices(schema: Json, shared: Json) -> list[Json] | None:
    """Return the only values that the schema of a parameter allows; None if there are others."""
    found: list[Json] = []
    for form in forms(schema, shared):
        if "const" in form:
            found.append(form["const"])
        elif isinstance(form.get("enum"), list):
            found += form["enum"]
        elif form.get("type") == "null":
            found.append(None)
        else:
            return None
    return found


def as_text(value: Json) -> str:
    """Return a value of a parameter as XML has it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def is_text(schema: Json, shared: Json) -> bool:
    """Whether a parameter is any text."""
    return types_of(schema, shared) == {"string"} and choices(schema, shared) is None


# For grammars


def text_rules(rule: str, schema: Schema, pairs: Pairs, end: str | None) -> list[str]:
    """Return a rule for text up to its end, with the length and the pattern of its schema.

    `end` is the end as a part of a rule, if it has a control token; then the text cannot contain its mark.
    """
    low, high, pattern = (schema.get(key) for key in ("minLength", "maxLength", "pattern"))
    limits = f"{low if isinstance(low, int) else 0},{high if isinstance(high, int) else ''}"
    texts = ["(?s:.*)" if limits == "0," else f"(?s:.{{{limits}}})"]
    texts += [_whole(pattern)] if isinstance(pattern, str) else []
    if end is not None:
        body = " & ".join(f"/{text}/" for text in texts)
        return [
            f"{rule.upper()}: {body} & ~/(?s:.*){escaped(pairs.closing)}(?s:.*)/",
            f"{rule}: {rule.upper()} {end}",
        ]
    body = " & ".join(f"/{text}{escaped(pairs.after_value)}/" for text in texts)
    earlier = "|".join(escaped(each) for each in pairs.value_ends if each != pairs.after_value)
    return [f"{rule.upper()}: {body} & ~/(?s:.*)({earlier})(?s:.*)/", f"{rule}[lazy]: {rule.upper()}"]


def _whole(pattern: str) -> str:
    """Return a schema's pattern, which may match anywhere, as a pattern of the whole text, for Lark.

    llguidance knows no anchors. Inside alternatives they stay, and the grammar does not compile.
    """
    has_end = re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if has_end else "(?s:.*)"
    inner = pattern.removeprefix("^")
    inner = inner[:-1] if has_end else inner
    if "|" not in pattern or _is_one_group(inner):
        pattern = inner
    slashes = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern)
    return f"{before}({slashes}){after}"


def _is_one_group(pattern: str) -> bool:
    """Whether the first bracket of a regular expression closes at its end."""
    brackets, depth = _NO_GROUPS.sub("_", pattern), 0
    for i, bracket in enumerate(brackets):
        depth += {"(": 1, ")": -1}.get(bracket, 0)
        if depth == 0:
            return i == len(brackets) - 1
    return False


def escaped(text: str) -> str:
    """Escape a text for a regular expression in Lark."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")
