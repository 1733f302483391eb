"""Models fetched from a hub on this machine, with what can go wrong, and used without it."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from pathlib import Path

import pytest

from command import ENTRY, environment, run, said
from hub_server import ADDRESS, BIG, LARGE, LARGE_ADDRESS, OWN_LIST, SMALL, Hub
from patience import PATIENCE, until


def kept(tmp_path: Path) -> list[Path]:
    """Whole and partial contents in the hub's cache."""
    return [path for path in (tmp_path / "hub").rglob("blobs/*") if path.is_file()]


def half(hub: Hub) -> int:
    """Bytes that a server that stalls has sent of the large file."""
    return len(hub.files[LARGE]) // 2


# Fetching


def test_fetched_once_then_used_without_the_hub(
    hub: Hub, env: dict[str, str], target_file: Path, draft_file: Path
) -> None:
    pulled = run("models", "pull", "big", env=env)
    assert pulled.code == 0, pulled
    paths = [Path(line) for line in pulled.stdout.splitlines()]
    assert [path.read_bytes() for path in paths] == [hub.files[BIG], hub.files[SMALL]]
    n_requests = hub.n_requests
    options = ("--seed", "3", "-n", "20", "--threads", "1", "--json", "the end")
    right = run("generate", "--target", target_file, "--draft", draft_file, *options, env=env).json["text"]
    for naming in (("--pair", "big"), ("--target", "big:q8_0", "--draft", "auto"), ("--target", ADDRESS)):
        assert run("generate", *naming, *options, env={**env, "HF_HUB_OFFLINE": "1"}).json["text"] == right
    assert hub.n_requests == n_requests
    assert run("models", "path", "big", env=env).stdout.strip() == str(paths[0])
    listed = {entry["name"]: entry for entry in json.loads(run("models", "list", "--json", env=env).stdout)}
    assert listed["big"]["here"] == str(paths[0])
    assert listed["qwen3-14b"]["here"] is None
    again = run("models", "pull", "big", env=env)
    assert "fetching" not in again.stderr


def test_a_name_that_is_not_here_is_fetched(hub: Hub, env: dict[str, str]) -> None:
    answer = run("generate", "--target", ADDRESS, "-n", "4", "--threads", "1", "x", env=env)
    assert answer.code == 0
    assert "fetching hf:acme/big-GGUF" in answer.stderr
    assert "try --draft auto" in answer.stderr  # the file's name is that of an entry with a draft


def test_all_parts_of_a_split_model(env: dict[str, str], split_files: list[Path], target_file: Path) -> None:
    """Only the first is named."""
    assert len(split_files) > 2
    address = f"hf:acme/split-GGUF:{split_files[0].name}"
    options = ("-n", "20", "--seed", "4", "--threads", "1", "--json", "the end")
    answer = run("generate", "--target", address, *options, env=env)
    assert answer.code == 0, answer
    assert answer.json["text"] == run("generate", "--target", target_file, *options, env=env).json["text"]
    here = Path(run("models", "path", address, env=env).stdout.strip())
    assert {path.name for path in here.parent.iterdir()} == {path.name for path in split_files}


def test_a_dropped_connection_goes_on_where_it_stopped(hub: Hub, env: dict[str, str]) -> None:
    hub.drops = 1
    answer = run("models", "pull", LARGE_ADDRESS, env=env)
    assert answer.code == 0, answer
    assert Path(answer.stdout.strip()).read_bytes() == hub.files[LARGE]
    assert hub.ranges == [f"bytes={half(hub)}-"]


def test_ctrl_c_keeps_what_arrived(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    hub.stalls = True
    command = [*ENTRY, "models", "pull", LARGE_ADDRESS]
    child = subprocess.Popen(command, env=environment(env), stderr=subprocess.PIPE, text=True)
    until(lambda: [path.stat().st_size for path in kept(tmp_path)] == [half(hub)])
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    assert "Traceback" not in stderr
    assert f"GB are kept; `llamaspec models pull {LARGE_ADDRESS}` goes on there" in stderr
    assert [path.stat().st_size for path in kept(tmp_path)] == [half(hub)]
    hub.stalls = False
    answer = run("models", "pull", LARGE_ADDRESS, env=env)
    assert Path(answer.stdout.strip()).read_bytes() == hub.files[LARGE]
    assert hub.ranges == [f"bytes={half(hub)}-"]


@pytest.mark.parametrize("n_bytes", [25_000_000, 26_000_000])
def test_a_partial_file_that_is_whole_or_spoilt(
    hub: Hub, env: dict[str, str], tmp_path: Path, n_bytes: int
) -> None:
    """What is longer than it can be was begun by two at once, or is of another file: begin anew."""
    hub.files[LARGE] = hub.files[LARGE][:25_000_000].ljust(25_000_000, b"\0")
    blobs = tmp_path / "hub" / "hub" / "models--acme--large-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hub.tag(LARGE)}.partial").write_bytes((hub.files[LARGE] + bytes(2_000_000))[:n_bytes])
    answer = run("models", "pull", LARGE_ADDRESS, env=env)
    assert Path(answer.stdout.strip()).read_bytes() == hub.files[LARGE]
    assert hub.ranges == []


