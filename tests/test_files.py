"""Small files: reading, refusing, writing and validating."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from llamaspec import files
from llamaspec.errors import printable
from llamaspec.files import file_identity, parse_json, read_file, write_file


@dataclass(frozen=True, slots=True)
class Part:
    seconds: float

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError(f"seconds must be >= 0,\x1b[31m got {self.seconds}")


@dataclass(frozen=True, slots=True)
class Whole:
    parts: tuple[Part, ...]
    n: int
    name: str | None = None


# Reading


def test_a_regular_file_below_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abcd")
    (tmp_path / "link").symlink_to(path)
    assert read_file(path, 4) == read_file(tmp_path / "link", 4) == b"abcd"


def test_files_that_block_or_never_end_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(b"12345")
    for name, reason in (("pipe", "not a regular"), ("zero", "not a regular"), ("large", "larger than 4")):
        with pytest.raises(OSError, match=reason) as raised:
            read_file(tmp_path / name, 4)
        assert raised.value.strerror
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path, 4)


# Writing


def test_a_failure_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write_file(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(path, "new \ud800")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_file(path, "new")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("x", "old")]


def test_a_link_stays_a_link_but_a_pipe_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    target, link = tmp_path / "kept" / "x", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_file(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        write_file(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
    assert not Path("/dev/null").is_file()


def test_leftovers_of_killed_writers_are_deleted(tmp_path: Path) -> None:
    names = (".x[1].aaa.tmp", ".x[1].bbb.tmp", ".y.aaa.tmp")
    for name in names:
        (tmp_path / name).write_text("")
    old = time.time() - files.STALE_SECONDS - 10
    for name in (names[0], names[2]):
        os.utime(tmp_path / name, (old, old))
    write_file(tmp_path / "x[1]", "")
    assert {path.name for path in tmp_path.iterdir()} == {"x[1]", names[1], names[2]}


# Validation


def test_a_dataclass_from_json() -> None:
    text = '{"parts": [{"seconds": 1}, {"seconds": 0.5}], "n": 3}'
    assert parse_json(Whole, text) == Whole((Part(1.0), Part(0.5)), 3)
    assert parse_json(list[Part], '[{"seconds": 1, "more": 2}]', unknown="ignore") == [Part(1.0)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        ("[" * 100_000, "recursion limit exceeded"),
        ('{"parts": [], "n": 1}, 2', "at most 1 item"),
        ('{"parts": [], "n": "1"}', "n: input should be a valid integer"),
        ('{"parts": [], "n": true}', "n: input should be a valid integer"),
        ('{"parts": [], "n": 1, "x": 2}', "x: unexpected keyword argument"),
        ('{"parts": 3, "n": 1}', "parts: input should be a valid array"),
        ('{"parts": [{"seconds": NaN}], "n": 1}', "parts.0.seconds: input should be a finite number"),
        ('{"parts": [{"seconds": 1e400}], "n": 1}', "parts.0.seconds: input should be a finite number"),
        (f'{{"parts": [{{"seconds": 1{400 * "0"}}}], "n": 1}}', "parts.0.seconds: input should be a "),
        (f'{{"parts": [], "n": 1{5000 * "0"}}}', "number out of range"),
        ('{"parts": [{"seconds": -1}], "n": 1}', r"parts.0: seconds must be >= 0,\x1b[31m got -1.0"),
        ('{"parts": [], "n": 1, "name": "\\ud800"}', "Invalid JSON"),
    ],
)
def test_invalid_json_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_json(Whole, text)
    message = str(raised.value)
    assert reason in message
    assert message == printable(message)
    assert len(message) <= 200


def test_bytes_that_are_not_utf_8() -> None:
    with pytest.raises(ValueError, match="invalid"):
        parse_json(Whole, b'{"parts": [], "n": 1, "name": "\xff"}')


# Text for terminals


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, Grüße \U0001f600 \\n", "plain, Grüße \U0001f600 \\n"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\nb\r\tc\x00\x7f", "a\\nb\\r\\tc\\x00\\x7f"),
        ("\x9b2J\x85", "\\x9b2J\\x85"),
        ("gguf\u202efug\u2066\u2028", "gguf\\u202efug\\u2066\\u2028"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_become_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    shown.encode()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_a_file_that_is_written_again_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    """Once, a conversation that only its user could read became readable for all."""
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(mode)
    write_file(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", mode)
    write_file(path, "secret", private=True)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write_file(tmp_path / "new", "")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_the_identity_of_a_model_stays_the_same(tmp_path: Path) -> None:
    """The size and the first mebibyte, so drafts made by an earlier version still belong to their target."""
    beginning, path = bytes(range(256)) * 4096, tmp_path / "target.gguf"
    key = hashlib.sha256(b"1048579" + beginning).hexdigest()[:32]
    for rest in (b"abc", b"xyz"):
        path.write_bytes(beginning + rest)
        assert file_identity(path) == key
    path.write_bytes(beginning + b"abcd")
    assert file_identity(path) != key
