"""Huge pages for the weights of a model, which are then read 10 to 25 % faster.

A processor looks the address of each page up in a small table, and weights fill thousands of times as many
small pages as it has entries. Linux maps most files with small pages only. So a thread replaces the mapping
of a loaded file, part by part, by a copy at the same addresses, while the model is used: no reader notices.
Other than a mapping, a copy cannot be dropped when memory is short, so it is made only if enough stays free.
tests/llama/test_huge_pages.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llamaspec.llama import resources

SPARE_BYTES = 2 << 30  # that stay free, beside half the size of the weights
PART_BYTES = 64 << 20  # that are copied at once
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_READ, _WRITE, _PRIVATE, _ANONYMOUS, _HUGE_PAGE, _MAY_MOVE, _FIXED = 1, 2, 2, 32, 14, 1, 2  # mmap, mremap
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def page_bytes() -> int | None:
    """Return the size of a huge page; None if the system gives none to programs that ask for them."""
    with suppress(OSError, ValueError):
        if sys.platform == "linux" and "[never]" not in (_SETTINGS / "enabled").read_text():
            return int((_SETTINGS / "hpage_pmd_size").read_text())
    return None


class Mapping(NamedTuple):
    """A part of a file in the memory of this process."""

    path: Path
    inode: int
    begin: int  # address
    end: int
    offset: int  # in the file


class NewMappings:
    """The mappings of files that a block makes; none if other threads make some in such a block meanwhile.

    A mapping of somebody else could end at any time.
    """

    _lock = threading.Lock()
    _n_running = _n_begun = 0  # blocks

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.found: list[Mapping] = []

    def __enter__(self) -> NewMappings:
        cls = NewMappings
        with cls._lock:
            cls._n_running += 1
            cls._n_begun += 1
            self._is_alone, self._number = cls._n_running == 1, cls._n_begun
        self._before = self._mappings()
        return self

    def __exit__(self, *_: object) -> None:
        after = self._mappings()
        cls = NewMappings
        with cls._lock:
            cls._n_running -= 1
            if self._is_alone and self._number == cls._n_begun:
                self.found = sorted(after - self._before)

    def _mappings(self) -> set[Mapping]:
        return set() if page_bytes() is None else {each for path in self._files for each in _mappings(path)}


class HugePages:
    """Moves the mappings of a loaded model into huge pages. `stop` must be called before they end."""

    def __init__(self, mappings: Sequence[Mapping]) -> None:
        self.n_bytes = 0  # that have been moved
        self._mappings, self._is_over = mappings, threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, once the sizes of everything else have been chosen by the memory that is free."""
        if self._mappings and self._thread is None:
            self._thread = threading.Thread(target=self._move, name="llamaspec-pages", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until everything has been moved."""
        if self._thread is not None:
            self._thread.join()

    def describe(self) -> str | None:
        """Return in words which pages the weights are in, for people; None if they are not mapped."""
        if self.n_bytes:
            return f"{self.n_bytes / 2**30:.1f} GiB of weights are in huge pages"
        if not self._mappings:
            return None
        reason = "this system has no huge pages for programs" if page_bytes() is None else "memory is short"
        return f"weights are in small pages, because {reason}"

    def stop(self) -> None:
        """End after the part that is being moved."""
        self._is_over.set()
        self.wait()

    def _move(self) -> None:
        page, n_bytes = page_bytes(), sum(each.end - each.begin for each in self._mappings)
        if page is None or resources.available_bytes() < n_bytes + n_bytes // 2 + SPARE_BYTES:
            return
        with suppress(OSError):
            for mapping in self._mappings:
                with mapping.path.open("rb", buffering=0) as file:
                    if (
                        os.fstat(file.fileno()).st_ino == mapping.inode
                    ):  # the path may lead to another one now
                        self._move_mapping(mapping, file.fileno(), page)

    def _move_mapping(self, mapping: Mapping, file: int, page: int) -> None:
        first, last = (
            -(-mapping.begin // page) * page,
            mapping.end // page * page,
        )  # the ends stay as they are
        for begin in range(first, last, PART_BYTES):
            length = min(PART_BYTES, last - begin)
            offset = mapping.offset + begin - mapping.begin
            if self._is_over.is_set() or not _replace(file, begin, length, offset, page):
                return
            self.n_bytes += length


def _mappings(path: Path) -> Iterator[Mapping]:
    """Yield the mappings of a file that can only be read."""
    name = os.path.realpath(path)
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        addresses, access, offset, _, inode, *its_name = line.split(maxsplit=5)
        if its_name == [name] and access.startswith("r-"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            yield Mapping(path, int(inode), begin, end, int(offset, 16))


def _replace(file: int, begin: int, length: int, offset: int, page: int) -> bool:
    """Replace a part of a mapping by a copy in huge pages; return whether that was possible."""
    libc = _libc()
    room = libc.mmap(None, length + page, _READ | _WRITE, _PRIVATE | _ANONYMOUS, -1, 0)
    if room == _FAILED:
        return False
    copy = -(-room // page) * page
    libc.madvise(copy, length, _HUGE_PAGE)
    view = memoryview((ctypes.c_char * length).from_address(copy)).cast("B")
    n = 0
    with suppress(OSError):  # as if the file ended there
        while n < length and (n_read := os.preadv(file, [view[n:]], offset + n)):
            n += n_read
    # The kernel replaces a range under its lock, so a thread that reads there sees either of the two.
    is_moved = n == length and libc.mremap(copy, length, length, _MAY_MOVE | _FIXED, begin) == begin
    for first, end in ((room, copy), (copy + (length if is_moved else 0), room + length + page)):
        if end > first:
            libc.munmap(first, end - first)
    return is_moved


@functools.cache
def _libc() -> ctypes.CDLL:
    libc, pointer, size, number = ctypes.CDLL(None), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = libc.mremap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mremap.argtypes = [pointer, size, size, number, pointer]
    libc.madvise.argtypes = [pointer, size, number]
    libc.munmap.argtypes = [pointer, size]
    return libc
