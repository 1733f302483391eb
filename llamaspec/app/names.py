"""What people call a model: a file, a name of the catalog, or an address on the hub."""

from __future__ import annotations

from pathlib import Path

from llamaspec.app.catalog import HUB, RemoteFile, read_catalog
from llamaspec.app.stored import find_here
from llamaspec.errors import ModelFileError, PairError

AUTO = "auto"  # in place of a draft


def find_model(called: str) -> Path:
    """The model's file; fetched first if it lies on the hub and not here.

    Parameters
    ----------
    called : str
        A path, NAME or NAME:QUANTIZATION of the catalog, or hf:owner/repo:file.

    Raises
    ------
    ModelFileError
        There is no such model, or it cannot be fetched.
    """
    if is_path(called):
        return Path(called)
    remote = find_remote(called)
    if remote is None:
        return Path(str(read_catalog().find(called).path)).expanduser()
    here = find_here(remote)
    if here is not None:
        return here
    from llamaspec.app import downloads  # slow to import, and most models are here

    return downloads.fetch(remote)


def is_path(called: str) -> bool:
    """Whether this names a file: one that exists, or looks as if it should."""
    if called.startswith(HUB):
        return False
    return called.endswith(".gguf") or "/" in called or "\\" in called or Path(called).exists()


def find_remote(called: str) -> RemoteFile | None:
    """The file on the hub; None for a name of the catalog that is a file on this machine.

    Raises
    ------
    ModelFileError
        There is no such model, or the address is not one.
    """
    if called.startswith(HUB):
        repo, _, file = called[len(HUB) :].partition(":")
        try:
            return RemoteFile(repo, file)
        except ValueError as error:
            raise ModelFileError(f"{called} is no address: {error}; write hf:owner/repo:file.gguf") from error
    name, _, quantization = called.partition(":")
    entry = read_catalog().find(name)
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
    if not is_path(target) and not target.startswith(HUB):
        catalog.find(target.partition(":")[0])
    draft = catalog.draft_of(target)
    if draft is None:
        raise PairError(f"no draft is known for {target}; name one, or copy from the text with --draft ngram")
    return draft
