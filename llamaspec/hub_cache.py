"""huggingface-hub's cache folder: finds, fetches, checks and removes model files there.

    CACHE/models--owner--name/snapshots/COMMIT/FILE links to ../../blobs/HASH

Other programs share the folder. What the hub says is checked before a transfer (names, sizes, addresses), and
the content after it (the hash): only then the file gets its name. A transfer that was ended, however it was,
leaves blobs/HASH.incomplete, and the next one goes on from there.
"""

from __future__ import annotations

import difflib
import hashlib
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

from llamaspec.catalog import MAX_BYTES, RemoteFile, quoted
from llamaspec.errors import ModelFileError
from llamaspec.files import STALE_SECONDS, read_file, write_file
from llamaspec.llama.gguf_file import check_gguf

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_EXTRA_BYTES = 32 << 20  # received beyond twice the announced size
_RESUMED_SECONDS = 7 * 24 * 3600.0  # a transfer that nobody continued for so long is given up
_IN_USE_SECONDS = 60.0  # another process may still be writing to a file that changed more recently
_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")  # SHA-256, or git's SHA-1 of a file outside of LFS

OnFetch = Callable[[RemoteFile, int], None]  # told what is fetched, and how many bytes of it are missing


def find_here(file: RemoteFile) -> Path | None:
    """The file on this machine, its first part if it was split; None unless all parts are here together.

    huggingface-hub itself finds only what belongs to the newest commit that it saw.
    """
    for state in fetched_states(repo_folder(file.repo)):
        if all((state / part).is_file() for part in file.parts):
            return state / file.file
    return None


def remove(file: RemoteFile) -> int:
    """Delete a file and its parts from this machine; returns how many bytes that freed.

    Content that another name links to stays, and so does what is outside of the repository's folder. Parts of
    files that a transfer left are deleted, whatever file of the repository they belong to.
    """
    folder = repo_folder(file.repo)
    freed = _sweep(folder / "blobs", _IN_USE_SECONDS, _IN_USE_SECONDS)
    freed += sum(
        _remove_link(folder, state / part) for state in fetched_states(folder) for part in file.parts
    )
    kept = (path.is_file() for at in ("snapshots/**/*", "blobs/*.incomplete") for path in folder.glob(at))
    if folder.exists() and not any(kept):
        shutil.rmtree(folder)
    return freed


def repo_folder(repo: str) -> Path:
    """The folder of a repository; it need not exist."""
    from huggingface_hub import constants  # takes a while, and most models are given as files

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def fetched_states(folder: Path) -> list[Path]:
    """The fetched states of a repository: first that of the main branch, then the newest."""
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
    """One step only: a blob may itself link to a store that other programs share."""
    return Path(os.path.normpath(link.parent / link.readlink())) if link.is_symlink() else link


# Fetching


def fetch(file: RemoteFile, on_fetch: OnFetch | None = None) -> Path:
    """Bring a file here, whole and checked; returns its first part, with the others beside it.

    Raises
    ------
    ModelFileError
        The hub cannot be reached or does not give the file, the disk is too small, or the content is wrong.
    """
    try:
        parts = {part: _ask(file, part) for part in file.parts}
        if len({said.commit for said in parts.values()}) > 1:
            raise ModelFileError(f"{file} changed on the hub while it was fetched; pull it again")
        blobs = repo_folder(file.repo) / "blobs"
        _sweep(blobs, STALE_SECONDS, _RESUMED_SECONDS)
        n_missing = sum(said.n_bytes - _n_here(blobs / said.tag, said) for said in parts.values())
        folder = next(folder for folder in blobs.parents if folder.exists())
        free = shutil.disk_usage(folder).free
        if n_missing > free:
            raise ModelFileError(
                f"{file} needs {n_missing / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free; "
                "make room, or set HF_HOME to a folder on a larger disk"
            )
        if on_fetch is not None and n_missing:
            on_fetch(file, n_missing)
        paths = [_fetch_part(file, part, said) for part, said in parts.items()]
        main = blobs.with_name("refs") / "main"
        main.parent.mkdir(exist_ok=True)
        write_file(main, parts[file.file].commit)
    except ModelFileError:
        raise
    except Exception as error:  # whatever the library makes of a strange answer
        raise ModelFileError(_reason(file, error)) from error
    return paths[0]


@dataclass(frozen=True, slots=True)
class _Announced:
    """What the hub says of a file, as far as it is possible."""

    commit: str
    tag: str  # the content's hash
    n_bytes: int


