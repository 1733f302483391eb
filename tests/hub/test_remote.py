"""Names from outside become paths: which ones are accepted, and that none leads out of its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaspec.errors import ModelFileError, printable
from llamaspec.hub.remote import RemoteFile, below, is_plain, remote_file

HOSTILE_FILES = (
    "../../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "a//x.gguf", "./x.gguf", "a\\..\\x.gguf", "C:x.gguf",
    "a\0.gguf", "a\n.gguf", "\x1b]0;t\x07.gguf", "\u202e.gguf", "\udcff.gguf", f"{251 * 'a'}.gguf",
    f"{30 * (40 * 'a' + '/')}x.gguf", "x.bin", "", "m-00000-of-00000.gguf", "m-00003-of-00002.gguf",
)  # fmt: skip
HOSTILE_REPOS = (
    "a", "a/b/c", "/b", "a/", "../..", "a/..", "./b", "a/b--c", "a--b/c", "a/b..c", "a\\b/c", "a/b\n",
    "a/\x1b", "a/-b", "a/b.", f"a/{97 * 'b'}", "ä/b", "",
)  # fmt: skip


@pytest.mark.parametrize("file", HOSTILE_FILES)
def test_files_that_are_refused(file: str) -> None:
    with pytest.raises(ValueError):
        RemoteFile("a/b", file)
    with pytest.raises(ModelFileError, match="is no address") as raised:
        remote_file(f"hf:a/b:{file}")
    assert str(raised.value) == printable(str(raised.value))


@pytest.mark.parametrize("repo", HOSTILE_REPOS)
def test_repositories_that_are_refused(repo: str) -> None:
    with pytest.raises(ValueError, match="named owner/name"):
        RemoteFile(repo, "x.gguf")


@pytest.mark.parametrize("file", ["x.gguf", "sub/folder/x-Q4_K_M.gguf", "..x.gguf", "ä b.gguf", "x...gguf"])
def test_files_that_are_accepted(file: str) -> None:
    assert str(remote_file(f"hf:Qwen/Qwen2.5-0.5B_x:{file}")) == f"hf:Qwen/Qwen2.5-0.5B_x:{file}"


def test_links_on_the_way_do_not_lead_out(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for made in (folder / "in", outside):
        made.mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "within").symlink_to(folder / "in")
    (tmp_path / "folder2").mkdir()
    (folder / "beside").symlink_to(tmp_path / "folder2")  # whose path begins alike
    assert below(folder, "within/x") == folder / "within" / "x"
    assert below(folder, "link") == folder / "link"  # at the end it may stand: it is looked at, not followed
    (tmp_path / "alias").symlink_to(folder)
    assert below(tmp_path / "alias", "in/x") == tmp_path / "alias" / "in" / "x"
    for name in ("link/x", "beside/x", "../outside/x", str(outside), "in/../../outside"):
        with pytest.raises(ModelFileError, match="leads out of"):
            below(folder, name)


def test_a_plain_name_is_below_every_folder() -> None:
    assert is_plain("a/b.c")
    assert not any(
        is_plain(name) for name in ("", "/", "a/", "/a", ".", "..", "a/./b", "a\\b", "a:b", "a\rb")
    )


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((255,), True),
        ((256,), False),
        ((255, 3), True),
        ((3, 256), False),
        ((255, 255, 255, 200, 55), True),
        ((255, 255, 255, 200, 56), False),
    ],
)
def test_a_plain_name_is_no_longer_than_file_systems_take(
    lengths: tuple[int, ...], *, expected: bool
) -> None:
    """255 bytes between two slashes and 1024 in all, some of them in characters of two bytes."""
    parts = [n // 2 * "ä" + n % 2 * "a" for n in lengths]
    assert is_plain("/".join(parts)) == expected
