"""Addresses of model files on the Hugging Face hub, and huggingface-hub's cache folder on this machine.

    CACHE/models--owner--name/snapshots/COMMIT/FILE links to ../../blobs/HASH

Other programs share the folder. Names from outside become paths, so each must be a plain relative path.
tests/hub/test_names.py.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from llamaspec.errors import FetchError, ModelFileError, quoted
from llamaspec.files import is_plain, model_stem, part_names, read_file
from llamaspec.model_names import PREFIXES, quantization_of

HUB = "hf:"
MAX_BYTES = 1 << 50  # of a file; a larger size must be a mistake
SHA256 = re.compile(r"[0-9a-f]{64}")
_OWNER_OR_REPO = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_IN_USE_SECONDS = 60.0  # another process may still be writing to a file that changed more recently


# Addresses


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A model file on the hub; ValueError if no repository or file can have this name."""

    repo: str  # owner/name
    file: str  # path inside the repository; the first part of a split model
    n_bytes: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if not is_repo(self.repo):
            raise ValueError(f"a repository is named owner/name, got {quoted(self.repo)}")
        if not self.file.endswith(".gguf"):
            raise ValueError(f"a model file ends in .gguf, got {quoted(self.file)}")
        if not is_plain(self.file):
            raise ValueError(f"a model file is a plain path inside its repository, got {quoted(self.file)}")
        if self.file not in self.parts:
            raise ValueError(f"a split model has no part with this number, got {quoted(self.file)}")

    @property
    def parts(self) -> tuple[str, ...]:
        """The files of a split model, in order; usually only this one."""
        return part_names(self.file)

    def __str__(self) -> str:
        return f"{HUB}{self.repo}:{self.file}"


def is_repo(name: str) -> bool:
    """Whether a repository can have this name, owner/name. "--" separates the two in the cache folder."""
    parts = name.split("/")
    return len(parts) == 2 and all(_OWNER_OR_REPO.fullmatch(part) for part in parts)


def remote_file(address: str) -> RemoteFile:
    """Return the file of an address, hf:owner/repo:file; ModelFileError if it is not an address."""
    repo, _, file = address.removeprefix(HUB).partition(":")
    try:
        return RemoteFile(repo, file)
    except ValueError as error:
        raise FetchError(
            f"{quoted(address)} is not an address: {error}; write hf:owner/repo:file.gguf"
        ) from error


def is_address(name: str) -> bool:
    """Whether a name is that of a model on the hub: hf:owner/repo, hf.co/owner/repo, or the URL of a page."""
    return name.lower().startswith((*PREFIXES, "https://", "http://"))


def is_path(name: str) -> bool:
    """Whether a name is a path, by its form or because the file exists; a folder hides no listed model."""
    if is_address(name):
        return False
    if name.endswith(".gguf") or "/" in name or "\\" in name:
        return True
    return os.path.exists(name) and not os.path.isdir(name)  # noqa: PTH110, PTH112 - Path raises for a NUL


def address_of(name: str) -> str:
    """Return the address, hf:..., that a name on the hub means, as llamaspec or Ollama writes it."""
    for prefix in PREFIXES:
        if name.lower().startswith(prefix):
            return f"{HUB}{name[len(prefix) :].removesuffix(':latest')}"
    from huggingface_hub import constants  # slow to import

    return address_of_page(name, constants.ENDPOINT)


def names_on_hub(file: RemoteFile) -> tuple[str, str, str]:
    """Return the names of a file on the hub: its own, its repository's, and that with its quantization."""
    name, on_hub = model_stem(PurePosixPath(file.file).name), f"hf.co/{file.repo}"
    return name, on_hub, f"{on_hub}:{quantization_of(name)}"


def address_of_page(url: str, hub_url: str) -> str:
    """Return the address, hf:..., of the repository or file that a page of the hub shows."""
    page = url.partition("?")[0].partition("#")[0].removeprefix(f"{hub_url}/")
    parts = unquote(page).strip("/").split("/")
    if len(parts) == 2 or parts[2:] == ["tree", "main"]:
        return f"{HUB}{parts[0]}/{parts[1]}"
    if parts[2:4] in (["blob", "main"], ["resolve", "main"]) and len(parts) > 4:
        return f"{HUB}{parts[0]}/{parts[1]}:{'/'.join(parts[4:])}"
    raise ModelFileError(
        f"{quoted(url)} is not the page of a model on the hub's main branch; write hf:owner/repo:file.gguf"
    )


