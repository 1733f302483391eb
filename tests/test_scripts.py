"""The report of scripts/demo.py; scripts/switching.py and scripts/serve_several.py with tiny models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import serve_several
import switching
from chat_models import TALKER, write_chat_model
from demo import Probed, most_gained, report
from fake_server import write_program
from llamaspec.measure.served_arms import PEER_PLAIN
from model_store import ModelStore
from tiny_models import Recipe


def test_the_demo_reports_every_quantisation_and_compares_the_best() -> None:
    found = [Probed("Q4_0", 1.0, 0, "drafting does not pay"), Probed("F16", 2.05, 5, "not below 0.31")]
    assert most_gained(found).kind == "F16"
    assert report(found).splitlines()[1:] == [
        "  Q4_0  nothing: drafting does not pay",
        "  F16   2.05 times the speed with 5 draft tokens a round: not below 0.31",
        "Comparing on F16, where it should gain most:",
    ]


def test_switching_measures_loading_and_turns(tmp_path: Path) -> None:
    one, two = (write_chat_model(tmp_path / f"{name}.gguf", TALKER) for name in ("one", "two"))
    peer = write_program(tmp_path / "llama-server", ["one ", "two"])
    options = ["--target", one, "--other", two, "--llama-server", peer, "--requests", 1, "-n", 2, "-r", 2]
    answer = CliRunner().invoke(switching.main, [*map(str, options)])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert [[*row] for row in found["loads"]] == 2 * [["llamaspec", PEER_PLAIN]]
    # Loading a model this small takes less time than a measurement's noise.
    assert set(found["loading"]) == {"llamaspec", PEER_PLAIN}
    assert [[*row] for row in found["switches"]] == 2 * [["alone", "switching"]]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_texts_and_memory_of_several_models(store: ModelStore) -> None:
    recipes = [("llama", Recipe()), ("llama", Recipe(seed=1)), ("gemma3", Recipe()), ("jamba", Recipe())]
    options = [f"--target={store.path(*recipe)}" for recipe in recipes]
    answer = CliRunner().invoke(serve_several.main, [*options, "--requests", "60", "--clients", "1"])
    assert answer.exit_code == 0, answer.output
    assert 2 <= json.loads(answer.stdout)["most_loaded"] < len(recipes)
