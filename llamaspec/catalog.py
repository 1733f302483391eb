"""From a model's name to its file: paths, addresses on the hub, and the lists (models.yaml) of short names.

One list comes with llamaspec; the user's own takes precedence. `resolve_*` fetch what is not on this machine;
`locate_*` never do.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from platformdirs import user_config_dir

from llamaspec.errors import ModelFileError, quoted
from llamaspec.files import parse_json, read_file, write_file
from llamaspec.hub import (
    HUB,
    MAX_BYTES,
    SHA256,
    OnFetch,
    RemoteFile,
    fetch,
    fetched_states,
    find_here,
    is_repo,
    list_models,
    repo_folder,
)  # fmt: skip

CACHE_TOKENS = 8192  # context size that an entry's cache_mb is for
_MAX_LIST_BYTES = 1 << 20


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
    return None if entry.path is not None and not quantization else entry.file(quantization or None)


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


# Addresses


def remote_file(address: str) -> RemoteFile:
    """The file of an address, hf:owner/repo:file; raises a ModelFileError if it is not an address."""
    repo, _, file = address.removeprefix(HUB).partition(":")
    try:
        return RemoteFile(repo, file)
    except ValueError as error:
        raise ModelFileError(
            f"{quoted(address)} is not an address: {error}; write hf:owner/repo:file.gguf"
        ) from error


def address_of_page(url: str, hub_url: str) -> str:
    """The address, hf:..., of the repository or file that a page of the hub shows."""
    page = url.partition("?")[0].partition("#")[0].removeprefix(f"{hub_url}/")
    parts = unquote(page).strip("/").split("/")
    if len(parts) == 2 or parts[2:] == ["tree", "main"]:
        return f"{HUB}{parts[0]}/{parts[1]}"
    if parts[2:4] in (["blob", "main"], ["resolve", "main"]) and len(parts) > 4:
        return f"{HUB}{parts[0]}/{parts[1]}:{'/'.join(parts[4:])}"
    raise ModelFileError(
        f"{quoted(url)} is not the page of a model on the hub's main branch; write hf:owner/repo:file.gguf"
    )


def matching(names: Iterable[str], repo: str, quantization: str) -> list[RemoteFile]:
    """The models of a quantization ("" = any) among a repository's files; the first part of a split one."""
    marked = re.compile(rf"(?:^|[-._/]){re.escape(quantization)}(?:[-./]|$)", re.IGNORECASE)
    found = []
    for name in dict.fromkeys(names):
        with suppress(ValueError):  # not a model, or a name that leads elsewhere
            file = RemoteFile(repo, name)
            is_model = file.parts[0] == name and "mmproj" not in name
            if is_model and (not quantization or marked.search(name)):
                found.append(file)
    return found


# Entries of a list


@dataclass(frozen=True, slots=True)
class Quantization:
    """One file of a model on the hub, as a list names it."""

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
    """A model as a list describes it; raises a ValueError if the description is invalid or incomplete."""

    name: str
    repo: str | None = None
    pattern: str | None = None  # of file names, with {quantization}
    default: str | None = None  # quantization
    quantizations: Mapping[str, Quantization] = field(default_factory=dict)
    path: str | None = None  # a file on this machine, instead of one on the hub
    draft: str | None = None  # name of another entry
    heads: bool | None = None  # whether its files have prediction heads; None = unknown
    architecture: str | None = None  # as llama.cpp names it
    vocabulary: int | None = None  # tokens
    cache_mb: int | None = None  # KV cache in f16, and states, of a context of CACHE_TOKENS
    licence: str | None = None
    memory_gb: int | None = None
    notes: str | None = None
    checked: str | None = None
    is_own: bool = False  # from the user's list

    def __post_init__(self) -> None:
        if self.path is None and (self.repo is None or self.default is None):
            raise ValueError("it needs a path, or a repo and a default quantization")
        if self.path is not None and (not self.path or "\0" in self.path):
            raise ValueError(f"no file has the path {quoted(self.path) or 'of no characters'}")
        if self.memory_gb is not None and not 0 < self.memory_gb < 1 << 20:
            raise ValueError("memory_gb must be a whole number of gigabytes")
        if self.cache_mb is not None and not 0 < self.cache_mb < 1 << 30:
            raise ValueError("cache_mb must be a whole number of megabytes")
        if self.pattern is not None and set("{}") & set(self.pattern.replace("{quantization}", "")):
            raise ValueError(f"pattern may have no braces but {{quantization}}, got {quoted(self.pattern)}")
        if self.repo is not None:
            try:
                for quantization in (None, *self.quantizations):
                    self.file(quantization)
            except ModelFileError as error:
                raise ValueError(str(error)) from error

    def file(self, quantization: str | None = None) -> RemoteFile:
        """The file of a quantization; None = the default. Raises a ModelFileError if there is none."""
        name = quoted(self.name)
        if self.repo is None or self.default is None:
            where = quoted(str(self.path))
            raise ModelFileError(f"{name} is a file on this machine, {where}; it has no quantizations")
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
        raise ModelFileError(f"{name} has no quantization {quoted(wanted)}; choose one of {choices}")

    def own_file(self) -> Path:
        """The file of an entry with a path; it need not exist."""
        assert self.path is not None
        return expanded(self.path)

    def as_listed(self) -> dict[str, Any]:
        """The entry as written to a list, without unknown fields."""

        def known(fields: list[tuple[str, Any]]) -> dict[str, Any]:
            own = ("name", "is_own")
            return {key: value for key, value in fields if key not in own and value not in (None, {})}

        return asdict(self, dict_factory=known)


def expanded(path: str) -> Path:
    """A path with ~ expanded; raises a ModelFileError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = quoted(path.partition("/")[0])
        raise ModelFileError(f"there is no home folder {user} for {quoted(path)}; check the path") from error


# The lists


class Catalog:
    """All entries by name; the user's own take precedence."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)

    def find(self, name: str) -> Entry:
        """The entry of a name; raises a ModelFileError that suggests similar names."""
        if name in self.entries:
            return self.entries[name]
        close = difflib.get_close_matches(name[:200], self.entries, n=3, cutoff=0.5)
        names = f"did you mean {quoted(', '.join(close))}?"
        meant = names if close else "`llamaspec models list` shows the names"
        if os.path.isdir(name):  # noqa: PTH112 - Path raises for a NUL
            meant = "it is a folder: name a .gguf file inside it"
        raise ModelFileError(f"no file and no model is called {quoted(name)}; {meant}")

    def draft_of(self, target: str) -> str | None:
        """The draft for a target (a name, an address on the hub or a file); None if the lists have none."""
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
    """Both lists; raises a ModelFileError if the user's cannot be read or parsed."""
    package = Path(str(files("llamaspec")))
    supplied = package / "models.yaml"  # of the installed package, else of the source tree
    if not supplied.exists():
        supplied = package.parent / "models.yaml"
    return Catalog({**_read(supplied, is_own=False), **_own_entries()})


def add_own(entry: Entry) -> Path:
    """Add an entry to the user's list, replacing one of the same name."""
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
        raise ModelFileError(f"{path} has an entry that cannot be understood: {reason}; fix it") from error


def _entry(name: str, what: object, is_own: bool) -> Entry:
    if not isinstance(what, dict):
        raise ValueError(f"{quoted(name)} must be a mapping")
    try:
        if given := {"name", "is_own"} & what.keys():
            raise ValueError(f"{given.pop()} means nothing")
        return parse_json(Entry, json.dumps({**what, "name": name, "is_own": is_own}, default=str))
    except ValueError as error:
        raise ValueError(f"{quoted(name)}: {error}") from error
