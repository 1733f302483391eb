"""A file of prefixes: tokens, and the content of the cells that hold their keys and values.

llama.cpp checks little of what it is given, so nothing reaches it that is not, bit by bit, what was written
for the same model: a hash runs on from the key of the file over all entries.
tests/llama/test_saved_prefixes.py.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamaspec.files import replacing
from llamaspec.llama.cells import Bytes, CopiedSequence
from llamaspec.values import TokenArray

_MAGIC = b"llamaspec prefixes 1\n"
_HEAD = struct.Struct("<iiiq")  # trunk or -1, tokens shared with it, tokens, bytes of content
_HASH_BYTES = hashlib.sha256().digest_size


class Prefix(NamedTuple):
    """One entry."""

    tokens: TokenArray  # [n] int32
    trunk: int | None  # the entry whose first `n_shared` tokens are the same cells
    n_shared: int
    content: Bytes  # of the other cells


class DamagedError(Exception):
    """The file is not as it was written, or was written for something else."""


def write_prefixes(path: Path, key: str, moved: Iterator[CopiedSequence], limit: int) -> int:
    """Write prefixes as they come, until the file would have more than `limit` bytes; how many bytes it has.

    Raises
    ------
    OSError
        The file is as it was.
    """
    places: dict[int, int] = {}  # of sequences, by their numbers
    if path.is_symlink():
        path.unlink()  # not ours, and a link would stay one
    with replacing(path, private=True) as file:
        file.write(_MAGIC)
        digest = _first_digest(key)
        for move in moved:
            trunk = -1 if move.trunk is None else places.get(move.trunk.number)
            if move.content is None or trunk is None:
                continue
            tokens = move.sequence.tokens[: move.n].tobytes()
            head = _HEAD.pack(trunk, move.n_shared, move.n, len(move.content))
            if file.tell() + len(head) + len(tokens) + len(move.content) + _HASH_BYTES > limit:
                break
            digest = _hash(digest, head, tokens, move.content.data)
            for part in (head, tokens, move.content.data, digest):
                file.write(part)
            places[move.sequence.number] = len(places)
        return file.tell()


def read_prefixes(path: Path, key: str) -> Iterator[Prefix]:
    """The prefixes of a file, each once it is known to be whole.

    Raises
    ------
    OSError
        The file cannot be read.
    DamagedError
        What follows is not what was written for this key.
    """
    with open(path, "rb", opener=_opened) as file:
        n_left = os.fstat(file.fileno()).st_size - len(_MAGIC)
        if file.read(len(_MAGIC)) != _MAGIC:
            raise DamagedError
        digest, n_read = _first_digest(key), 0
        while n_left:
            head = file.read(_HEAD.size)
            trunk, n_shared, n, n_bytes = _fields(head, n_read)
            n_left -= _HEAD.size + 4 * n + n_bytes + _HASH_BYTES
            if n_left < 0:
                raise DamagedError
            tokens, content = _read(file, 4 * n), _read(file, n_bytes)
            digest = _hash(digest, head, tokens.data, content.data)
            if file.read(_HASH_BYTES) != digest:
                raise DamagedError
            yield Prefix(tokens.view(np.int32), trunk if trunk >= 0 else None, n_shared, content)
            n_read += 1


def _fields(head: bytes, n_read: int) -> tuple[int, int, int, int]:
    if len(head) < _HEAD.size:
        raise DamagedError
    trunk, n_shared, n, n_bytes = _HEAD.unpack(head)
    if not (-1 <= trunk < n_read and 0 <= n_shared <= n and n_bytes >= 0 and (trunk >= 0) == (n_shared > 0)):
        raise DamagedError
    return trunk, n_shared, n, n_bytes


def _read(file: BufferedReader, n: int) -> Bytes:
    content = np.empty(n, dtype=np.uint8)
    if file.readinto(content.data) != n:
        raise DamagedError
    return content


def _first_digest(key: str) -> bytes:
    return hashlib.sha256(_MAGIC + key.encode()).digest()


def _hash(digest: bytes, *parts: bytes | memoryview) -> bytes:
    made = hashlib.sha256(digest)
    for part in parts:
        made.update(part)
    return made.digest()


def _opened(name: str, flags: int) -> int:
    """A regular file of this person, which nobody else can write."""
    file = os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    facts = os.fstat(file)
    if stat.S_ISREG(facts.st_mode) and is_private(facts):
        return file
    os.close(file)
    raise DamagedError


def is_private(facts: os.stat_result) -> bool:
    """Whether nobody else can write it."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