def test_two_that_fetch_the_same_file_do_not_spoil_it(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    hub.stalls = True
    command = [*ENTRY, "models", "pull", LARGE_ADDRESS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    first = subprocess.Popen(command, env=environment(env), text=True, **pipes)  # type: ignore[call-overload]
    until(lambda: [path.stat().st_size for path in kept(tmp_path)] == [half(hub)])
    n_before = hub.n_requests
    second = subprocess.Popen(command, env=environment(env), text=True, **pipes)  # type: ignore[call-overload]
    until(lambda: hub.n_requests > n_before)  # it has asked what the file is, and now waits for the first
    hub.stalls = False
    first.kill()
    first.communicate(timeout=PATIENCE)
    out, err = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, err
    assert Path(out.strip()).read_bytes() == hub.files[LARGE]
    assert hub.ranges == [f"bytes={half(hub)}-"]  # what the first had fetched was not fetched again


def test_what_was_fetched_earlier_stays_when_the_repository_moves_on(hub: Hub, env: dict[str, str]) -> None:
    hub.files["acme/big-GGUF/other.gguf"] = hub.files[SMALL]
    first = run("models", "pull", "--no-draft", ADDRESS, env=env).stdout
    hub.commit = "f" * 40
    assert run("models", "pull", "hf:acme/big-GGUF:other.gguf", env=env).code == 0
    away = {**env, "HF_HUB_OFFLINE": "1"}
    assert run("models", "path", ADDRESS, env=away).stdout == first


# What can go wrong


def test_a_wrong_file_name_suggests_close_ones(env: dict[str, str]) -> None:
    line = said(run("models", "pull", "hf:acme/big-GGUF:big-Q8_1.gguf", env=env))
    assert "acme/big-GGUF has no file big-Q8_1.gguf; did you mean big-Q8_0.gguf?" in line


def test_a_missing_part_is_named(hub: Hub, env: dict[str, str], split_files: list[Path]) -> None:
    first, second, *_ = (part.name for part in split_files)
    del hub.files[f"acme/split-GGUF/{second}"]
    assert f"has no file {second}" in said(run("models", "pull", f"hf:acme/split-GGUF:{first}", env=env))


def test_a_wrong_hash_leaves_nothing(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    hub.hashes[BIG] = hashlib.sha256(b"other").hexdigest()
    assert "arrived damaged" in said(run("models", "pull", "big", env=env))
    assert kept(tmp_path) == []


def test_another_file_than_the_list_describes(env: dict[str, str]) -> None:
    own = Path(env["LLAMASPEC_CONFIG"]) / "models.yaml"
    own.write_text(
        OWN_LIST.replace("{file: small-Q8_0.gguf}", f"{{file: small-Q8_0.gguf, sha256: {64 * 'f'}}}")
    )
    assert "is not the file that the list" in said(run("models", "pull", "small", env=env))


@pytest.mark.parametrize(
    ("refusal", "part"),
    [
        ((401, "RepoNotFound"), "run `hf auth login`"),
        ((404, "RepoNotFound"), "the hub has no repository acme/big-GGUF"),
        ((403, "GatedRepo"), "agree on its page"),
        ((404, "EntryNotFound"), "acme/big-GGUF has no file big-Q8_0.gguf"),
        ((500, ""), "the hub answered 500"),
    ],
)
def test_refusals(hub: Hub, env: dict[str, str], refusal: tuple[int, str], part: str) -> None:
    hub.refusals["acme/big-GGUF"] = refusal
    assert part in said(run("generate", "--target", "big", "x", env=env))


def test_a_disk_that_is_too_small(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    hub.sizes[BIG] = 10**15
    line = said(run("models", "pull", "big", env=env))
    assert "needs 1000000.0 GB more" in line
    assert "set HF_HOME" in line
    assert kept(tmp_path) == []


def test_no_hub(env: dict[str, str]) -> None:
    away = {**env, "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "the hub cannot be reached" in said(run("generate", "--target", "big", "x", env=away))


def test_offline(hub: Hub, env: dict[str, str]) -> None:
    line = said(run("generate", "--pair", "big", "x", env={**env, "HF_HUB_OFFLINE": "1"}))
    assert "HF_HUB_OFFLINE is set" in line
    assert "llamaspec models pull" in line
    assert hub.n_requests == 0
    assert "models pull big" in said(run("models", "path", "big", env=env))


def test_the_token_of_the_environment(hub: Hub, env: dict[str, str]) -> None:
    run("models", "pull", "small", env={**env, "HF_TOKEN": "hf_secret"})
    assert set(hub.authorizations) == {"Bearer hf_secret"}
