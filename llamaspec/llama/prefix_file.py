"""Saves the prefix store in a private folder of bounded size, and loads it again.

One file for each model and way to compute its keys and values, with the nodes of the store, each behind its
parent. llama.cpp checks little of what it is given. So a hash runs on from the key of the file over all
nodes, and nothing reaches llama.cpp but what was written for the same model.
tests/llama/test_prefix_file.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamaspec.errors import LlamaspecError
from llamaspec.files import replacing
from llamaspec.llama import runtime
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.prefix_store import Node, PrefixStore
from llamaspec.llama.trial import release_key

SUFFIX = ".prefixes"
_MAGIC = b"llamaspec prefixes 3\n"
_HEAD = struct.Struct("<iiiq")  # parent or -1, whether it is whole, tokens, bytes of content

Tell = Callable[[str], None]  # receives a remark for the person


class DamagedError(Exception):
    """The file is not as it was written, or was written for something else."""


@dataclass(frozen=True, slots=True)
class PrefixFolder:
    """A folder with the prefixes of models; LlamaspecError if it cannot be made or others can write there."""

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

    def load(self, models: Sequence[LlamaModel], tell: Tell) -> None:
        """Put what is saved of some models into their store, which is empty."""
        n_tokens = 0
        for model in models:
            path = self.file_of(model)
            try:
                n_tokens += _read_nodes(path, path.stem, model.store, model.owner)
            except FileNotFoundError:
                pass
            except (OSError, DamagedError) as error:
                model.forget()
                reason = (isinstance(error, OSError) and error.strerror) or "it is not as it was written"
                tell(f"{path} counts as empty: {reason}")
        if n_tokens:
            tell(f"{n_tokens} tokens of prefixes were loaded")

    def save(self, models: Sequence[LlamaModel], tell: Tell) -> None:
        """Save what is known of finished texts; the oldest files go first."""
        room, paths = self.limit, [self.file_of(model) for model in models]
        try:
            for model, path in zip(models, paths, strict=True):
                model.store_finished()
                room -= _write_nodes(path, path.stem, model.store, model.owner, room)
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


def _write_nodes(path: Path, key: str, store: PrefixStore, owner: Hashable, limit: int) -> int:
    """Write nodes as long as the file has at most `limit` bytes; how many it has. May raise OSError."""
    places = {store.root(owner): -1}
    if path.is_symlink():
        path.unlink()  # not ours, and a link would stay one
    with replacing(path, private=True) as file:
        file.write(_MAGIC)
        digest = _digest(b"", key.encode())
        for node in store.nodes(owner):
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


def _read_nodes(path: Path, key: str, store: PrefixStore, owner: Hashable) -> int:
    """Put the nodes of a file into a store, each once it is known to be what was written for `key`.

    Stops where the store is full. Returns the number of tokens. Raises OSError or DamagedError.
    """
    nodes, n_tokens = [store.root(owner)], 0
    with open(path, "rb", opener=_open_private) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise DamagedError
        n_left = os.fstat(file.fileno()).st_size - len(_MAGIC)
        digest = _digest(b"", key.encode())
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
    """A hash over the one before and some parts."""
    made = hashlib.sha256(before)
    for part in parts:
        made.update(part)
    return made.digest()


def _open_private(name: str, flags: int) -> int:
    """Open a regular file of this person, which nobody else can write."""
    file = os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    facts = os.fstat(file)
    if stat.S_ISREG(facts.st_mode) and _is_private(facts):
        return file
    os.close(file)
    raise DamagedError


def _is_private(facts: os.stat_result) -> bool:
    """Whether nobody else can write it."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
