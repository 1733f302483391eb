"""From a model's name to its file: on this machine, in huggingface-hub's cache folder, or fetched.

`resolve_*` fetch what is not here; `locate_*` and `find_draft` never do. huggingface-hub transfers and keeps
the files; what it believes of the hub is checked before (names, sizes, addresses) and after (the hash).
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llamaspec.catalog import (
    HUB,
    MAX_BYTES,
    RemoteFile,
    address_of_page,
    is_repo,
    matching,
    quoted,
    read_catalog,
    remote_file,
)  # fmt: skip
from llamaspec.errors import ModelFileError, PairError
from llamaspec.files import cache_folder, read_beginning, read_file
from llamaspec.llama.gguf_file import check_gguf, read_gguf

AUTO = "auto"  # in place of a draft: the one that is known for the target
DRAFT_FOR = "llamaspec.draft_for"  # metadata of a draft made here: the identity of its target
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_EXTRA_BYTES = 32 << 20  # received beyond twice the announced size
_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")  # SHA-256, or git's SHA-1 of a file outside of LFS

OnFetch = Callable[[RemoteFile, int], None]  # told what is fetched, and how many bytes of it are missing


# Names


def resolve_model(name: str | Path, on_fetch: OnFetch | None = None) -> Path:
    """The model's file; fetched first if it is on the hub and not here, after `on_fetch` was told.

    Parameters
    ----------
    name : str or Path
        A path, NAME or NAME:QUANTIZATION of the lists, hf:owner/repo:file, hf:owner/repo:QUANTIZATION,
        hf:owner/repo where it has one model, or the address of a file's page. A `Path` is always a file.
    on_fetch : callable, optional

    Raises
    ------
    ModelFileError
        There is no such model, or it cannot be fetched.
    """
    found = _own_or_remote(name, ask=True)
    return found if isinstance(found, Path) else find_here(found) or fetch(found, on_fetch)


def resolve_draft(draft: str | Path, target: str | Path, on_fetch: OnFetch | None = None) -> Path:
    """The same for a draft; "auto" is the one that is known for the target, or a PairError."""
    return resolve_model(find_draft(str(target)) if draft == AUTO else draft, on_fetch)


def locate_model(name: str | Path) -> Path:
    """The model's file, or a ModelFileError if it is not on this machine; never asks the hub."""
    found = _own_or_remote(name, ask=False)
    here = found if isinstance(found, Path) else find_here(found)
    if here is None:
        called = quoted(str(name))
        raise ModelFileError(f"{called} is not on this machine; run `llamaspec models pull {called}`")
    return here


def is_path(name: str) -> bool:
    """Whether this names a file: one that exists, or looks as if it should."""
    if _is_address(name):
        return False
    return name.endswith(".gguf") or "/" in name or "\\" in name or os.path.exists(name)  # noqa: PTH110


def find_remote(name: str, *, ask: bool = True) -> RemoteFile | None:
    """The file on the hub; None for a name of the lists that is a file on this machine.

    An address without a file is looked up here, and then, if `ask`, on the hub. A ModelFileError where
    there is no such model.
    """
    if name.startswith(HUB):
        return _find_address(name, ask)
    if _is_address(name):
        from huggingface_hub import constants

        return _find_address(address_of_page(name, constants.ENDPOINT), ask)
    plain, _, quantization = name.partition(":")
    entry = read_catalog().find(plain)
    return None if entry.path is not None else entry.file(quantization or None)


def find_draft(target: str) -> str:
    """The name of the draft for a target; a PairError where none is known."""
    if not is_path(target) and not _is_address(target):
        read_catalog().find(target.partition(":")[0])
    draft = _known_draft(target)
    if draft is None:
        raise PairError(f"no draft is known for {quoted(target)}; name one")
    return draft


def has_draft(target: str) -> bool:
    """Whether a draft is known for a target; False for an unknown target."""
    return _known_draft(target) is not None


def may_have_heads(target: str) -> bool:
    """Whether prediction heads are worth looking for in a target: not if the lists say that it has none."""
    name = target.partition(":")[0]
    entry = None if is_path(target) else read_catalog().entries.get(name)
    return entry is None or entry.heads is not False


def _known_draft(target: str) -> str | None:
    """The newest that was made here, else a listed one."""
    try:
        drafts = made_drafts(locate_model(target))
    except ModelFileError:
        drafts = []
    return str(drafts[0].absolute()) if drafts else read_catalog().draft_of(target)


def _is_address(name: str) -> bool:
    return name.startswith((HUB, "https://", "http://"))


def _own_or_remote(name: str | Path, *, ask: bool) -> Path | RemoteFile:
    if isinstance(name, Path) or is_path(name):
        return Path(name)
    return find_remote(name, ask=ask) or read_catalog().find(name.partition(":")[0]).own_file()


