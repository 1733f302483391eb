"""Fetches model files from the hub into its own cache folder, once; from then on no network is needed.

huggingface-hub knows the protocol, the tokens and the folders. What is added here: a file that was cut off
goes on where it stopped, also in another run; room on the disk is checked first and the hash last; and
whatever goes wrong becomes one line. tests/app/test_models.py has a server that speaks the protocol.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import click
from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is that of the transport in use
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import HfFileMetadata, http_get
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    WeakFileLock,
    build_hf_headers,
    disable_progress_bars,
)

from llamaspec.app.catalog import RemoteFile
from llamaspec.app.stored import PARTIAL, folder_of, partial_bytes
from llamaspec.app.terminal import SlowProgress
from llamaspec.errors import ModelFileError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20  # bytes


def fetch(file: RemoteFile) -> Path:
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
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _told_in_one_line(file):
        facts = {part: _ask(file, part) for part in file.parts}
        missing = _check_room(file, facts)
        if missing:
            click.echo(f"llamaspec: fetching {file}, {missing / 1e9:.1f} GB", err=True)
        for part, fact in facts.items():
            _fetch_part(file, part, fact)
        paths = [hf_hub_download(file.repo, part) for part in file.parts]
    return Path(paths[0])


def _ask(file: RemoteFile, part: str) -> HfFileMetadata:
    try:
        return get_hf_file_metadata(hf_hub_url(file.repo, part), token=get_token())
    except EntryNotFoundError as error:
        raise ModelFileError(_no_such_file(file, part)) from error


def _no_such_file(file: RemoteFile, part: str) -> str:
    """Names what is similar, if the hub lists the repository's files."""
    try:
        others = [name for name in HfApi().list_repo_files(file.repo) if name.endswith(".gguf")]
    except (HTTPError, OSError):
        others = []
    close = difflib.get_close_matches(part, others, n=3, cutoff=0.3)
    meant = f"did you mean {', '.join(close)}?" if close else "look at the files on its page at the hub"
    return f"{file.repo} has no file {part}; {meant}"


def _content(file: RemoteFile, fact: HfFileMetadata) -> Path:
    return folder_of(file) / "blobs" / str(fact.etag)


def _partial(file: RemoteFile, fact: HfFileMetadata) -> Path:
    return folder_of(file) / "blobs" / f"{fact.etag}{PARTIAL}"


def _check_room(file: RemoteFile, facts: dict[str, HfFileMetadata]) -> int:
    """Bytes that must still be fetched, if there is room for them."""
    missing = 0
    for fact in facts.values():
        if not _content(file, fact).exists():
            partial = _partial(file, fact)
            missing += (fact.size or 0) - (partial.stat().st_size if partial.exists() else 0)
    folder = next(folder for folder in folder_of(file).parents if folder.exists())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ModelFileError(
            f"{file} needs {missing / 1e9:.1f} GB more, {folder} has {free / 1e9:.1f} GB free; "
            "make room, or set HF_HOME to a folder on a larger disk"
        )
    for part, fact in facts.items():
        if (fact.size or 0) > constants.MAX_HTTP_DOWNLOAD_SIZE and not _content(file, fact).exists():
            raise ModelFileError(
                f"{part} is too large for a plain download; fetch it with the hub's own program, and it is "
                f"found here: hf download {file.repo} {part}"
            )
    return missing


def _fetch_part(file: RemoteFile, part: str, fact: HfFileMetadata) -> None:
    content, partial = _content(file, fact), _partial(file, fact)
    expected = _expected_hash(file, fact)
    content.parent.mkdir(parents=True, exist_ok=True)
    folder = folder_of(file)
    lock = folder.parent / ".locks" / folder.name / f"{fact.etag}.lock"  # where huggingface-hub has its own
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):  # two that append to one file would spoil it
        if not content.exists():
            _append(file, part, fact, partial)
            if expected is not None:
                _check_hash(partial, part, expected)
            partial.replace(content)


def _append(file: RemoteFile, part: str, fact: HfFileMetadata, partial: Path) -> None:
    """Fetch what is missing of a file."""
    headers = build_hf_headers()
    if urlsplit(fact.location).netloc != urlsplit(hf_hub_url(file.repo, part)).netloc:
        headers.pop("authorization", None)  # a store that the hub only points to
    if partial.exists() and fact.size is not None and partial.stat().st_size > fact.size:
        partial.unlink()  # spoilt
    while True:
        n_before = partial.stat().st_size if partial.exists() else 0
        try:
            with partial.open("ab") as out:
                http_get(
                    fact.location,
                    out,
                    resume_size=n_before,
                    headers=headers,
                    expected_size=fact.size,
                    displayed_filename=part,
                )
            return
        except HTTPError:  # not every version of huggingface-hub goes on by itself
            if partial.stat().st_size == n_before:
                raise


def _expected_hash(file: RemoteFile, fact: HfFileMetadata) -> str | None:
    """What the list says, or else the hub. For large files the hub's tag is the hash of the content."""
    published = fact.etag if fact.etag is not None and _SHA256.fullmatch(fact.etag) else None
    known = file.sha256 if len(file.parts) == 1 else None
    if known is not None and published is not None and known != published:
        raise ModelFileError(
            f"{file} is not the file that the list of models describes: its hash is {published[:12]}..., "
            f"expected {known[:12]}...; to take it all the same, name it as {file}"
        )
    return known or published


def _check_hash(path: Path, name: str, expected: str) -> None:
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as content, SlowProgress(f"checking {name}") as progress:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress.part(done, size)
    if digest.hexdigest() != expected:
        path.unlink()
        raise ModelFileError(
            f"{name} arrived damaged: its hash is {digest.hexdigest()[:12]}..., expected {expected[:12]}...; "
            "it was deleted, pull it again"
        )


@contextmanager
def _told_in_one_line(file: RemoteFile) -> Iterator[None]:
    pull = f"`llamaspec models pull {file}`"
    try:
        yield
    except KeyboardInterrupt:
        kept = partial_bytes(file) / 1e9
        click.echo(f"\nllamaspec: stopped, {kept:.2f} GB are kept; {pull} goes on there", err=True)
        raise
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
        raise ModelFileError(
            f"{file} is not on this machine, and the hub cannot be reached ({error}); with a network, {pull} "
            "goes on where it stopped"
        ) from error
    except OSError as error:
        raise ModelFileError(
            f"cannot keep {file}: {error.strerror or error}; {pull} goes on where it stopped"
        ) from error
