"""A model file on the hub by its address, hf:owner/repo:file, and the rules for names from outside.

Such a name becomes a path on this machine, so it is a plain relative path: no "..", nothing absolute, nothing
invisible. `below` looks again after links are resolved. Knows neither the network nor which files are here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from llamaspec.errors import ModelFileError, printable

HUB = "hf:"
MAX_BYTES = 1 << 50  # of a file; a larger size is a mistake
SHA256 = re.compile(r"[0-9a-f]{64}")
_OWNER_OR_REPO = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_LONGEST_PART = 96  # characters of an owner or a repository
_LONGEST_NAME, _LONGEST_FILE = 255, 1024  # bytes: of one folder or file, of the path inside the repository
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A model file on the hub.

    Raises
    ------
    ValueError
        The repository or the file cannot be one.
    """

    repo: str  # owner/name
    file: str  # path inside the repository; of a model in parts, the first
    n_bytes: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if not is_repo(self.repo):
            raise ValueError(f"a repository is named owner/name, got {quoted(self.repo)}")
        if not self.file.endswith(".gguf"):
            raise ValueError(f"a model file ends in .gguf, got {quoted(self.file)}")
        if not is_plain(self.file):
            raise ValueError(f"a model file is a plain path inside its repository, got {quoted(self.file)}")
        found = _PART.fullmatch(self.file)
        if found is not None and not 1 <= int(found[2]) <= int(found[3]):
            raise ValueError(f"a model has no such part, got {quoted(self.file)}")

    @property
    def parts(self) -> tuple[str, ...]:
        """All files of a model that was split, in order; usually this one alone."""
        found = _PART.fullmatch(self.file)
        if found is None:
            return (self.file,)
        stem, _, n = found.groups()
        return tuple(f"{stem}-{i:05}-of-{n}.gguf" for i in range(1, int(n) + 1))

    def __str__(self) -> str:
        return f"{HUB}{self.repo}:{self.file}"


def remote_file(address: str) -> RemoteFile:
    """The file of an address.

    Raises
    ------
    ModelFileError
        It is no address.
    """
    repo, _, file = address.removeprefix(HUB).partition(":")
    try:
        return RemoteFile(repo, file)
    except ValueError as error:
        raise ModelFileError(
            f"{quoted(address)} is no address: {error}; write hf:owner/repo:file.gguf"
        ) from error


def address_of_page(url: str) -> str:
    """The address of a repository or a file whose page's address was copied from a browser.

    Raises
    ------
    ModelFileError
        It is another page.
    """
    from huggingface_hub import constants  # takes a while, and most models are files

    page = url.partition("?")[0].partition("#")[0].removeprefix(f"{constants.ENDPOINT}/")
    parts = unquote(page).strip("/").split("/")
    if len(parts) == 2 or (parts[2:] == ["tree", "main"]):
        return f"{HUB}{parts[0]}/{parts[1]}"
    if parts[2:4] in (["blob", "main"], ["resolve", "main"]) and len(parts) > 4:
        return f"{HUB}{parts[0]}/{parts[1]}:{'/'.join(parts[4:])}"
    raise ModelFileError(
        f"{quoted(url)} is no page of a model on the hub's main branch; write hf:owner/repo:file.gguf"
    )


def is_repo(name: str) -> bool:
    """Whether a repository can be called so."""
    parts = name.split("/")
    return len(parts) == 2 and all(map(_is_owner_or_repo, parts))


def matching(names: Iterable[str], repo: str, quantization: str) -> list[RemoteFile]:
    """The models among a repository's files with a quantization, "" = any; of a split one the first part."""
    marked = re.compile(rf"(?:^|[-._/]){re.escape(quantization)}(?:[-./]|$)", re.IGNORECASE)
    found = []
    for name in dict.fromkeys(names):
        with suppress(ValueError):  # no model, or a name that leads elsewhere
            file = RemoteFile(repo, name)
            is_model = file.parts[0] == name and "mmproj" not in name
            if is_model and (not quantization or marked.search(name)):
                found.append(file)
    return found


def is_plain(name: str) -> bool:
    """Whether a name is a relative path that cannot lead out of its folder, on any system."""
    parts = name.split("/")
    try:
        lengths = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return False
    return (
        printable(name) == name
        and not set(name) & set('\\:*?"<>|')
        and not any(part in ("", ".", "..") for part in parts)
        and max(lengths) <= _LONGEST_NAME
        and sum(lengths) + len(parts) - 1 <= _LONGEST_FILE
    )


def below(folder: Path, name: str) -> Path:
    """The path of a name inside a folder; a link may stand at its end, but not lead out on the way.

    Raises
    ------
    ModelFileError
        It leads elsewhere.
    """
    path = folder / name
    top, parent = os.path.realpath(folder), os.path.realpath(path.parent)
    if not is_plain(name) or os.path.commonpath([top, parent]) != top:
        raise ModelFileError(f"{quoted(name)} leads out of {folder}; nothing there is read or written")
    return path


def quoted(text: str) -> str:
    """A name from outside, for a message of one line."""
    return f"{printable(text[:200])}{'...' if len(text) > 200 else ''}"


def _is_owner_or_repo(part: str) -> bool:
    plain = _OWNER_OR_REPO.fullmatch(part) is not None and len(part) <= _LONGEST_PART
    return plain and "--" not in part and ".." not in part  # "--" separates the two in the hub's cache
