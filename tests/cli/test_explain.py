"""`--explain`, `--timeline`, and the choice of a draft length."""

from __future__ import annotations

import json
import re
from pathlib import Path

from command import generate


def timeline_data(page: Path) -> dict[str, object]:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found
    data: dict[str, object] = json.loads(found[1])
    return data


def test_explain_of_a_fixed_length_says_who_chose_it(models: list[Path]) -> None:
    answer = generate("-n", "10", "-k", "2", "--explain", "hello", models=models)
    assert "--draft-length fixed the draft length at 2" in answer.stderr


def test_the_timeline_holds_every_round(models: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "timeline.html"
    answer = generate(
        "-n", "40", "-k", "3", "--seed", "1", "--timeline", str(page), "--json", "</script>", models=models
    )
    rounds = timeline_data(page)["rounds"]
    assert isinstance(rounds, list)
    assert len(rounds) == answer.json["statistics"]["rounds"]
    assert sum(round_["accepted"] + 1 for round_ in rounds) == 40
    assert all(len(round_["drafted"]) <= 3 for round_ in rounds)
    assert "http" not in page.read_text().replace("http-equiv", "")
