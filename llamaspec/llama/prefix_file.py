"""Prefixes that outlive a process: what the KV caches hold, in a private folder of bounded size.

One file for each model and way to compute its keys and values: for each prefix its tokens, and the content
of its cells. llama.cpp checks little of what it is given, so nothing reaches it that is not, bit by bit, what
was written for the same model: a hash runs on from the key of the file over all entries. Models that keep
states, or have a sliding window, have nothing that could be copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamaspec.errors import LlamaspecError
from llamaspec.files import replacing
from llamaspec.llama import runtime
from llamaspec.llama.cells import Bytes, CachedSequence, CopiedSequence
from llamaspec.llama.kv_cache import KVCache
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.trial import file_identity
from llamaspec.values import TokenArray

SUFFIX = ".prefixes"
_MAGIC = b"llamaspec prefixes 2\n"
_HEAD = struct.Struct("<iiiq")  # trunk or -1, tokens shared with it, tokens, bytes of content

Tell = Callable[[str], None]  # receives a remark for the person


class DamagedError(Exception):
    """The file is not as it was written, or was written for something else."""


class Prefix(NamedTuple):
    """One entry."""

    tokens: TokenArray  # [n] int32
    trunk: int | None  # the entry whose first `n_shared` tokens are the same cells
    n_shared: int
    content: Bytes  # of the other cells


@dataclass(frozen=True, slots=True)
class PrefixFolder:
    """A folder with the prefixes of models.

    Raises
    ------
    LlamaspecError
        It cannot be made, or others can write there.
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

    def load(self, models: Sequence[LlamaModel], tell: Tell) -> None:
        """Put what is saved of some models into their KV caches, which are empty."""
        n_tokens = 0
        for model in models:
            cache, path = model.prefix_cache, self.file_of(model)
            if cache is None:
                tell(f"prefixes of {model.path.name} are not saved: its memory cannot be copied")
                continue
            try:
                _put_in(cache, _read_prefixes(path, path.stem))
                n_tokens += cache.n_used
            except FileNotFoundError:
                pass
            except (OSError, DamagedError) as error:
                model.forget()
                reason = (isinstance(error, OSError) and error.strerror) or "it is not as it was written"
                tell(f"{path} counts as empty: {reason}")
        if n_tokens:
            tell(f"{n_tokens} tokens of prefixes were loaded")

    def save(self, models: Sequence[LlamaModel], tell: Tell) -> None:
        """Save what the KV caches of some models hold, which are empty afterwards; oldest files go first."""
        room, paths = self.limit, [self.file_of(model) for model in models]
        try:
            for model, path in zip(models, paths, strict=True):
                if (cache := model.prefix_cache) is not None:
                    room -= _write_prefixes(path, path.stem, cache.take_out(), room)
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
            file_identity(model.path), runtime.backend_description(), options.gpu_layers, options.repack,
            *options.placement,
            model.flash_attention, options.cache_type_k, options.cache_type_v, options.heads,
        ])  # fmt: skip
        return self.path / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{SUFFIX}"


def _put_in(cache: KVCache, prefixes: Iterable[Prefix]) -> None:
    """Put prefixes into an empty cache; without one that found no room, what shares its cells has none."""
    held: list[CachedSequence | None] = []
    for tokens, place, n_shared, content in prefixes:
        trunk = None if place is None else held[place]
        has_trunk = place is None or trunk is not None
        held.append(cache.put_in(tokens, content, trunk, n_shared) if has_trunk else None)


def _write_prefixes(path: Path, key: str, copied: Iterator[CopiedSequence], limit: int) -> int:
    """Write prefixes as they come, as long as the file has at most `limit` bytes; how many bytes it has.

    After an OSError the file is as it was.
    """
    places: dict[int, int] = {}  # of sequences, by their numbers
    if path.is_symlink():
        path.unlink()  # not ours, and a link would stay one
    with replacing(path, private=True) as file:
        file.write(_MAGIC)
        digest = _digest(b"", key.encode())
        for each in copied:
            trunk = -1 if each.trunk is None else places.get(each.trunk.number)
            if each.content is None or trunk is None:
                continue
            tokens = each.sequence.tokens[: each.n].tobytes()
            head = _HEAD.pack(trunk, each.n_shared, each.n, len(each.content))
            if file.tell() + len(head) + len(tokens) + len(each.content) + len(digest) > limit:
                break
            digest = _digest(digest, head, tokens, each.content.data)
            for part in (head, tokens, each.content.data, digest):
                file.write(part)
            places[each.sequence.number] = len(places)
        return file.tell()


def _read_prefixes(path: Path, key: str) -> Iterator[Prefix]:
    """The prefixes of a file, each once it is known to be what was written for this key.

    Raises OSError or DamagedError.
    """
    with open(path, "rb", opener=_open_private) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise DamagedError
        n_left = os.fstat(file.fileno()).st_size - len(_MAGIC)
        digest, n_read = _digest(b"", key.encode()), 0
        while n_left:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise DamagedError
            trunk, n_shared, n, n_bytes = _HEAD.unpack(head)
            n_left -= _HEAD.size + 4 * n + n_bytes + len(digest)
            if min(n, n_bytes, n_left) < 0:
                raise DamagedError
            tokens, content = np.fromfile(file, np.uint8, 4 * n), np.fromfile(file, np.uint8, n_bytes)
            digest = _digest(digest, head, tokens.data, content.data)
            if file.read(len(digest)) != digest or not -1 <= trunk < n_read:
                raise DamagedError
            yield Prefix(tokens.view(np.int32), trunk if trunk >= 0 else None, n_shared, content)
            n_read += 1


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
