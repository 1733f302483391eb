"""The content of one file of the hub: what is announced of it, its bytes, and whether they are right.

huggingface-hub's own `hf_hub_download` begins anew in every run, compares the size after the last byte only
and no hash at all, and takes the hub's tag for a path (tests/hub/test_hostile_hub.py). Here nothing that the
hub says is believed: at most the announced bytes are read, and their hash decides.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the transport in use
from huggingface_hub.file_download import HfFileMetadata

from llamaspec.errors import ModelFileError
from llamaspec.files import parse_json
from llamaspec.hub.remote import MAX_BYTES, SHA256, quoted

OnBytes = Callable[[int], None]  # told how many bytes of the file are done
_GIT_HASH = re.compile(r"[0-9a-f]{40}")  # of a commit, and of a file that git itself keeps
_CHUNK = 1 << 20  # bytes
_MAX_LISTING_BYTES = 8 << 20
_TRIES, _PAUSE_SECONDS = 5, 1.0  # attempts in a row that bring nothing, and the time between two


@dataclass(frozen=True, slots=True)
class Announced:
    """What the hub says of a file, in so far as it can be true."""

    name: str  # for messages
    url: str  # where the content is, perhaps on another server
    tag: str  # the content's hash: SHA-256, or git's where git itself keeps the file
    commit: str  # the state of the repository
    n_bytes: int

    @classmethod
    def of(cls, fact: HfFileMetadata, name: str) -> Announced:
        """Refuse what is no hash, no size or no address.

        Raises
        ------
        ModelFileError
            Names what is missing.
        """
        tag, commit, n_bytes = fact.etag or "", fact.commit_hash or "", fact.size or 0
        if not (SHA256.fullmatch(tag) or _GIT_HASH.fullmatch(tag)):
            raise _strange(name, f"the hash {quoted(tag) or 'of no digits'}")
        if not _GIT_HASH.fullmatch(commit):
            raise _strange(name, f"the commit {quoted(commit) or 'of no digits'}")
        if not 0 < n_bytes <= MAX_BYTES:
            raise _strange(name, "no size that a file can have")
        if _origin(fact.location) is None:
            raise _strange(name, f"the address {quoted(fact.location)}")
        return cls(name, fact.location, tag, commit, n_bytes)


def token() -> str | None:
    """The person's token for the hub, if it may be sent without being asked for."""
    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def append(said: Announced, partial: Path, on_bytes: OnBytes) -> None:
    """Fetch what is missing of a file behind what is there.

    Raises
    ------
    ModelFileError
        The server sends something else than was asked for, or ends early again and again.
    HTTPError
        It cannot be reached.
    """
    if _size(partial) > said.n_bytes:
        partial.unlink()  # spoilt
    n_failed = 0
    while (n_before := _size(partial)) < said.n_bytes:
        failure: HTTPError | None = None
        try:
            _stream(said, partial, n_before, on_bytes)
        except HTTPError as error:
            failure = error
        if _size(partial) > n_before:
            n_failed = 0
            continue
        n_failed += 1
        if n_failed == _TRIES:
            ended = f"{said.name} ends after {n_before} of {said.n_bytes} bytes; pull it again"
            raise failure or ModelFileError(ended)
        time.sleep(_PAUSE_SECONDS)


def check_hash(path: Path, tag: str, name: str, on_bytes: OnBytes) -> None:
    """Compare a file with its hash; a wrong one is deleted.

    Raises
    ------
    ModelFileError
        The content is not what was announced.
    """
    is_git = len(tag) == 40
    digest = hashlib.sha1(usedforsecurity=False) if is_git else hashlib.sha256()
    if is_git:
        digest.update(f"blob {_size(path)}\0".encode())
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
            on_bytes(content.tell())
    if digest.hexdigest() != tag:
        path.unlink()
        raise ModelFileError(
            f"{name} arrived damaged: its hash is {digest.hexdigest()[:12]}..., expected {tag[:12]}...; "
            "it was deleted, pull it again"
        )


def list_files(repo: str) -> list[str]:
    """The files of a repository, as far as one page of the hub's answer names them.

    Raises
    ------
    ValueError
        The answer is no list of files.
    HTTPError
        The hub cannot be reached.
    """
    content = bytearray()
    with _asked(f"{constants.ENDPOINT}/api/models/{repo}/tree/main?recursive=true", {}) as response:
        if response.status_code != 200:
            raise ValueError(f"the hub answered {response.status_code}")
        for chunk in response.iter_raw():
            content += chunk
            if len(content) > _MAX_LISTING_BYTES:
                raise ValueError("the list of files does not end")
    return [listed.path for listed in parse_json(list[_Listed], bytes(content), unknown="ignore")]


@dataclass(frozen=True, slots=True)
class _Listed:
    path: str


def _stream(said: Announced, partial: Path, start: int, on_bytes: OnBytes) -> None:
    asked = {"Range": f"bytes={start}-"} if start else {}
    with _asked(said.url, asked) as response:
        if response.status_code not in (200, 206):
            raise ModelFileError(
                f"the hub answered {response.status_code} for {said.name}; what arrived is kept, try later"
            )
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise _strange(said.name, f"content encoded as {quoted(encoding)}, which was not asked for")
        if response.status_code == 200:
            start = 0  # the server does not know ranges
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise _strange(said.name, "another part than the one that was asked for")
        with _opened(partial, start) as out:
            for chunk in response.iter_raw():
                out.write(chunk[: said.n_bytes - start])
                start = min(start + len(chunk), said.n_bytes)
                on_bytes(start)
                if start == said.n_bytes:
                    return  # whatever else is sent


@contextmanager
def _asked(url: str, headers: dict[str, str]) -> Iterator[Any]:
    """A response whose body has not been read. The token goes to the hub itself only."""
    headers = {**headers, "Accept-Encoding": "identity"}
    if (secret := token()) and _origin(url) == _origin(constants.ENDPOINT):
        headers["Authorization"] = f"Bearer {secret}"
    seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=seconds) as response:
        yield response


def _origin(url: str) -> tuple[str, str, int | None] | None:
    """Scheme, host and port; None where this is no address of the web."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or " " in url:
        return None
    return parts.scheme, parts.hostname, port or {"http": 80, "https": 443}[parts.scheme]


@contextmanager
def _opened(partial: Path, start: int) -> Iterator[IO[bytes]]:
    """For writing from a position on; never through a link, and only into a regular file."""
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    with os.fdopen(descriptor, "wb", buffering=0) as out:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{partial} is not a regular file")
        out.truncate(start)
        out.seek(start)
        yield out


def _size(path: Path) -> int:
    return path.lstat().st_size if path.exists() else 0


def _strange(name: str, what: str) -> ModelFileError:
    return ModelFileError(f"the hub gives {what} for {name}; nothing was kept of that")
