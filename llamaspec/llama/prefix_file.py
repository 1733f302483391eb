"""Prefixes that outlive a process: what the KV caches hold, in a private folder of bounded size.

One file for each model and way to compute its keys and values: for each prefix its tokens, and the content
of its cells. llama.cpp checks little of what it is given, so a hash runs on from the key of the file over all
entries: nothing else than what was written for the same model reaches it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamaspec.errors import LlamaspecError
from llamaspec.files import replacing
from llamaspec.llama import runtime
from llamaspec.llama.cells import CachedSequence, CopiedSequence
from llamaspec.llama.kv_cache import KVCache
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.trial import file_identity

SUFFIX = ".prefixes"
_MAGIC = b"llamaspec prefixes 2\n"
_HEAD = struct.Struct("<iiiq")  # trunk or -1, tokens shared with it, tokens, bytes of content

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
        """Put what is saved of some models into their KV caches, which are empty."""
        n_tokens = 0
        for model in models:
            cache, path = model.prefix_cache, self.file_of(model)
            if cache is None:
                tell(f"prefixes of {model.path.name} are not saved: its memory cannot be copied")
                continue
            try:
                _read_prefixes(path, path.stem, cache)
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
            options.flash_attention, options.cache_type_k, options.cache_type_v, options.heads,
        ])  # fmt: skip
        return self.path / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{SUFFIX}"


def _write_prefixes(path: Path, key: str, copied: Iterator[CopiedSequence], limit: int) -> int:
    """Write prefixes as long as the file has at most `limit` bytes; how many it has. May raise OSError."""
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


def _read_prefixes(path: Path, key: str, cache: KVCache) -> None:
    """Put the prefixes of a file into an empty cache, each once it is known to be what was written for `key`.

    A prefix whose trunk found no room has none. Raises OSError or DamagedError.
    """
    held: list[CachedSequence | None] = []
    with open(path, "rb", opener=_open_private) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise DamagedError
        n_left = os.fstat(file.fileno()).st_size - len(_MAGIC)
        digest = _digest(b"", key.encode())
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
            if file.read(len(digest)) != digest or not -1 <= trunk < len(held):
                raise DamagedError
            base = held[trunk] if trunk >= 0 else None
            fits = trunk < 0 or base is not None
            held.append(cache.put_in(tokens.view(np.int32), content, base, n_shared) if fits else None)


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
