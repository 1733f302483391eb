"""Which files of the hub are here, and what removing one frees."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from llamaspec.hub.cache import find_here, remove
from llamaspec.hub.remote import RemoteFile


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


def test_folders_that_no_hub_made_are_passed_over(folder: Path) -> None:
    file = RemoteFile("acme/big-GGUF", "m.gguf")
    link = keep(folder, "m.gguf", b"1")
    (folder / "snapshots" / "odd:name").mkdir()
    assert find_here(file) == link


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
