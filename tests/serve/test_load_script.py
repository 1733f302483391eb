"""The load script: what it asks, what it counts, and what it makes of the figures."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import load_figures
import serve_load
from load_figures import AUTO, BASE, Load, conclusion, figures
from serve_load import Arm, Case
from serving import Served

# tokens per second of each turn; the second turn ran on a machine that was half as fast
SPEEDS = {
    AUTO: (30.0, 16.0, 33.0),
    BASE: (20.0, 10.0, 24.0),
    "llama-server, no draft": (22.0, 9.0, 21.0),
    "llama-server n_max=2": (25.0, 20.0, 22.0),
}


def load(arm: str, turn: int, n_clients: int = 1, **more: float) -> Load:
    speed = SPEEDS[arm][turn] * n_clients
    measured = {"first_seconds": 0.1 + turn, "gap_p50": 0.02, "gap_p99": 0.5, "draft_length": 3.0 / n_clients}
    return Load("big-Q4_0.gguf", arm, n_clients, 1.0, turn, 60, 60 / speed, **{**measured, **more})


def loads(*clients: int) -> list[Load]:
    return [load(arm, turn, n) for n in clients for turn in range(3) for arm in SPEEDS]


def test_medians_of_speeds_and_of_ratios_of_the_same_turn() -> None:
    found = {each.arm: each for each in figures(loads(1))}
    own = found[AUTO]
    assert own.speed == pytest.approx(30.0)
    assert own.to_base == pytest.approx(1.5)  # of 1.5, 1.6 and 1.375
    assert own.to_peer == pytest.approx(1.2)  # of 1.2, 0.8 and 1.5: n_max=2 is the faster arm
    assert own.first_seconds == pytest.approx(1.1)
    assert found[BASE].to_base == 1.0
    assert found["llama-server, no draft"].to_peer == pytest.approx(0.88)


def test_a_turn_that_was_cut_short_is_left_out() -> None:
    found = figures([load(AUTO, 0), load(BASE, 0), load(AUTO, 1)])
    assert found[0].to_base == pytest.approx(1.5)
    assert found[0].to_peer is None
    assert figures([load(AUTO, 0)])[0].to_base is None


def test_the_conclusion_names_the_worst_load() -> None:
    worse = [replace(each, seconds=2 * each.seconds) if each.arm == AUTO else each for each in loads(4)]
    said = conclusion(figures([*loads(1), *worse]))
    assert said == (
        "Automatic length: at least 0.75 times as fast as no draft (big-Q4_0, temperature 1, 4 clients); "
        "at least 0.60 times as fast as the best arm of llama-server (big-Q4_0, temperature 1, 4 clients); "
        "K 3.0 with 1 client, 0.8 with 4 clients."
    )
    assert "llama-server" not in conclusion(figures([load(AUTO, 0), load(BASE, 0)]))


def test_what_was_kept_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kept, picture = tmp_path / "loads.jsonl", tmp_path / "loads.svg"
    kept.write_text("".join(json.dumps(asdict(each)) + "\n" for each in loads(1, 4)) + '{"target": "cu')
    answer = CliRunner().invoke(load_figures.main, [str(kept), str(picture)])
    assert answer.exit_code == 0, answer.output
    assert "line 25" in answer.stderr
    printed = json.loads(answer.stdout)["figures"]
    assert printed == [asdict(each) for each in figures(loads(1, 4))]
    drawn = picture.read_text()
    for text in ("clients at once", "tokens per second", "K: draft tokens in a round", *SPEEDS):
        assert f"<!-- {text}" in drawn  # matplotlib writes each text as a comment beside its glyphs
    assert CliRunner().invoke(load_figures.main, [str(kept), str(tmp_path / "loads.gif")]).exit_code == 2
    kept.write_text("")
    assert CliRunner().invoke(load_figures.main, [str(kept), str(picture)]).exit_code == 1


def test_arms() -> None:
    files = Path("big.gguf"), Path("small.gguf")
    own = dict(serve_load._commands(*files, None, (1, 3), None, 8))
    assert list(own) == [AUTO, BASE]
    assert "small.gguf" in own[AUTO]
    assert "small.gguf" not in own[BASE]
    both = dict(serve_load._commands(*files, Path("bin/llama-server"), (1, 3), 2, 8))
    assert list(both)[2:] == ["llama-server, no draft", "llama-server n_max=1", "llama-server n_max=3"]
    assert all("--threads 2" in " ".join(command) for command in both.values())


def test_a_folder_without_llama_server(demo_files: tuple[Path, Path], tmp_path: Path) -> None:
    files = ["--target", str(demo_files[0]), "--draft", str(demo_files[1])]
    answer = CliRunner().invoke(serve_load.main, [*files, "--llama-cpp", str(tmp_path)])
    assert answer.exit_code == 2
    assert "has no llama-server" in answer.stderr


def test_no_two_prompts_begin_alike() -> None:
    cases = [Case(n, t, turn, 2, 9) for n in (1, 8) for t in (0.0, 1.0) for turn in range(2)]
    prompts = [prompt for case in cases for own in case.prompts(["a", "b", "c"]) for prompt, _ in own]
    assert len({prompt.split("\n")[0] for prompt in prompts}) == len(prompts) == 2 * 2 * 2 * (1 + 8)


def test_a_load(server: Served) -> None:
    """This server drafts 3 tokens, but for the last rounds of a text."""
    case = Case(2, 0.0, 1, 2, 12)
    found = serve_load._measure(Path("x/big.gguf"), Arm(AUTO, server.url), case, ["def f(x):", "import os"])
    assert (found.target, found.arm, found.n_clients, found.turn) == ("big.gguf", AUTO, 2, 1)
    assert found.n_tokens == 2 * 2 * 12
    assert 2.0 < found.draft_length <= 3.0
    assert 0.0 < found.gap_p50 <= found.gap_p99 < found.seconds
    assert 0.0 < found.first_seconds < found.seconds


def test_a_server_that_refuses(server: Served) -> None:
    case = Case(1, -1.0, 0, 1, 9)
    with pytest.raises(click.ClickException, match="temperature"):
        serve_load._measure(Path("big.gguf"), Arm(AUTO, server.url), case, ["a"])


def test_rounds_that_llama_server_does_not_tell() -> None:
    """48 tokens, 30 of them accepted draft tokens: 18 rounds."""
    answer = serve_load._Answer(0.0)
    answer.note({"predicted_n": 48, "draft_n": 45, "draft_n_accepted": 30})
    assert (answer.n_drafted, answer.n_rounds) == (45, 18)
    answer.note({"predicted_n": 48, "draft_n": 45, "draft_n_accepted": 30, "rounds": 17})
    assert answer.n_rounds == 17


def test_events_that_arrive_together() -> None:
    answer = serve_load._Answer(0.0, times=[1.0, 1.0001, 1.0002, 1.5, 1.5001])
    assert answer.gaps() == pytest.approx([0.4998])
