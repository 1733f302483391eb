"""Prefix stores on disk: a folder for each model and each way to compute its keys and values.

While sequences are generated, new ones are saved in the background, so a process that is killed loses only
the last minute. Several processes may use a folder: all give a node the same file, and write it in one step.
At a limit in bytes, the files that were not used for longest are deleted. tests/llama/test_prefix_file.py.
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
    read_node,
)
from llamaspec.llama.prefix_store import KnownPrefix, Node, PrefixStore

if TYPE_CHECKING:
    from llamaspec.llama.model import LlamaModel

T = TypeVar("T")
Report = Callable[[str], object]  # receives a line

OLD_SUFFIX = ".prefixes"  # of files that llamaspec 0.2 wrote
SAVE_SECONDS = 45.0  # between two saves in the background: with the time of a save less than a minute
SAVED_BYTES = 1 << 30  # maximum bytes that one of them writes
REST = 3.0  # seconds of rest after each second of writing
COPIED = 2048  # tokens that are copied to the store at once, between two evaluations
STALE_SECONDS = 60.0  # a temporary file that is not written to for so long is that of a killed process


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

    ns_unused: int  # negative time of the latest use, in nanoseconds
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
    def keeping(self, models: Sequence[LlamaModel], report: Report, call: Call) -> Iterator[None]:
        """Load the saved sequences of some models on entry, and save new ones during the block."""
        self.load(models, report, call)
        is_over, told = threading.Event(), set[str]()

        def tell(line: str) -> None:
            if line not in told:  # a full disk stays full for a while
                told.add(line)
                report(line)

        def save_often() -> None:
            while not is_over.wait(SAVE_SECONDS):
                try:
                    self.save(models, tell, call, SAVED_BYTES, is_over)
                except Exception as error:  # noqa: BLE001, PERF203  # the next time may succeed
                    tell(f"cannot save prefixes: {str(error) or type(error).__name__}")

        thread = threading.Thread(target=save_often, name="llamaspec-prefixes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def load(self, models: Sequence[LlamaModel], report: Report, call: Call = call_here) -> None:
        """Load saved sequences into the empty stores of some models, and delete damaged files."""
        n_tokens = 0
        for model in models:
            store, folder = model.store, self.folder_of(model)
            nodes = self._read(folder, store, report)
            n_tokens += call(partial(_add_nodes, store, [*nodes.values()]))
            self._recorded[folder.name] = {key: node.last_used for key, node in nodes.items()}
        if n_tokens:
            report(f"loaded {n_tokens} tokens of prefixes")

    def _read(self, folder: Path, store: PrefixStore, report: Report) -> dict[str, Node]:
        """Return the saved nodes for which the store has room, by their keys, each after its parent."""
        nodes, n_left, damaged = {folder.name: store.root}, store.limit - store.n_bytes, list[Path]()
        for file in sorted(_found(folder, f"*{SUFFIX}")):
            try:
                key, node = read_node(file.path, nodes)
            except DamagedError:  # noqa: PERF203
                damaged.append(file.path)
            except (OSError, LookupError):  # deleted or locked by another process, or without its parent
                continue
            else:
                n_left -= node.n_bytes
                if n_left < 0:
                    break
                nodes[key] = node
        for path in damaged:
            path.unlink(missing_ok=True)
        if damaged:
            others = f" and {len(damaged) - 1} others" if len(damaged) > 1 else ""
            report(f"ignoring {damaged[0]}{others}: damaged")
        del nodes[folder.name]
        return nodes

    def save(
        self,
        models: Sequence[LlamaModel],
        report: Report,
        call: Call = call_here,
        max_bytes: float = math.inf,
        is_over: threading.Event | None = None,
    ) -> None:
        """Save what is new of the finished sequences of some models, up to `max_bytes`.

        With `is_over`, leave time to others, until it is set: then stop.
        """
        now = time.time_ns()
        try:
            for model in models:
                while call(partial(model.store_finished, COPIED)):
                    pass
                folder, used = self.folder_of(model), call(model.store.by_last_use)
                for file, stamp in self._missing(folder, used, now):
                    begin = time.perf_counter()
                    max_bytes -= file.n_bytes
                    if max_bytes < 0:
                        return
                    file.write(stamp)
                    if is_over is not None and is_over.wait(REST * (time.perf_counter() - begin)):
                        return
        except OSError as error:
            report(f"cannot save prefixes in {self.path}: {error.strerror}")

    def _missing(
        self, folder: Path, used: Sequence[tuple[Node, int]], now: int
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
        room = _Room(self, now)
        for file, stamp in missing:
            if room.take(file.n_bytes, stamp):
                yield file, stamp
            after[file.key] = last_uses[file.node]  # without room, it is not tried again before it is used

    def folder_of(self, model: LlamaModel) -> Path:
        """Return the folder of a model: other weights, settings or builds of llama.cpp have other folders."""
        how = [*model.options.computing, model.options.heads]
        key = json.dumps([model.weights.keys.release, runtime.backend_description(), *how])
        return self.path / hashlib.sha256(key.encode()).hexdigest()[:KEY_LENGTH]


class _Room:
    """The bytes that a folder has left. The files that were not used for longest make room for others."""

    def __init__(self, folder: PrefixFolder, now: int) -> None:
        self._files = sorted([*_found(folder.path, f"*/*{SUFFIX}"), *_found(folder.path, f"*{OLD_SUFFIX}")])
        self._n_left = folder.limit - sum(file.n_bytes for file in self._files)
        for file in _found(folder.path, "*/.*.tmp"):
            if now - file.used < STALE_SECONDS * 1e9:
                self._n_left -= file.n_bytes
            else:
                file.path.unlink(missing_ok=True)
        self.take(0, now + 1)

    def take(self, n_bytes: int, used: int) -> bool:
        """Take some bytes for a file that was used at a time; False if there is no room for it."""
        while self._n_left < n_bytes and self._files and self._files[-1].used < used:
            file = self._files.pop()
            file.path.unlink(missing_ok=True)
            self._n_left += file.n_bytes
        is_there = self._n_left >= n_bytes
        self._n_left -= n_bytes if is_there else 0
        return is_there


def _found(folder: Path, pattern: str) -> Iterator[SavedFile]:
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):  # another process has deleted it
            facts = path.lstat()
            yield SavedFile(-facts.st_mtime_ns, path, facts.st_size)


def _touch(path: Path, now: int) -> bool:
    """Record the use of a file; False if there is none."""
    try:
        os.utime(path, ns=(now, now), follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _add_nodes(store: PrefixStore, nodes: Sequence[Node]) -> int:
    """Add nodes to a store, the most recently used first, each after its parent; return their tokens.

    Stops when the store is full.
    """
    added: list[Node] = []
    for node in nodes:
        if store.n_bytes + node.n_bytes > store.limit:
            break
        store.add(node)
        added.append(node)
    for node in reversed(added):
        store.touch(KnownPrefix((node,)))
    return sum(len(node.tokens) for node in added)
