"""Model files on the Hugging Face hub: their addresses, and huggingface-hub's cache folder of fetched ones.

    CACHE/models--owner--name/snapshots/COMMIT/FILE links to ../../blobs/HASH

Other programs share the folder. Names from outside become paths, so each must be a plain relative path. The
hub's metadata (names, sizes, addresses) is checked before a transfer, and the hash of the content after it;
only then does the file get its name. An interrupted transfer leaves blobs/HASH.incomplete, and the next one
resumes it. huggingface-hub no longer does that (2.4: each transfer writes a file of its own, and deletes it
if it fails), so transfers are ours.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llamaspec.errors import ModelFileError, quoted
from llamaspec.files import file_hash, is_plain, part_names, read_file, write_file
from llamaspec.llama.gguf_file import check_gguf

HUB = "hf:"
MAX_BYTES = 1 << 50  # of a file; a larger size must be a mistake
SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OWNER_OR_REPO = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_MAX_EXTRA_BYTES = 32 << 20  # received beyond twice the announced size
_STALE_SECONDS = 7 * 24 * 3600.0  # an interrupted transfer this old is deleted
_IN_USE_SECONDS = 60.0  # another process may still be writing to a file that changed more recently

OnFetch = Callable[["RemoteFile", int], None]  # called with the file and the number of missing bytes


# Addresses


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A model file on the hub; raises a ValueError if no repository or file can have this name."""

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
            raise ValueError(f"a model has no such part, got {quoted(self.file)}")

    @property
    def parts(self) -> tuple[str, ...]:
        """All files of a split model, in order; usually only this one."""
        return part_names(self.file)

    def __str__(self) -> str:
        return f"{HUB}{self.repo}:{self.file}"


def is_repo(name: str) -> bool:
    """Whether a repository can have this name, owner/name; "--" separates the two in the hub's cache."""
    parts = name.split("/")
    return len(parts) == 2 and all(_OWNER_OR_REPO.fullmatch(part) for part in parts)


# The cache folder


def find_here(file: RemoteFile) -> Path | None:
    """The file on this machine, or its first part if it was split; None unless all parts are here together.

    huggingface-hub itself finds only files of the newest commit that it has seen.
    """
    for state in fetched_states(repo_folder(file.repo)):
        if all((state / part).is_file() for part in file.parts):
            return state / file.file
    return None


def remove(file: RemoteFile) -> int:
    """Delete a file and its parts from this machine; return the number of bytes freed.

    Content that another name links to stays, and so does anything outside the repository's folder. Leftovers
    of interrupted transfers are deleted for the whole repository.
    """
    folder = repo_folder(file.repo)
    freed = _sweep(folder / "blobs", _IN_USE_SECONDS)
    freed += sum(
        _remove_link(folder, state / part) for state in fetched_states(folder) for part in file.parts
    )
    kept = (path.is_file() for at in ("snapshots/**/*", "blobs/*.incomplete") for path in folder.glob(at))
    if folder.exists() and not any(kept):
        shutil.rmtree(folder)
    return freed


def repo_folder(repo: str) -> Path:
    """The folder of a repository; it need not exist."""
    from huggingface_hub import constants  # slow to import, and most models are given as files

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def fetched_states(folder: Path) -> list[Path]:
    """The snapshots of a repository: the main branch first, then newest first."""
    try:
        main = read_file(folder / "refs" / "main", 100).decode(errors="replace").strip()
    except OSError:
        main = ""
    states = [path for path in (folder / "snapshots").glob("*") if path.is_dir() and not path.is_symlink()]
    return sorted(states, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)


def _remove_link(folder: Path, link: Path) -> int:
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
    """Follow one link only: a blob may itself link to a store that other programs share."""
    return Path(os.path.normpath(link.parent / link.readlink())) if link.is_symlink() else link


# Fetching


@dataclass(frozen=True, slots=True)
class _Part:
    """A file to fetch, as the hub announces it; validated, because its fields become paths."""

    repo: str
    name: str
    commit: str
    sha256: str
    n_bytes: int

    @property
    def blob(self) -> Path:
        """Where the content goes."""
        return repo_folder(self.repo) / "blobs" / self.sha256

    @property
    def incomplete(self) -> Path:
        """Where a transfer writes."""
        return self.blob.with_name(f"{self.sha256}.incomplete")

    @property
    def n_here(self) -> int:
        """Number of bytes that need no transfer."""
        if self.blob.exists():
            return self.n_bytes
        with suppress(OSError):
            n_bytes = self.incomplete.stat().st_size
            return n_bytes if n_bytes <= self.n_bytes else 0
        return 0


