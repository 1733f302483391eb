"""Prefix stores on disk: a folder for each model and each way to compute its keys and values.

While sequences are generated, saved ones are loaded in the background, and then new ones are saved, so a
process that is killed loses only the last minute. Several processes may use a folder: all give a node the
same file, and write it in one step. At a limit in bytes, the files that were not used for longest are
deleted. A file that cannot be read or deleted is skipped. tests/llama/test_prefix_file.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from llamaspec.errors import LlamaspecError
from llamaspec.llama import runtime
from llamaspec.llama.prefix_file import (
    KEY_LENGTH,
    SUFFIX,
    DamagedError,
    NodeFile,
    files_of,
    is_private,
    key_of,
    read_node,
)
from llamaspec.llama.prefix_store import Node, PrefixStore

if TYPE_CHECKING:
    from llamaspec.llama.options import ModelOptions
    from llamaspec.llama.weights import Weights

T = TypeVar("T")
Report = Callable[[str], object]  # receives a line

OLD_SUFFIX = ".prefixes"  # of files that llamaspec 0.2 wrote
SAVE_SECONDS = 45.0  # between two saves in the background: with the time of a save less than a minute
SAVED_BYTES = 1 << 30  # maximum bytes that one of them writes
REST = 3.0  # seconds of rest after each second of writing
COPIED = 2048  # tokens that are copied to the store at once, between two evaluations
STALE_SECONDS = 60.0  # a temporary file that is not written to for so long is that of a killed process


class Cached(Protocol):
    """A model, or a draft that reads its rows: its KV cache has a store."""

    @property
    def store(self) -> PrefixStore:
        """The store."""
        ...

    @property
    def weights(self) -> Weights:
        """Its file, opened."""
        ...

    @property
    def options(self) -> ModelOptions:
        """How it was opened."""
        ...

    @property
    def part(self) -> tuple[object, ...]:
        """What names its prefixes beside its file and options."""
        ...

    def store_finished(self, n_most: int, /) -> int:
        """Copy some tokens of finished sequences to the store; return how many, 0 = none is left."""
        ...


class Call(Protocol):
    """Calls a function in the thread that uses the models."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Call it and return its result."""
        ...


def call_here(function: Callable[[], T], /) -> T:
    """Call a function in this thread."""
    return function()


class SavedFile(NamedTuple):
    """A file in a folder. They are in the order in which they are worth keeping."""

    ns_unused: int  # negative time of the latest use, in nanoseconds; 0 if a clock was ahead
    path: Path  # the parent of a node before the node
    n_bytes: int

    @property
    def used(self) -> int:
        """Time of the latest use, in nanoseconds since 1970."""
        return -self.ns_unused


