"""From a model's name to its file: on this machine, in huggingface-hub's cache folder, or fetched.

`resolve_*` fetch what is not here; `locate_*` and `find_draft` never do.
"""

from __future__ import annotations

import os
import re
from glob import escape
from pathlib import Path

from llamaspec.catalog import (
    HUB,
    RemoteFile,
    address_of_page,
    is_repo,
    matching,
    quoted,
    read_catalog,
    remote_file,
)  # fmt: skip
from llamaspec.errors import ModelFileError
from llamaspec.files import cache_folder, file_identity
from llamaspec.hub_cache import OnFetch, fetch, fetched_states, find_here, list_models, repo_folder
from llamaspec.llama.gguf_file import read_gguf

AUTO = "auto"  # in place of a draft: the one that is known for the target
DRAFT_FOR = "llamaspec.draft_for"  # metadata of a draft made here: the identity of its target


# Names


def resolve_model(name: str | Path, on_fetch: OnFetch | None = None) -> Path:
    """The model's file; fetched first if it is on the hub and not on this machine.

    Parameters
    ----------
    name : str or Path
        A path, NAME or NAME:QUANTIZATION from the lists, hf:owner/repo:file, hf:owner/repo:QUANTIZATION,
        hf:owner/repo if it has one model, or the URL of a file's page. A `Path` is always a file.
    on_fetch : callable, optional
        Called before a transfer, with the file and the number of missing bytes.

    Raises
    ------
    ModelFileError
        There is no such model, or it cannot be fetched.
    """
    found = _own_or_remote(name, ask=True)
    return found if isinstance(found, Path) else find_here(found) or fetch(found, on_fetch)


def locate_model(name: str | Path) -> Path:
    """The model's file, or a ModelFileError if it is not on this machine; never asks the hub."""
    found = _own_or_remote(name, ask=False)
    here = found if isinstance(found, Path) else find_here(found)
    if here is None:
        called = quoted(str(name))
        raise ModelFileError(f"{called} is not on this machine; run `llamaspec models pull {called}`")
    return here


def is_path(name: str) -> bool:
    """Whether this is a path of a file, by its form or because it exists. A folder hides no listed model."""
    if _is_address(name):
        return False
    if name.endswith(".gguf") or "/" in name or "\\" in name:
        return True
    return os.path.exists(name) and not os.path.isdir(name)  # noqa: PTH110, PTH112 - Path raises for a NUL


def find_remote(name: str, *, ask: bool = True) -> RemoteFile | None:
    """The file on the hub; None if a list gives the name to a file on this machine.

    An address without a file is looked up on this machine, then, if `ask`, on the hub. Raises a
    ModelFileError if there is no such model.
    """
    if name.startswith(HUB):
        return _find_address(name, ask)
    if _is_address(name):
        from huggingface_hub import constants

        return _find_address(address_of_page(name, constants.ENDPOINT), ask)
    plain, _, quantization = name.partition(":")
    entry = read_catalog().find(plain)
    return None if entry.path is not None else entry.file(quantization or None)


def find_draft(target: str) -> str | None:
    """The name of the draft for a target: the newest that was made here, else a listed one."""
    try:
        drafts = made_drafts(locate_model(target))
    except ModelFileError:
        drafts = []
    return str(drafts[0].absolute()) if drafts else read_catalog().draft_of(target)


def may_have_heads(target: str) -> bool:
    """Whether a target may have prediction heads: False only if the lists say that it has none."""
    name = target.partition(":")[0]
    entry = None if is_path(target) else read_catalog().entries.get(name)
    return entry is None or entry.heads is not False


def _is_address(name: str) -> bool:
    return name.startswith((HUB, "https://", "http://"))


def _own_or_remote(name: str | Path, *, ask: bool) -> Path | RemoteFile:
    if "\0" in str(name):
        raise ModelFileError(f"no file has the path {quoted(str(name))}; check it")
    if isinstance(name, Path) or is_path(name):
        return Path(name)
    return find_remote(name, ask=ask) or read_catalog().find(name.partition(":")[0]).own_file()


def _find_address(address: str, ask: bool) -> RemoteFile:
    """The file of an address that may lack the file's name, or give only a quantization."""
    repo, _, quantization = address.removeprefix(HUB).partition(":")
    if quantization.endswith(".gguf") or not is_repo(repo):
        return remote_file(address)
    states = fetched_states(repo_folder(repo))
    fetched = (path.relative_to(state).as_posix() for state in states for path in state.rglob("*.gguf"))
    here = matching(sorted(fetched), repo, quantization)
    if len(here) == 1:
        return here[0]
    if not ask:
        raise ModelFileError(f"{quoted(address)} is not on this machine, or several are; name the file")
    listed = list_models(repo)
    there = matching(listed, repo, quantization)
    if len(there) == 1:
        return there[0]
    found = there or matching(listed, repo, "")
    choices = quoted(", ".join(file.file for file in found)) or "it has none"
    which = "several models" if there else "no such model"
    raise ModelFileError(f"{quoted(address)} has {which}; name one as hf:owner/repo:file.gguf ({choices})")


# Drafts made on this machine


def made_path(target: Path, label: str) -> Path:
    """The path of a draft made here: beside its target, or in our cache folder if that is the hub's."""
    in_hub = any(part.startswith("models--") for part in target.absolute().parts)
    folder = cache_folder() / "drafts" if in_hub else target.parent
    return folder / f"{_stem(target)}.draft-{label}.gguf"


def made_drafts(target: Path) -> list[Path]:
    """The drafts made for this target on this machine, newest first."""
    pattern = f"{escape(_stem(target))}.draft-*.gguf"
    folders = {target.parent.absolute(), (cache_folder() / "drafts").absolute()}
    try:
        found = [path for folder in folders for path in folder.glob(pattern) if path.is_file()]
        wanted = file_identity(target) if found else ""
        fitting = [path for path in found if read_gguf(path).text(DRAFT_FOR) == wanted]
        return sorted(fitting, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    except (OSError, ValueError):  # ValueError: no path has such a name
        return []


def _stem(target: Path) -> str:
    return re.sub("-[0-9]{5}-of-[0-9]{5}$", "", target.stem)
