"""From a model's name to its file: paths, addresses on the hub, and short names from lists (models.yaml).

One list comes with llamaspec; the user's own list takes precedence. `resolve_model` fetches a file that is
not on this machine, `locate_model` never does. tests/hub/test_names.py.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_config_dir

from llamaspec.defaults import Defaults
from llamaspec.errors import FetchError, ModelFileError, quoted
from llamaspec.files import expanded, parse_json, read_file, write_file
from llamaspec.hub import (
    HUB,
    MAX_BYTES,
    SHA256,
    RemoteFile,
    address_of,
    fetched_models,
    fetched_snapshots,
    files_of,
    find_here,
    is_address,
    is_path,
    is_repo,
    names_on_hub,
    remote_file,
    repo_folder,
)
from llamaspec.model_names import family, matching, quantization_of

if TYPE_CHECKING:
    from llamaspec.fetching import OnFetch

CACHE_TOKENS = 8192  # context size to which an entry's cache_mb refers
_MAX_LIST_BYTES = 1 << 20


# Names


def resolve_model(name: str | Path, on_fetch: OnFetch | None = None) -> Path:
    """Return a model's file; fetch it if it is on the hub and not on this machine.

    Parameters
    ----------
    name : str or Path
        A path, NAME or NAME:QUANTIZATION from the lists, hf:owner/repo:file, hf:owner/repo:QUANTIZATION,
        hf:owner/repo if it has one model, the URL of a file's page, or the name of a fetched file; spelled as
        in requests to the server (`model_names.matching`). A `Path` is always a file.
    on_fetch : callable, optional
        Called before a transfer with the file and the number of missing bytes.

    Raises
    ------
    ModelFileError
        There is no such model, or it cannot be fetched.
    """
    found = _own_or_remote(name, ask=True)
    if isinstance(found, Path):
        return found
    here = find_here(found)
    if here is None:
        from llamaspec.fetching import fetch

        here = fetch(found, on_fetch)
    return here


def locate_model(name: str | Path) -> Path:
    """Return a model's file without asking the hub; ModelFileError if it is not on this machine."""
    found = _own_or_remote(name, ask=False)
    here = found if isinstance(found, Path) else find_here(found)
    if here is None:
        shown = quoted(str(name))
        raise ModelFileError(f"{shown} is not on this machine; run `llamaspec models pull {shown}`")
    return here


def find_remote(name: str, *, ask: bool = True) -> RemoteFile | None:
    """Return the file on the hub that a name means; None if it means a file on this machine.

    An address without a file name is looked up on this machine and then, if `ask`, on the hub. ModelFileError
    if there is no such model.
    """
    if is_address(name):
        return _find_address(address_of(name), ask)
    found = read_catalog().meaning(name)
    if found is None:
        return _find_fetched(name)
    entry, quantization = found
    return None if entry.path is not None and not quantization else entry.file(quantization or None)


def _find_fetched(name: str) -> RemoteFile:
    """Return the file of a name that no list has; ModelFileError unless one fetched file has it."""
    files = [file for file, _ in fetched_models()]
    found = matching(name, [names_on_hub(file) for file in files])
    if not found:
        raise read_catalog().unknown(name)
    return files[_only(name, found, [str(file) for file in files])]


def _only(name: str, found: Sequence[int], names: Sequence[str]) -> int:
    """Return the one that was found; ModelFileError, with the names of all, if there are several."""
    if len(found) > 1:
        several = quoted(", ".join(names[i] for i in found))
        raise ModelFileError(f"{quoted(name)} means several models: {several}; name one of them")
    return found[0]


def _own_or_remote(name: str | Path, *, ask: bool) -> Path | RemoteFile:
    if "\0" in str(name):
        raise ModelFileError(f"no file has the path {quoted(str(name))}; check it")
    if isinstance(name, Path) or is_path(name):
        return Path(name)
    return find_remote(name, ask=ask) or read_catalog().find(name).own_file()


def _find_address(address: str, ask: bool) -> RemoteFile:
    """Return the file of an address that may give only a quantization, or only a repository."""
    repo, _, quantization = address.removeprefix(HUB).partition(":")
    if quantization.endswith(".gguf") or not is_repo(repo):
        return remote_file(address)
    snapshots = fetched_snapshots(repo_folder(repo))
    fetched = (path.relative_to(folder).as_posix() for folder in snapshots for path in folder.rglob("*.gguf"))
    here = files_of(sorted(fetched), repo, quantization)
    if len(here) == 1:
        return here[0]
    if not ask:
        if not here:
            raise ModelFileError(
                f"{quoted(address)} is not on this machine; run `llamaspec models pull {quoted(address)}`"
            )
        _only(address, range(len(here)), [str(file) for file in here])
    from llamaspec.fetching import list_models

    listed = list_models(repo)
    there = files_of(listed, repo, quantization)
    if len(there) == 1:
        return there[0]
    found = there or files_of(listed, repo, "")
    choices = quoted(", ".join(file.file for file in found)) or "it has none"
    which = "several models" if there else "no such model"
    raise FetchError(f"{quoted(address)} has {which}; name one as hf:owner/repo:file.gguf ({choices})")


