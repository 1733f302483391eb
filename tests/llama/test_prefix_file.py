"""Prefixes on disk: found again bit by bit, in order; nothing else reaches llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forward_requests import Count, RandomRows, request, text
from llamaspec import LlamaModel, LlamaspecError
from llamaspec.llama.cells import Cells
from llamaspec.llama.kv_cache import SLACK
from llamaspec.llama.prefix_file import PrefixFolder
from llamaspec.values import TARGET, ForwardRequest
from model_store import OpenModel
from simulated_cells import Checked

LARGE = 1 << 40


def moved(source: Checked, goal: Checked) -> list[int]:
    """What one cache holds, put into another: the tokens of each prefix that found room."""
    held: dict[int, Any] = {}
    for move in source.cache.take_out():
        assert move.content is not None
        trunk = None if move.trunk is None else held[move.trunk.number]
        if move.trunk is not None and trunk is None:
            held[move.sequence.number] = None
            continue
        tokens = move.sequence.tokens[: move.n].copy()
        goal.cells._copies = source.cells._copies
        held[move.sequence.number] = goal.cache.put_in(tokens, move.content, trunk, move.n_shared)
        goal.check()
    return [sequence.n for sequence in held.values() if sequence is not None]


def test_the_last_used_comes_first_and_is_given_up_last() -> None:
    source, goal = Checked(128), Checked(64)
    for row, n in enumerate((20, 30, 20)):
        source.run(row, request(n, row))
        source.cache.release(row)
    assert moved(source, goal) == [20, 30]  # no room for the oldest
    goal.run(5, request(20, 5))
    assert goal.run(6, request(20, 2)) == 19


def test_ctrl_c_while_a_prefix_is_put_in_leaves_nothing_of_it() -> None:
    """llama.cpp has it already, and nobody has noted it: cells would be filled out of order."""
    source, goal = Checked(64), Checked(64)
    source.run(0, request(20, 0))
    source.cache.release(0)
    copy_in = goal.cells.copy_in

    def interrupted(sequence: int, content: Any) -> bool:
        copy_in(sequence, content)
        goal.cells.copy_in = copy_in  # type: ignore[method-assign]
        raise KeyboardInterrupt

    goal.cells.copy_in = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        moved(source, goal)
    assert goal.cells.n_used == 20
    assert goal.run(1, request(20, 0)) == 0
    goal.check()


@pytest.mark.parametrize("seed", range(4))
def test_what_was_put_in_keeps_its_order_whatever_follows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, goal, rows = Checked(160, 7), Checked(160, 7), RandomRows(rng, longest=50, n_sequences=5)

    def some(checked: Checked, n: int) -> None:
        for _ in range(n):
            for row in rows.leaving():
                checked.cache.release(row)
            batch = rows.batch()
            answers = checked.prepare(*((row, wanted, 0) for row, wanted in batch))
            ready = [
                entry
                for entry, n_cached in zip(batch, answers, strict=True)
                if isinstance(n_cached, int) and n_cached < entry[1].n_tokens
            ]
            checked.evaluate(*ready) if ready else None

    some(source, 60)
    for row in list(rows.texts):
        source.cache.release(row)
    texts = [*rows.texts.values()]
    assert sum(moved(source, goal)) > 0
    assert source.cells.n_used == 0
    assert goal.cache.n_used <= SLACK * 160
    rows.texts, rows.ended = {}, texts
    some(goal, 100)


def filled(model: LlamaModel) -> list[Any]:
    """Texts that share a beginning, with rejected tokens between them; what the model says of each."""
    model.forward(request(90), row=0)
    model.forward(request(70, 1, draft=text(6, 5)), row=1)
    model.forward(request(92, draft=text(3, 4)), row=0)
    model.forward(request(71, 1), row=1)
    shared = np.concatenate([text(60), text(30, 2)])
    texts = [text(92), text(71, 1), shared]
    answers = []
    for row, tokens in enumerate(texts):
        model.forward(ForwardRequest(TARGET, tokens), row)
        answers.append(model.forward(ForwardRequest(TARGET, tokens), row).copy())  # alone, not in a batch
    for row in range(3):
        model.release(row)
    return [*zip(texts, answers, strict=True)]


@pytest.mark.parametrize("options", [{}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}])
def test_another_process_would_say_the_same(
    opened: OpenModel, evaluated: Count, tmp_path: Path, options: dict[str, str]
) -> None:
    before, after, told = opened(**options), opened(**options), list[str]()
    folder = PrefixFolder(tmp_path / "saved", LARGE)
    said = filled(before)
    folder.save([before], told.append)
    assert told == []
    folder.load([after], told.append)
    assert told == [f"{92 + 71 + 30} tokens of prefixes were loaded"]
    evaluated.taken()
    for row, (tokens, logits) in enumerate(said):
        answer = after.forward(ForwardRequest(TARGET, tokens), row)
        assert np.array_equal(answer, logits)
    assert evaluated.taken() == 3
    (file,) = folder.path.iterdir()
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
def test_a_damaged_file_is_none_and_written_anew(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    before, after, folder, told = opened(), opened(), PrefixFolder(tmp_path / "saved", LARGE), list[str]()
    written, given = set[bytes](), list[bytes]()
    copy_out, copy_in = Cells.copy_out, Cells.copy_in

    def copied_out(self: Cells, sequence: int, start: int) -> Any:
        content = copy_out(self, sequence, start)
        written.add(b"" if content is None else content.tobytes())
        return content

    def copied_in(self: Cells, sequence: int, content: Any) -> bool:
        given.append(content.tobytes())
        return copy_in(self, sequence, content)

    filled(before)
    monkeypatch.setattr(Cells, "copy_out", copied_out)
    folder.save([before], told.append)
    monkeypatch.setattr(Cells, "copy_in", copied_in)
    (file,) = folder.path.iterdir()
    DAMAGE[kind](file)
    folder.load([after], told.append)
    assert len(told) == 1
    assert told[0].startswith(f"{file} counts as empty: ")
    assert after.cache_use()[0] == 0
    assert set(given) <= written
    filled(after)
    folder.save([after], told.append)
    folder.load([before], told.append)
    assert told[1:] == [f"{92 + 71 + 30} tokens of prefixes were loaded"]


def test_what_was_saved_for_another_model_or_way_to_compute_is_not_used(
    opened: OpenModel, tmp_path: Path
) -> None:
    model, other, folder = opened(), opened(cache_type_v="q8_0"), PrefixFolder(tmp_path, LARGE)
    filled(model)
    folder.save([model], pytest.fail)
    folder.load([other], pytest.fail)  # would tell of what is there
    assert other.cache_use()[0] == 0
    folder.file_of(model).rename(folder.file_of(other))
    told: list[str] = []
    folder.load([other], told.append)
    assert told == [f"{folder.file_of(other)} counts as empty: it is not as it was written"]


def test_the_folder_has_a_size(opened: OpenModel, evaluated: Count, tmp_path: Path) -> None:
    """Of one file the last used prefixes stay; of several files the last written."""
    model, other, told = opened(), opened(cache_type_v="q8_0"), list[str]()
    folder = PrefixFolder(tmp_path, LARGE)
    filled(other)
    folder.save([other], told.append)
    filled(model)
    folder.save([model], told.append)
    n_bytes = folder.file_of(model).stat().st_size
    assert folder.file_of(other).exists()
    filled(model)
    small = PrefixFolder(tmp_path, n_bytes - 1)
    small.save([model], told.append)
    assert [*tmp_path.iterdir()] == [folder.file_of(model)]
    assert folder.file_of(model).stat().st_size < n_bytes
    folder.load([model], told.append)
    evaluated.taken()
    model.forward(ForwardRequest(TARGET, np.concatenate([text(60), text(30, 2)])))
    assert evaluated.taken() == 1
    model.forward(request(71, 1), 1)  # the prefix that was used least recently
    assert evaluated.taken() == 71


@pytest.mark.parametrize("kind", ["mamba", "gemma3"])
def test_a_memory_that_cannot_be_copied_is_one_line(opened: OpenModel, tmp_path: Path, kind: str) -> None:
    model, folder, told = opened(kind), PrefixFolder(tmp_path, LARGE), list[str]()
    model.forward(request(40))
    model.release(-1)
    folder.load([model], told.append)
    assert told == [f"prefixes of {model.path.name} are not saved: its memory cannot be copied"]
    folder.save([model], told.append)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_where_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(LlamaspecError, match="others can write"):
        PrefixFolder(tmp_path, LARGE)
    (tmp_path / "file").touch()
    with pytest.raises(LlamaspecError, match="cannot use the folder"):
        PrefixFolder(tmp_path / "file", LARGE)


def test_what_cannot_be_written_is_one_line(opened: OpenModel, tmp_path: Path) -> None:
    model, told = opened(), list[str]()
    folder = PrefixFolder(tmp_path / "gone", LARGE)
    folder.path.rmdir()
    filled(model)
    folder.save([model], told.append)
    assert told == [f"prefixes cannot be saved in {folder.path}: No such file or directory"]
