"""Prefixes on disk: restored bit by bit; damaged and foreign files never reach llama.cpp."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forward_requests import Count, assert_same, request, text
from llamaspec import ClosedError, LlamaModel, LlamaspecError
from llamaspec.llama import prefix_folder
from llamaspec.llama.cells import BLOCK, Cells
from llamaspec.llama.prefix_file import SUFFIX, NodeFile, read_node
from llamaspec.llama.prefix_folder import OLD_SUFFIX, PrefixFolder, call_here
from llamaspec.values import EVERYONE, TARGET, ForwardRequest, scope_of
from model_store import ModelStore, OpenModel
from patience import until
from tiny_models import Recipe

LARGE = 1 << 40
FUTURE = 1 << 32  # seconds since 1970: the year 2106


def files_of(folder: PrefixFolder) -> list[Path]:
    """Return the files of all nodes."""
    return sorted(folder.path.glob(f"*/*{SUFFIX}"))


def size_of(folder: PrefixFolder) -> int:
    return sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file())


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
    files, (inner,) = files_of(folder), folder.path.iterdir()
    assert {path.stat().st_mode & 0o777 for path in (folder.path, inner)} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


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
    file, *others = files_of(folder)
    DAMAGE[kind](file)
    folder.load([after], reported.append)
    assert reported[0] == f"ignoring {file}: damaged"
    assert len(reported) == 1 + bool(others)
    assert not file.exists()
    assert set(given) <= written
    after.forget()
    filled(after)
    folder.save([after], reported.append)
    before.forget()
    folder.load([before], reported.append)
    assert reported[-1] == f"loaded {92 + 71 + 90} tokens of prefixes"


def test_the_same_tokens_after_different_ones_have_a_file_each(opened: OpenModel, tmp_path: Path) -> None:
    long = Recipe(n_context=1024)
    before, after, folder = opened("llama", long), opened("llama", long), PrefixFolder(tmp_path, LARGE)
    texts = [np.concatenate([text(BLOCK, seed), text(40, 9)]) for seed in (1, 2)]
    answers, reported = list[Any](), list[str]()
    for tokens in texts:
        answers.append(before.forward(ForwardRequest(TARGET, tokens), 0).copy())
        before.release(0)
    folder.save([before], pytest.fail)
    folder.load([after], reported.append)
    for tokens, answer in zip(texts, answers, strict=True):
        assert after.n_cached(tokens) == len(tokens)
        assert_same(after.forward(ForwardRequest(TARGET, tokens), 0), answer)
        after.release(0)


def test_saved_prefixes_are_found_only_in_their_scope(opened: OpenModel, tmp_path: Path) -> None:
    """The same tokens have a file for each scope, and one scope's may follow those for everyone."""
    before, after, folder = opened(), opened(), PrefixFolder(tmp_path, LARGE)
    for number, (n, seed, scope) in enumerate(((40, 0, EVERYONE), (90, 0, "a"), (50, 1, "a"), (50, 1, "b"))):
        before.forward(request(n, seed, scope=scope), number)
        before.release(number)
    folder.save([before], pytest.fail)
    assert len(files_of(folder)) == 4
    folder.load([after], list[str]().append)
    found = [
        [after.n_cached(text(90, seed), scope_of(scope)) for scope in ("a", "b", "c", "", EVERYONE)]
        for seed in (0, 1)
    ]
    assert found == [[90, 40, 40, 40, 40], [50, 50, 0, 0, 0]]


def test_prefixes_of_other_models_or_settings_are_not_used(opened: OpenModel, tmp_path: Path) -> None:
    model, other, folder = opened(), opened(cache_type_v="q8_0"), PrefixFolder(tmp_path, LARGE)
    filled(model)
    folder.save([model], pytest.fail)
    folder.load([other], pytest.fail)  # reports what it loads
    folder.folder_of(model).rename(folder.folder_of(other))
    folder.load([other], pytest.fail)  # they begin with the other model's key


