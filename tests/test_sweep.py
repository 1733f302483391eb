"""The sweep measures what is missing, outlives models that cannot be loaded, and is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import plot_sweep
import sweep_probe
from llamaspec.measure.probe import Effort


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_probe, "QUICK", Effort(widths=(1, 2, 3), depths=(16,), most_turns=3))


def sweep(out: Path, *arguments: str | Path) -> tuple[list[dict[str, Any]], str]:
    answer = CliRunner().invoke(sweep_probe.main, [str(out), *map(str, arguments)])
    assert answer.exit_code == 0, answer.output
    return [json.loads(line) for line in out.read_text().splitlines()], answer.stderr


def test_every_combination_gets_a_line_once(target_file: Path, draft_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep.jsonl"
    options = ("--draft", draft_file, "--threads", "1", "-ngl", "0", "-ngl", "1")
    lines, said = sweep(out, target_file, tmp_path / "missing.gguf", *options)
    assert [line["case"]["gpu_layers"] for line in lines] == [0, 1, 0, 1]
    assert ["error" in line for line in lines] == [False, False, True, True]
    assert "whether drafting pays" in said  # few widths in so small a context
    again, said = sweep(out, target_file, *options)
    assert again == lines
    assert said.count(": known") == 2


def test_it_is_drawn(target_file: Path, draft_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "sweep.jsonl", tmp_path / "sweep.svg"
    sweep(out, target_file, "--draft", draft_file, "--threads", "1")
    out.write_text(out.read_text() + '{"cut')
    answer = CliRunner().invoke(plot_sweep.main, [str(out), str(picture)])
    assert answer.exit_code == 0, answer.output
    assert "line 2" in answer.stderr
    assert "<svg" in picture.read_text()
    assert CliRunner().invoke(plot_sweep.main, [str(out), str(tmp_path / "sweep.gif")]).exit_code == 2
    assert CliRunner().invoke(plot_sweep.main, [str(out), str(picture), "--match", "none"]).exit_code == 1
