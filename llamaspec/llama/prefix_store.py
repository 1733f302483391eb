"""Finished sequences in main memory and on disk: their tokens and the content of their KV cells.

The store is a tree, as in SGLang's RadixAttention (arXiv 2312.07104). A node holds some tokens that follow
those of its parent, so a common beginning of several sequences is stored once, and a conversation that grows
adds only its new tokens. If layers keep states, a node holds a whole sequence, because a state cannot be cut.
At a limit in bytes, the least recently used leaves are dropped. Only the compute thread calls this module.

`PrefixFolder` saves stores. llama.cpp hardly checks the content that it restores, so a hash chain covers the
key of a file and all its nodes: only content for the same model and settings reaches llama.cpp.
tests/llama/test_prefix_store.py, tests/llama/test_prefix_file.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from llamaspec.errors import LlamaspecError
from llamaspec.files import FileLock, replacing
from llamaspec.llama import runtime
from llamaspec.llama.trial import release_key
from llamaspec.values import NO_TOKENS, TokenArray, n_common

if TYPE_CHECKING:
    from llamaspec.llama.model import LlamaModel

Bytes = npt.NDArray[np.uint8]

SUFFIX = ".prefixes"
_MAGIC = b"llamaspec prefixes 3\n"
_HEAD = struct.Struct("<iiiq")  # index of the parent or -1, is_whole, number of tokens, bytes of content


class Checkpoint(NamedTuple):
    """The recurrent state after the first `n` tokens of a sequence."""

    n: int
    state: Bytes


@dataclass(slots=True, eq=False)
class Node:
    """Tokens that follow those of the parent, and the content of their KV cells."""

    parent: Node | None
    tokens: TokenArray  # [n]
    content: Bytes
    is_whole: bool = False  # the content is a state, which cannot be cut
    checkpoints: tuple[Checkpoint, ...] = ()  # earlier states
    last_used: int = 0
    children: list[Node] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Bytes of memory."""
        return self.tokens.nbytes + self.content.nbytes + sum(each.state.nbytes for each in self.checkpoints)

    def n_usable(self, tokens: TokenArray) -> int:
        """Return how many of the node's tokens can serve a sequence that continues with `tokens`."""
        n = n_common(self.tokens, tokens)
        if not self.is_whole or n == len(self.tokens):
            return n
        return max((each.n for each in self.checkpoints if each.n <= n), default=0)

    def below(self) -> Iterator[Node]:
        """Yield all nodes below this one, each after its parent."""
        waiting = list(self.children)
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children


class KnownPrefix(NamedTuple):
    """The longest stored beginning of a sequence: all tokens of `nodes`, except perhaps of the last one."""

    nodes: tuple[Node, ...] = ()
    n: int = 0  # tokens