@dataclass(frozen=True, slots=True)
class PrefixFolder:
    """A private folder with saved sequences of any models.

    Its methods may be called in any thread; `call` calls what touches a model or its store. Raises
    LlamaspecError if the folder cannot be created or others can write to it.
    """

    path: Path
    limit: int  # bytes of all files together
    # By the key of a model, and that of a node: the latest use that needs no record on disk any more.
    _recorded: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.path.stat()
        except OSError as error:
            message = f"cannot use the folder {self.path}: {error.strerror}; name another"
            raise LlamaspecError(message) from error
        if not is_private(facts):
            raise LlamaspecError(
                f"others can write to {self.path}, and llama.cpp trusts its files; "
                f"name another folder, or run: chmod 700 {self.path}"
            )

    @contextmanager
    def keeping(self, models: Sequence[Cached], report: Report, call: Call) -> Iterator[None]:
        """During the block, load the saved sequences of some models, and save new ones every now and then."""
        is_over, told = threading.Event(), set[str]()

        def tell(line: str) -> None:
            if line not in told:  # a full disk stays full for a while
                told.add(line)
                report(line)

        def attempt(what: str, function: Callable[[], None]) -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001  # the next time may succeed
                tell(f"cannot {what} prefixes: {str(error) or type(error).__name__}")

        def work() -> None:
            attempt("load", lambda: self.load(models, tell, call, is_over))
            while not is_over.wait(SAVE_SECONDS):
                attempt("save", lambda: self.save(models, tell, call, SAVED_BYTES, is_over))

        thread = threading.Thread(target=work, name="llamaspec-prefixes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def load(
        self,
        models: Sequence[Cached],
        report: Report,
        call: Call = call_here,
        is_over: threading.Event | None = None,
    ) -> None:
        """Load what the stores of some models lack and have room for, the most recently used files first.

        Damaged files are deleted. Stops when `is_over` is set.
        """
        loaded = [_Loaded(self.folder_of(model), model.store, call) for model in models]
        files = [(file, i) for i, each in enumerate(loaded) for file in _found(each.folder, f"*{SUFFIX}")]
        n_tokens, damaged = 0, list[Path]()
        for rank, (file, i) in enumerate(sorted(files)):
            if is_over is not None and is_over.is_set():
                break
            try:
                n_tokens += loaded[i].add(file, -rank)
            except DamagedError:
                damaged.append(file.path)
                _delete(file.path)
            except (OSError, LookupError):  # deleted or locked by another process, or without its parent
                continue
        for each in loaded:
            self._recorded[each.folder.name] = each.recorded
        if damaged:
            report(f"ignoring {_named(damaged)}: damaged")
        if n_tokens:
            report(f"loaded {n_tokens} tokens of prefixes")

    def save(
        self,
        models: Sequence[Cached],
        report: Report,
        call: Call = call_here,
        max_bytes: float = math.inf,
        is_over: threading.Event | None = None,
    ) -> None:
        """Save what is new of the finished sequences of some models, up to `max_bytes`.

        With `is_over`, leave time to others, until it is set: then stop.
        """
        now, stuck = time.time_ns(), list[Path]()
        try:
            for model in models:
                store_finished(model, call, is_over)
                folder, used = self.folder_of(model), call(model.store.by_last_use)
                for file, stamp in self._missing(folder, used, now, stuck):
                    begin = time.perf_counter()
                    max_bytes -= file.n_bytes
                    if max_bytes < 0:
                        return
                    file.write(stamp)
                    if is_over is not None and is_over.wait(REST * (time.perf_counter() - begin)):
                        return
        except OSError as error:
            report(f"cannot save prefixes in {self.path}: {error.strerror}")
        finally:
            if stuck:
                report(f"cannot delete {_named(stuck)}; delete what is in the way, or name another folder")

    def _missing(
        self, folder: Path, used: Sequence[tuple[Node, int]], now: int, stuck: list[Path]
    ) -> Iterator[tuple[NodeFile, int]]:
        """Yield the files to write, each with its time of use once there is room, and touch the others.

        The times on disk have the order in which the files are worth keeping, a nanosecond apart.
        """
        folder.mkdir(mode=0o700, exist_ok=True)
        before, after = self._recorded.get(folder.name, {}), dict[str, int]()
        self._recorded[folder.name] = after
        last_uses, n_bytes, missing = dict(used), 0, []
        for rank, file in enumerate(files_of(last_uses, folder)):
            n_bytes += file.n_bytes
            is_new = n_bytes <= self.limit and last_uses[file.node] > before.get(file.key, 0)
            if is_new and not _touch(file.path, now - rank):
                missing.append((file, now - rank))
            else:
                after[file.key] = last_uses[file.node]
        room = _Room(self, now, stuck)
        for file, stamp in missing:
            if room.take(file.n_bytes, stamp):
                yield file, stamp
            after[file.key] = last_uses[file.node]  # without room, it is not tried again before it is used

    def folder_of(self, model: Cached) -> Path:
        """Return the folder of a model."""
        return self.path / prefix_key(model)


