"""The comparison of drafts of drafts: by hand, and once on the embedded models."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time

import pytest
from click.testing import CliRunner

from llamaspec import open_pair
from measure_stages import ALL, PLAIN, Arms, Turn, main, score


def turn(prompt: int, plain: float, first: float, both: float, agreed: float | None) -> Turn:
    agreements = {} if agreed is None else {"draft 1, by the target": agreed}
    rates = {PLAIN: plain, "draft 1": first, "draft 2": plain / 2, ALL: both}
    return Turn(0.0, prompt, rates, {"draft 1": 0.1}, agreements, same_text=True)


def test_ratios_are_of_the_same_turn() -> None:
    """A machine that is twice as fast in one turn changes nothing, and the last text wrote nothing."""
    turns = [turn(0, 1, 2, 3, 0.5), turn(0, 2, 4, 6, 0.7), turn(0, 1, 9, 9, 0.6), turn(1, 3, 24, 12, None)]
    found = score(turns)
    assert found.ratios == pytest.approx({PLAIN: 1.0, "draft 1": 4.0, "draft 2": 0.5, ALL: 12**0.5})
    assert found.best == "draft 1"
    assert found.stages == (0.875, 1.25, 1.5)
    assert found.costs == {"draft 1": 0.1}
    assert found.agreements == {"draft 1, by the target": 0.6}


def test_every_arm_says_the_same(demo_files: tuple[Path, Path]) -> None:
    target, draft = map(str, demo_files)
    sizes = ["--max-prompts", "1", "-n", "6", "-r", "1", "-t", "1", "--threads", "1", "--cpu-time"]
    answer = CliRunner().invoke(main, ["--target", target, "--draft", draft, "--draft", draft, *sizes])
    assert answer.exit_code == 0, answer.output
    (found,) = json.loads(answer.stdout.splitlines()[-1])["scores"]
    assert found["same_text"]
    assert set(found["ratios"]) == {PLAIN, "draft 1", "draft 2", ALL}
    assert found["agreements"]["draft 2, by draft 1"] == 1.0
    assert found["costs"]["draft 1"] > 0


def test_who_drafts_in_each_arm(demo_files: tuple[Path, Path]) -> None:
    target, draft = demo_files
    with open_pair(target, [draft, draft]) as pair:
        first, second = pair.draft_models
        arms = Arms([pair.target, first, second], process_time)
        drafting = {name: each.draft_models for name, each in arms.pairs.items()}
        assert drafting == {PLAIN: (), "draft 1": (first,), "draft 2": (second,), ALL: (first, second)}
        assert {each.clock for each in arms.pairs.values()} == {process_time}


def test_what_cannot_be_compared_is_refused(demo_files: tuple[Path, Path]) -> None:
    target, draft = map(str, demo_files)
    answer = CliRunner().invoke(main, ["--target", target, "--draft", draft])
    assert answer.exit_code == 2
    assert "needs two drafts" in answer.stderr
    more = ["--draft", draft, "--cpu-time", "--threads", "2"]
    answer = CliRunner().invoke(main, ["--target", target, "--draft", draft, *more])
    assert "give --threads 1" in answer.stderr
