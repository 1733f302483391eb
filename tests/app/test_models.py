"""Models by name: the list that comes with llamaspec, and one's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from command import environment, invoke, run, said
from hub_server import ADDRESS
from llamaspec.app.catalog import Catalog, Entry, RemoteFile, read_catalog
from llamaspec.errors import ModelFileError

QUANTIZATION = "big: {{repo: a/b, default: q, quantizations: {{q: {}}}}}"


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
