"""Models by name: fetched from a hub on this machine, with what can go wrong, and used without it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from command import ENTRY, Answer, environment, invoke, run
from hub_server import Hub, serving
from llamaspec.app.catalog import Catalog, Entry, RemoteFile, read_catalog
from llamaspec.app.stored import find_here, remove
from llamaspec.errors import ModelFileError
from model_store import ModelStore
from tiny_models import Recipe

BIG, SMALL = "acme/big-GGUF/big-Q8_0.gguf", "acme/small-GGUF/small-Q8_0.gguf"
LARGE = "acme/large-GGUF/large.gguf"  # huggingface-hub writes 10 MiB at a time
LARGE_ADDRESS = "hf:acme/large-GGUF:large.gguf"
ADDRESS = "hf:acme/big-GGUF:big-Q8_0.gguf"
QUANTIZATION = "big: {{repo: a/b, default: q, quantizations: {{q: {}}}}}"
OWN_LIST = """
big:
  repo: acme/big-GGUF
  pattern: big-{quantization}.gguf
  default: Q8_0
  draft: small
small:
  repo: acme/small-GGUF
  default: Q8_0
  quantizations: {Q8_0: {file: small-Q8_0.gguf}}
"""


@pytest.fixture
def split_files(store: ModelStore) -> list[Path]:
    """The target in parts."""
    first = store.path("llama", Recipe(dtype="q8_0", tensors_per_file=8))
    return sorted(first.parent.glob(first.name.replace("-00001-", "-*-")))


@pytest.fixture
def hub(target_file: Path, draft_file: Path, split_files: list[Path]) -> Iterator[Hub]:
    files = {
        BIG: target_file.read_bytes(),
        SMALL: draft_file.read_bytes(),
        LARGE: b"GGUF" + bytes(24 << 20),
        **{f"acme/split-GGUF/{part.name}": part.read_bytes() for part in split_files},
    }
    with serving(Hub(files)) as server:
        yield server


@pytest.fixture
def env(hub: Hub, tmp_path: Path) -> dict[str, str]:
    config = tmp_path / "config"
    config.mkdir()
    (config / "models.yaml").write_text(OWN_LIST)
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hub"),
        "LLAMASPEC_CONFIG": str(config),
        "LLAMASPEC_CACHE": str(tmp_path / "cache"),
    }


@pytest.fixture
def own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The person's own list, for commands in this process."""
    for name in ("LLAMASPEC_TARGET", "LLAMASPEC_DRAFT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LLAMASPEC_CONFIG", str(tmp_path))
    path = tmp_path / "models.yaml"
    path.write_text(OWN_LIST)
    return path


def said(answer: Answer) -> str:
    """The one line of an error."""
    assert answer.code == 1
    assert "Traceback" not in answer.stderr
    return answer.stderr.splitlines()[-1]


def kept(tmp_path: Path) -> list[Path]:
    """Whole and partial contents in the hub's cache."""
    return [path for path in (tmp_path / "hub").rglob("blobs/*") if path.is_file()]


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
    assert hub.ranges == [f"bytes={10 << 20}-"]


