"""`llamaspec bench`: real servers with the embedded pair, and programs with known answers."""

from __future__ import annotations

import hashlib
import json
import platform
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from command import ENTRY, environment, invoke, run
from fake_server import write_checkout, write_program
from patience import PATIENCE

OPTIONS = ("--task", "ask", "--threads", "1", "-n", "8")
SPEED = ["arm", "whole", "spread", "worst", "prompt", "decoding", "first", "total"]
ANSWERS = ["arm", "s", "first s", "total s", "same text", "accepted drafts"]


def test_the_embedded_pair_beside_a_checkout_and_llama_server(
    demo_files: tuple[Path, Path], tmp_path: Path
) -> None:
    peer = write_program(tmp_path / "llama-server", ["one ", "two ", "three"])
    against = write_checkout(tmp_path / "before", ["other"])
    shared = tmp_path / "shared.json"
    more: list[str | Path] = [
        "--llama-server",
        peer,
        "--against",
        against,
        "-k",
        "3",
        "-r",
        "2",
        "--also",
        "-k 1",
    ]
    done = run("bench", *OPTIONS, *more, "--share", shared, "--json", "--markdown")
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    peers = [f"llama-server, {kind}" for kind in ("none", "draft-simple", "ngram-simple", "ngram-mod")]
    arms = found["groups"]["chat and code"]
    assert [*arms] == ["plain", "auto", "-k 1", "before: auto", *peers, "llama-server, best of each prompt"]
    assert found["baseline"] == "llama-server, none"
    assert [arms[arm]["n_same"] for arm in ("plain", "auto", "before: auto", peers[1])] == [0, 0, 0, 4]
    assert found["versions"]["llama-server"] == "77 (abc)"
    for model, path in zip((found["target"], *found["drafts"]), demo_files, strict=True):
        content = path.read_bytes()
        assert (model["n_bytes"], model["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert found["settings"]["options"] == "--threads 1 --draft-length 3 --n-ctx 1024"
    assert json.loads(shared.read_text()) == found
    for secret in (str(tmp_path), str(demo_files[0].parent), platform.node()):
        assert secret not in shared.read_text()
    samples = found["samples"]
    assert len(samples) == 8 * 4
    texts, drafted = (
        {arm: [each[field] for each in samples if each["arm"] == arm] for arm in ("plain", "-k 1", "auto")}
        for field in ("differs_at", "n_drafted")
    )
    assert texts["plain"] == texts["auto"], "ours write the same"
    assert 0 == sum(drafted["plain"]) < sum(drafted["-k 1"]) < sum(drafted["auto"]), "each got its options"
    assert {each["n_tokens"] for each in samples if each["arm"] in peers} == {3}
    assert not any("text" in each or "reply" in each for each in samples)
    table = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    n = len(arms)
    assert (table[0], table[2 + n]) == (SPEED, ANSWERS)
    assert table[4 + n + 5][4].strip() == "4/4"
    assert table[4 + n + 1][5].strip().endswith(f"/{sum(drafted['auto'])}")
    assert "before: auto: text differs from llama-server, none in ask 1 at character 1" in done.stdout


class OtherPrograms:
    """They use this many hardware threads."""

    n_threads = 0.0

    def n_taken(self) -> float:
        return self.n_threads


@pytest.mark.usefixtures("demo_files", "own_cache")
@pytest.mark.parametrize(
    ("limit", "shown", "n_taken"), [((), "", 0.0), ((), "", 1000.0), (("-n", "2"), "-n 2 ", 0.0)]
)
def test_a_quick_run(
    limit: tuple[str, ...], shown: str, n_taken: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables name the command. Only answers of full length on a calm machine leave a verdict."""
    monkeypatch.setattr(OtherPrograms, "n_threads", n_taken)
    monkeypatch.setattr("llamaspec.cli.bench.LoadWatch", OtherPrograms)
    answer = invoke("bench", "--quick", "--threads", "1", *limit, "--markdown")
    assert answer.code == 0, answer.stderr
    assert f" --quick {shown}-t 0 -r 1`" in answer.stdout
    assert ("warning: other programs used" in answer.stderr) == (n_taken > 0)
    assert bool([*tmp_path.rglob("*.bench.json")]) == (not limit and not n_taken)


@pytest.mark.usefixtures("demo_files")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_is_shown_after_an_interrupt(tmp_path: Path, number: signal.Signals) -> None:
    """No server is left running either."""
    peer = write_program(tmp_path / "slow", ["word "] * 3, 0.2)
    command = [*ENTRY, "bench", *OPTIONS, "-r", "500", "--llama-server", str(peer), "--spec-types", "none"]
    command += ["--share", str(tmp_path / "part.json")]
    popen = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert popen.stderr is not None
    while not popen.stderr.readline().startswith("llamaspec: 2/1000 "):  # all have answered the first
        assert popen.poll() is None
    servers = psutil.Process(popen.pid).children()
    assert len(servers) == 3
    popen.send_signal(number)
    stdout, stderr = popen.communicate(timeout=PATIENCE)
    assert not any(server.is_running() for server in servers)
    assert popen.returncode == 128 + number
    assert "Traceback" not in stderr
    if number == signal.SIGINT:
        assert "interrupted; results so far:" in stderr
        assert "llama-server, none" in stdout
    assert not (tmp_path / "part.json").exists(), "only a whole run is shared"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--quick", "--task", "ask"), "drop --task, --tasks or --share"),
        (("--quick", "--share", "x.json"), "drop --task, --tasks or --share"),
        (("--also", "-k '4"), "--also cannot be split into options: no closing quotation; quote it"),
        (("--task", "sing"), "there is no task sing in tasks.yaml; choose one of ask, explain,"),
        (("--tasks", "missing.yaml"), "cannot read the tasks missing.yaml"),
        (("--against", "nowhere"), "nowhere has no llamaspec; name the root of a checkout"),
        (("--llama-server", "nowhere"), "nowhere is not a program; name its file"),
        (("--share", "no folder/x.json"), "cannot write the report no folder/x.json"),
        (("--share", "x.json", "--tasks", "own.yaml"), "--share needs the built-in tasks; drop --tasks"),
        (("--target", "missing.gguf"), "no such model file"),
        (("-r", "0"), "must be an integer ≥ 1"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], says: str) -> None:
    answer = invoke("bench", *arguments)
    assert answer.code != 0
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1, answer.stderr
    assert says in answer.stderr


@pytest.mark.usefixtures("demo_files")
def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho first >&2\necho 'no such option' >&2\nexit 3\n")
    broken.chmod(0o755)
    answer = invoke("bench", *OPTIONS, "--llama-server", broken)
    assert answer.code == 1
    last = answer.stderr.splitlines()[-1]
    assert last == "llamaspec: the server of 'llama-server, none' did not start: no such option"
    ours = invoke("bench", *OPTIONS, "--also", "--nope").stderr.splitlines()[-1]
    assert ours.endswith("see `llamaspec serve -h`")


@pytest.mark.usefixtures("demo_files", "own_cache")
def test_the_plain_arm_drafts_nothing() -> None:
    """It used to be `serve --no-draft`, which still drafts the tokens that a schema forces."""
    answer = invoke("bench", "--task", "json", "--threads", "1", "-n", "16", "--json")
    assert answer.code == 0, answer.stderr
    drafted = {sample["arm"]: sample["n_drafted"] for sample in answer.json["samples"]}
    assert drafted["plain"] == 0 < drafted["auto"]
