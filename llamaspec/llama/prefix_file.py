"""A node of a prefix store as a file.

A file's name is a hash of all tokens up to the end of its node, and of the scope that may find them, so that
all processes give it the same name.
llama.cpp hardly checks the content that it restores, so another hash covers the file and its model's key:
only content for the same model and settings reaches llama.cpp. tests/llama/test_prefix_file.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamaspec.llama.prefix_store import Checkpoint, Node
from llamaspec.values import NO_SCOPE

SUFFIX = ".prefix"
KEY_LENGTH = 32  # characters of the key of a model or of a node
_MAGIC = b"llamaspec prefix 6\n"
# Magic, the parent's key, the scope, flags, checkpoints, tokens, bytes.
_HEAD = struct.Struct(f"<{len(_MAGIC)}s{KEY_LENGTH}s{len(NO_SCOPE)}siiiq")
_TABLE = np.dtype([("n", "<i8"), ("n_bytes", "<i8")])  # of a checkpoint: its tokens, the bytes of its state
_DIGEST_BYTES = hashlib.sha256().digest_size
_WHOLE, _SHARED = 1, 2  # flags of a node


class DamagedError(Exception):
    """The file was changed since it was written, or was written for another model."""


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A node, and its place in the folder of a model. The folder's name is the model's key."""

    node: Node
    folder: Path
    parent: str  # the parent's key; of a node without one, the model's
    key: str
    start: int  # number of tokens before the node

    @property
    def path(self) -> Path:
        """The file. The names of parents are less than those of their children."""
        return self.folder / f"{self.start:010}-{self.key}{SUFFIX}"

    @property
    def n_bytes(self) -> int:
        """Size of the file."""
        table = _TABLE.itemsize * len(self.node.checkpoints)
        return _HEAD.size + table + self.node.n_bytes + _DIGEST_BYTES

    def write(self, used: int) -> None:
        """Write the file in one step, as last used at a time in nanoseconds. May raise OSError."""
        node, path = self.node, self.path
        sizes = len(node.checkpoints), len(node.tokens), len(node.content)
        head = _HEAD.pack(_MAGIC, self.parent.encode(), node.scope, _flags(node), *sizes)
        table = np.array([(each.n, len(each.state)) for each in node.checkpoints], _TABLE)
        parts: list[bytes | memoryview] = [head, table.tobytes(), node.tokens.data, node.content.data]
        parts += [each.state.data for each in node.checkpoints]
        new = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        try:
            with open(new, "xb", opener=_open_new) as file:
                file.writelines((*parts, _digest(self.folder.name, *parts)))
            os.utime(new, ns=(used, used))
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def files_of(nodes: Iterable[Node], folder: Path) -> Iterator[NodeFile]:
    """Yield the files of nodes of one store; each node comes after its parent."""
    places: dict[Node | None, tuple[str, int]] = {}  # key and end
    for node in nodes:
        parent, start = places.get(node.parent, (folder.name, 0))
        key = _key(parent, node)
        places[node] = key, start + len(node.tokens)
        yield NodeFile(node, folder, parent, key, start)


def key_of(path: Path) -> str:
    """Return the key of a node by the name of its file."""
    return path.stem[-KEY_LENGTH:]


def read_node(path: Path, parents: Mapping[str, Node]) -> tuple[str, Node]:
    """Read a node and its key; the node of its parent must be among `parents`, by their keys.

    Raises LookupError if it is not, otherwise OSError or DamagedError.
    """
    with open(path, "rb", opener=_open_private) as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise DamagedError
        magic, parent, scope, flags, n_checkpoints, n, n_bytes = _HEAD.unpack(head)
        n_file = os.fstat(file.fileno()).st_size
        if magic != _MAGIC or min(n_checkpoints, n - 1, n_bytes) < 0 or n_checkpoints > n_file:
            raise DamagedError
        table = np.fromfile(file, _TABLE, n_checkpoints)
        sizes = [4 * n, n_bytes, *table["n_bytes"].tolist()]
        if min(sizes) < 0 or _HEAD.size + table.nbytes + sum(sizes) + _DIGEST_BYTES != n_file:
            raise DamagedError
        before = parent.decode(errors="replace")
        if before not in parents:
            raise LookupError
        parts = [np.fromfile(file, np.uint8, size) for size in sizes]
        if file.read() != _digest(path.parent.name, head, table.tobytes(), *(part.data for part in parts)):
            raise DamagedError
    tokens, content, *states = parts
    node = Node(parents[before], tokens.view(np.int32), content, scope)
    node.is_whole, node.is_shared = bool(flags & _WHOLE), bool(flags & _SHARED)
    node.checkpoints = tuple(map(Checkpoint, table["n"].tolist(), states))
    return _key(before, node), node


def is_private(facts: os.stat_result) -> bool:
    """Whether only this user can write a file or folder."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def _flags(node: Node) -> int:
    return _WHOLE * node.is_whole | _SHARED * node.is_shared


def _key(parent: str, node: Node) -> str:
    return _digest(parent, node.scope, bytes([_flags(node)]), node.tokens.data).hex()[:KEY_LENGTH]


def _digest(key: str, *parts: bytes | memoryview) -> bytes:
    """Return a hash over a key and some parts."""
    made = hashlib.sha256(key.encode())
    for part in parts:
        made.update(part)
    return made.digest()


def _open_new(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _open_private(name: str, flags: int) -> int:
    """Open a file; DamagedError unless it is a regular file that only this user can write."""
    try:
        file = os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link
            raise DamagedError from error
        raise
    facts = os.fstat(file)
    if stat.S_ISREG(facts.st_mode) and is_private(facts):
        return file
    os.close(file)
    raise DamagedError