@dataclass(slots=True, eq=False)
class _Room:
    """Memory that several stores share, up to a limit."""

    limit: int  # bytes
    n_bytes: int = 0
    roots: list[Node] = field(default_factory=list)
    clock: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class PrefixStore:
    """The stored sequences of one model, in at most `limit` bytes; 0 = nothing is stored.

    With `limit_of`, it shares the limit of that store. They share no content, because the models differ.
    """

    def __init__(self, limit: int = 0, *, limit_of: PrefixStore | None = None) -> None:
        self._room: _Room = _Room(limit) if limit_of is None else limit_of._room
        self.root = Node(None, NO_TOKENS, np.empty(0, dtype=np.uint8))
        self._room.roots.append(self.root)

    @property
    def limit(self) -> int:
        """Maximum number of bytes of all stores that share the limit."""
        return self._room.limit

    @property
    def n_bytes(self) -> int:
        """Bytes in all stores that share the limit."""
        return self._room.n_bytes

    def find(self, tokens: TokenArray) -> KnownPrefix:
        """Return the longest stored beginning of `tokens`."""
        best, waiting = KnownPrefix(), [(self.root, KnownPrefix())]
        while waiting:
            node, found = waiting.pop()
            for child in node.children:
                n = child.n_usable(tokens[found.n :])
                longer = KnownPrefix((*found.nodes, child), found.n + n)
                if longer.n > best.n:
                    best = longer
                if n == len(child.tokens):
                    waiting.append((child, longer))
        return best

    def put(self, tokens: TokenArray, block: int, copy: Callable[[int, int], Bytes | None]) -> None:
        """Store a sequence in nodes of at most `block` tokens.

        `copy(start, end)` returns the content of a range of positions. It is called only for positions that
        are not stored yet. If it returns None, the sequence is stored only up to there.
        """
        if not self.limit:
            return
        found = self.find(tokens)
        self.touch(found)
        if found.n == len(tokens):
            return
        parent, n = self.root, 0
        for node in found.nodes:  # the last node may contain other tokens, too
            if n + len(node.tokens) <= found.n:
                parent, n = node, n + len(node.tokens)
        for start in range(n, len(tokens), block):
            new = tokens[start : start + block].copy()
            content = copy(start, start + len(new))
            if content is None or not self.add(node := Node(parent, new, content)):
                return
            parent = node

    def put_whole(self, tokens: TokenArray, content: Bytes, checkpoints: tuple[Checkpoint, ...] = ()) -> None:
        """Store a sequence whose content cannot be cut, and drop the stored beginnings of it."""
        if not self.limit:
            return
        for node in tuple(self.root.children):
            if n_common(node.tokens, tokens) == len(node.tokens):
                self._remove(node)
        self.add(Node(self.root, tokens.copy(), content, is_whole=True, checkpoints=checkpoints))

    def touch(self, found: KnownPrefix) -> None:
        """Record a use of the nodes."""
        now = next(self._room.clock)
        for node in found.nodes:
            node.last_used = now

    def add(self, node: Node) -> bool:
        """Add a node to its parent, and drop leaves over the limit; False if the node itself was dropped."""
        assert node.parent is not None
        room = self._room
        node.last_used = next(room.clock)
        node.parent.children.append(node)
        room.n_bytes += node.n_bytes
        while room.n_bytes > room.limit:
            leaves = [each for root in room.roots for each in root.below() if not each.children]
            oldest = min(leaves, key=lambda leaf: leaf.last_used)
            self._remove(oldest)
            if oldest is node:
                return False
        return True

    def nodes(self) -> list[Node]:
        """Return all nodes: the most recently used sequences first, and each node after its parent."""
        newest: dict[Node, int] = {}
        nodes = list(self.root.below())
        for node in reversed(nodes):
            newest[node] = max([node.last_used, *(newest[child] for child in node.children)])
        return sorted(nodes, key=lambda node: -newest[node])  # stable: parents stay before children

    def close(self) -> None:
        """Drop everything, and leave the shared limit to the other stores."""
        self.clear()
        if self.root in self._room.roots:
            self._room.roots.remove(self.root)

    def clear(self) -> None:
        """Drop everything."""
        self._room.n_bytes -= sum(node.n_bytes for node in self.root.below())
        self.root.children.clear()

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        leaf.parent.children.remove(leaf)
        self._room.n_bytes -= leaf.n_bytes


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
    _locks: dict[str, FileLock] = field(default_factory=dict)  # by the file's stem
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

    def _lock(self, stem: str) -> FileLock | None:
        return FileLock.taken(self.path / f"{stem}.lock")

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
            head = _HEAD.pack(places[node.parent], node.is_whole, len(node.tokens), len(content))
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
            parent, is_whole, n, n_bytes = _HEAD.unpack(head)
            n_left -= _HEAD.size + 4 * n + n_bytes + len(digest)
            if min(n - 1, n_bytes, n_left) < 0:
                raise DamagedError
            tokens, content = np.fromfile(file, np.uint8, 4 * n), np.fromfile(file, np.uint8, n_bytes)
            digest = _digest(digest, head, tokens.data, content.data)
            if file.read(len(digest)) != digest or not -1 <= parent < len(nodes) - 1:
                raise DamagedError
            node = Node(nodes[parent + 1], tokens.view(np.int32), content, is_whole=bool(is_whole))
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