def test_ctrl_c_keeps_what_arrived(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    hub.stalls = True
    command = [*ENTRY, "models", "pull", LARGE_ADDRESS]
    child = subprocess.Popen(command, env=environment(env), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in kept(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "Traceback" not in stderr
    assert f"GB are kept; `llamaspec models pull {LARGE_ADDRESS}` goes on there" in stderr
    (partial,) = kept(tmp_path)
    n_kept = partial.stat().st_size
    hub.stalls = False
    answer = run("models", "pull", LARGE_ADDRESS, env=env)
    assert Path(answer.stdout.strip()).read_bytes() == hub.files[LARGE]
    assert hub.ranges == [f"bytes={n_kept}-"]


@pytest.mark.parametrize("n_bytes", [25_000_000, 26_000_000])
def test_a_partial_file_that_is_whole_or_spoilt(
    hub: Hub, env: dict[str, str], tmp_path: Path, n_bytes: int
) -> None:
    """What is longer than it can be was begun by two at once, or is of another file: begin anew."""
    hub.files[LARGE] = hub.files[LARGE][:4] + bytes(25_000_000 - 4)
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
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in kept(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    n_before = hub.n_requests
    second = subprocess.Popen(command, env=environment(env), text=True, **pipes)  # type: ignore[call-overload]
    while hub.n_requests == n_before:  # it has asked what the file is, and now waits for the first
        assert time.monotonic() < deadline
        time.sleep(0.05)
    hub.stalls = False
    first.kill()
    first.communicate(timeout=30)
    out, err = second.communicate(timeout=30)
    assert second.returncode == 0, err
    assert Path(out.strip()).read_bytes() == hub.files[LARGE]
    (asked,) = hub.ranges  # what the first had fetched was not fetched again
    assert int(asked.removeprefix("bytes=").removesuffix("-")) >= 10_000_000


def test_what_was_fetched_earlier_stays_when_the_repository_moves_on(hub: Hub, env: dict[str, str]) -> None:
    hub.files["acme/big-GGUF/other.gguf"] = b"GGUF other"
    first = run("models", "pull", "--no-draft", ADDRESS, env=env).stdout
    hub.commit = "f" * 40
    assert run("models", "pull", "hf:acme/big-GGUF:other.gguf", env=env).code == 0
    away = {**env, "HF_HUB_OFFLINE": "1"}
    assert run("models", "path", ADDRESS, env=away).stdout == first


# What is here and what removing frees


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a repository as huggingface-hub keeps it; see `keep`."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path / "models--acme--big-GGUF"


def keep(folder: Path, name: str, content: bytes, commit: str = "c" * 40) -> Path:
    blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
    link = folder / "snapshots" / commit / name
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link.symlink_to(Path("../../blobs") / blob.name)
    return link


def test_the_main_branch_comes_before_what_is_newer(folder: Path) -> None:
    file = RemoteFile("acme/big-GGUF", "m.gguf")
    old, new = (
        keep(folder, "m.gguf", text, commit) for text, commit in ((b"old", "a" * 40), (b"n", "b" * 40))
    )
    os.utime(old.parent, (1, 1))
    assert find_here(file) == new
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    assert find_here(file) == old


def test_parts_count_only_together(folder: Path) -> None:
    file = RemoteFile("acme/big-GGUF", "m-00001-of-00002.gguf")
    first = keep(folder, "m-00001-of-00002.gguf", b"1")
    assert find_here(file) is None
    keep(folder, "m-00002-of-00002.gguf", b"2", commit="d" * 40)
    assert find_here(file) is None
    keep(folder, "m-00002-of-00002.gguf", b"2")
    assert find_here(file) == first


def test_removing_frees_what_nothing_else_needs(folder: Path) -> None:
    one, two = keep(folder, "one.gguf", b"shared"), keep(folder, "two.gguf", b"shared too")
    also = two.with_name("also.gguf")
    also.symlink_to(one.readlink())
    (folder / "blobs" / "abc.partial").write_bytes(b"123")
    assert remove(RemoteFile("acme/big-GGUF", "one.gguf")) == 3
    assert (also.read_bytes(), one.exists()) == (b"shared", False)
    assert remove(RemoteFile("acme/big-GGUF", "also.gguf")) == 6
    assert two.read_bytes() == b"shared too"
    assert remove(RemoteFile("acme/big-GGUF", "two.gguf")) == 10
    assert not folder.exists()


def test_removing_leaves_a_store_that_others_share(folder: Path, tmp_path: Path) -> None:
    """Newer versions of huggingface-hub let blobs lead to a store of all repositories."""
    link = keep(folder, "one.gguf", b"x")
    shared = tmp_path / "shared"
    shared.write_bytes(b"shared")
    blob = folder / "blobs" / link.readlink().name
    blob.unlink()
    blob.symlink_to(shared)
    remove(RemoteFile("acme/big-GGUF", "one.gguf"))
    assert shared.read_bytes() == b"shared"


# What can go wrong


def test_a_wrong_file_name_suggests_close_ones(env: dict[str, str]) -> None:
    line = said(run("models", "pull", "hf:acme/big-GGUF:big-Q8_1.gguf", env=env))
    assert "acme/big-GGUF has no file big-Q8_1.gguf; did you mean big-Q8_0.gguf?" in line


def test_a_missing_part_is_named(hub: Hub, env: dict[str, str]) -> None:
    del hub.files[SPLIT.format(2)]
    line = said(run("models", "pull", "hf:acme/split-GGUF:split-00001-of-00002.gguf", env=env))
    assert "has no file split-00002-of-00002.gguf" in line


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


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("generate", "--target", "bigg", "x"), "did you mean big"),
        (("generate", "--pair", "qwen3-14c", "x"), "did you mean qwen3-14b"),
        (("generate", "--pair", "small", "x"), "no draft is known for small"),
        (("generate", "--target", "hf:acme", "x"), "write hf:owner/repo:file.gguf"),
        (("generate", "--target", "small:Q4_0", "x"), "small has no quantization Q4_0"),
        (("models", "show", "nobody"), "`llamaspec models list`"),
        (("models", "remove", "qwen3-14b"), "nothing of qwen3-14b is on this machine"),
        (("models", "add", "mine", "missing.gguf"), "no such model file"),
        (("models", "add", "mine", ADDRESS, "--draft", "nobody"), "no model is called nobody"),
    ],
)
def test_names_that_mean_nothing(
    own_list: Path, arguments: tuple[str, ...], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own_list.parent / "hub"))
    assert part in said(invoke(*arguments))