def fetch(file: RemoteFile, on_fetch: OnFetch | None = None) -> Path:
    """Fetch and check a file; return the path of its first part, with the others beside it.

    Raises
    ------
    ModelFileError
        The hub cannot be reached or refuses the file, the disk is full, or the content is wrong.
    """
    try:
        parts = [_announced(file, name) for name in file.parts]
        if len({part.commit for part in parts}) > 1:
            raise ModelFileError(f"{file} changed on the hub while it was fetched; pull it again")
        blobs = repo_folder(file.repo) / "blobs"
        _sweep(blobs, _STALE_SECONDS)
        n_missing = sum(part.n_bytes - part.n_here for part in parts)
        folder = next(folder for folder in blobs.parents if folder.exists())
        free = shutil.disk_usage(folder).free
        if n_missing > free:
            raise ModelFileError(
                f"{file} needs {n_missing / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free; "
                "make room, or set HF_HOME to a folder on a larger disk"
            )
        if on_fetch is not None and n_missing:
            on_fetch(file, n_missing)
        paths = [_fetch_part(part) for part in parts]
        main = blobs.with_name("refs") / "main"
        main.parent.mkdir(exist_ok=True)
        write_file(main, parts[0].commit)
    except ModelFileError:
        raise
    except Exception as error:  # the library raises many kinds for an unexpected answer
        raise ModelFileError(_reason(file, error)) from error
    return paths[0]


