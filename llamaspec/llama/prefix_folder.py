"""Prefix stores on disk: a file for each model and each way to compute its keys and values.

llama.cpp hardly checks the content that it restores, so a hash chain covers the key of a file and all its
nodes: only content for the same model and settings reaches llama.cpp. tests/llama/test_prefix_file.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import BaseFileLock, FileLock, Timeout

from llamaspec.errors import LlamaspecError
from llamaspec.files import replacing
from llamaspec.llama import runtime
from llamaspec.llama.prefix_store import Node, PrefixStore
from llamaspec.llama.trial import release_key

if TYPE_CHECKING:
    from llamaspec.llama.model import LlamaModel

SUFFIX = ".prefixes"
_MAGIC = b"llamaspec prefixes 3\n"
_HEAD = struct.Struct("<iiiq")  # index of the parent or -1, flags, number of tokens, bytes of content
_WHOLE, _SHARED = 1, 2  # flags of a node


class DamagedError(Exception):
    """The file was changed since it was written, or was written for another model."""


@dataclass(frozen=True, slots=True)
class PrefixFolder:
    """A private folder with a file for each model and each way to compute its keys and values.

    The first process that loads a file has a lock on it until it has saved; others load it, but do not save,
    because they would replace the sequences of the first. Raises LlamaspecError if the folder cannot be
    created or others can write to it.
    """

    path: Path
    limit: int  # bytes of all files together
    _locks: dict[str, BaseFileLock] = field(default_factory=dict)  # by the file's stem
    _foreign: set[str] = field(default_factory=set)  # stems of files that another process had locked

    def __post_init__(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.path.stat()
        except OSError as error:
            message = f"cannot use the folder {self.path}: {error.strerror}; name another"
            raise LlamaspecError(message) from error
        if not _is_private(facts):
            raise LlamaspecError(
                f"others can write to {self.path}, and llama.cpp trusts its files; "
                f"name another folder, or run: chmod 700 {self.path}"
            )

    def load(self, models: Sequence[LlamaModel], report: Callable[[str], None]) -> None:
        """Load saved sequences into the empty stores of some models."""
        n_tokens = 0
        for model in models:
            path = self.file_of(model)
            if not self._owns(path.stem):
                name = model.path.name
                report(f"another process saves prefixes of {name} in {self.path}, so this one will not")
            try:
                n_tokens += _read_nodes(path, model.store)
            except FileNotFoundError:
                pass
            except (OSError, DamagedError) as error:
                model.forget()
                reason = (isinstance(error, OSError) and error.strerror) or "it is damaged"
                report(f"ignoring {path}: {reason}")
        if n_tokens:
            report(f"loaded {n_tokens} tokens of prefixes")

    def save(self, models: Sequence[LlamaModel], report: Callable[[str], None]) -> None:
        """Save the finished sequences of some models; delete the oldest files of others over the limit."""
        try:
            room = self.limit - self._sweep()
            saved = [(self.file_of(model), model) for model in models]
            saved = [(path, model) for path, model in saved if self._owns(path.stem)]
            for path, model in saved:
                model.store_finished()
                room -= _write_nodes(path, model.store, room)
            others = [path for path in self.path.glob(f"*{SUFFIX}") if path not in dict(saved)]
            for path in sorted(others, key=lambda path: path.lstat().st_mtime, reverse=True):
                room -= path.lstat().st_size
                if room < 0:
                    path.unlink()
        except OSError as error:
            report(f"cannot save prefixes in {self.path}: {error.strerror}")
        finally:
            while self._locks:
                self._locks.popitem()[1].release()

    def _owns(self, stem: str) -> bool:
        """Whether this process may replace a file: no other had it when this process first asked."""
        if stem not in self._locks and stem not in self._foreign:
            lock = self._lock(stem)
            if lock is None:
                self._foreign.add(stem)
            else:
                self._locks[stem] = lock
        return stem in self._locks

    def _lock(self, stem: str) -> BaseFileLock | None:
        """Take the lock of a file, which ends with this process; None if another process has it."""
        self.path.stat()  # raises an error if the folder is gone, which FileLock would make again, for all
        lock = FileLock(self.path / f"{stem}.lock", mode=0o600, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return None
        return lock

    def _sweep(self) -> int:
        """Delete the temporary files of killed processes; return the bytes of those still being written."""
        n_bytes = 0
        for path in self.path.glob(".*.tmp"):
            stem = path.name[1:].partition(".")[0]
            lock = None if stem in self._locks else self._lock(stem)
            if stem in self._locks or lock is not None:
                path.unlink(missing_ok=True)
            else:
                with suppress(FileNotFoundError):  # it has its final name now
                    n_bytes += path.lstat().st_size
            if lock is not None:
                lock.release()
        return n_bytes

    def file_of(self, model: LlamaModel) -> Path:
        """Return the file for a model: other weights, settings or builds of llama.cpp have other files."""
        options = model.options
        key = json.dumps([
            release_key(model.path), runtime.backend_description(), options.gpu_layers, options.repack,
            *options.placement,
            options.flash_attention, options.cache_type_k, options.cache_type_v, options.heads,
        ])  # fmt: skip
        return self.path / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{SUFFIX}"


def _write_nodes(path: Path, store: PrefixStore, limit: int) -> int:
    """Write nodes up to `limit` bytes; return the size of the file. May raise OSError."""
    places = {store.root: -1}
    if path.is_symlink():
        path.unlink()  # otherwise its target would be written
    with replacing(path, private=True) as file:
        file.write(_MAGIC)
        digest = _digest(b"", path.stem.encode())
        for node in store.nodes():
            assert node.parent is not None
            tokens, content = node.tokens.tobytes(), node.content.data
            flags = _WHOLE * node.is_whole | _SHARED * node.is_shared
            head = _HEAD.pack(places[node.parent], flags, len(node.tokens), len(content))
            if file.tell() + len(head) + len(tokens) + len(content) + len(digest) > limit:
                break
            digest = _digest(digest, head, tokens, content)
            for part in (head, tokens, content, digest):
                file.write(part)
            places[node] = len(places) - 1
        return file.tell()


def _read_nodes(path: Path, store: PrefixStore) -> int:
    """Add the nodes of a file to a store, each after its hash was checked; return their number of tokens.

    Stops when the store is full. Raises OSError or DamagedError.
    """
    nodes, n_tokens = [store.root], 0
    with open(path, "rb", opener=_open_private) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise DamagedError
        n_left = os.fstat(file.fileno()).st_size - len(_MAGIC)
        digest = _digest(b"", path.stem.encode())
        while n_left:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise DamagedError
            parent, flags, n, n_bytes = _HEAD.unpack(head)
            n_left -= _HEAD.size + 4 * n + n_bytes + len(digest)
            if min(n - 1, n_bytes, n_left) < 0:
                raise DamagedError
            tokens, content = np.fromfile(file, np.uint8, 4 * n), np.fromfile(file, np.uint8, n_bytes)
            digest = _digest(digest, head, tokens.data, content.data)
            if file.read(len(digest)) != digest or not -1 <= parent < len(nodes) - 1:
                raise DamagedError
            node = Node(nodes[parent + 1], tokens.view(np.int32), content)
            node.is_whole, node.is_shared = bool(flags & _WHOLE), bool(flags & _SHARED)
            if store.n_bytes + node.n_bytes > store.limit:
                break
            store.add(node)
            nodes.append(node)
            n_tokens += n
    return n_tokens


def _digest(before: bytes, *parts: bytes | memoryview) -> bytes:
    """Return a hash over the previous hash and some parts."""
    made = hashlib.sha256(before)
    for part in parts:
        made.update(part)
    return made.digest()


def _open_private(name: str, flags: int) -> int:
    """Open a file; DamagedError unless it is a regular file that only this user can write."""
    file = os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    facts = os.fstat(file)
    if stat.S_ISREG(facts.st_mode) and _is_private(facts):
        return file
    os.close(file)
    raise DamagedError


def _is_private(facts: os.stat_result) -> bool:
    """Whether only this user can write a file or folder."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
