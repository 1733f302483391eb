"""Models by name: the list that comes with llamaspec, and the user's own beside it.

A list is YAML, validated like every stored file (`llamaspec/files.py`). Knows no network: what a name means,
not whether the file is here (`hub/cache.py`).
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from platformdirs import user_config_dir

from llamaspec.errors import ModelFileError
from llamaspec.files import parse_json, read_file, write_file
from llamaspec.hub.entries import Entry, as_listed
from llamaspec.hub.remote import quoted

_MAX_LIST_BYTES = 1 << 20


class Catalog:
    """All entries, the user's own before those that come with llamaspec."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)

    def find(self, name: str) -> Entry:
        """The entry of a name.

        Raises
        ------
        ModelFileError
            There is none; names what is close.
        """
        if name in self.entries:
            return self.entries[name]
        close = difflib.get_close_matches(name[:200], self.entries, n=3, cutoff=0.5)
        meant = (
            f"did you mean {quoted(', '.join(close))}?"
            if close
            else "`llamaspec models list` shows the names"
        )
        raise ModelFileError(f"no file and no model is called {quoted(name)}; {meant}")

    def draft_of(self, target: str) -> str | None:
        """The draft for a target, which is a name, a hub address or a file; None where none is known."""
        name = target.partition(":")[0]
        if name in self.entries:
            return self.entries[name].draft
        file = target.rpartition(":")[2].rpartition("/")[2].lower()
        for entry in self.entries.values():
            if entry.pattern is not None and entry.draft is not None:
                before, _, after = entry.pattern.lower().rpartition("/")[2].partition("{quantization}")
                if file.startswith(before) and file.endswith(after):
                    return entry.draft
        return None


def own_list() -> Path:
    """The user's own list; it need not exist."""
    folder = os.environ.get("LLAMASPEC_CONFIG") or user_config_dir("llamaspec", appauthor=False)
    return Path(folder) / "models.yaml"


def read_catalog() -> Catalog:
    """Both lists.

    Raises
    ------
    ModelFileError
        The user's list cannot be read or understood.
    """
    return Catalog({**_read(_supplied_list(), is_own=False), **_own_entries()})


def add_own(entry: Entry) -> Path:
    """Write an entry into the user's list, in place of one of the same name."""
    return _write_own({**_own_entries(), entry.name: entry})


def remove_own(name: str) -> bool:
    """Take an entry out of the user's list; answers whether it was there."""
    entries = _own_entries()
    existed = entries.pop(name, None) is not None
    if existed:
        _write_own(entries)
    return existed


def _supplied_list() -> Path:
    """In the installed package, or at the top of the source tree."""
    package = Path(str(files("llamaspec")))
    installed = package / "models.yaml"
    return installed if installed.exists() else package.parent / "models.yaml"


def _own_entries() -> dict[str, Entry]:
    try:
        return _read(own_list(), is_own=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _write_own(entries: Mapping[str, Entry]) -> Path:
    import yaml  # 40 ms, which commands that are given files do not need

    path = own_list()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, yaml.safe_dump({name: as_listed(e) for name, e in entries.items()}, sort_keys=False))
    except OSError as error:
        raise ModelFileError(
            f"cannot write {path}: {error.strerror}; set LLAMASPEC_CONFIG to a folder of yours"
        ) from error
    return path


def _read(path: Path, *, is_own: bool) -> dict[str, Entry]:
    try:
        listed = _read_yaml(path)
        if not isinstance(listed, dict):
            raise ValueError("it has to be a mapping from names to what is known of them")
        return {str(name): _entry(str(name), what, is_own) for name, what in listed.items()}
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}; mend or delete it") from error
    except RecursionError as error:
        raise ModelFileError(f"{path} is nested too deeply; mend or delete it") from error
    except (TypeError, ValueError) as error:
        reason = str(error).replace("; ", ", ")
        raise ModelFileError(f"{path} has an entry that cannot be understood: {reason}; mend it") from error


def _read_yaml(path: Path) -> Any:
    import yaml

    class PlainLoader(yaml.SafeLoader):
        """Without aliases, which could make much out of little, and tags, which make errors of all kinds."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
                raise yaml.MarkedYAMLError(problem_mark=self.get_mark())
            return super().compose_node(parent, index)

    try:
        return yaml.load(read_file(path, _MAX_LIST_BYTES), PlainLoader) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise ModelFileError(f"{path}{place}: this is not plain YAML; mend or delete it") from error


def _entry(name: str, what: object, is_own: bool) -> Entry:
    if not isinstance(what, dict):
        raise ValueError(f"{quoted(name)} must be a mapping")
    try:
        if given := {"name", "is_own"} & what.keys():
            raise ValueError(f"{given.pop()} means nothing")
        return parse_json(Entry, json.dumps({**what, "name": name, "is_own": is_own}, default=str))
    except ValueError as error:
        raise ValueError(f"{quoted(name)}: {error}") from error
