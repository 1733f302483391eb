"""Fetches model files from the hub into its own cache folder, once; from then on no network is needed.

huggingface-hub knows the protocol, the tokens and the folders; the bytes are `hub/transfer.py`'s. What is
done here: room on the disk is looked at first; two that fetch the same file do not spoil it; a file gets its
name when it is whole, has the announced hash and is a GGUF; and whatever goes wrong becomes one line.
"""

from __future__ import annotations

import difflib
import importlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from filelock import FileLock
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is that of the transport in use
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from llamaspec.errors import ModelFileError
from llamaspec.files import write_file
from llamaspec.hub.cache import PARTIAL, folder_of
from llamaspec.hub.progress import FetchProgress, OnFetch
from llamaspec.hub.remote import RemoteFile, below, quoted
from llamaspec.hub.transfer import Announced, OnBytes, append, check_hash, list_files, token
from llamaspec.llama.gguf_header import check_gguf

# For addresses that the transport in use (httpx, or its successor) cannot read.
_InvalidURL: type[Exception] = importlib.import_module(HTTPError.__module__.partition(".")[0]).InvalidURL


def fetch(file: RemoteFile, on_progress: OnFetch | None = None) -> Path:
    """Bring a file here, whole and checked.

    Returns
    -------
    Path
        The file, its first part if it was split: llama.cpp finds the others beside it.

    Raises
    ------
    ModelFileError
        The hub cannot be reached or does not give the file, the disk is too small, or the content is wrong.
        What has arrived stays, and the next try goes on from there.
    """
    with _told_in_one_line(file):
        parts = {part: _ask(file, part) for part in file.parts}
        if len({said.commit for said in parts.values()}) > 1:
            raise ModelFileError(f"{file} changes on the hub while it is asked for; pull it again")
        missing = _check_room(file, parts)
        tell = _Teller(file, on_progress, sum(said.n_bytes for said in parts.values()))
        if missing:
            tell("fetching", tell.total_bytes - missing, tell.total_bytes)
        for said in parts.values():
            _fetch_part(file, said, tell)
        paths = [_name(file, part, said) for part, said in parts.items()]
        write_file(below(folder_of(file), "refs/main"), next(iter(parts.values())).commit)
    return paths[0]


def list_models(repo: str) -> list[str]:
    """The model files of a repository.

    Raises
    ------
    ModelFileError
        The hub does not say.
    """
    try:
        return [name for name in list_files(repo) if name.endswith(".gguf")]
    except (HTTPError, OSError, ValueError) as error:
        raise ModelFileError(
            f"cannot see which models {repo} has: {quoted(str(error))}; name one: hf:owner/repo:file.gguf"
        ) from error