def test_a_file_that_takes_the_place_of_the_model_gets_no_prefixes(
    opened: OpenModel, store: ModelStore, tmp_path: Path
) -> None:
    """Those of the old file, which is still in use, were saved for the new one."""
    folder, path = PrefixFolder(tmp_path / "saved", LARGE), tmp_path / "model.gguf"
    shutil.copy(store.path("llama"), path)
    with LlamaModel(path, opened().options) as model:
        shutil.copy(store.path("llama", Recipe(seed=9)), tmp_path / "new.gguf")
        (tmp_path / "new.gguf").replace(path)
        filled(model)
        folder.save([model], pytest.fail)
        with LlamaModel(path, model.options) as other:
            PrefixFolder(folder.path, LARGE).load([other], pytest.fail)  # reports what it loads


def test_the_folder_has_a_maximum_size(opened: OpenModel, evaluated: Count, tmp_path: Path) -> None:
    """The prefixes that were used last stay, whatever the model; a clock that was ahead does not count."""
    model, other, reported = opened(), opened(cache_type_v="q8_0"), list[str]()
    folder = PrefixFolder(tmp_path, LARGE)
    filled(other)
    folder.save([other], reported.append)
    (tmp_path / f"{'0' * 32}{OLD_SUFFIX}").write_bytes(b"x")
    for path in files_of(folder):
        os.utime(path, (FUTURE, FUTURE))
    filled(model)
    folder.save([model], reported.append)
    n_bytes = sum(path.stat().st_size for path in folder.folder_of(model).iterdir())
    filled(model)
    small = PrefixFolder(tmp_path, n_bytes - 1)
    small.save([model], reported.append)
    assert n_bytes > size_of(folder) > 0
    assert not [*folder.folder_of(other).iterdir(), *tmp_path.glob(f"*{OLD_SUFFIX}")]
    small.save([model], reported.append)  # writes nothing that would go again
    assert reported == []
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


