"""Prefixes on disk: restored bit by bit; damaged and foreign files never reach llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from forward_requests import Count, assert_same, request, text
from llamaspec import LlamaModel, LlamaspecError
from llamaspec.llama.cells import Cells
from llamaspec.llama.prefix_folder import SUFFIX, PrefixFolder
from llamaspec.values import TARGET, ForwardRequest
from model_store import OpenModel

LARGE = 1 << 40


def filled(model: LlamaModel) -> list[Any]:
    """Evaluate sequences with a common beginning and rejected tokens; return each with its logits."""
    model.forward(request(90), number=0)
    model.forward(request(70, 1, draft=text(6, 5)), number=1)
    model.forward(request(92, draft=text(3, 4)), number=0)
    model.forward(request(71, 1), number=1)
    shared = np.concatenate([text(60), text(30, 2)])
    texts = [text(92), text(71, 1), shared]
    answers = []
    for number, tokens in enumerate(texts):
        model.forward(ForwardRequest(TARGET, tokens), number)
        answers.append(model.forward(ForwardRequest(TARGET, tokens), number).copy())  # alone, not in a batch
    for number in range(3):
        model.release(number)
    return [*zip(texts, answers, strict=True)]


@pytest.mark.parametrize("options", [{}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}])
def test_another_process_computes_the_same_logits(
    opened: OpenModel, evaluated: Count, tmp_path: Path, options: dict[str, str]
) -> None:
    before, after, reported = opened(**options), opened(**options), list[str]()
    folder = PrefixFolder(tmp_path / "saved", LARGE)
    computed = filled(before)
    folder.save([before], reported.append)
    assert reported == []
    folder.load([after], reported.append)
    assert reported == [f"loaded {92 + 71 + 90} tokens of prefixes"]
    evaluated.taken()
    for number, (tokens, logits) in enumerate(computed):
        answer = after.forward(ForwardRequest(TARGET, tokens), number)
        assert np.array_equal(answer, logits)
    assert evaluated.taken() == 3
    (file,) = folder.path.glob("*.prefixes")
    assert (folder.path.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def flipped(at: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[int(at * (len(content) - 1))] ^= 1
        file.write_bytes(content)

    return damage


def linked(file: Path) -> None:
    elsewhere = file.rename(file.with_name("elsewhere"))
    file.symlink_to(elsewhere)


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGE: dict[str, Callable[[Path], object]] = {
    **{f"flipped at {at}": flipped(at) for at in (0.0, 0.0003, 0.5, 1.0)},
    "cut": lambda file: os.truncate(file, file.stat().st_size - 1),
    "cut to a part of a head": lambda file: os.truncate(file, 25),
    "a length that is not there": lambda file: file.write_bytes(file.read_bytes()[:21] + b"\xff\x7f" * 40),
    "empty": lambda file: os.truncate(file, 0),
    "a link": linked,
    "a pipe": piped,
    "others can write it": lambda file: file.chmod(0o666),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_ignored_and_replaced(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    before, after, folder, reported = opened(), opened(), PrefixFolder(tmp_path / "saved", LARGE), list[str]()
    written, given = set[bytes](), list[bytes]()
    copy_out, copy_in = Cells.copy_out, Cells.copy_in

    def copied_out(self: Cells, sequence: int, start: int, end: int) -> Any:
        content = copy_out(self, sequence, start, end)
        written.add(b"" if content is None else content.tobytes())
        return content

    def copied_in(self: Cells, content: Any, parts: Any) -> bool:
        given.append(content.tobytes())
        return copy_in(self, content, parts)

    filled(before)
    monkeypatch.setattr(Cells, "copy_out", copied_out)
    folder.save([before], reported.append)
    monkeypatch.setattr(Cells, "copy_in", copied_in)
    (file,) = folder.path.glob(f"*{SUFFIX}")
    DAMAGE[kind](file)
    folder.load([after], reported.append)
    assert len(reported) == 1
    assert reported[0].startswith(f"ignoring {file}: ")
    assert after.cache_use()[0] == 0
    assert set(given) <= written
    filled(after)
    folder.save([after], reported.append)
    folder.load([before], reported.append)
    assert reported[1:] == [f"loaded {92 + 71 + 90} tokens of prefixes"]


def test_prefixes_of_other_models_or_settings_are_not_used(opened: OpenModel, tmp_path: Path) -> None:
    model, other, folder = opened(), opened(cache_type_v="q8_0"), PrefixFolder(tmp_path, LARGE)
    filled(model)
    folder.save([model], pytest.fail)
    folder.load([other], pytest.fail)  # reports what it loads
    assert other.cache_use()[0] == 0
    folder.file_of(model).rename(folder.file_of(other))
    reported: list[str] = []
    folder.load([other], reported.append)
    assert reported == [f"ignoring {folder.file_of(other)}: it is damaged"]


def test_the_folder_has_a_maximum_size(opened: OpenModel, evaluated: Count, tmp_path: Path) -> None:
    """In a file, the most recently used prefixes stay; of several files, the most recently written."""
    model, other, reported = opened(), opened(cache_type_v="q8_0"), list[str]()
    folder = PrefixFolder(tmp_path, LARGE)
    filled(other)
    folder.save([other], reported.append)
    filled(model)
    folder.save([model], reported.append)
    n_bytes = folder.file_of(model).stat().st_size
    assert folder.file_of(other).exists()
    filled(model)
    small = PrefixFolder(tmp_path, n_bytes - 1)
    small.save([model], reported.append)
    assert [*tmp_path.glob(f"*{SUFFIX}")] == [folder.file_of(model)]
    assert folder.file_of(model).stat().st_size < n_bytes
    later = opened()
    folder.load([later], reported.append)
    evaluated.taken()
    later.forward(ForwardRequest(TARGET, np.concatenate([text(60), text(30, 2)])))
    assert evaluated.taken() == 1
    later.forward(request(71, 1), 1)
    assert evaluated.taken() == 1
    later.forward(request(92), 2)  # the least recently used sequence: it shares only 60 tokens with another
    assert evaluated.taken() == 32


@pytest.mark.parametrize("kind", ["gemma3", "mamba", "jamba", "lfm2"])
def test_states_and_windows_are_saved_too(
    opened: OpenModel, evaluated: Count, tmp_path: Path, kind: str
) -> None:
    before, after, folder, reported = opened(kind), opened(kind), PrefixFolder(tmp_path, LARGE), list[str]()
    before.forward(request(40), number=0)
    before.release(0)
    folder.save([before], pytest.fail)
    folder.load([after], reported.append)
    assert reported == ["loaded 40 tokens of prefixes"]
    evaluated.taken()
    answer = after.forward(request(44), number=0).copy()
    assert evaluated.taken() == 4
    assert_same(answer, before.forward(request(44), number=1))


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(LlamaspecError, match="others can write"):
        PrefixFolder(tmp_path, LARGE)
    (tmp_path / "file").touch()
    with pytest.raises(LlamaspecError, match="cannot use the folder"):
        PrefixFolder(tmp_path / "file", LARGE)


def test_a_failed_write_is_reported_in_one_line(opened: OpenModel, tmp_path: Path) -> None:
    model, reported = opened(), list[str]()
    folder = PrefixFolder(tmp_path / "gone", LARGE)
    folder.path.rmdir()
    filled(model)
    folder.save([model], reported.append)
    assert reported == [f"cannot save prefixes in {folder.path}: No such file or directory"]


def test_two_processes_do_not_lose_each_other_s_prefixes(opened: OpenModel, tmp_path: Path) -> None:
    """The one that stopped last replaced the other's file."""
    first, second, reported = opened(), opened(), list[str]()
    ours, theirs = PrefixFolder(tmp_path / "saved", LARGE), PrefixFolder(tmp_path / "saved", LARGE)
    ours.load([first], reported.append)
    assert reported == []
    theirs.load([second], reported.append)
    (line,) = reported
    assert "another process saves prefixes" in line
    filled(first)
    ours.save([first], reported.append)
    (file,) = ours.path.glob("*.prefixes")
    content = file.read_bytes()
    second.forget()
    theirs.save([second], reported.append)
    assert file.read_bytes() == content
    assert {path.name for path in ours.path.iterdir()} - {f"{file.stem}.lock"} == {file.name}
    PrefixFolder(ours.path, LARGE).load([second], reported.append)
    assert reported[1:] == [f"loaded {92 + 71 + 90} tokens of prefixes"]


def test_temporary_files_of_killed_processes_go(opened: OpenModel, tmp_path: Path) -> None:
    """They stayed for an hour, those of other models for ever, and did not count for the folder's size."""
    model, reported = opened(), list[str]()
    folder = PrefixFolder(tmp_path / "saved", LARGE)
    stem = folder.file_of(model).stem
    for name in (stem, "0" * 32, "1" * 32):
        (folder.path / f".{name}.prefixe.0123456789ab.tmp").write_bytes(b"x" * 1000)
    writer = FileLock(folder.path / f"{'1' * 32}.lock")
    writer.acquire()  # as a process that writes just now
    filled(model)
    folder.save([model], reported.append)
    (left,) = folder.path.glob(".*.tmp")
    assert left.name.startswith(".1111")
    size = folder.file_of(model).stat().st_size
    small = PrefixFolder(folder.path, size + 999)  # what is being written counts
    small.save([model], reported.append)
    assert small.file_of(model).stat().st_size < size
    assert reported == []
    writer.release()
