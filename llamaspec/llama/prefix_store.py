"""Finished sequences in main memory and on disk: their tokens, and what llama.cpp computed for them.

A tree, as in SGLang's RadixAttention (arXiv 2312.07104). A node holds the content of the KV cells of some
tokens behind its parent's, so sequences with a common beginning store it once, and a conversation that grows
adds only what is new. If layers keep states, a node holds a whole sequence, because a state cannot be cut.
The least recently used leaves are dropped at a limit in bytes. Only the compute thread calls it.

`PrefixFolder` saves stores. llama.cpp checks little of what it is given, so a hash runs on from the key of a
file over all nodes: only what was written for the same model and settings reaches llama.cpp.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from llamaspec.errors import LlamaspecError
from llamaspec.files import replacing
from llamaspec.llama import runtime
from llamaspec.llama.trial import release_key
from llamaspec.values import NO_TOKENS, TokenArray, n_common

if TYPE_CHECKING:
    from llamaspec.llama.model import LlamaModel

Bytes = npt.NDArray[np.uint8]

SUFFIX = ".prefixes"
_MAGIC = b"llamaspec prefixes 3\n"
_HEAD = struct.Struct("<iiiq")  # parent or -1, whether it is whole, tokens, bytes of content


class Checkpoint(NamedTuple):
    """The state of layers that keep one, after the first `n` tokens of a sequence."""

    n: int
    state: Bytes


@dataclass(slots=True, eq=False)
class Node:
    """Some tokens behind those of its parent, and what llama.cpp computed for them."""

    parent: Node | None
    tokens: TokenArray  # [n]
    content: Bytes
    is_whole: bool = False  # the content cannot be cut: it is a state
    checkpoints: tuple[Checkpoint, ...] = ()  # earlier states of a whole sequence
    last_used: int = 0
    children: list[Node] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.tokens.nbytes + self.content.nbytes + sum(each.state.nbytes for each in self.checkpoints)

    def n_usable(self, tokens: TokenArray) -> int:
        """Return how many of its tokens serve a sequence that goes on with `tokens`."""
        n = n_common(self.tokens, tokens)
        if not self.is_whole or n == len(self.tokens):
            return n
        return max((each.n for each in self.checkpoints if each.n <= n), default=0)

    def below(self) -> Iterator[Node]:
        """All nodes below it, each behind its parent."""
        waiting = list(self.children)
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children


class KnownPrefix(NamedTuple):
    """The longest stored beginning of a sequence: all of `nodes`, but perhaps only some of the last."""

    nodes: tuple[Node, ...] = ()
    n: int = 0  # tokens


@dataclass(slots=True, eq=False)
class _Room:
    """Memory that several stores share."""

    limit: int  # bytes
    n_bytes: int = 0
    roots: list[Node] = field(default_factory=list)
    clock: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class PrefixStore:
    """The stored sequences of one model, in at most `limit` bytes; 0 = nothing is stored.

    A store `beside` another shares its limit and nothing else: what one model has computed is of no use to
    another.
    """

    def __init__(self, limit: int = 0, *, beside: PrefixStore | None = None) -> None:
        self._room: _Room = _Room(limit) if beside is None else beside._room
        self.root = Node(None, NO_TOKENS, np.empty(0, dtype=np.uint8))
        self._room.roots.append(self.root)

    @property
    def limit(self) -> int:
        """Bytes of all stores that share it."""
        return self._room.limit

    @property
    def n_bytes(self) -> int:
        """Bytes that these stores take."""
        return self._room.n_bytes

    def find(self, tokens: TokenArray) -> KnownPrefix:
        """Find the longest stored beginning of some tokens."""
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

        `copy(start, end)` returns the content of some positions. It is called only for those that are not
        stored yet; if it returns None, the sequence is stored up to there.
        """
        if not self.limit:
            return
        found = self.find(tokens)
        self.touch(found)
        if found.n == len(tokens):
            return
        parent, n = self.root, 0
        for node in found.nodes:  # the last one may go on otherwise
            if n + len(node.tokens) <= found.n:
                parent, n = node, n + len(node.tokens)
        for start in range(n, len(tokens), block):
            new = tokens[start : start + block].copy()
            content = copy(start, start + len(new))
            if content is None or not self.add(node := Node(parent, new, content)):
                return
            parent = node

    def put_whole(self, tokens: TokenArray, content: Bytes, checkpoints: tuple[Checkpoint, ...] = ()) -> None:
        """Store a sequence whose content cannot be cut, in place of those that it begins with."""
        if not self.limit:
            return
        for node in tuple(self.root.children):
            if n_common(node.tokens, tokens) == len(node.tokens):
                self._remove(node)
        self.add(Node(self.root, tokens.copy(), content, is_whole=True, checkpoints=checkpoints))

    def touch(self, found: KnownPrefix) -> None:
        """Note that what was found is used."""
        now = next(self._room.clock)
        for node in found.nodes:
            node.last_used = now

    def add(self, node: Node) -> bool:
        """Add a node to its parent and drop what is over the limit; False if the node itself is."""
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
        """All nodes, those of the last used sequences first, but each behind its parent."""
        newest: dict[Node, int] = {}
        nodes = list(self.root.below())
        for node in reversed(nodes):
            newest[node] = max([node.last_used, *(newest[child] for child in node.children)])
        return sorted(nodes, key=lambda node: -newest[node])  # stable: parents stay before children

    def clear(self) -> None:
        """Drop everything."""
        self._room.n_bytes -= sum(node.n_bytes for node in self.root.below())
        self.root.children.clear()

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        leaf.parent.children.remove(leaf)
        self._room.n_bytes -= leaf.n_bytes