def test_a_file_has_its_name_only_when_it_is_whole(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another server may read the folder at any moment. What could not be written is deleted."""
    model, folder, reported, seen = opened(), PrefixFolder(tmp_path, LARGE), list[str](), list[Path]()

    def full(*_: object) -> None:
        seen.extend(files_of(folder))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    filled(model)
    folder.save([model], reported.append)
    assert reported == [f"cannot save prefixes in {folder.path}: No space left on device"]
    assert (seen, size_of(folder)) == ([], 0)


def test_two_processes_add_to_each_other_s_prefixes(opened: OpenModel, tmp_path: Path) -> None:
    """The one that stopped last replaced the other's file; then, only the first one saved."""
    first, second, reported = opened(), opened(), list[str]()
    ours, theirs = PrefixFolder(tmp_path / "saved", LARGE), PrefixFolder(tmp_path / "saved", LARGE)
    filled(first)
    second.forward(request(92), number=0)  # the same sequence as one of the others
    second.forward(request(50, 5), number=1)
    for number in range(2):
        second.release(number)
    ours.save([first], reported.append)
    theirs.save([second], reported.append)
    ours.save([first], reported.append)
    third = opened()
    PrefixFolder(ours.path, LARGE).load([third], reported.append)
    assert third.n_cached(text(92)) == 92
    assert third.n_cached(text(71, 1)) == 71
    assert third.n_cached(text(50, 5)) == 50


def test_only_what_is_new_is_written(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, folder, written = opened(), PrefixFolder(tmp_path / "saved", LARGE), list[Path]()
    write = NodeFile.write

    def noted(self: NodeFile, used: int) -> None:
        written.append(self.path)
        write(self, used)

    monkeypatch.setattr(NodeFile, "write", noted)
    filled(model)
    folder.save([model], pytest.fail, max_bytes=1)
    assert not written
    folder.save([model], pytest.fail)
    assert written == [*dict.fromkeys(written)]
    n_written = len(written)
    folder.save([model], pytest.fail)
    assert len(written) == n_written
    model.forward(request(120), number=0)
    model.release(0)
    folder.save([model], pytest.fail)
    assert len(written) == n_written + 1
    assert {*written} == {*files_of(folder)}


def test_a_sequence_keeps_its_cells_when_it_is_saved(
    opened: OpenModel, evaluated: Count, tmp_path: Path
) -> None:
    model, folder = opened(), PrefixFolder(tmp_path / "saved", LARGE)
    before = model.forward(request(90), number=0).copy()
    model.release(0)
    folder.save([model], pytest.fail)
    assert model.cache_use()[0] == 90
    evaluated.taken()
    assert np.array_equal(model.forward(request(90), number=1), before)
    assert evaluated.taken() == 1


def test_a_background_save_that_fails_is_reported_once_and_tried_again(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prefix_folder, "SAVE_SECONDS", 0.01)
    model, folder, reported, n_calls = opened(), PrefixFolder(tmp_path / "saved", LARGE), list[str](), 0

    def call(function: Callable[[], Any], /) -> Any:
        nonlocal n_calls
        n_calls += 1
        if 1 < n_calls < 4:
            raise ClosedError("not now")
        return function()

    filled(model)
    with folder.keeping([model], reported.append, call):
        until(lambda: bool(files_of(folder)))
    assert reported == ["cannot save prefixes: not now"]


def test_an_entry_that_cannot_be_deleted_is_skipped(opened: OpenModel, tmp_path: Path) -> None:
    """It kept the server from starting, and nothing was saved any more."""
    model, other, folder, reported = opened(), opened(), PrefixFolder(tmp_path / "saved", LARGE), list[str]()
    filled(model)
    folder.save([model], pytest.fail)
    odd = folder.folder_of(model) / f"x{SUFFIX}"
    odd.mkdir()
    os.utime(odd, (1, 1))
    folder.load([other], reported.append)
    assert reported == [f"ignoring {odd}: damaged", f"loaded {92 + 71 + 90} tokens of prefixes"]
    small = PrefixFolder(folder.path, size_of(folder) // 2)
    small.save([model], reported.append)
    assert reported[2:] == [f"cannot delete {odd}; delete what is in the way, or name another folder"]
    assert 0 < size_of(folder) <= small.limit


def test_prefixes_are_loaded_while_the_model_is_used(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests waited until all files had been read. What is computed meanwhile is not loaded, too."""
    before, after, folder, reported = opened(), opened(), PrefixFolder(tmp_path / "saved", LARGE), list[str]()
    filled(before)
    folder.save([before], pytest.fail)
    may_read = threading.Event()

    def waiting(*args: Any) -> Any:
        may_read.wait()
        return read_node(*args)

    monkeypatch.setattr(prefix_folder, "read_node", waiting)
    with folder.keeping([after], reported.append, call_here):
        after.forward(request(71, 1), number=0)
        after.release(0)
        after.store_finished()
        n_bytes = after.store.n_bytes
        may_read.set()
        until(lambda: reported)
    assert reported == [f"loaded {92 + 90} tokens of prefixes"]
    assert after.store.n_bytes == before.store.n_bytes > n_bytes > 0
    folder.load([after], pytest.fail)  # reports what it loads


def test_loading_ends_after_the_file_that_is_read(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The most recently used sequence comes first, and saving goes on where it was."""
    before, after, folder, reported = opened(), opened(), PrefixFolder(tmp_path / "saved", LARGE), list[str]()
    filled(before)
    before.forward(request(71, 1), number=0)
    before.release(0)
    folder.save([before], pytest.fail)
    is_over = threading.Event()

    def last(*args: Any) -> Any:
        is_over.set()
        return read_node(*args)

    monkeypatch.setattr(prefix_folder, "read_node", last)
    folder.load([after], reported.append, is_over=is_over)
    assert reported == ["loaded 71 tokens of prefixes"]
    assert after.n_cached(text(71, 1)) == 71
    times = [path.stat().st_mtime_ns for path in files_of(folder)]
    folder.save([after], pytest.fail)
    assert [path.stat().st_mtime_ns for path in files_of(folder)] == times


def test_temporary_files_of_killed_processes_go(opened: OpenModel, tmp_path: Path) -> None:
    """They stayed for an hour, those of other models for ever, and did not count for the folder's size."""
    model, folder = opened(), PrefixFolder(tmp_path / "saved", LARGE)
    old, ahead, new = (folder.path / ("0" * 32) / f".{name}.tmp" for name in ("old", "ahead", "new"))
    old.parent.mkdir()
    for path in (old, ahead, new):
        path.write_bytes(b"x" * 1000)
    os.utime(old, (1, 1))
    os.utime(ahead, (FUTURE, FUTURE))
    filled(model)
    folder.save([model], pytest.fail)
    assert [path.exists() for path in (old, ahead, new)] == [False, False, True]
    size = size_of(folder)
    small = PrefixFolder(folder.path, size - 1)  # what is being written counts
    small.save([model], pytest.fail)
    assert size_of(folder) < size
    assert new.exists()
