"""From a name to a file: addresses, lists, the cache folder; names from outside never lead out of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from command import invoke, said
from hub_server import ADDRESS, BIG, SMALL, Hub
from llamaspec.catalog import find_remote, locate_model, read_catalog, resolve_model
from llamaspec.errors import ModelFileError, printable
from llamaspec.files import is_plain
from llamaspec.hub import RemoteFile, find_here, remote_file, remove

HOSTILE_FILES = (
    "../../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "a//x.gguf", "./x.gguf", "a\\..\\x.gguf", "C:x.gguf",
    "a\0.gguf", "a\n.gguf", "\x1b]0;t\x07.gguf", "\u202e.gguf", "\udcff.gguf", f"{251 * 'a'}.gguf",
    f"{30 * (40 * 'a' + '/')}x.gguf", "x.bin", "", "m-00000-of-00000.gguf", "m-00003-of-00002.gguf",
)  # fmt: skip
HOSTILE_REPOS = (
    "a", "a/b/c", "/b", "a/", "../..", "a/..", "./b", "a/b--c", "a--b/c", "a/b..c", "a\\b/c", "a/b\n",
    "a/\x1b", "a/-b", "a/b.", f"a/{97 * 'b'}", "ä/b", "",
)  # fmt: skip


# Names


@pytest.mark.parametrize("file", HOSTILE_FILES)
def test_files_that_are_refused(file: str) -> None:
    with pytest.raises(ValueError):
        RemoteFile("a/b", file)
    with pytest.raises(ModelFileError, match="is not an address") as raised:
        remote_file(f"hf:a/b:{file}")
    assert str(raised.value) == printable(str(raised.value))


@pytest.mark.parametrize("repo", HOSTILE_REPOS)
def test_repositories_that_are_refused(repo: str) -> None:
    with pytest.raises(ValueError, match="named owner/name"):
        RemoteFile(repo, "x.gguf")


@pytest.mark.parametrize("file", ["x.gguf", "sub/folder/x-Q4_K_M.gguf", "..x.gguf", "ä b.gguf", "x...gguf"])
def test_files_that_are_accepted(file: str) -> None:
    assert str(remote_file(f"hf:Qwen/Qwen2.5-0.5B_x:{file}")) == f"hf:Qwen/Qwen2.5-0.5B_x:{file}"


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((255,), True), ((256,), False), ((3, 256), False), ((255, 255, 255, 200, 55), True),
     ((255, 255, 255, 200, 56), False)],
)  # fmt: skip
def test_the_longest_plain_names(lengths: tuple[int, ...], *, expected: bool) -> None:
    """255 bytes between two slashes and 1024 in all; some characters have two bytes."""
    assert is_plain("/".join(n // 2 * "ä" + n % 2 * "a" for n in lengths)) == expected


def test_an_address_may_leave_out_the_file(hub: Hub, cache: Path) -> None:
    hub.files |= {"acme/two-GGUF/two-Q4_K_M.gguf": b"x", "acme/two-GGUF/two-Q4_K_S.gguf": b"x"}
    hub.files |= {"acme/two-GGUF/mmproj-two-Q4_K_M.gguf": b"x", "acme/big-GGUF/README.md": b"x"}
    assert find_remote("hf:acme/two-GGUF:q4_k_m") == RemoteFile("acme/two-GGUF", "two-Q4_K_M.gguf")
    first = find_remote("hf:acme/split-GGUF")
    assert first is not None
    assert "-00001-of-" in first.file
    for address, says in (
        ("hf:acme/two-GGUF", "has several models; name one"),
        ("hf:acme/two-GGUF:Q4_K", r"has no such model; .*two-Q4_K_M.gguf, two-Q4_K_S.gguf"),
        ("large:8b", "is called large:8b; "),
        ("hf.co/acme/two-GGUF:latest", "has several models; name one"),
        ("hf:acme/none", "cannot list the models of acme/none|has no such model"),
    ):
        with pytest.raises(ModelFileError, match=says):
            resolve_model(address)
    with pytest.raises(
        ModelFileError, match="hf:acme/big-GGUF is not on this machine; run `llamaspec models pull"
    ):
        locate_model("hf:acme/big-GGUF")
    path = resolve_model("hf:acme/big-GGUF:Q8_0")
    assert path.read_bytes() == hub.files[BIG]
    n_requests, hub.listing = hub.n_requests, b"no more answers"
    assert resolve_model("hf:acme/big-GGUF") == locate_model("hf:acme/big-GGUF:q8_0") == path
    assert hub.n_requests == n_requests


def test_names_are_spelled_as_in_requests(hub: Hub, own_list: Path, cache: Path) -> None:
    """Each of these was a name to the server, and most were none to the commands."""
    own_list.write_text(own_list.read_text().replace("big:\n", "qwen3-8b:\n"))
    file, draft = find_remote(ADDRESS), "small"
    for name in ("qwen3:8b", "QWEN3-8B:latest", "qwen3:8b-q8_0", "hf.co/acme/big-GGUF:q8_0"):
        assert (find_remote(name), read_catalog().draft_of(name)) == (file, draft)
    assert find_remote("huggingface.co/acme/big-GGUF:latest") == file
    for command in ("show", "pull", "path"):
        assert invoke("models", command, "qwen3:8b").code == 0
    assert invoke("models", "add", "mine", "hf.co/acme/big-GGUF:Q8_0", "--draft", "SMALL").code == 0
    assert read_catalog().draft_of("mine:latest") == "SMALL"
    assert invoke("models", "path", "Mine").stdout == invoke("models", "path", ADDRESS).stdout
    assert "removed your entry" in invoke("models", "remove", "mine:latest").stderr


def test_a_fetched_file_has_a_name(hub: Hub, cache: Path) -> None:
    """Only the server knew it."""
    hub.files |= {f"acme/two-GGUF/two-{kind}.gguf": hub.files[BIG] for kind in ("Q4_0", "Q8_0")}
    path = resolve_model("hf:acme/two-GGUF:Q4_0")
    assert locate_model("two:q4_0") == locate_model("two") == locate_model("hf.co/acme/two-GGUF") == path
    resolve_model("hf:acme/two-GGUF:Q8_0")
    several = "means several models: hf:acme/two-GGUF:two-Q4_0.gguf, hf:acme/two-GGUF:two-Q8_0.gguf; name one"
    for name in ("two", "hf.co/acme/two-GGUF"):
        with pytest.raises(ModelFileError, match=several):
            locate_model(name)


def test_the_address_of_a_page(hub: Hub, cache: Path) -> None:
    file = find_remote(ADDRESS)
    for page in ("blob/main/big-Q8_0.gguf", "resolve/main/big-Q8_0.gguf?download=true", "", "tree/main"):
        assert find_remote(f"{hub.url}/acme/big-GGUF/{page}") == file
    for page in ("acme/big-GGUF/blob/other/big-Q8_0.gguf", "acme", "acme/big-GGUF/blob/main/%2e%2e/x.gguf"):
        with pytest.raises(ModelFileError, match=r"write hf:owner/repo:file\.gguf"):
            find_remote(f"{hub.url}/{page}")
    with pytest.raises(ModelFileError, match="is not the page"):
        find_remote("https://elsewhere.example/acme/big-GGUF/blob/main/big-Q8_0.gguf")


def test_the_known_draft(hub: Hub, cache: Path) -> None:
    assert read_catalog().draft_of("big") == read_catalog().draft_of(ADDRESS) == "small"
    assert resolve_model("small").read_bytes() == hub.files[SMALL]
    assert read_catalog().draft_of("small") is None


@pytest.mark.parametrize("option", ["--show", "--forget"])
@pytest.mark.parametrize("naming", [("--pair", "big"), ("--target", ADDRESS)])
def test_locating_a_model_makes_no_requests(
    hub: Hub, cache: Path, option: str, naming: tuple[str, ...]
) -> None:
    with pytest.raises(ModelFileError, match="big is not on this machine; run `llamaspec models pull big`"):
        locate_model("big")
    assert "on this machine" in said(invoke("probe", option, *naming))
    assert hub.n_requests == 0
    assert not cache.exists()


def test_library_errors_name_no_options(cache: Path) -> None:
    assert "leave the draft out" in said(invoke("generate", "--pair", "small", "x"))
    for name in ("nobody", "hf:acme", "small:Q4_0", "hf:a/b:../x.gguf"):
        with pytest.raises(ModelFileError) as error:
            locate_model(name)
        assert "--" not in str(error.value)


# The cache folder


@pytest.fixture
def folder(cache: Path) -> Path:
    """Return the folder of a repository, in the form of huggingface-hub; see `keep`."""
    return cache / "models--acme--big-GGUF"


def keep(folder: Path, name: str, content: bytes, commit: str = "c" * 40) -> Path:
    blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
    link = folder / "snapshots" / commit / name
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link.symlink_to(Path("../../blobs") / blob.name)
    return link


def test_the_main_branch_comes_before_newer_snapshots(folder: Path) -> None:
    file = RemoteFile("acme/big-GGUF", "m.gguf")
    old, new = (keep(folder, "m.gguf", text, commit * 40) for text, commit in ((b"old", "a"), (b"n", "b")))
    os.utime(old.parent, (1, 1))
    assert find_here(file) == new
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    assert find_here(file) == old


def test_a_split_model_needs_all_parts_together(folder: Path) -> None:
    file = RemoteFile("acme/big-GGUF", "m-00001-of-00002.gguf")
    first = keep(folder, "m-00001-of-00002.gguf", b"1")
    keep(folder, "m-00002-of-00002.gguf", b"2", commit="d" * 40)
    assert find_here(file) is None
    keep(folder, "m-00002-of-00002.gguf", b"2")
    assert find_here(file) == first


def test_removing_frees_content_that_nothing_else_needs(folder: Path) -> None:
    one, two = keep(folder, "one.gguf", b"shared"), keep(folder, "two.gguf", b"shared too")
    also = two.with_name("also.gguf")
    also.symlink_to(one.readlink())
    assert remove(RemoteFile("acme/big-GGUF", "one.gguf")) == 0
    assert (also.read_bytes(), one.exists()) == (b"shared", False)
    assert remove(RemoteFile("acme/big-GGUF", "also.gguf")) == 6
    assert two.read_bytes() == b"shared too"
    assert remove(RemoteFile("acme/big-GGUF", "two.gguf")) == 10
    assert not folder.exists()


def test_removing_leaves_files_outside_the_folder(folder: Path, tmp_path: Path) -> None:
    """A store of newer versions of huggingface-hub, a link of the user, and another folder."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("one.gguf", "two.gguf", "three.gguf"):
        (outside / name).write_bytes(b"mine")
    link = keep(folder, "one.gguf", b"x")
    blob = folder / "blobs" / link.readlink().name
    blob.unlink()
    blob.symlink_to(outside / "one.gguf")
    link.with_name("two.gguf").symlink_to(outside / "two.gguf")
    (folder / "snapshots" / "state").symlink_to(outside)
    link.with_name("sub").symlink_to(outside)
    for name in ("one.gguf", "two.gguf", "three.gguf", "sub/three.gguf"):
        remove(RemoteFile("acme/big-GGUF", name))
    assert {path.read_bytes() for path in outside.iterdir()} == {b"mine"}
    assert len(list(outside.iterdir())) == 3
