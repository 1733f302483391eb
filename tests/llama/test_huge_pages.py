"""Mapped weights that are moved into huge pages while they are read."""

from __future__ import annotations

import mmap
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from llamaspec import LlamaModel, ModelOptions, demo_target
from llamaspec.llama import huge_pages, resources
from llamaspec.llama.huge_pages import HugePages, Mapping, NewMappings, page_bytes
from llamaspec.values import TARGET, ForwardRequest

PAGE = page_bytes()
needs_huge_pages = pytest.mark.skipif(PAGE is None, reason="this system gives no huge pages to programs")
LARGE = 24 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(1).bytes(LARGE + 4096 + 5))
    return path


class Mapped:
    """A file that is mapped, as llama.cpp maps a model."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file, NewMappings([path]) as self.mappings:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.content = np.frombuffer(self.map, dtype=np.uint8)

    @property
    def found(self) -> list[Mapping]:
        return self.mappings.found


def moved(mappings: list[Mapping]) -> HugePages:
    pages = HugePages(mappings)
    pages.start()
    pages.wait()
    return pages


def huge_bytes(mapped: Mapped) -> int:
    """Return how much of a mapping is in huge pages now, as the kernel says."""
    first, found, is_here = mapped.content.ctypes.data, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        begin, dash, rest = line.partition("-")
        if dash and " " in rest and rest.split()[0].isalnum() and ":" not in begin:
            is_here = first <= int(begin, 16) < first + mapped.content.size
        elif is_here and line.startswith("AnonHugePages:"):
            found += 1024 * int(line.split()[1])
    return found


@needs_huge_pages
def test_a_mapping_moves_while_others_read_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "PART_BYTES", PAGE)
    mapped, truth = Mapped(path), np.fromfile(path, dtype=np.uint8)
    is_over, wrong = threading.Event(), []

    def read() -> None:
        while not is_over.is_set():
            if not np.array_equal(mapped.content, truth):
                wrong.append(True)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        pages = moved(mapped.found)
    finally:
        is_over.set()
        reader.join()
    assert not wrong
    assert np.array_equal(mapped.content, truth)
    assert pages.n_bytes == huge_bytes(mapped) >= LARGE - 2 * (PAGE or 0)


@needs_huge_pages
def test_what_must_not_move_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping stays if memory is short, if its file was replaced, or if it may be somebody else's."""
    mapped = Mapped(path)
    with NewMappings([path]) as outer:
        another = Mapped(path)
    assert (outer.found, another.found) == ([], [])
    monkeypatch.setattr(resources, "available_bytes", lambda: 3 * LARGE // 2)
    assert moved(mapped.found).n_bytes == 0
    monkeypatch.undo()
    path.rename(path.with_suffix(".old"))
    path.write_bytes(bytes(LARGE))
    assert moved(mapped.found).n_bytes == 0
    assert mapped.content.any()


@needs_huge_pages
def test_stopping_ends_after_a_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "PART_BYTES", PAGE)
    mapped = Mapped(path)
    replace, pages = huge_pages._replace, HugePages(mapped.found)

    def stop_and_replace(*arguments: int) -> bool:
        pages._is_over.set()
        return replace(*arguments)

    monkeypatch.setattr(huge_pages, "_replace", stop_and_replace)
    pages.start()
    pages.wait()
    assert pages.n_bytes == PAGE


@needs_huge_pages
def test_a_model_computes_the_same_and_is_freed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, tokens = tmp_path / "own.gguf", np.arange(2, 40, dtype=np.int32)
    shutil.copy(demo_target(), path)  # other tests of this process may hold that one
    logits = []
    for has_room in (True, False):
        if not has_room:
            monkeypatch.setattr(resources, "available_bytes", lambda: 1 << 30)
        with LlamaModel(path, ModelOptions(n_ctx=64, threads=1)) as model:
            if not model.weights.suits_kernels:
                pytest.skip("llama.cpp repacks the weights")
            model.weights.huge_pages.wait()
            assert (model.weights.huge_pages.n_bytes > 0) == has_room
            logits.append(model.forward(ForwardRequest(TARGET, tokens)).copy())
            assert str(path) in Path("/proc/self/maps").read_text()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert np.array_equal(logits[0], logits[1])