def test_a_pair_and_a_target_are_one_too_many(env: dict[str, str]) -> None:
    answer = run("generate", "--pair", "big", "--target", "small", "x", env=env)
    assert answer.code == 2
    assert "drop --target" in answer.stderr
    with_environment = {**env, "LLAMASPEC_TARGET": "missing.gguf"}  # the command line is nearer
    assert run("generate", "--pair", "big", "-n", "2", "--threads", "1", "x", env=with_environment).code == 0


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("big: [", "this is not YAML"),
        ("big: 3", "cannot be understood: big must be a mapping, got 3"),
        ("big: {licence: MIT}", "it needs a path, or a repo"),
        ("big: {colour: red}", "big: colour means nothing"),
        ("- big", "cannot be understood"),
        ("big: {repo: [a], default: q, pattern: x.gguf}", "big: repo must be text, got ['a']"),
        ("big: {repo: a, default: q, pattern: x.gguf}", "big: a repository is named owner/name, got 'a'"),
        ("big: {repo: a/b, default: q}", "big: big has no quantization q, choose one of "),
        ("big: {repo: a/b, default: q, pattern: 'x{size}.gguf'}", "no other braces than {quantization}"),
        ("big: {repo: a/b, default: q, pattern: x.bin}", "big: a model file ends in .gguf, got 'x.bin'"),
        ("big: {path: x.gguf, memory_gb: much}", "big: memory_gb must be a whole number, got 'much'"),
        ("big: {path: x.gguf, quantizations: [q]}", "big: quantizations must be a mapping, got ['q']"),
        (QUANTIZATION.format("x.gguf"), "big: quantization q must be a mapping with a file, got 'x.gguf'"),
        (QUANTIZATION.format("{bytes: 3}"), "big: quantization q must be a mapping with a file"),
        (QUANTIZATION.format("{file: x.gguf, size: 3}"), "big: quantization q has 'size', which means"),
        (QUANTIZATION.format("{file: x.gguf, bytes: few}"), "big: bytes of q must be a whole number above 0"),
        (
            QUANTIZATION.format(f"{{file: x.gguf, sha256: {64 * '0'}}}"),
            "64 hexadecimal digits in quotes, got 0",
        ),
    ],
)
def test_a_list_that_cannot_be_read(own_list: Path, text: str, part: str) -> None:
    own_list.write_text(text)
    for arguments in (["list"], ["add", "mine", ADDRESS]):
        line = said(invoke("models", *arguments))
        assert part in line
        assert str(own_list) in line
        assert "; mend" in line
    assert own_list.read_text() == text


# Names of one's own


