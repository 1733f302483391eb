"""`generate --json-schema` and `--grammar`: given as a file or as text, valid and invalid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import PROMPT, generate

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
        "required": ["n", "kind"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("is_file", [False, True])
def test_json_schema(is_file: bool, models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(SCHEMA)
    given = str(tmp_path / "schema.json") if is_file else SCHEMA
    answers = {
        generate(PROMPT, "--json-schema", given, "-t", "1.5", "--seed", "3", *lengths, models=models).stdout
        for lengths in ((), ("-k", "4"), ("--no-draft",))
    }
    (text,) = answers
    found = json.loads(text)
    assert list(found) == ["n", "kind"]
    assert found["n"] in range(100)


@pytest.mark.parametrize("grammar", ['start: "the " ("and" | "self")', 'root ::= "the " ("and" | "self")'])
@pytest.mark.parametrize("is_file", [False, True])
def test_grammar(grammar: str, is_file: bool, models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "text.grammar").write_text(grammar)
    given = str(tmp_path / "text.grammar") if is_file else grammar
    answer = generate(PROMPT, "--grammar", given, "--json", models=models).json
    assert answer["text"] in ("the and", "the self")
    assert answer["stop_reason"] == "end"


def test_a_text_that_is_cut_says_so(models: list[Path]) -> None:
    answer = generate(PROMPT, "--json-schema", SCHEMA, "-n", "3", "--no-stats", models=models)
    (line,) = answer.complaints
    assert "raise --max-tokens" in line


@pytest.mark.parametrize(
    ("options", "says", "code"),
    [
        (["--json-schema", "missing.json"], "cannot read the JSON schema missing.json", 1),
        (["--grammar", "missing.lark"], "name a readable file", 1),
        (["--grammar", 'start: "a"', "--json-schema", "{}"], "give --json-schema or --grammar, not both", 2),
    ],
)
def test_wrong_ones_are_refused_in_one_line(
    options: list[str], says: str, code: int, models: list[Path]
) -> None:
    answer = generate(PROMPT, *options, models=models)
    assert answer.code == code
    assert answer.stdout == ""
    (line,) = answer.complaints
    assert says in line
