"""Small files of users and of llamaspec, and the names of model files.

A file is read whole, and only if it is regular and not too large, so pipes, devices and huge files cannot
block. It is replaced in one step. pydantic validates its content strictly against a dataclass: no numbers in
quotes, no unknown keys, no NaN.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from glob import escape
from io import FileIO
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar, cast

from llamaspec.errors import ModelFileError, printable, quoted

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
Unknown = Literal["forbid", "ignore"]  # how to treat keys that a dataclass lacks

STALE_SECONDS = 3600.0  # a killed process has left a temporary file this old
_LONGEST_REASON = 200  # characters
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 1024  # limits of file systems
_PART = re.compile(r"(.*)-[0-9]{5}-of-([0-9]{5})\.gguf", re.DOTALL)


def cache_folder() -> Path:
    """Return the folder of files that can be made again: $LLAMASPEC_CACHE, or the user's cache folder."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("LLAMASPEC_CACHE") or user_cache_dir("llamaspec", appauthor=False))


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes; otherwise an OSError whose `strerror` says why."""
    content = read_beginning(path, limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes")
    return content


def read_beginning(path: Path, n: int) -> bytes:
    """Read the first `n` bytes of a regular file, or all if it is shorter; otherwise an OSError."""
    with regular_file(path) as file:
        return file.read(n) or b""


@contextmanager
def regular_file(path: Path) -> Iterator[FileIO]:
    """Open a file to read it, without a buffer; OSError if it is a device, or a pipe, which could block."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", buffering=0, opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        yield file


def file_identity(path: Path) -> str:
    """Return a hash of the size and the first MiB of a large file, which identifies it in any folder."""
    key = hashlib.sha256(str(path.stat().st_size).encode())
    key.update(read_beginning(path, 1 << 20))
    return key.hexdigest()[:32]


def file_hash(path: Path, on_bytes: Callable[[int], object]) -> str:
    """Return the SHA-256 of a file in hexadecimal digits; `on_bytes` receives the size of each chunk."""
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


def is_plain(name: str) -> bool:
    """Whether a name is a relative path that cannot lead out of its folder, on any system."""
    try:
        content = name.encode()
    except UnicodeEncodeError:
        return False
    return (
        printable(name) == name
        and not set(name) & set('\\:*?"<>|')
        and not any(part in ("", ".", "..") for part in name.split("/"))
        and max(len(part) for part in content.split(b"/")) <= _MAX_NAME_BYTES
        and len(content) <= _MAX_PATH_BYTES
    )


def part_names(name: str) -> tuple[str, ...]:
    """Return the names of all parts of a split model; any other file has one part.

    Examples
    --------
    >>> part_names("big-00002-of-00002.gguf")
    ('big-00001-of-00002.gguf', 'big-00002-of-00002.gguf')
    """
    found = _PART.fullmatch(name)
    if found is None:
        return (name,)
    return tuple(f"{found[1]}-{i:05}-of-{found[2]}.gguf" for i in range(1, int(found[2]) + 1))


def model_stem(name: str) -> str:
    """Return the name of a model file without its suffix and part number.

    Examples
    --------
    >>> model_stem("big-00002-of-00002.gguf")
    'big'
    """
    found = _PART.fullmatch(name)
    return found[1] if found else Path(name).stem


def write_file(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file in one step: whatever happens, a reader finds the old content or the new.

    The folder must exist. A link to a regular file stays a link. An existing file keeps its owner and its
    permissions, but only the user can read a private file.

    Raises
    ------
    OSError
        The old content is unchanged, and no other file is left.
    """
    with replacing(path, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` at the end of the block, as `write_file` does."""
    real = Path(os.path.realpath(path))
    path = real if real.is_file() else path
    prefix = f".{path.name[:40]}."
    _sweep(path.parent, prefix)
    new = path.with_name(f"{prefix}{secrets.token_hex(6)}.tmp")
    try:
        before = path.stat() if path.is_file() else None
        if private or before is not None:
            new.touch(mode=0o600, exist_ok=False)
        with new.open("wb") as file:
            yield file
        if before is not None:
            with suppress(PermissionError):  # only root may give files away
                os.chown(new, before.st_uid, before.st_gid)
            if not private:
                new.chmod(before.st_mode & 0o777)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def parse_json(kind: type[T], content: str | bytes, unknown: Unknown = "forbid") -> T:
    """Make a dataclass, or a container of dataclasses, from JSON.

    Raises
    ------
    ValueError
        The content does not match; the message is one line.
    """
    from pydantic import ValidationError  # slow to import, and most commands read no such file

    data = content.encode() if isinstance(content, str) else content
    if not data.strip():
        raise ValueError("it is empty")
    try:
        return cast(T, _adapter(cast(Any, kind), unknown).validate_json(b"[" + data + b"]")[0])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        message = first["msg"].removeprefix("Value error, ")
        message = f"{place}: {message[:1].lower()}{message[1:]}" if place else message
        raise ValueError(printable(message)[:_LONGEST_REASON]) from error


@lru_cache(maxsize=32)
def _adapter(kind: Any, unknown: Unknown) -> TypeAdapter[Any]:
    """Return a validator of a one-tuple: a configuration reaches a dataclass only inside a container."""
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(strict=True, extra=unknown, allow_inf_nan=False)
    one: Any = GenericAlias(tuple, (kind,))
    return TypeAdapter(one, config=config)


def _sweep(folder: Path, prefix: str) -> None:
    """Delete temporary files of killed processes."""
    for left in folder.glob(f"{escape(prefix)}*.tmp"):
        with suppress(OSError):  # another process has deleted it
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink()


def expanded(path: str) -> Path:
    """Return a path with ~ expanded; ModelFileError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = quoted(path.partition("/")[0])
        raise ModelFileError(f"there is no home folder {user} for {quoted(path)}; check the path") from error