# Entries of a list


@dataclass(frozen=True, slots=True)
class Quantization:
    """One file of a model on the hub, as a list describes it."""

    file: str
    bytes: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if self.bytes is not None and not 0 < self.bytes <= MAX_BYTES:
            raise ValueError(f"bytes must be from 1 to {MAX_BYTES}")
        if self.sha256 is not None and not SHA256.fullmatch(self.sha256):
            raise ValueError(f"sha256 must be 64 hexadecimal digits in quotes, got {quoted(self.sha256)}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A model as a list describes it; ValueError if the description is invalid or incomplete."""

    name: str
    repo: str | None = None
    pattern: str | None = None  # of file names, with {quantization}
    default: str | None = None  # the quantization if none is given
    quantizations: Mapping[str, Quantization] = field(default_factory=dict)
    path: str | None = None  # a file on this machine, instead of one on the hub
    draft: str | None = None  # name of another entry
    heads: bool | None = None  # whether its files have prediction heads; None = unknown
    architecture: str | None = None  # as llama.cpp names it
    vocabulary: int | None = None  # tokens
    cache_mb: int | None = None  # KV cache in f16, with states, of a context of CACHE_TOKENS
    licence: str | None = None
    memory_gb: int | None = None
    notes: str | None = None
    checked: str | None = None
    options: Defaults | None = None
    is_own: bool = False  # from the user's list

    def __post_init__(self) -> None:
        if self.path is None and (self.repo is None or self.default is None):
            raise ValueError("it needs a path, or a repo and a default quantization")
        if self.path is not None and (not self.path or "\0" in self.path):
            raise ValueError(f"no file has the path '{quoted(self.path)}'")
        if self.memory_gb is not None and not 0 < self.memory_gb < 1 << 20:
            raise ValueError(f"memory_gb must be from 1 to {(1 << 20) - 1}, got {self.memory_gb}")
        if self.cache_mb is not None and not 0 < self.cache_mb < 1 << 30:
            raise ValueError(f"cache_mb must be from 1 to {(1 << 30) - 1}, got {self.cache_mb}")
        if self.pattern is not None and set("{}") & set(self.pattern.replace("{quantization}", "")):
            raise ValueError(f"pattern may have no braces but {{quantization}}, got {quoted(self.pattern)}")
        if self.repo is not None:
            try:
                for quantization in (None, *self.quantizations):
                    self.file(quantization)
            except ModelFileError as error:
                raise ValueError(str(error)) from error

    def file(self, quantization: str | None = None) -> RemoteFile:
        """Return the file of a quantization; None = the default. ModelFileError if there is none."""
        name = quoted(self.name)
        if self.repo is None or self.default is None:
            path = quoted(str(self.path))
            raise ModelFileError(f"{name} is the file {path}; it has no quantizations, so give only the name")
        wanted = quantization or self.default
        known = {key.lower(): value for key, value in self.quantizations.items()}
        found = known.get(wanted.lower())
        try:
            if found is not None:
                return RemoteFile(self.repo, found.file, found.bytes, found.sha256)
            if self.pattern is not None:
                case = str.lower if self.default.islower() else str.upper
                return RemoteFile(self.repo, self.pattern.format(quantization=case(wanted)))
        except ValueError as error:
            raise ModelFileError(f"{name} has no usable file: {error}; name another") from error
        choices = quoted(", ".join(self.quantizations))
        raise FetchError(f"{name} has no quantization {quoted(wanted)}; choose one of {choices}")

    def own_file(self) -> Path:
        """Return the file of an entry with a path; the file may not exist."""
        assert self.path is not None
        return expanded(self.path)

    def as_listed(self) -> dict[str, Any]:
        """Return the entry as it is written to a list, without unknown fields."""

        def known(fields: list[tuple[str, Any]]) -> dict[str, Any]:
            own = ("name", "is_own")
            return {key: value for key, value in fields if key not in own and value not in (None, {})}

        return asdict(self, dict_factory=known)


# The lists


class Catalog:
    """The models of all lists by name."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)

    def meaning(self, name: str) -> tuple[Entry, str] | None:
        """Return the entry that a name means, spelled as in requests, and the quantization ("" = default).

        None if there is no such entry; ModelFileError if there are several.
        """
        of_all = [(entry, each) for entry in self.entries.values() for each in ("", *entry.quantizations)]
        names = [f"{entry.name}:{each}".removesuffix(":") for entry, each in of_all]
        if found := matching(name, [[each] for each in names]):
            return of_all[_only(name, found, names)]
        base, _, quantization = name.partition(":")
        if base in self.entries:
            return self.entries[base], quantization
        at = matching(family(name), [[each] for each in self.entries]) if quantization_of(name) else []
        return (list(self.entries.values())[at[0]], quantization_of(name)) if at else None

    def find(self, name: str) -> Entry:
        """Return the entry of NAME or NAME:QUANTIZATION; ModelFileError, with other names, if none has it."""
        if (found := self.meaning(name)) is None:
            raise self.unknown(name)
        return found[0]

    def unknown(self, name: str) -> ModelFileError:
        """Return the error for a name that nothing has."""
        close = difflib.get_close_matches(name[:200].replace(":", "-"), self.entries, n=3, cutoff=0.5)
        remedy = "`llamaspec models list` shows the names"
        if os.path.isdir(name):  # noqa: PTH112 - Path raises for a NUL
            remedy = "it is a folder: name a .gguf file inside it"
        elif close:
            remedy = f"did you mean {quoted(', '.join(close))}?"
        return ModelFileError(f"no file and no model is called {quoted(name)}; {remedy}")

    def draft_of(self, target: str) -> str | None:
        """Return the draft of a target (a name, an address or a file); None if the lists have none."""
        if (found := self.named(target)) is not None:
            return found.draft
        address = address_of(target) if is_address(target) else target
        repo, _, file = address.removeprefix(HUB).partition(":")
        file = (file or repo).rpartition("/")[2].lower()
        for entry in self.entries.values():
            before, _, after = (entry.pattern or "").lower().rpartition("/")[2].partition("{quantization}")
            is_file = entry.pattern and file.startswith(before) and file.endswith(after)
            is_in_repo = entry.repo == repo and not file.endswith(".gguf")
            if entry.draft is not None and (is_file or is_in_repo):
                return entry.draft
        return None

    def named(self, target: str) -> Entry | None:
        """Return the entry of a name; None for a file or an address."""
        found = None if is_path(target) or is_address(target) else self.meaning(target)
        return None if found is None else found[0]


def defaults_of(target: str) -> Defaults:
    """Return the options that the lists give for a model; none for a file or an address."""
    entry = None if is_path(target) else read_catalog().named(target)
    return Defaults() if entry is None or entry.options is None else entry.options


def own_list() -> Path:
    """Return the path of the user's own list, which may not exist."""
    folder = os.environ.get("LLAMASPEC_CONFIG") or user_config_dir("llamaspec", appauthor=False)
    return Path(folder) / "models.yaml"


def read_catalog() -> Catalog:
    """Read both lists; ModelFileError if the user's own list cannot be read or parsed."""
    package = Path(str(files("llamaspec")))
    supplied = package / "models.yaml"  # in the installed package; in the source tree it is beside it
    if not supplied.exists():
        supplied = package.parent / "models.yaml"
    return Catalog({**_read(supplied, is_own=False), **_own_entries()})


def add_own(entry: Entry) -> Path:
    """Add an entry to the user's list, in place of one with the same name; return the list's path."""
    return _write_own({**_own_entries(), entry.name: entry})


def remove_own(name: str) -> bool:
    """Remove an entry from the user's list; return whether it was there."""
    entries = _own_entries()
    existed = entries.pop(name, None) is not None
    if existed:
        _write_own(entries)
    return existed


def _own_entries() -> dict[str, Entry]:
    try:
        return _read(own_list(), is_own=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _write_own(entries: Mapping[str, Entry]) -> Path:
    import yaml  # 40 ms to import, needed only for names from a list

    path = own_list()
    listed = {name: entry.as_listed() for name, entry in entries.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, yaml.safe_dump(listed, sort_keys=False))
    except OSError as error:
        raise ModelFileError(
            f"cannot write {path}: {error.strerror}; set LLAMASPEC_CONFIG to a folder of yours"
        ) from error
    return path


def _read(path: Path, *, is_own: bool) -> dict[str, Entry]:
    import yaml

    try:
        listed = yaml.safe_load(read_file(path, _MAX_LIST_BYTES)) or {}
        if not isinstance(listed, dict):
            raise ValueError("it must be a mapping from names to descriptions")
        return {str(name): _entry(str(name), what, is_own) for name, what in listed.items()}
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}; fix or delete it") from error
    except RecursionError as error:
        raise ModelFileError(f"{path} is nested too deeply; fix or delete it") from error
    except (yaml.YAMLError, AttributeError) as error:  # AttributeError: impossible dates
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise ModelFileError(f"{path}{place}: this is not plain YAML; fix or delete it") from error
    except (TypeError, ValueError) as error:
        reason = str(error).replace("; ", ", ")
        raise ModelFileError(f"{path} is invalid: {reason}; fix or delete it") from error


def _entry(name: str, what: object, is_own: bool) -> Entry:
    if not isinstance(what, dict):
        raise ValueError(f"{quoted(name)} must be a mapping")
    try:
        if given := {"name", "is_own"} & what.keys():
            raise ValueError(f"{given.pop()} is not a field")
        return parse_json(Entry, json.dumps({**what, "name": name, "is_own": is_own}, default=str))
    except ValueError as error:
        raise ValueError(f"{quoted(name)}: {error}") from error
