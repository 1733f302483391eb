"""Fetching model files from the Hugging Face hub into huggingface-hub's cache folder.

The hub's metadata (names, sizes, addresses) is checked before a transfer, and the hash of the content after
it. Only then does the file get its name. An interrupted transfer leaves blobs/HASH.incomplete, and the next
one resumes it. huggingface-hub itself no longer resumes transfers: since 2.4, each writes a file of its own,
and deletes it on failure. tests/hub/test_fetching.py.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llamaspec.errors import FetchError, ModelFileError, quoted
from llamaspec.files import file_hash, write_file
from llamaspec.hub import MAX_BYTES, SHA256, RemoteFile, remove_link, repo_folder, sweep
from llamaspec.llama.gguf_file import check_gguf

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_EXTRA_BYTES = 32 << 20  # received beyond twice the announced size
_STALE_SECONDS = 7 * 24 * 3600.0  # an interrupted transfer this old is deleted

OnFetch = Callable[[RemoteFile, int], None]  # called with the file and the number of missing bytes


@dataclass(frozen=True, slots=True)
class _Part:
    """A file as the hub announces it; checked before it is made, because its fields become paths."""

    repo: str
    name: str
    commit: str
    sha256: str
    n_bytes: int

    @property
    def blob(self) -> Path:
        """The path of the content."""
        return repo_folder(self.repo) / "blobs" / self.sha256

    @property
    def incomplete(self) -> Path:
        """The path of a transfer that has not ended."""
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
    """Fetch and check a model file; return the path of its first part, with the other parts beside it.

    Raises
    ------
    ModelFileError
        The hub cannot be reached or refuses the file, the disk is full, or the content is wrong.
    """
    try:
        parts = [_announced(file, name) for name in file.parts]
        if len({part.commit for part in parts}) > 1:
            raise FetchError(f"{file} changed on the hub during the download; pull it again")
        blobs = repo_folder(file.repo) / "blobs"
        sweep(blobs, _STALE_SECONDS)
        n_missing = sum(part.n_bytes - part.n_here for part in parts)
        folder = next(folder for folder in blobs.parents if folder.exists())
        free = shutil.disk_usage(folder).free
        if n_missing > free:
            raise ModelFileError(
                f"{file} needs {_size(n_missing)}, {_size(n_missing - free)} more than {folder} has free; "
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
    except Exception as error:  # the library raises many types for an unexpected answer
        raise _fetch_error(file, error) from error
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
        remedy = f"did you mean {close}?" if close else "see the files on its page at the hub"
        raise FetchError(f"{file.repo} has no file {name}; {remedy}") from error
    part = _Part(file.repo, name, fact.commit_hash or "", fact.etag or "", fact.size or 0)
    fault = None
    if not SHA256.fullmatch(part.sha256):
        fault = f"hash '{quoted(part.sha256)}'"
    elif not _COMMIT.fullmatch(part.commit):
        fault = f"commit '{quoted(part.commit)}'"
    elif not 0 < part.n_bytes <= MAX_BYTES:
        fault = "size"
    elif urlsplit(fact.location).scheme not in ("http", "https"):
        fault = f"address '{quoted(fact.location)}'"
    if fault is not None:
        raise FetchError(f"the hub gives an invalid {fault} for {name}; nothing was fetched, try later")
    known = file.sha256 if file.parts == (name,) else None
    if known is not None and known != part.sha256:
        raise FetchError(
            f"{file} is not the file in the list of models: its hash is {part.sha256[:12]}..., "
            f"expected {known[:12]}...; to use it anyway, give the model as {file}"
        )
    return part


def _fetch_part(part: _Part) -> Path:
    """Check the content of one file, fetching it if it is not on this machine; return the link to it."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    folder, blob = repo_folder(part.repo), part.blob
    link = folder / "snapshots" / part.commit / part.name
    lock = folder.parent / ".locks" / folder.name / f"{part.sha256}.lock"  # as other programs call it
    for path in (blob, link, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    if part.n_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE and not blob.exists():
        hf_hub_download(part.repo, part.name, revision=part.commit)  # too large for HTTP: cannot be resumed
    with WeakFileLock(lock):
        content = next((path for path in (link, blob) if path.exists()), None) or _transfer(part)
        try:
            _check(content, part)
        except ModelFileError:
            remove_link(folder, content)
            raise
        if content != link:
            content.replace(blob)
            link.unlink(missing_ok=True)  # a broken link
            try:
                link.symlink_to(os.path.relpath(blob, link.parent))
            except OSError:  # the file system has no links
                blob.replace(link)
    return link


def _transfer(part: _Part) -> Path:
    """Fetch the missing bytes of a file; the next transfer resumes an interrupted one."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        """A progress bar that aborts a transfer which is far larger than announced."""

        n_done = 0

        def update(self, n: float | None = 1) -> Any:
            self.n_done += int(n or 0)
            if self.n_done > 2 * part.n_bytes + _MAX_EXTRA_BYTES:
                raise FetchError(
                    f"the hub sends more than the announced {part.n_bytes} bytes of {part.name}; try later"
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
        with suppress(OSError):  # the file may not exist
            if refused or not 0 < content.stat().st_size <= part.n_bytes:
                content.unlink()  # it is not a beginning of this file
        raise
    return content


def _check(content: Path, part: _Part) -> None:
    """Raise a ModelFileError unless the content has the announced hash and is a model."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    settings = _bar_settings("checking", content.stat().st_size)
    with tqdm(**settings) as bar:  # type: ignore[no-untyped-call]
        found = file_hash(content, bar.update)
    if found != part.sha256:
        raise FetchError(
            f"{part.name} arrived damaged and was deleted: its hash is {found[:12]}..., "
            f"expected {part.sha256[:12]}...; pull it again"
        )
    try:
        check_gguf(content)
    except ModelFileError as error:
        reason = str(error).partition(";")[0].replace(str(content), "it")
        raise FetchError(f"{part.name} on the hub is not a model: {reason}; name another file") from error


def _bar_settings(label: str, n_bytes: int) -> dict[str, Any]:
    """Return the options of a progress bar; off without a stderr, which the library does not check."""
    is_off = True if sys.stderr is None else None
    return {"total": n_bytes, "unit": "B", "unit_scale": True, "desc": label, "disable": is_off}


def list_models(repo: str) -> list[str]:
    """Return the names of the model files in a repository, as the hub gives them."""
    from huggingface_hub import HfApi, constants, errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's

    try:  # one request, because `list_repo_files` retries for minutes
        facts = HfApi(endpoint=constants.ENDPOINT).model_info(repo, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        names = [sibling.rfilename for sibling in facts.siblings or ()]
        return [name for name in names if name.endswith(".gguf")]
    except Exception as error:  # the library raises many types for an unexpected answer
        reason, remedy = quoted(str(error)), "name one as hf:owner/repo:file.gguf"
        if isinstance(error, HTTPError) and not isinstance(error, errors.HfHubHTTPError):
            reason, remedy = f"the hub cannot be reached ({reason})", "check the network, or name a file"
        kind = FetchError if isinstance(error, HTTPError) else ModelFileError
        raise kind(f"cannot list the models of {repo}: {reason}; {remedy}") from error


def _size(n_bytes: int) -> str:
    """Return a size in the unit that shows it."""
    if n_bytes < 1e6:
        return f"{n_bytes} bytes"
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes < 1e8 else f"{n_bytes / 1e9:.1f} GB"


def _fetch_error(file: RemoteFile, error: Exception) -> ModelFileError:
    """Return the error for an exception of the library, which may name files of this machine."""
    from huggingface_hub import errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's

    pull = f"`llamaspec models pull {file}`"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return FetchError(
            f"{file} is not on this machine, and HF_HUB_OFFLINE is set; unset it and run {pull} once"
        )
    if isinstance(error, errors.GatedRepoError):
        return FetchError(
            f"{file.repo} requires you to accept its terms; accept them on its page at the hub, "
            "then run `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return FetchError(
            f"the hub has no repository {file.repo}, or it is private; check the name or run `hf auth login`"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return FetchError(f"the hub answered {error.response.status_code} for {file}; try {pull} later")
    detail = quoted(getattr(error, "strerror", None) or str(error))
    if isinstance(error, HTTPError | errors.LocalEntryNotFoundError):
        return FetchError(
            f"{file} is not on this machine, and the hub cannot be reached ({detail}); try {pull} later"
        )
    if isinstance(error, OSError):
        remedy = f"check the disk, or set HF_HOME to another folder, and run {pull} again"
        return ModelFileError(f"cannot store {file}: {detail}; {remedy}")
    return ModelFileError(f"the hub gave an invalid answer for {file} ({detail}); try {pull} later")
