"""Lark grammars as regular expressions: what matches, and what is refused."""

from __future__ import annotations

import re

import pytest

from llamaspec.errors import ConstraintError
from llamaspec.sampling.lark import MAX_PATTERN, lark_pattern

GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    ('start: "a" ("b" | "c")* [D]\nD.2: /\\d+/', ["a", "abcb", "ab12"], ["", "ad", "1"]),
    ('?start: x~2 y~1..2\nx: "("i -> one  // a comment: "\ny: "a\\n" | /B/i', ["((a\n", "((bB"], ["(a\n"]),
    ("%import common.INT\n%import common (WS, LF)\nstart: INT (LF INT)+\n    | WS", ["1\n22", " "], ["1"]),
    ("%import common.CNAME -> NAME\nstart: NAME\n", ["a_1"], ["1a"]),
    ('start: "0".."9" /a\\/b/ "."', ["5a/b."], ["5a/bx"]),
    ("start: /a|b/ /c./s", ["ac\n", "bcd"], ["ab", "a"]),
    ('start: one | \n\none: "x"', ["x", ""], ["xx"]),
]
REFUSED = [
    ('start: "(" start ")"', "contains itself"),
    ('start: a\na: b\nb: "x" a?', "contains itself"),
    ('start: "a"\n%ignore " "', "%ignore"),
    ("%import common.EMAIL\nstart: EMAIL", "common.EMAIL"),
    ("start: a", "no rule a"),
    ('other: "a"', "no rule start"),
    ('start: ("a"', "lacks a )"),
    ('start: "a")', "bracket too many"),
    ("start: 'a'", "line 1"),
    ('start: "\\x"', "wrong escape"),
    (
        "start: a9\na0: /x/\n" + "\n".join(f"a{i + 1}: " + f"a{i} " * 9 for i in range(9)),
        f"{MAX_PATTERN} characters",
    ),
    ("start: " + "(" * 30_000, "too deeply"),
    ("x" * (MAX_PATTERN + 1), "shorten"),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS, ids=range(len(GRAMMARS)))
def test_a_grammar_becomes_a_pattern(grammar: str, good: list[str], bad: list[str]) -> None:
    pattern = re.compile(lark_pattern(grammar))
    assert all(map(pattern.fullmatch, good))
    assert not any(map(pattern.fullmatch, bad))


@pytest.mark.parametrize(("grammar", "told"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_regular_expression(grammar: str, told: str) -> None:
    """Rules that double at each step end soon, too."""
    with pytest.raises(ConstraintError, match=re.escape(told)):
        lark_pattern(grammar)