def _find_address(address: str, ask: bool) -> RemoteFile:
    """The file of an address that may leave out the file, or give only its quantization."""
    repo, _, quantization = address.removeprefix(HUB).partition(":")
    if quantization.endswith(".gguf") or not is_repo(repo):
        return remote_file(address)
    states = _states(_folder(repo))
    fetched = (path.relative_to(state).as_posix() for state in states for path in state.rglob("*.gguf"))
    here = matching(sorted(fetched), repo, quantization)
    if len(here) == 1:
        return here[0]
    if not ask:
        raise ModelFileError(f"{quoted(address)} is not on this machine, or more than one; name the file")
    listed = _list_models(repo)
    there = matching(listed, repo, quantization)
    if len(there) == 1:
        return there[0]
    found = there or matching(listed, repo, "")
    choices = quoted(", ".join(file.file for file in found)) or "it has none"
    which = "several models" if there else "no such model"
    raise ModelFileError(f"{quoted(address)} has {which}; name one as hf:owner/repo:file.gguf ({choices})")


# Drafts made on this machine


def identity(target: Path) -> str:
    """What tells a model file from others, wherever it is: a hash of its size and its first MiB."""
    key = hashlib.sha256(str(target.stat().st_size).encode())
    key.update(read_beginning(target, 1 << 20))
    return key.hexdigest()[:32]


def made_path(target: Path, label: str) -> Path:
    """Where a made draft belongs: beside its target, or in our cache folder where the target is the hub's."""
    in_hub = any(part.startswith("models--") for part in target.absolute().parts)
    folder = cache_folder() / "drafts" if in_hub else target.parent
    return folder / f"{_stem(target)}.draft-{label}.gguf"


def made_drafts(target: Path) -> list[Path]:
    """The drafts that were made for this target, the newest first."""
    pattern = f"{escape(_stem(target))}.draft-*.gguf"
    folders = {target.parent.absolute(), (cache_folder() / "drafts").absolute()}
    try:
        found = [path for folder in folders for path in folder.glob(pattern) if path.is_file()]
        wanted = identity(target) if found else ""
        fitting = [path for path in found if read_gguf(path).texts.get(DRAFT_FOR) == wanted]
        return sorted(fitting, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    except (OSError, ValueError):  # ValueError: no path has such a name
        return []


def _stem(target: Path) -> str:
    return re.sub(r"-\d{5}-of-\d{5}$", "", target.stem)


# The cache folder: CACHE/models--owner--name/snapshots/COMMIT/FILE links to ../../blobs/HASH


def find_here(file: RemoteFile) -> Path | None:
    """The file on this machine, its first part if it was split; None unless all parts are here together.

    huggingface-hub itself finds only what belongs to the newest commit that it saw.
    """
    for state in _states(_folder(file.repo)):
        if all((state / part).is_file() for part in file.parts):
            return state / file.file
    return None


def remove(file: RemoteFile) -> int:
    """Delete a file and its parts from this machine; returns how many bytes that freed.

    Content that another name links to stays, and so does what is outside of the repository's folder.
    """
    folder = _folder(file.repo)
    freed = sum(_remove_link(folder, state / part) for state in _states(folder) for part in file.parts)
    if folder.exists() and not any(path.is_file() for path in (folder / "snapshots").rglob("*")):
        shutil.rmtree(folder)
    return freed


def _folder(repo: str) -> Path:
    from huggingface_hub import constants  # takes a while, and most models are given as files

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _states(folder: Path) -> list[Path]:
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
        blobs = _folder(file.repo) / "blobs"
        n_missing = sum(said.n_bytes for said in parts.values() if not (blobs / said.tag).exists())
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
            names = _list_models(file.repo)
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
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        """The library's own; ends a transfer that brings far more than was announced."""

        n_done = 0

        def update(self, n: float | None = 1) -> Any:
            self.n_done += int(n or 0)
            if self.n_done > 2 * said.n_bytes + _MAX_EXTRA_BYTES:
                raise ModelFileError(f"the hub sends more than the {said.n_bytes} bytes of {part}; try later")
            return super().update(n)

    path = Path(hf_hub_download(file.repo, part, tqdm_class=Bar))
    if f"snapshots/{said.commit}/{part}" not in path.as_posix():
        raise ModelFileError(f"{file} changed on the hub while it was fetched; pull it again")
    expected = (file.sha256 if len(file.parts) == 1 else None) or said.tag
    try:
        with tqdm(total=said.n_bytes, unit="B", unit_scale=True, desc="checking", disable=None) as bar:  # type: ignore[no-untyped-call]
            found = file_hash(path, len(expected), bar.update)
        if found != expected:
            raise ModelFileError(
                f"{part} arrived damaged: its hash is {found[:12]}..., expected {expected[:12]}...; "
                "it was deleted, pull it again"
            )
        try:
            check_gguf(path)
        except ModelFileError as error:
            reason = str(error).partition(";")[0].replace(str(path), "it")
            raise ModelFileError(
                f"what the hub has as {part} is no model: {reason}; name another file"
            ) from error
    except BaseException:  # also when interrupted: what is not checked is not kept
        _remove_link(_folder(file.repo), path)
        raise
    return path


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


def _list_models(repo: str) -> list[str]:
    """The names of the model files in a repository, as the hub gives them."""
    from huggingface_hub import HfApi, constants

    try:
        names = HfApi(endpoint=constants.ENDPOINT).list_repo_files(repo)
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
