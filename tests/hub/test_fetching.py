"""Fetching from a local hub: faults, attacks of a hostile hub, and use without a hub."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from command import ENTRY, environment, invoke, naming, run, said
from hub_server import ADDRESS, BIG, LARGE, LARGE_ADDRESS, OWN_LIST, SMALL, Hub, serving
from llamaspec import fetching
from llamaspec.catalog import locate_model, resolve_model
from llamaspec.errors import ModelFileError, printable
from llamaspec.fetching import fetch
from llamaspec.files import file_hash
from llamaspec.hub import RemoteFile, find_here, remove
from patience import PATIENCE, until

FILE = RemoteFile("acme/big-GGUF", "big-Q8_0.gguf")


def refused(file: RemoteFile = FILE) -> str:
    """Return the error of a fetch that fails."""
    with pytest.raises(ModelFileError) as raised:
        fetch(file)
    line = str(raised.value)
    assert line == printable(line)
    return line


def written(folder: Path) -> list[str]:
    """Return all files that fetching left in the folder of a test, except locks."""
    ours = ("models.yaml", "CACHEDIR.TAG")
    found = (path for path in folder.rglob("*") if path.is_file() and path.name not in ours)
    return [
        str(path.relative_to(folder)) for path in found if path.suffix != ".lock" and "refs" not in path.parts
    ]


# Commands


def test_fetched_once_then_used_without_the_hub(
    hub: Hub, cache: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = invoke("models", "pull", "big")
    assert pulled.code == 0, pulled
    assert "fetching hf:acme/big-GGUF" in pulled.stderr
    paths = [Path(line) for line in pulled.stdout.splitlines()]
    assert [path.read_bytes() for path in paths] == [hub.files[BIG], hub.files[SMALL]]
    n_requests = hub.n_requests
    options = ("--seed", "3", "-n", "20", "--threads", "1", "--json", "the end")
    right = invoke("generate", *naming(models), *options).json["text"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for named in (("--pair", "big"), ("--target", "big:q8_0", "--draft", "auto"), ("--target", ADDRESS)):
        assert invoke("generate", *named, *options).json["text"] == right
    assert hub.n_requests == n_requests
    assert invoke("models", "path", "big").stdout.strip() == str(paths[0])
    listed = {entry["name"]: entry for entry in json.loads(invoke("models", "list", "--json").stdout)}
    assert (listed["big"]["here"], listed["qwen3-14b"]["here"]) == (str(paths[0]), None)
    assert "fetching" not in invoke("models", "pull", "big").stderr


@pytest.mark.usefixtures("cache")
def test_all_parts_of_a_split_model(split_files: list[Path], target_file: Path) -> None:
    """Only the first is named; the command that needs the model fetches it."""
    address = f"hf:acme/split-GGUF:{split_files[0].name}"
    options = ("-n", "20", "--seed", "4", "--threads", "1", "--json", "the end")
    answer = invoke("generate", "--target", address, *options)
    assert answer.code == 0, answer
    assert answer.json["text"] == invoke("generate", "--target", target_file, *options).json["text"]
    here = Path(invoke("models", "path", address).stdout.strip())
    assert {path.name for path in here.parent.iterdir()} == {path.name for path in split_files}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_fetch_resumes(
    hub: Hub, env: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    hub.stalls = True
    command = [*ENTRY, "models", "pull", LARGE_ADDRESS]
    child = subprocess.Popen(command, env=environment(env), stderr=subprocess.PIPE, text=True)
    until(lambda: any(path.stat().st_size for path in (tmp_path / "hub").rglob("blobs/*")))
    child.send_signal(number)
    _, stderr = child.communicate(timeout=PATIENCE)
    assert child.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in stderr
    (left,) = (tmp_path / "hub").rglob("blobs/*")
    n_left = left.stat().st_size
    hub.stalls = False
    answer = run("models", "pull", LARGE_ADDRESS, env=env)
    content = Path(answer.stdout.strip())
    assert content.read_bytes() == hub.files[LARGE]
    assert hub.ranges == [f"bytes={n_left}-"]
    assert hub.n_sent == len(hub.files[LARGE]) - n_left
    assert list((tmp_path / "hub").rglob("blobs/*")) == [content.resolve()]


@pytest.mark.parametrize(
    ("refusal", "part"),
    [
        ((401, "RepoNotFound"), "run `hf auth login`"),
        ((404, "RepoNotFound"), "the hub has no repository acme/big-GGUF"),
        ((403, "GatedRepo"), "accept them on its page"),
        ((404, "EntryNotFound"), "acme/big-GGUF has no file big-Q8_0.gguf"),
        ((500, ""), "the hub answered 500"),
    ],
)
def test_refusals(hub: Hub, cache: Path, refusal: tuple[int, str], part: str) -> None:
    hub.refusals["acme/big-GGUF"] = refusal
    assert part in refused()


def test_no_hub(hub: Hub, env: dict[str, str]) -> None:
    away = {**env, "HF_ENDPOINT": "http://127.0.0.1:9"}
    for name in ("big", "hf:acme/big-GGUF"):
        assert "the hub cannot be reached" in said(run("generate", "--target", name, "x", env=away))
    line = said(run("generate", "--pair", "big", "x", env={**env, "HF_HUB_OFFLINE": "1"}))
    assert "HF_HUB_OFFLINE is set" in line
    assert "llamaspec models pull" in line
    assert hub.n_requests == 0


def test_a_hub_that_does_not_answer(env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        away = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HUB_ETAG_TIMEOUT": "1"}
        assert "timed out" in said(run("generate", "--target", "hf:acme/big-GGUF", "x", env={**env, **away}))


def test_a_hub_that_fails_is_asked_once(hub: Hub, cache: Path) -> None:
    hub.listing_status = 503
    with pytest.raises(ModelFileError, match="cannot list the models of acme/big-GGUF"):
        resolve_model("hf:acme/big-GGUF")
    assert hub.n_listings == 1


@pytest.mark.usefixtures("cache")
def test_another_file_than_the_list_describes(own_list: Path) -> None:
    with_hash = f"{{file: small-Q8_0.gguf, sha256: {64 * 'f'}}}"
    own_list.write_text(OWN_LIST.replace("{file: small-Q8_0.gguf}", with_hash))
    assert "is not the file in the list" in said(invoke("models", "pull", "small"))


# Faults of a transfer


def test_a_dropped_connection_resumes(hub: Hub, cache: Path) -> None:
    hub.drops = 1
    assert resolve_model(LARGE_ADDRESS).read_bytes() == hub.files[LARGE]
    assert len(hub.ranges) == 1
    assert hub.ranges != ["bytes=0-"]


@pytest.fixture
def left(hub: Hub, cache: Path) -> Path:
    """Return the path of an interrupted transfer; the test writes the file."""
    blobs = cache / "models--acme--big-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    return blobs / f"{hub.tag(BIG)}.incomplete"


def test_only_what_is_missing_is_announced_and_needs_room(
    hub: Hub, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left.write_bytes(hub.files[BIG][:1000])
    n_missing = len(hub.files[BIG]) - 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=n_missing))
    announced = list[int]()
    assert fetch(FILE, lambda _file, n: announced.append(n)).read_bytes() == hub.files[BIG]
    assert announced == [n_missing]


@pytest.mark.parametrize("wrong", ["content", "length"])
def test_a_wrong_beginning_is_fetched_again(hub: Hub, left: Path, wrong: str) -> None:
    n = len(hub.files[BIG])
    left.write_bytes(bytes(1000 if wrong == "content" else n + 1))
    if wrong == "content":
        assert "arrived damaged" in refused()
    assert fetch(FILE).read_bytes() == hub.files[BIG]


def test_a_folder_that_is_not_writable(hub: Hub, left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is simulated, because tests may run as root."""
    opened = Path.open

    def refusing(path: Path, *arguments: Any, **settings: Any) -> Any:
        if path == left:
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **settings)

    monkeypatch.setattr(Path, "open", refusing)
    assert f"cannot store {FILE}: Permission denied; check the disk, or set HF_HOME" in refused()