class _Teller:
    """Tells how far all parts together are."""

    def __init__(self, file: RemoteFile, on_progress: OnFetch | None, total_bytes: int) -> None:
        self._file, self._on_progress, self.total_bytes = file, on_progress, total_bytes
        self._before = 0  # bytes of the parts that are done

    def __call__(self, activity: Literal["fetching", "checking"], done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(FetchProgress(self._file, activity, done, total))

    def fetching(self, said: Announced) -> OnBytes:
        before, self._before = self._before, self._before + said.n_bytes
        return lambda done: self("fetching", before + done, self.total_bytes)

    def checking(self, said: Announced) -> OnBytes:
        return lambda done: self("checking", done, said.n_bytes)


def _ask(file: RemoteFile, part: str) -> Announced:
    try:
        return Announced.of(get_hf_file_metadata(hf_hub_url(file.repo, part), token=token() or False), part)
    except EntryNotFoundError as error:
        raise ModelFileError(_no_such_file(file, part)) from error


def _no_such_file(file: RemoteFile, part: str) -> str:
    """Names what is similar, if the hub lists the repository's files."""
    try:
        others = [name for name in list_files(file.repo) if name.endswith(".gguf")]
    except (HTTPError, OSError, ValueError):
        others = []
    close = difflib.get_close_matches(part, others, n=3, cutoff=0.3)
    meant = (
        f"did you mean {quoted(', '.join(close))}?" if close else "look at the files on its page at the hub"
    )
    return f"{file.repo} has no file {part}; {meant}"


def _content(file: RemoteFile, said: Announced) -> Path:
    return below(folder_of(file), f"blobs/{said.tag}")


def _partial(file: RemoteFile, said: Announced) -> Path:
    return below(folder_of(file), f"blobs/{said.tag}{PARTIAL}")


def _check_room(file: RemoteFile, parts: Mapping[str, Announced]) -> int:
    """Bytes that must still be fetched, if there is room for them."""
    absent = {part: said for part, said in parts.items() if not _content(file, said).exists()}
    partials = {part: _partial(file, said) for part, said in absent.items()}
    missing = sum(
        max(0, said.n_bytes - (partials[part].stat().st_size if partials[part].exists() else 0))
        for part, said in absent.items()
    )
    folder = next(folder for folder in folder_of(file).parents if folder.exists())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ModelFileError(
            f"{file} needs {missing / 1e9:.1f} GB more, {folder} has {free / 1e9:.1f} GB free; "
            "make room, or set HF_HOME to a folder on a larger disk"
        )
    for part, said in absent.items():
        if said.n_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise ModelFileError(
                f"{part} is too large for a plain download; fetch it with the hub's own program, and it is "
                f"found here: hf download {file.repo} {part}"
            )
    return missing


def _fetch_part(file: RemoteFile, said: Announced, tell: _Teller) -> None:
    content, partial = _content(file, said), _partial(file, said)
    expected = _expected_hash(file, said)
    folder = folder_of(file)
    lock = below(folder.parent, f".locks/{folder.name}/{said.tag}.lock")  # where huggingface-hub has its own
    for path in (content, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    fetching = tell.fetching(said)
    with FileLock(lock):  # two that append to one file would spoil it
        if content.exists():
            _check_model(content, said)
            return
        append(said, partial, fetching)
        check_hash(partial, expected, said.name, tell.checking(said))
        try:
            _check_model(partial, said)
        except ModelFileError:
            partial.unlink()
            raise
        partial.replace(content)


def _check_model(path: Path, said: Announced) -> None:
    try:
        check_gguf(path)
    except ModelFileError as error:
        reason = str(error).partition(";")[0].replace(str(path), "it")
        raise ModelFileError(
            f"what the hub gives for {said.name} is no model: {reason}; name another file"
        ) from error


def _expected_hash(file: RemoteFile, said: Announced) -> str:
    """What the list says, or else the hub."""
    known = file.sha256 if len(file.parts) == 1 else None
    if known is not None and len(said.tag) == len(known) and known != said.tag:
        raise ModelFileError(
            f"{file} is not the file that the list of models describes: its hash is {said.tag[:12]}..., "
            f"expected {known[:12]}...; to take it all the same, name it as {file}"
        )
    return known or said.tag


def _name(file: RemoteFile, part: str, said: Announced) -> Path:
    """Give a whole file its name, as huggingface-hub does."""
    folder, content = folder_of(file), _content(file, said)
    link = below(folder, f"snapshots/{said.commit}/{part}")
    for path in (link, folder / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    if link.is_file():
        return link
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(os.path.relpath(content, link.parent))
    except OSError:  # a disk without links
        content.replace(link)
    return link


@contextmanager
def _told_in_one_line(file: RemoteFile) -> Iterator[None]:
    pull = f"`llamaspec models pull {file}`"
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ModelFileError(
            f"{file} is not on this machine, and HF_HUB_OFFLINE is set; unset it and run {pull} once"
        ) from error
    except GatedRepoError as error:
        raise ModelFileError(
            f"{file.repo} is given only to those who agreed to its terms; agree on its page at the hub, "
            "then run `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelFileError(
            f"the hub has no repository {file.repo}, or it is private; check the name, or run `hf auth login`"
        ) from error
    except HfHubHTTPError as error:
        raise ModelFileError(
            f"the hub answered {error.response.status_code} for {file}; try again later, {pull} goes on "
            "where it stopped"
        ) from error
    except HTTPError as error:
        reason = quoted(str(error))
        raise ModelFileError(
            f"{file} is not on this machine, and the hub cannot be reached ({reason}); with a network, "
            f"{pull} goes on where it stopped"
        ) from error
    except OSError as error:
        raise ModelFileError(
            f"cannot keep {file}: {error.strerror or error}; {pull} goes on where it stopped"
        ) from error
    except (_InvalidURL, ValueError) as error:
        raise ModelFileError(
            f"the hub gives an answer for {file} that makes no sense ({quoted(str(error))}); try again later"
        ) from error
