"""Models by name: fetched from a hub on this machine, with what can go wrong, and used without it."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import ENTRY, Answer, environment, run
from hub_server import Hub, serving
from llamaspec.app.catalog import Catalog, Entry, RemoteFile, read_catalog
from llamaspec.errors import ModelFileError
from model_store import ModelStore
from tiny_models import Recipe

BIG, SMALL = "acme/big-GGUF/big-Q8_0.gguf", "acme/small-GGUF/small-Q8_0.gguf"
LARGE = "acme/large-GGUF/large.gguf"  # huggingface-hub writes 10 MiB at a time
LARGE_ADDRESS = "hf:acme/large-GGUF:large.gguf"
ADDRESS = "hf:acme/big-GGUF:big-Q8_0.gguf"
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
    (partial,) = kept(tmp_path)
    n_kept = partial.stat().st_size
    hub.stalls = False
    answer = run("models", "pull", LARGE_ADDRESS, env=env)
    assert Path(answer.stdout.strip()).read_bytes() == hub.files[LARGE]
    assert hub.ranges == [f"bytes={n_kept}-"]


# What can go wrong


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
def test_names_that_mean_nothing(env: dict[str, str], arguments: tuple[str, ...], part: str) -> None:
    assert part in said(run(*arguments, env=env))


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
        ("big: 3", "cannot be understood"),
        ("big: {licence: MIT}", "it needs a path, or a repo"),
        ("big: {colour: red}", "unexpected keyword argument 'colour'"),
    ],
)
def test_a_list_that_cannot_be_read(env: dict[str, str], text: str, part: str) -> None:
    (Path(env["LLAMASPEC_CONFIG"]) / "models.yaml").write_text(text)
    assert part in said(run("models", "list", env=env))
    assert part in said(run("models", "add", "mine", ADDRESS, env=env))


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