def test_a_wrong_size_does_not_block_the_next_transfer(hub: Hub, cache: Path) -> None:
    """The next transfer would start after the end of the file, where the hub has nothing."""
    hub.sizes[BIG] = len(hub.files[BIG]) + 1000
    refused()
    refused()
    hub.sizes.clear()
    assert fetch(FILE).read_bytes() == hub.files[BIG]


def test_old_leftovers_of_transfers_are_deleted(hub: Hub, left: Path) -> None:
    hours = 3600.0
    ages = {
        f"{'a' * 64}.0123abcd.incomplete": 8 * 24 * hours,  # of huggingface-hub
        f"{'b' * 64}.incomplete": 8 * 24 * hours,
        f"{'c' * 64}.incomplete": 2 * hours,
    }
    for name, age in ages.items():
        path = left.with_name(name)
        path.write_bytes(b"x")
        os.utime(path, 2 * (path.stat().st_mtime - age,))
    fetch(FILE)
    kept = {path.name[0] for path in left.parent.glob("*.incomplete")}
    assert kept == {"c"}


def test_removing_deletes_leftovers_of_transfers(left: Path) -> None:
    left.write_bytes(bytes(1000))
    assert remove(FILE) == 0  # somebody may be writing to it
    assert left.exists()
    os.utime(left, (1, 1))
    assert remove(FILE) == 1000
    assert not left.exists()