def test_names_come_and_go(env: dict[str, str], target_file: Path) -> None:
    assert run("models", "add", "mine", target_file, "--draft", "small", "--notes", "fast", env=env).code == 0
    assert run("models", "add", "theirs", ADDRESS, env=env).code == 0
    shown = run("models", "show", "mine", "--json", env=env).json
    assert (shown["here"], shown["draft"], shown["notes"]) == (str(target_file), "small", "fast")
    assert run("models", "path", "mine", env=env).stdout.strip() == str(target_file)
    answer = run("generate", "--pair", "mine", "-n", "4", "--threads", "1", "--json", "x", env=env)
    assert answer.json["draft"].endswith("small-Q8_0.gguf")
    assert "freed" not in run("models", "remove", "mine", env=env).stderr
    assert target_file.exists()
    run("models", "pull", "theirs", env=env)
    gone = run("models", "remove", "theirs", env=env).stderr
    assert "freed" in gone
    assert "dropped your entry" in gone
    names = [entry["name"] for entry in json.loads(run("models", "list", "--json", env=env).stdout)]
    assert "mine" not in names
    assert "theirs" not in names
    assert "big" in names


def test_a_name_must_not_look_like_a_file(env: dict[str, str]) -> None:
    answer = run("models", "add", "mine.gguf", ADDRESS, env=env)
    assert answer.code == 2
    assert "cannot be a name" in answer.stderr


def test_a_list_that_cannot_be_written(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "in the way").write_text("")
    away = {**env, "LLAMASPEC_CONFIG": str(tmp_path / "in the way")}
    assert "set LLAMASPEC_CONFIG to a folder of yours" in said(
        run("models", "add", "mine", ADDRESS, env=away)
    )


def test_a_file_needs_neither_the_list_nor_the_hub(target_file: Path, draft_file: Path) -> None:
    """Whoever names files does not wait for what reads lists and asks networks."""
    code = (
        "import sys; from llamaspec.app.cli import main\n"
        "try: main()\n"
        "finally: print({'yaml', 'huggingface_hub', 'httpx2', 'httpx'} & set(sys.modules))"
    )
    arguments = ["generate", "--target", target_file, "--draft", draft_file, "-n", "1", "--no-stats", "x"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment(), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "set()"


# The list that comes with llamaspec


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    monkeypatch.setenv("LLAMASPEC_CONFIG", str(tmp_path))
    return read_catalog()


def test_every_entry_is_complete(catalog: Catalog) -> None:
    assert {8, 16, 32, 64} <= {entry.memory_gb for entry in catalog.entries.values()}
    for entry in catalog.entries.values():
        file = entry.file()
        assert entry.licence
        assert entry.checked in (("hash", "listed") if file.sha256 else ("name",))
        assert file.n_bytes
        if entry.draft is not None:
            draft = catalog.find(entry.draft).file()
            assert entry.memory_gb
            assert draft.n_bytes
            assert file.n_bytes > 3 * draft.n_bytes
            assert file.n_bytes + draft.n_bytes < 0.8e9 * entry.memory_gb


def test_drafts_are_found_by_name_address_and_file(catalog: Catalog) -> None:
    for target in (
        "qwen3-32b",
        "qwen3-32b:Q8_0",
        "hf:someone/Qwen3-32B-GGUF:Qwen3-32B-Q5_K_M.gguf",
        "/models/Qwen3-32B-Q4_K_M.gguf",
    ):
        assert catalog.draft_of(target) == "qwen3-0.6b"
    assert catalog.draft_of("/models/else.gguf") is None


def test_quantizations_that_are_not_listed_follow_the_pattern(catalog: Catalog) -> None:
    assert catalog.find("qwen3-32b").file("q8_0") == RemoteFile("Qwen/Qwen3-32B-GGUF", "Qwen3-32B-Q8_0.gguf")
    assert catalog.find("qwen2.5-3b").file("Q8_0").file == "qwen2.5-3b-instruct-q8_0.gguf"
    with pytest.raises(ModelFileError, match="on this machine"):
        Entry("mine", path="x.gguf").file("q8_0")


def test_parts() -> None:
    assert RemoteFile("a/b", "m-00001-of-00003.gguf").parts == tuple(
        f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)
    )
    assert RemoteFile("a/b", "m.gguf").parts == ("m.gguf",)
    for repo, file in (("a", "m.gguf"), ("a/b", "m.bin"), ("/b", "m.gguf")):
        with pytest.raises(ValueError, match="got"):
            RemoteFile(repo, file)