def store_finished(model: Cached, call: Call, is_over: threading.Event | None = None) -> None:
    """Copy the finished sequences of a model to its store, a few tokens at once, until `is_over` is set."""
    while call(partial(model.store_finished, COPIED)):
        if is_over is not None and is_over.is_set():
            return


def prefix_key(model: Cached) -> str:
    """Return a key of a model's prefixes: other weights, settings or builds of llama.cpp have another."""
    how = [*model.options.computing, model.options.heads, *model.part]
    key = json.dumps([model.weights.keys.release, runtime.backend_description(), *how])
    return hashlib.sha256(key.encode()).hexdigest()[:KEY_LENGTH]


class _Loaded:
    """The nodes of a folder that are in the model's store, by their keys."""

    def __init__(self, folder: Path, store: PrefixStore, call: Call) -> None:
        self.folder, self._store, self._call = folder, store, call
        uses = dict(call(store.by_last_use))
        present = [*files_of(uses, folder)]
        self._uses = {file.key: uses[file.node] for file in present}
        self._nodes = {folder.name: store.root} | {file.key: file.node for file in present}
        self.recorded: dict[str, int] = {}  # the latest use of each that needs no record on disk any more

    def add(self, file: SavedFile, last_used: int) -> int:
        """Add a file's node to the store, if it has room; return the number of new tokens."""
        store, key = self._store, key_of(file.path)
        if key in self._uses:
            self.recorded[key] = self._uses[key]
            return 0
        if not store.has_room(file.n_bytes):
            return 0
        key, read = read_node(file.path, self._nodes)
        node = self._call(partial(store.add_older, read, last_used))
        if node is not None:
            self._nodes[key] = node
        if node is not read:  # computed meanwhile, or there is no room any more
            return 0
        self.recorded[key] = last_used
        return len(node.tokens)


class _Room:
    """The bytes that a folder has left. The files that were not used for longest make room for others.

    What cannot be deleted is added to `stuck`.
    """

    def __init__(self, folder: PrefixFolder, now: int, stuck: list[Path]) -> None:
        self._stuck = stuck
        self._files = sorted([*_found(folder.path, f"*/*{SUFFIX}"), *_found(folder.path, f"*{OLD_SUFFIX}")])
        self._n_left = folder.limit - sum(file.n_bytes for file in self._files)
        for file in _found(folder.path, "*/.*.tmp"):
            if now - file.used < STALE_SECONDS * 1e9:
                self._n_left -= file.n_bytes
            elif not _delete(file.path):
                stuck.append(file.path)
        self.take(0, now + 1)

    def take(self, n_bytes: int, used: int) -> bool:
        """Take some bytes for a file that was used at a time; False if there is no room for it."""
        while self._n_left < n_bytes and self._files and self._files[-1].used < used:
            file = self._files.pop()
            if _delete(file.path):
                self._n_left += file.n_bytes
            else:
                self._stuck.append(file.path)
        is_there = self._n_left >= n_bytes
        self._n_left -= n_bytes if is_there else 0
        return is_there


def _found(folder: Path, pattern: str) -> Iterator[SavedFile]:
    for path in folder.glob(pattern):
        with suppress(OSError):  # another process has deleted it, or it cannot be read
            facts = path.lstat()
            is_past = facts.st_mtime_ns <= time.time_ns()  # otherwise it would stay for ever
            yield SavedFile(-facts.st_mtime_ns * is_past, path, facts.st_size)


def _delete(path: Path) -> bool:
    """Delete a file; False if that is impossible: it is a folder, or its folder cannot be written."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _named(paths: Sequence[Path]) -> str:
    """Name the first of some files."""
    n_others = len(paths) - 1
    return str(paths[0]) + (f" and {n_others} other{'s' if n_others > 1 else ''}" if n_others else "")


def _touch(path: Path, now: int) -> bool:
    """Record the use of a file; False if there is none."""
    try:
        os.utime(path, ns=(now, now), follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