def test_ctrl_c_while_content_is_checked_loses_nothing(
    hub: Hub, cache: Path, split_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked parts stay. A part that was not checked has no name yet, and is checked the next time."""
    checked = list[Path]()

    def interrupted(path: Path, *arguments: Any) -> str:
        checked.append(path)
        if len(checked) == 2:
            raise KeyboardInterrupt
        return file_hash(path, *arguments)

    monkeypatch.setattr(fetching, "file_hash", interrupted)
    split = RemoteFile("acme/split-GGUF", split_files[0].name)
    with pytest.raises(KeyboardInterrupt):
        fetch(split)
    first = cache / "models--acme--split-GGUF" / "snapshots" / hub.commit / split_files[0].name
    assert first.read_bytes() == split_files[0].read_bytes()
    assert find_here(RemoteFile(split.repo, split_files[1].name)) is None
    n_sent = hub.n_sent
    assert fetch(split) == first
    assert hub.n_sent - n_sent == split_files[2].stat().st_size
    assert len(checked) == 5  # the first again, because another program may have written it
    assert {path.name for path in first.parent.iterdir()} == {path.name for path in split_files}


def test_without_links_the_file_itself_has_the_name(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(Path, "symlink_to", fails)
    for _ in range(2):
        assert fetch(FILE).read_bytes() == hub.files[BIG]
    assert hub.n_sent == len(hub.files[BIG])
    assert not list(cache.rglob("blobs/*"))


def test_a_fetched_file_stays_when_the_repository_changes(hub: Hub, cache: Path) -> None:
    hub.files["acme/big-GGUF/other.gguf"] = hub.files[SMALL]
    first = fetch(FILE)
    hub.commit = "f" * 40
    fetch(RemoteFile("acme/big-GGUF", "other.gguf"))
    assert locate_model(ADDRESS) == first


def test_parts_of_different_states_are_not_mixed(hub: Hub, cache: Path, split_files: list[Path]) -> None:
    hub.next_commits = ["a" * 40]
    assert "changed on the hub" in refused(RemoteFile("acme/split-GGUF", split_files[0].name))


def test_a_wrong_file_name_suggests_close_ones(hub: Hub, cache: Path, split_files: list[Path]) -> None:
    line = refused(RemoteFile(FILE.repo, "big-Q8_1.gguf"))
    assert "acme/big-GGUF has no file big-Q8_1.gguf; did you mean big-Q8_0.gguf?" in line
    del hub.files[f"acme/split-GGUF/{split_files[1].name}"]
    line = refused(RemoteFile("acme/split-GGUF", split_files[0].name))
    assert f"has no file {split_files[1].name}" in line


def test_a_disk_that_is_too_small(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_free = len(hub.files[BIG]) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=n_free))
    line = refused()
    assert "set HF_HOME" in line
    assert f"needs {n_free + 1} bytes" in line  # it said that 0.0 GB are needed and 0.0 GB free
    assert "1 bytes more than" in line
    assert hub.n_sent == 0
    n_free += 1
    fetch(FILE)
    n_free = 0
    fetch(FILE)  # it is here


# A hostile hub


@pytest.mark.parametrize("header", ["ETag", "X-Repo-Commit"])
@pytest.mark.parametrize(
    "value", ["/ABSOLUTE/escaped", "../../../escaped", "..", ".", "", None, "a/b", "A" * 40, "0" * 63]
)  # fmt: skip
def test_a_hash_or_a_commit_is_never_a_path(
    hub: Hub, cache: Path, tmp_path: Path, header: str, value: str | None
) -> None:
    told = value.replace("/ABSOLUTE", str(tmp_path)) if value is not None else None
    hub.headers = {header: told, **({"X-Linked-Etag": None} if header == "ETag" else {})}
    assert "the hub gives an invalid " in refused()
    assert written(tmp_path) == []


@pytest.mark.parametrize("size", [None, "0", "-5", "many", "1" + 400 * "0", "1" + 5000 * "0", "9" * 16])
def test_an_impossible_size(hub: Hub, cache: Path, tmp_path: Path, size: str | None) -> None:
    hub.headers = {"X-Linked-Size": size, "Content-Length": "0" if size is None else None}
    assert "the hub gives an invalid size" in refused()
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "http://[", "//", "/\x7f", "http://a b/", "http://h:99999/"]
)
def test_an_impossible_address(hub: Hub, cache: Path, tmp_path: Path, location: str) -> None:
    hub.elsewhere, hub.headers = hub.url, {"Location": location}
    refused()
    assert written(tmp_path) == []


def test_other_sizes_than_announced_leave_nothing(hub: Hub, cache: Path, tmp_path: Path) -> None:
    hub.sizes[BIG] = 1000
    refused()
    hub.sizes.clear()
    hub.extra_bytes = 300 << 20
    assert "sends more than" in refused()
    assert hub.n_sent < 200 << 20  # the size of buffers
    assert written(tmp_path) == []


def test_a_wrong_hash_leaves_nothing(hub: Hub, cache: Path, tmp_path: Path) -> None:
    hub.hashes[BIG] = "0" * 64
    assert "arrived damaged" in refused()
    assert written(tmp_path) == []


@pytest.mark.parametrize("content", [b"<html>sorry</html>" * 100, b"GGUF", b"GGUF<html>" + bytes(100)])
def test_only_a_model_is_kept(hub: Hub, cache: Path, tmp_path: Path, content: bytes) -> None:
    """The size and the hash are right, but the content is not a model."""
    hub.files[BIG] = content
    assert "big-Q8_0.gguf on the hub is not a model" in refused()
    assert written(tmp_path) == []


def test_content_of_another_program_is_checked(hub: Hub, cache: Path) -> None:
    blob = cache / "models--acme--big-GGUF" / "blobs" / hub.tag(BIG)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"<html>")
    assert "arrived damaged" in refused()
    assert find_here(FILE) is None
    assert fetch(FILE).read_bytes() == hub.files[BIG]


@pytest.mark.parametrize(
    "listing",
    [b"[" * 100_000, b"[]", b"{}", b'{"id": "a/b", "siblings": [{"rfilename": 3}]}', b"\xff"],
)  # fmt: skip
def test_an_invalid_list_of_files(hub: Hub, cache: Path, listing: bytes) -> None:
    hub.listing = listing
    line = refused(RemoteFile(FILE.repo, "big-Q8_1.gguf"))
    assert "has no file big-Q8_1.gguf; see the files on its page" in line


def test_names_in_a_list_of_files_are_escaped(hub: Hub, cache: Path) -> None:
    hub.listing = b'{"id": "a/b", "siblings": [{"rfilename": "big-Q8_\\u001b[31m0.gguf"}]}'
    assert r"did you mean big-Q8_\x1b[31m0.gguf" in refused(RemoteFile(FILE.repo, "big-Q8_1.gguf"))


@pytest.fixture
def other_server(hub: Hub) -> Iterator[Hub]:
    """Another host with the same files."""
    with serving(Hub(hub.files)) as server:
        server.url = server.url.replace("127.0.0.1", "localhost")
        yield server


@pytest.mark.parametrize("redirect", ["elsewhere", "elsewhere_with_content"])
def test_the_token_goes_to_its_own_hub_only(hub: Hub, cache: Path, other_server: Hub, redirect: str) -> None:
    """Also if the hub announces the content as its own and then redirects."""
    setattr(hub, redirect, other_server.url)
    assert fetch(FILE).read_bytes() == hub.files[BIG]
    assert set(hub.authorizations) == {"Bearer hf_secret"}
    assert other_server.authorizations == [None]


def test_the_token_is_not_sent_if_the_user_forbids_it(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    fetch(FILE)
    assert set(hub.authorizations) == {None}
