"""What people call a model: a file, a name of the lists, or an address on the hub; and which file it is.

`resolve_*` fetch what is not here; `locate_*` and `models path` never do. Knows no options of commands.
"""

from __future__ import annotations

import os
from pathlib import Path

from llamaspec.errors import ModelFileError, PairError
from llamaspec.hub.cache import find_here, models_here
from llamaspec.hub.catalog import read_catalog
from llamaspec.hub.made import made_drafts
from llamaspec.hub.progress import OnFetch
from llamaspec.hub.remote import (
    HUB,
    RemoteFile,
    address_of_page,
    is_repo,
    matching,
    quoted,
    remote_file,
)

AUTO = "auto"  # in place of a draft: the one that is known for the target


def resolve_model(name: str | Path, on_progress: OnFetch | None = None) -> Path:
    """The model's file; fetched first if it lies on the hub and not here.

    Parameters
    ----------
    name : str or Path
        A path, NAME or NAME:QUANTIZATION of the lists, hf:owner/repo:file, hf:owner/repo:QUANTIZATION,
        hf:owner/repo where it has one model, or the address of a file's page. A `Path` is always a file.
    on_progress : callable, optional
        Told what is fetched, and how much of it is here.

    Raises
    ------
    ModelFileError
        There is no such model, or it cannot be fetched.
    """
    found = _own_or_remote(name, ask=True)
    if isinstance(found, Path):
        return found
    here = find_here(found)
    if here is not None:
        return here
    from llamaspec.hub.download import fetch  # slow to import, and most models are here

    return fetch(found, on_progress)


def resolve_draft(draft: str | Path, target: str | Path, on_progress: OnFetch | None = None) -> Path:
    """The same for a draft; "auto" is the one that is known for the target.

    Raises
    ------
    ModelFileError
        There is no such model, or it cannot be fetched.
    PairError
        No draft is known for the target.
    """
    return resolve_model(find_draft(str(target)) if draft == AUTO else draft, on_progress)


def locate_model(name: str | Path) -> Path:
    """The model's file, if it is on this machine; asks nobody else.

    Raises
    ------
    ModelFileError
        There is no such model, or it is not here.
    """
    found = _own_or_remote(name, ask=False)
    here = found if isinstance(found, Path) else find_here(found)
    if here is None:
        called = quoted(str(name))
        raise ModelFileError(f"{called} is not on this machine; run `llamaspec models pull {called}`")
    return here


def is_path(name: str) -> bool:
    """Whether this names a file: one that exists, or looks as if it should."""
    if is_address(name):
        return False
    return name.endswith(".gguf") or "/" in name or "\\" in name or os.path.exists(name)  # noqa: PTH110


def is_address(name: str) -> bool:
    """Whether this names something on the hub."""
    return name.startswith((HUB, "https://", "http://"))


def find_remote(name: str, *, ask: bool = True) -> RemoteFile | None:
    """The file on the hub; None for a name of the lists that is a file on this machine.

    An address without a file is looked up here, and then, if the hub may be asked, there.

    Raises
    ------
    ModelFileError
        There is no such model, or the address is not one.
    """
    if is_address(name):
        return _find_address(name if name.startswith(HUB) else address_of_page(name), ask)
    plain, _, quantization = name.partition(":")
    entry = read_catalog().find(plain)
    return None if entry.path is not None else entry.file(quantization or None)


def find_draft(target: str) -> str:
    """The name of the draft for a target.

    Raises
    ------
    ModelFileError
        There is no such target.
    PairError
        No draft is known for it.
    """
    catalog = read_catalog()
    if not is_path(target) and not is_address(target):
        catalog.find(target.partition(":")[0])
    draft = catalog.draft_of(target) or _made_draft(target)
    if draft is None:
        raise PairError(f"no draft is known for {quoted(target)}; name one")
    return draft


def has_draft(target: str) -> bool:
    """Whether a draft is known for a target; False for a target that nobody knows."""
    return (read_catalog().draft_of(target) or _made_draft(target)) is not None


def may_have_heads(target: str) -> bool:
    """Whether prediction heads are worth looking for in a target: not if the lists say that it has none."""
    name = target.partition(":")[0]
    entry = None if is_path(target) else read_catalog().entries.get(name)
    return entry is None or entry.heads is not False


def _made_draft(target: str) -> str | None:
    """The newest draft that was made here for a target; None where the target is not here."""
    try:
        drafts = made_drafts(locate_model(target))
    except ModelFileError:
        return None
    return str(drafts[0].absolute()) if drafts else None


def _own_or_remote(name: str | Path, *, ask: bool) -> Path | RemoteFile:
    if isinstance(name, Path) or is_path(name):
        return Path(name)
    return find_remote(name, ask=ask) or read_catalog().find(name.partition(":")[0]).own_file()


def _find_address(address: str, ask: bool) -> RemoteFile:
    """The file of an address that may leave it out, or say no more of it than its quantization."""
    repo, _, quantization = address.removeprefix(HUB).partition(":")
    if quantization.endswith(".gguf") or not is_repo(repo):
        return remote_file(address)
    here = matching(models_here(repo), repo, quantization)
    if len(here) == 1:
        return here[0]
    if not ask:
        raise ModelFileError(f"{quoted(address)} is not on this machine, or more than one; name the file")
    from llamaspec.hub.download import list_models

    listed = list_models(repo)
    there = matching(listed, repo, quantization)
    if len(there) == 1:
        return there[0]
    found = there or matching(listed, repo, "")
    choices = quoted(", ".join(file.file for file in found)) or "it has none"
    which = "several models" if there else "no such model"
    raise ModelFileError(f"{quoted(address)} has {which}; name one as hf:owner/repo:file.gguf ({choices})")
