"""What the scripts compute themselves, and that those which use much of llamaspec still run."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import bench_clients
import sweep_probe
from bench_clients import QUESTIONS, Run, compared, converse
from demo import Found, most_gained, report
from fake_server import write_program
from llamaspec.measure.probe import Effort
from llamaspec.measure.served_arms import PEER_PLAIN, Answer, Arm
from overhead import hand_over_seconds
from patience import PATIENCE


def test_the_demo_reports_every_quantisation_and_compares_the_best() -> None:
    found = [Found("Q4_0", 1.0, 0, "drafting does not pay"), Found("F16", 2.05, 5, "not below 0.31")]
    assert most_gained(found).kind == "F16"
    assert report(found).splitlines()[1:] == [
        "  Q4_0  nothing: drafting does not pay",
        "  F16   2.05 times the speed with 5 draft tokens a round: not below 0.31",
        "Comparing on F16, where it should gain most:",
    ]


def test_a_sweep_measures_what_is_missing_and_is_drawn(
    demo_files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sweep_probe, "QUICK", Effort(widths=(1, 2, 3), depths=(16,), most_turns=3))
    out, picture = tmp_path / "sweep.jsonl", tmp_path / "sweep.svg"

    def sweep(*arguments: str | Path) -> tuple[list[dict[str, Any]], str]:
        answer = CliRunner().invoke(sweep_probe.main, [str(out), *map(str, arguments)])
        assert answer.exit_code == 0, answer.output
        return [json.loads(line) for line in out.read_text().splitlines()], answer.stderr

    options = ("--draft", demo_files[1], "--threads", "1", "-ngl", "0", "-ngl", "1")
    lines, _ = sweep(demo_files[0], tmp_path / "missing.gguf", *options)
    assert [line["case"]["gpu_layers"] for line in lines] == [0, 1, 0, 1]
    assert ["error" in line for line in lines] == [False, False, True, True]
    again, said = sweep(demo_files[0], *options, "--plot", picture)
    assert again == lines
    assert said.count(": known") == 2
    assert "<svg" in picture.read_text()


def test_the_hand_over_of_a_token_is_measured() -> None:
    assert abs(hand_over_seconds(2, 20)) < 0.1


def test_two_clients_talk_at_the_same_time() -> None:
    together = threading.Barrier(len(QUESTIONS), timeout=PATIENCE)
    asked: list[list[str]] = []

    def ask(body: Mapping[str, Any]) -> Answer:
        together.wait()  # no answer before both have asked
        texts = [message["content"] for message in body["messages"]]
        asked.append(texts)
        assert (body["max_tokens"], body["ignore_eos"]) == (9, True)
        return Answer("", f"to {texts[-1]}", 7, 9, 3.0, float(len(texts)))

    run = converse("auto", ask, 5, 9)
    assert (run.arm, run.n_tokens, run.first_seconds) == ("auto", 8 * 9, 5.0)
    assert len({texts[0] for texts in asked}) == 1, "one system prompt"
    assert asked[0][0].startswith("[5]")
    for questions in QUESTIONS:
        last = next(texts for texts in asked if texts[-1] == questions[-1])
        assert last[1::2] == [*questions]
        assert last[2::2] == [f"to {question}" for question in questions[:-1]], "its own answers"


def test_clients_are_compared_repeat_by_repeat() -> None:
    runs = [Run("auto", 2.0, 1.0, 8), Run(PEER_PLAIN, 8.0, 2.0, 8)]
    runs += [Run("auto", 4.0, 1.0, 8), Run(PEER_PLAIN, 12.0, 4.0, 8)]
    found = compared(runs)
    assert found["auto"] == {
        "seconds": 3.0, "ratio": (8 / 2 + 12 / 4) / 2, "first_seconds": 1.0, "tokens_per_second": 3.0
    }  # fmt: skip
    assert found[PEER_PLAIN]["ratio"] == 1.0


def test_the_servers_of_two_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def own_arms(options: list[str], *_: Any) -> list[Arm]:
        given.extend(options)
        return [Arm("plain", ("no program",)), Arm("auto", (str(program),))]

    program = write_program(tmp_path / "llama-server", ["one ", "two"])
    monkeypatch.setattr(bench_clients, "own_arms", own_arms)
    target = tmp_path / "t.gguf"
    target.touch()
    options = ["--target", target, "--llama-server", program, "-r", "2", "--spec-type", "ngram-mod"]
    answer = CliRunner().invoke(bench_clients.main, [*map(str, options), "--json"])
    assert answer.exit_code == 0, answer.output
    assert given == ["--target", str(target), "--n-ctx", "8192", "--ctx-per-request", "4096"]
    told = json.loads(answer.stdout)
    assert [*told["arms"]] == ["auto", PEER_PLAIN, "llama-server, ngram-mod"]
    assert [run["n_tokens"] for run in told["runs"]] == 6 * [2 * 8]
    assert "2/2 auto: " in answer.stderr