class DamagedError(Exception):
    """The file is not as it was written, or was written for something else."""


@dataclass(frozen=True, slots=True)
class PrefixFolder:
    """A private folder with a file for each model and way to compute its keys and values.

    LlamaspecError if it cannot be made or others can write there.
    """

    path: Path
    limit: int  # bytes of all files together

    def __post_init__(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.path.stat()
        except OSError as error:
            message = f"cannot use the folder {self.path}: {error.strerror}; name another"
            raise LlamaspecError(message) from error
        if not _is_private(facts):
            raise LlamaspecError(
                f"others can write in {self.path}, and llama.cpp trusts what lies there; "
                f"name another folder, or: chmod 700 {self.path}"
            )

    def load(self, models: Sequence[LlamaModel], tell: Callable[[str], None]) -> None:
        """Put what is saved of some models into their stores, which are empty."""
        n_tokens = 0
        for model in models:
            path = self.file_of(model)
            try:
                n_tokens += _read_nodes(path, model.store)
            except FileNotFoundError:
                pass
            except (OSError, DamagedError) as error:
                model.forget()
                reason = (isinstance(error, OSError) and error.strerror) or "it is not as it was written"
                tell(f"{path} counts as empty: {reason}")
        if n_tokens:
            tell(f"{n_tokens} tokens of prefixes were loaded")

    def save(self, models: Sequence[LlamaModel], tell: Callable[[str], None]) -> None:
        """Save what is known of finished sequences; the oldest files go first."""
        room, paths = self.limit, [self.file_of(model) for model in models]
        try:
            for model, path in zip(models, paths, strict=True):
                model.store_finished()
                room -= _write_nodes(path, model.store, room)
            others = [path for path in self.path.glob(f"*{SUFFIX}") if path not in paths]
            for path in sorted(others, key=lambda path: path.lstat().st_mtime, reverse=True):
                room -= path.lstat().st_size
                if room < 0:
                    path.unlink()
        except OSError as error:
            tell(f"prefixes cannot be saved in {self.path}: {error.strerror}")

    def file_of(self, model: LlamaModel) -> Path:
        """The file of a model's prefixes: other weights, formats or builds of llama.cpp have other files."""
        options = model.options
        key = json.dumps([
            release_key(model.path), runtime.backend_description(), options.gpu_layers, options.repack,
            *options.placement,
            options.flash_attention, options.cache_type_k, options.cache_type_v, options.heads,
        ])  # fmt: skip
        return self.path / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{SUFFIX}"


def _write_nodes(path: Path, store: PrefixStore, limit: int) -> int:
    """Write nodes as long as the file has at most `limit` bytes; return its size. May raise OSError."""
    places = {store.root: -1}
    if path.is_symlink():
        path.unlink()  # not ours, and a link would stay one
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
    """Put the nodes of a file into a store, each once its hash shows that it was written for this file.

    Stops if the store is full. Returns the number of tokens. Raises OSError or DamagedError.
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
    """A hash over the previous one and some parts."""
    made = hashlib.sha256(before)
    for part in parts:
        made.update(part)
    return made.digest()


def _open_private(name: str, flags: int) -> int:
    """Open a regular file of this user that nobody else can write."""
    file = os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    facts = os.fstat(file)
    if stat.S_ISREG(facts.st_mode) and _is_private(facts):
        return file
    os.close(file)
    raise DamagedError


def _is_private(facts: os.stat_result) -> bool:
    """Whether nobody else can write it."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