def _announced(file: RemoteFile, name: str) -> _Part:
    """Ask the hub for one part of a file; ModelFileError if the answer cannot be right."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    try:
        fact = get_hf_file_metadata(hf_hub_url(file.repo, name))
    except EntryNotFoundError as error:
        try:
            names = list_models(file.repo)
        except ModelFileError:
            names = []
        close = quoted(", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.3)))
        meant = f"did you mean {close}?" if close else "look at the files on its page at the hub"
        raise ModelFileError(f"{file.repo} has no file {name}; {meant}") from error
    part = _Part(file.repo, name, fact.commit_hash or "", fact.etag or "", fact.size or 0)
    fault = None
    if not SHA256.fullmatch(part.sha256):
        fault = f"the hash {quoted(part.sha256) or 'of no digits'}"
    elif not _COMMIT.fullmatch(part.commit):
        fault = f"the commit {quoted(part.commit) or 'of no digits'}"
    elif not 0 < part.n_bytes <= MAX_BYTES:
        fault = "no size that a file can have"
    elif urlsplit(fact.location).scheme not in ("http", "https"):
        fault = f"the address {quoted(fact.location)}"
    if fault is not None:
        raise ModelFileError(f"the hub gives {fault} for {name}; nothing was fetched")
    known = file.sha256 if file.parts == (name,) else None
    if known is not None and known != part.sha256:
        raise ModelFileError(
            f"{file} is not the file that the list of models describes: its hash is {part.sha256[:12]}..., "
            f"expected {known[:12]}...; to use it anyway, give the model as {file}"
        )
    return part


def _fetch_part(part: _Part) -> Path:
    """Fetch one file, unless its content is here, and check it; return the link to it."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    folder, blob = repo_folder(part.repo), part.blob
    link = folder / "snapshots" / part.commit / part.name
    lock = folder.parent / ".locks" / folder.name / f"{part.sha256}.lock"  # as other programs name it
    for path in (blob, link, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    if part.n_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE and not blob.exists():
        hf_hub_download(part.repo, part.name, revision=part.commit)  # uses a protocol that cannot resume
    with WeakFileLock(lock):
        content = next((path for path in (link, blob) if path.exists()), None) or _transfer(part)
        try:
            _check(content, part)
        except ModelFileError:
            _remove_link(folder, content)
            raise
        if content != link:
            content.replace(blob)
            link.unlink(missing_ok=True)  # a broken link
            try:
                link.symlink_to(os.path.relpath(blob, link.parent))
            except OSError:  # this file system has no links
                blob.replace(link)
    return link


def _transfer(part: _Part) -> Path:
    """Fetch the missing bytes of a file; if this is interrupted, the next transfer resumes it."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        """The library's bar; also aborts a transfer that is far larger than announced."""

        n_done = 0

        def update(self, n: float | None = 1) -> Any:
            self.n_done += int(n or 0)
            if self.n_done > 2 * part.n_bytes + _MAX_EXTRA_BYTES:
                raise ModelFileError(
                    f"the hub sends more than the {part.n_bytes} bytes of {part.name}; try later"
                )
            return super().update(n)

    content, n_here = part.incomplete, part.n_here
    url = hf_hub_url(part.repo, part.name, revision=part.commit)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    bar = Bar(initial=n_here, **_bar_settings(part.name[-40:], part.n_bytes))  # type: ignore[no-untyped-call]
    try:
        with bar, content.open("ab" if n_here else "wb") as output:
            http_get(
                url, output, resume_size=n_here, headers=headers, expected_size=part.n_bytes, _tqdm_bar=bar
            )
    except BaseException as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        refused = status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        with suppress(OSError):  # for example, it could not be opened
            if refused or not 0 < content.stat().st_size <= part.n_bytes:
                content.unlink()  # not the beginning of this file
        raise
    return content


def _check(content: Path, part: _Part) -> None:
    """Raise a ModelFileError unless the content has the announced hash and is a model."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    settings = _bar_settings("checking", content.stat().st_size)
    with tqdm(**settings) as bar:  # type: ignore[no-untyped-call]
        found = file_hash(content, bar.update)
    if found != part.sha256:
        raise ModelFileError(
            f"{part.name} arrived damaged: its hash is {found[:12]}..., expected {part.sha256[:12]}...; "
            "it was deleted, pull it again"
        )
    try:
        check_gguf(content)
    except ModelFileError as error:
        reason = str(error).partition(";")[0].replace(str(content), "it")
        raise ModelFileError(
            f"what the hub has as {part.name} is no model: {reason}; name another file"
        ) from error


def _bar_settings(label: str, n_bytes: int) -> dict[str, Any]:
    """Options of progress bars; off if there is no stderr, which the library does not check."""
    is_off = True if sys.stderr is None else None
    return {"total": n_bytes, "unit": "B", "unit_scale": True, "desc": label, "disable": is_off}


def _sweep(blobs: Path, seconds: float) -> int:
    """Delete interrupted transfers that are older than this; return the number of bytes freed."""
    freed = 0
    for left in blobs.glob("*.incomplete"):
        with suppress(OSError):  # another process was faster
            facts = left.stat()
            if time.time() - facts.st_mtime > seconds:
                left.unlink()
                freed += facts.st_size
    return freed


def list_models(repo: str) -> list[str]:
    """The names of the model files in a repository, as the hub gives them."""
    from huggingface_hub import HfApi, constants

    try:  # one request: `list_repo_files` asks again and again for minutes
        facts = HfApi(endpoint=constants.ENDPOINT).model_info(repo, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        names = [sibling.rfilename for sibling in facts.siblings or ()]
        return [name for name in names if name.endswith(".gguf")]
    except Exception as error:  # the library raises many kinds for an unexpected answer
        raise ModelFileError(
            f"cannot list the models of {repo}: {quoted(str(error))}; name one: hf:owner/repo:file.gguf"
        ) from error


def _reason(file: RemoteFile, error: Exception) -> str:
    from huggingface_hub import errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the transport

    pull = f"`llamaspec models pull {file}`"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{file} is not on this machine, and HF_HUB_OFFLINE is set; unset it and run {pull} once"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{file.repo} is given only to those who agreed to its terms; agree on its page at the hub, "
            "then run `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the hub has no repository {file.repo}, or it is private; check the name or run `hf auth login`"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub answered {error.response.status_code} for {file}; try {pull} later"
    detail = quoted(getattr(error, "strerror", None) or str(error))
    if isinstance(error, HTTPError | errors.LocalEntryNotFoundError):
        return f"{file} is not on this machine, and the hub cannot be reached ({detail}); try {pull} later"
    if isinstance(error, OSError):
        return f"cannot keep {file}: {detail}; see to the disk, and {pull} again"
    return f"the hub gives an answer for {file} that makes no sense ({detail}); try {pull} later"
