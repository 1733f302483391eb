"""Models by name for the commands: what is not here is fetched, and that is told on stderr."""

from __future__ import annotations

from pathlib import Path

from llamaspec.catalog import RemoteFile
from llamaspec.cli.terminal import say
from llamaspec.errors import PairError
from llamaspec.hub import find_draft, resolve_model


def fetched_model(name: str) -> Path:
    """The file of a model; a ModelFileError where there is none, or where it cannot be fetched."""
    return resolve_model(name, say_fetching)


def known_draft(target: str) -> str:
    """The name of the draft for a target; a PairError where none is known says what else can be asked for."""
    try:
        return find_draft(target)
    except PairError as error:
        raise PairError(f"{error}, or look it up with --draft ngram") from error


def say_fetching(file: RemoteFile, n_missing: int) -> None:
    """Tell what is fetched; the bar is huggingface-hub's."""
    say(f"fetching {file}, {n_missing / 1e9:.1f} GB")