def files_of(names: Iterable[str], repo: str, quantization: str) -> list[RemoteFile]:
    """Return the models of a quantization ("" = any) among a repository's files."""
    marked = re.compile(rf"(?:^|[-._/]){re.escape(quantization)}(?:[-./]|$)", re.IGNORECASE)
    found = []
    for name in dict.fromkeys(names):
        with suppress(ValueError):  # not a model, or a path that leads out of the repository
            file = RemoteFile(repo, name)
            is_model = file.parts[0] == name and "mmproj" not in name
            if is_model and (not quantization or marked.search(name)):
                found.append(file)
    return found


# The cache folder


def find_here(file: RemoteFile) -> Path | None:
    """Return the path of a file, of which all parts must be in one snapshot; None if it is not here.

    huggingface-hub itself finds only files of the newest commit that it has seen.
    """
    for snapshot in fetched_snapshots(repo_folder(file.repo)):
        if all((snapshot / part).is_file() for part in file.parts):
            return snapshot / file.file
    return None


def remove(file: RemoteFile) -> int:
    """Delete a file with all its parts from this machine; return the number of bytes freed.

    Content stays if another name links to it, or if it is outside the repository's folder. Interrupted
    transfers of the repository are deleted, too.
    """
    folder = repo_folder(file.repo)
    freed = sweep(folder / "blobs", _IN_USE_SECONDS)
    for snapshot in fetched_snapshots(folder):
        freed += sum(remove_link(folder, snapshot / part) for part in file.parts)
    kept = (path.is_file() for at in ("snapshots/**/*", "blobs/*.incomplete") for path in folder.glob(at))
    if folder.exists() and not any(kept):
        shutil.rmtree(folder)
    return freed


def repo_folder(repo: str) -> Path:
    """Return the folder of a repository, which may not exist."""
    from huggingface_hub import constants  # slow to import, and most models are given as files

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def fetched_snapshots(folder: Path) -> list[Path]:
    """Return the snapshots of a repository: the main branch, then the others, newest first."""
    try:
        main = read_file(folder / "refs" / "main", 100).decode(errors="replace").strip()
    except OSError:
        main = ""
    found = [path for path in (folder / "snapshots").glob("*") if path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)


def fetched_models() -> Iterator[tuple[RemoteFile, Path]]:
    """Yield all models in the cache folder of which all parts are there, each once, with its path."""
    for folder in sorted(repo_folder("*/*").parent.glob("models--*")):
        repo, seen = folder.name.removeprefix("models--").replace("--", "/", 1), set[str]()
        for snapshot in fetched_snapshots(folder):
            for path in sorted(snapshot.rglob("*.gguf")):
                name = path.relative_to(snapshot).as_posix()
                with suppress(ValueError):  # not the name of a model
                    file = RemoteFile(repo, name)
                    is_whole = all((snapshot / part).is_file() for part in file.parts)
                    if name == file.parts[0] and name not in seen and is_whole:
                        seen.add(name)
                        yield file, path


def remove_link(folder: Path, link: Path) -> int:
    """Delete a name in a repository's folder, and content without other names; return the bytes freed."""
    parent = Path(os.path.realpath(link.parent))
    if not link.is_file() or not parent.is_relative_to(os.path.realpath(folder)):
        return 0
    n_bytes = link.stat().st_size
    content = _content(link)
    link.unlink()
    if content != link:
        links = (path for path in (folder / "snapshots").rglob("*") if path.is_symlink())
        if content.parent != folder / "blobs" or any(_content(path) == content for path in links):
            return 0
        content.unlink(missing_ok=True)
    return n_bytes


def _content(link: Path) -> Path:
    """Follow one link only, because a blob may itself be a link into a store that other programs share."""
    return Path(os.path.normpath(link.parent / link.readlink())) if link.is_symlink() else link


def sweep(blobs: Path, seconds: float) -> int:
    """Delete interrupted transfers older than `seconds`; return the number of bytes freed."""
    freed = 0
    for left in blobs.glob("*.incomplete"):
        with suppress(OSError):  # another process has deleted it
            facts = left.stat()
            if time.time() - facts.st_mtime > seconds:
                left.unlink()
                freed += facts.st_size
    return freed
