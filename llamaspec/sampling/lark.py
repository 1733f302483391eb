r"""Lark grammars as regular expressions, so that a text inside JSON can be held to one.

In JSON the text is escaped, and only `pattern` looks behind the escapes. A grammar without recursion is one
regular expression; others are refused, and so is `%ignore`. tests/sampling/test_lark.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from llamaspec.errors import ConstraintError

MAX_PATTERN = 64 << 10  # characters
# A name before a colon begins a definition; nothing else in Lark has a colon.
_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|->[ \t]*\w+)
      | (?P<directive>%[^\n]*)
      | (?P<define>[?!]*\w+)(\.-?\d+)?[ \t]*:
      | (?P<range>"[^"\\]"\.\."[^"\\]")
      | (?P<string>"(?:\\.|[^"\\\n])*")(?P<case>i?)
      | /(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[imsx]*)
      | ~[ ]*(?P<least>\d+)([ ]*\.\.[ ]*(?P<most>\d+))?
      | (?P<name>\w+)
      | (?P<mark>[|()\[\]?*+])""",
    re.VERBOSE,
)
_IMPORT = re.compile(r"%import\s+common\s*(?:\.\s*(\w+)(?:\s*->\s*(\w+))?|\(([\w\s,]+)\))\s*(?://.*)?")
_DIGITS, _LETTER = "[0-9]+", "[a-zA-Z]"
_FLOAT = rf"(?:{_DIGITS}[eE][+-]?{_DIGITS}|(?:{_DIGITS}\.[0-9]*|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?)"
_COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": _DIGITS, "SIGNED_INT": f"[+-]?{_DIGITS}",
    "DECIMAL": rf"(?:{_DIGITS}\.[0-9]*|\.{_DIGITS})", "FLOAT": _FLOAT, "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"(?:{_FLOAT}|{_DIGITS})", "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|{_DIGITS})",
    "ESCAPED_STRING": r'"(?:\\.|[^"\\\n])*"', "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]",
    "LETTER": _LETTER, "WORD": f"{_LETTER}+", "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+", "CR": r"\r", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+",
}  # fmt: skip


def lark_pattern(grammar: str) -> str:
    """Return a regular expression for the texts of a Lark grammar.

    Raises
    ------
    ConstraintError
        The grammar is not Lark, is recursive, or uses what this module does not know.
    """
    if len(grammar) > MAX_PATTERN:
        raise ConstraintError(f"the grammar has more than {MAX_PATTERN} characters; shorten it")
    try:
        return _Expansion(*_definitions(grammar)).of("start")
    except RecursionError as error:
        raise ConstraintError("the grammar is nested too deeply; flatten it") from error


def _definitions(grammar: str) -> tuple[dict[str, list[re.Match[str]]], dict[str, str]]:
    """Return the tokens of each rule and terminal, and the patterns of those that are imported."""
    found: dict[str, list[re.Match[str]]] = {}
    imported: dict[str, str] = {}
    body, place = list[re.Match[str]](), 0
    while place < len(grammar):
        token = _TOKEN.match(grammar, place)
        if token is None:
            line = grammar.count("\n", 0, place) + 1
            raise ConstraintError(f"the grammar has something unknown in line {line}; correct it")
        place = token.end()
        if token["define"]:
            body = found.setdefault(token["define"].lstrip("?!"), [])
        elif token["directive"]:
            imported |= _imported(token["directive"])
        elif not token["space"]:
            body.append(token)
    return found, imported


def _imported(directive: str) -> Mapping[str, str]:
    parts = _IMPORT.fullmatch(directive.strip())
    if parts is None:
        raise ConstraintError(
            f"the grammar has {directive.split()[0]}, of which only %import common is known"
        )
    names = (
        {parts[2] or parts[1]: parts[1]}
        if parts[1]
        else {name: name for name in re.findall(r"\w+", parts[3])}
    )
    if unknown := [name for name in names.values() if name not in _COMMON]:
        raise ConstraintError(f"the grammar imports common.{unknown[0]}, which is not known; define it")
    return {name: _COMMON[common] for name, common in names.items()}


class _Expansion:
    """Replaces names by what they stand for, until only a regular expression is left."""

    def __init__(self, bodies: Mapping[str, list[re.Match[str]]], known: Mapping[str, str]) -> None:
        self._bodies, self._known, self._open = bodies, dict(known), set[str]()

    def of(self, name: str) -> str:
        """Return the pattern of a rule or terminal."""
        if name in self._known:
            return self._known[name]
        if name not in self._bodies:
            raise ConstraintError(f"the grammar has no rule {name[:64]}; define it")
        if name in self._open:
            raise ConstraintError(
                f"the grammar's rule {name[:64]} contains itself, so it is no regular expression"
            )
        self._open.add(name)
        tokens = self._bodies[name][::-1]
        pattern = self._alternatives(tokens)
        if tokens:
            raise ConstraintError(f"the grammar's rule {name[:64]} has a bracket too many; remove it")
        self._open.remove(name)
        self._known[name] = pattern
        return pattern

    def _alternatives(self, left: list[re.Match[str]], closing: str = "") -> str:
        """Take tokens from the end of `left` up to a closing bracket; return their pattern as a group."""
        parts = [""]
        while left and left[-1]["mark"] not in (")", "]"):
            token = left.pop()
            if token["mark"] == "|":
                parts.append("")
            else:
                parts[-1] += self._item(token, left)
        if closing and (not left or left.pop()["mark"] != closing):
            raise ConstraintError(f"the grammar lacks a {closing}; add it")
        pattern = f"(?:{'|'.join(parts)})"
        if len(pattern) > MAX_PATTERN:
            raise ConstraintError(
                f"the grammar is a pattern of more than {MAX_PATTERN} characters; shorten it"
            )
        return pattern

    def _item(self, token: re.Match[str], left: list[re.Match[str]]) -> str:
        """Return the pattern of one item; an operator applies to the group before it."""
        if token["mark"] in ("(", "["):
            is_optional = token["mark"] == "["
            return self._alternatives(left, "]" if is_optional else ")") + ("?" if is_optional else "")
        if token["mark"]:
            return token["mark"]
        if token["least"]:
            return f"{{{token['least']},{token['most'] or token['least']}}}"
        if token["range"]:
            return f"[{re.escape(token['range'][1])}-{re.escape(token['range'][-2])}]"
        if token["string"]:
            text = re.escape(_unescaped(token["string"]))
            return f"(?{token['case']}:{text})"
        if token["regex"]:
            return f"(?{token['flags']}:{token['regex']})".replace("\\/", "/")
        return f"(?:{self.of(token['name'])})"


def _unescaped(string: str) -> str:
    try:
        return str(ast.literal_eval(string))
    except (SyntaxError, ValueError) as error:
        raise ConstraintError("the grammar has a string with a wrong escape; correct it") from error