def _ask(file: RemoteFile, part: str) -> _Announced:
    """Ask before anything is written: huggingface-hub takes the tag and the commit for paths."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    try:
        fact = get_hf_file_metadata(hf_hub_url(file.repo, part))
    except EntryNotFoundError as error:
        try:
            names = list_models(file.repo)
        except ModelFileError:
            names = []
        close = quoted(", ".join(difflib.get_close_matches(part, names, n=3, cutoff=0.3)))
        meant = f"did you mean {close}?" if close else "look at the files on its page at the hub"
        raise ModelFileError(f"{file.repo} has no file {part}; {meant}") from error
    said = _Announced(fact.commit_hash or "", fact.etag or "", fact.size or 0)
    fault = None
    if not _HASH.fullmatch(said.tag):
        fault = f"the hash {quoted(said.tag) or 'of no digits'}"
    elif not _COMMIT.fullmatch(said.commit):
        fault = f"the commit {quoted(said.commit) or 'of no digits'}"
    elif not 0 < said.n_bytes <= MAX_BYTES:
        fault = "no size that a file can have"
    elif urlsplit(fact.location).scheme not in ("http", "https"):
        fault = f"the address {quoted(fact.location)}"
    if fault is not None:
        raise ModelFileError(f"the hub gives {fault} for {part}; nothing was fetched")
    known = file.sha256 if file.parts == (part,) else None
    if known is not None and len(said.tag) == len(known) and known != said.tag:
        raise ModelFileError(
            f"{file} is not the file that the list of models describes: its hash is {said.tag[:12]}..., "
            f"expected {known[:12]}...; to use it anyway, give the model as {file}"
        )
    return said


def _fetch_part(file: RemoteFile, part: str, said: _Announced) -> Path:
    """Bring one file here, unless its content is, and check it; returns the link to it."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    folder = repo_folder(file.repo)
    blob, link = folder / "blobs" / said.tag, folder / "snapshots" / said.commit / part
    lock = folder.parent / ".locks" / folder.name / f"{said.tag}.lock"  # as other programs name it
    for path in (blob, link, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    if said.n_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE and not blob.exists():
        hf_hub_download(file.repo, part, revision=said.commit)  # by a protocol that cannot resume
    with WeakFileLock(lock):
        content = next((path for path in (link, blob) if path.exists()), None) or _transfer(file, part, said)
        try:
            _check(content, part, (file.sha256 if len(file.parts) == 1 else None) or said.tag)
        except ModelFileError:
            _remove_link(folder, content)
            raise
        if content != link:
            content.replace(blob)
            link.unlink(missing_ok=True)  # it leads nowhere
            try:
                link.symlink_to(os.path.relpath(blob, link.parent))
            except OSError:  # no links here
                blob.replace(link)
    return link


def _transfer(file: RemoteFile, part: str, said: _Announced) -> Path:
    """Fetch what is missing of a file's content; whatever ends this, the next transfer continues it."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        """The library's own; ends a transfer that brings far more than was announced."""

        n_done = 0

        def update(self, n: float | None = 1) -> Any:
            self.n_done += int(n or 0)
            if self.n_done > 2 * said.n_bytes + _MAX_EXTRA_BYTES:
                raise ModelFileError(f"the hub sends more than the {said.n_bytes} bytes of {part}; try later")
            return super().update(n)

    blob = repo_folder(file.repo) / "blobs" / said.tag
    content, n_here = _incomplete(blob), _n_here(blob, said)
    url = hf_hub_url(file.repo, part, revision=said.commit)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    bar = Bar(initial=n_here, **_bar_settings(part[-40:], said.n_bytes))  # type: ignore[no-untyped-call]
    try:
        with bar, content.open("ab" if n_here else "wb") as output:
            http_get(
                url, output, resume_size=n_here, headers=headers, expected_size=said.n_bytes, _tqdm_bar=bar
            )
    except BaseException as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        refused = status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        with suppress(OSError):  # such as that it could not be opened
            if refused or not 0 < content.stat().st_size <= said.n_bytes:
                content.unlink()  # it is not the beginning of this file
        raise
    return content


def _check(content: Path, part: str, expected: str) -> None:
    """Raise a ModelFileError unless the content has this hash and is a model."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    settings = _bar_settings("checking", content.stat().st_size)
    with tqdm(**settings) as bar:  # type: ignore[no-untyped-call]
        found = file_hash(content, len(expected), bar.update)
    if found != expected:
        raise ModelFileError(
            f"{part} arrived damaged: its hash is {found[:12]}..., expected {expected[:12]}...; "
            "it was deleted, pull it again"
        )
    try:
        check_gguf(content)
    except ModelFileError as error:
        reason = str(error).partition(";")[0].replace(str(content), "it")
        raise ModelFileError(
            f"what the hub has as {part} is no model: {reason}; name another file"
        ) from error


def _bar_settings(label: str, n_bytes: int) -> dict[str, Any]:
    """How bars look; off a terminal there are none, which the library finds out only if there is a stderr."""
    is_off = True if sys.stderr is None else None
    return {"total": n_bytes, "unit": "B", "unit_scale": True, "desc": label, "disable": is_off}


def _incomplete(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _n_here(blob: Path, said: _Announced) -> int:
    """How many bytes of a file's content need not be transferred."""
    if blob.exists():
        return said.n_bytes
    with suppress(OSError):
        n_bytes = _incomplete(blob).stat().st_size
        return n_bytes if n_bytes <= said.n_bytes else 0
    return 0


def _sweep(blobs: Path, stale_seconds: float, resumed_seconds: float) -> int:
    """Delete what ended transfers left, by its age; returns how many bytes that freed.

    huggingface-hub adds a random part to the name, and cannot continue such a file.
    """
    freed = 0
    for left in blobs.glob("*.incomplete"):
        most = resumed_seconds if _HASH.fullmatch(left.stem) else stale_seconds
        with suppress(OSError):  # another process was faster
            facts = left.stat()
            if time.time() - facts.st_mtime > most:
                left.unlink()
                freed += facts.st_size
    return freed


def file_hash(path: Path, n_digits: int, on_bytes: Callable[[int], object]) -> str:
    """SHA-256 in 64 digits, or in 40 what git computes of a file that is not in LFS."""
    digest = hashlib.sha256() if n_digits == 64 else hashlib.sha1(usedforsecurity=False)
    if n_digits != 64:
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


def list_models(repo: str) -> list[str]:
    """The names of the model files in a repository, as the hub gives them."""
    from huggingface_hub import HfApi, constants

    try:  # one request: `list_repo_files` asks again and again for minutes
        facts = HfApi(endpoint=constants.ENDPOINT).model_info(repo, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        names = [sibling.rfilename for sibling in facts.siblings or ()]
        return [name for name in names if name.endswith(".gguf")]
    except Exception as error:  # whatever the library makes of a strange answer
        raise ModelFileError(
            f"cannot see which models {repo} has: {quoted(str(error))}; name one: hf:owner/repo:file.gguf"
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
