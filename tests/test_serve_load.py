"""The script that loads servers: its concurrent requests, and its comparison of servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import serve_load
from fake_server import write_program
from llamaspec.measure.served_arms import PEER_PLAIN, Answer, ServerCommand
from patience import PATIENCE
from serve_load import QUESTIONS, Load, compared, conversations, measured


def test_clients_talk_at_the_same_time_behind_one_system_prompt() -> None:
    together = threading.Barrier(2, timeout=PATIENCE)
    asked: list[list[str]] = []

    def ask(body: Mapping[str, Any]) -> Answer:
        together.wait()  # no answer before both have asked
        texts = [message["content"] for message in body["messages"]]
        asked.append(texts)
        assert (body["max_tokens"], body["ignore_eos"]) == (9, True)
        return Answer("", f"to {texts[-1]}", 7, 9, 3.0, float(len(texts)))

    talks = [*conversations("[5.2]", 2, 4, shared=True)]
    load = measured("auto", ask, talks, {"max_tokens": 9, "ignore_eos": True}, 4)
    assert (load.arm, load.n_clients, load.turn) == ("auto", 2, 4)
    assert (load.n_tokens, load.first_seconds) == (8 * 9, 5.0)
    assert len({texts[0] for texts in asked}) == 1, "one system prompt"
    assert asked[0][0].startswith("[5.2]")
    for questions in (QUESTIONS[:4], QUESTIONS[4:]):
        last = next(texts for texts in asked if texts[-1] == questions[-1])
        assert last[1::2] == [*questions]
        assert last[2::2] == [f"to {question}" for question in questions[:-1]], "its own answers"


def test_without_a_system_prompt_nothing_begins_alike() -> None:
    asked: list[str] = []

    def ask(body: Mapping[str, Any]) -> Answer:
        (message,) = body["messages"]
        asked.append(message["content"])
        return Answer("", "", 7, 9, 3.0, 1.0)

    for label in ("[1.2]", "[2.2]"):
        measured("auto", ask, [*conversations(label, 2, 3, shared=False)], {}, 0)
    assert len({text[:10] for text in asked}) == 12


def test_servers_are_compared_turn_by_turn() -> None:
    loads = [Load("auto", 2, 0, 2.0, 1.0, 8), Load(PEER_PLAIN, 2, 0, 8.0, 2.0, 8)]
    loads += [Load("auto", 2, 1, 4.0, 1.0, 8), Load(PEER_PLAIN, 2, 1, 12.0, 4.0, 8)]
    ours, peer = compared(loads)
    assert ours == {
        "clients": 2, "server": "auto", "seconds": 3.0, "ratio": (8 / 2 + 12 / 4) / 2, "first seconds": 1.0,
        "tokens/s": 3.0,
    }  # fmt: skip
    assert (peer["server"], peer["ratio"]) == (PEER_PLAIN, 1.0)


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = write_program(tmp_path / "llama-server", ["one ", "two"])
    given: list[str] = []

    def own_arms(options: list[str], *_: Any) -> list[ServerCommand]:
        given.extend(options)
        return [ServerCommand("auto", (str(program),))]

    monkeypatch.setattr(serve_load, "own_arms", own_arms)
    target = tmp_path / "t.gguf"
    target.touch()
    options = ["--target", str(target), "--llama-server", str(program), "--spec-type", "ngram-mod"]
    answer = CliRunner().invoke(serve_load.main, [*options, "-r", "2", "-c", "2"])
    assert answer.exit_code == 0, answer.output
    assert given == ["--target", str(target), "--n-ctx", "8192", "--ctx-per-request", "4096"]
    found = json.loads(answer.stdout)["found"]
    names = ["auto", PEER_PLAIN, "llama-server, ngram-mod"]
    assert [each["server"] for each in found] == names
    assert "2/2 2 clients, auto: " in answer.stderr
