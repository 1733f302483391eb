"""What a run learns about a pair is kept for the next run; it never changes the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import generate, invoke, naming
from llamaspec.opening import WORTH_KEEPING

PROMPT = "Once upon a time"
LONG, SHORT = 80, WORTH_KEEPING - 1  # tokens; an evaluation gives at least one

pytestmark = pytest.mark.usefixtures("own_cache")


def text(models: list[Path], n: int = LONG) -> str:
    answer = generate(PROMPT, "--seed", "5", "-n", str(n), "--json", models=models).json
    assert len(answer["tokens"]) == n  # this seed gives a long text
    found: str = answer["text"]
    return found


def kept(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("*.runs.json"))


@pytest.mark.parametrize("option", ["--quick", "--forget"])
def test_a_probe_makes_it_old(models: list[Path], tmp_path: Path, option: str) -> None:
    text(models)
    before = kept(tmp_path)[0].read_text()
    assert invoke("probe", *naming(models), option).code == 0
    found = [path.read_text() for path in kept(tmp_path)]
    assert before not in found
    assert len(found) == (option == "--quick")


def test_the_first_run_says_that_it_has_measured(models: list[Path]) -> None:
    line = "first run with this pair"
    short = generate("-n", "8", "-t", "0", "hello", models=models)
    assert line not in short.stderr, "it kept nothing"
    silent, first, second = (
        generate("-n", "80", "-t", "0", "hello", *more, models=models) for more in (["--no-stats"], [], [])
    )
    assert line not in silent.stderr
    assert line not in second.stderr
    forgotten = invoke("probe", *naming(models), "--forget")
    assert forgotten.code == 0, forgotten.stderr
    assert line in generate("-n", "80", "-t", "0", "hello", models=models).stderr
    assert first.code == second.code == 0
