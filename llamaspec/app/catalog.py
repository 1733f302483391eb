"""Models by name: the list that comes with llamaspec, and the user's own beside it.

Knows no network: what a name means, not whether the file is here (`app/stored.py`).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from platformdirs import user_config_dir

from llamaspec.errors import ModelFileError

HUB = "hf:"  # hf:owner/repo:file
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A model file on the hub.

    Raises
    ------
    ValueError
        The repository or the file cannot be one.
    """

    repo: str  # owner/name
    file: str  # path inside the repository; of a model in parts, the first
    n_bytes: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if self.repo.count("/") != 1 or not all(self.repo.split("/")):
            raise ValueError(f"a repository is named owner/name, got {self.repo!r}")
        if not self.file.endswith(".gguf"):
            raise ValueError(f"a model file ends in .gguf, got {self.file!r}")

    @property
    def parts(self) -> tuple[str, ...]:
        """All files of a model that was split, in order; usually this one alone."""
        found = _PART.match(self.file)
        if found is None:
            return (self.file,)
        stem, _, n = found.groups()
        return tuple(f"{stem}-{i:05}-of-{n}.gguf" for i in range(1, int(n) + 1))

    def __str__(self) -> str:
        return f"{HUB}{self.repo}:{self.file}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a model under a name.

    Raises
    ------
    ValueError
        It says neither where on the hub the model is nor where on this machine.
    """

    name: str
    repo: str | None = None
    pattern: str | None = None  # of file names, with {quantization}
    default: str | None = None  # quantization
    quantizations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # file, bytes, sha256
    path: str | None = None  # a file on this machine, instead of one on the hub
    draft: str | None = None  # name of another entry
    licence: str | None = None
    memory_gb: int | None = None
    template: str | None = None
    notes: str | None = None
    checked: str | None = None
    is_own: bool = False  # from the user's list

    def __post_init__(self) -> None:
        if self.path is None and (self.repo is None or self.default is None):
            raise ValueError("it needs a path, or a repo and a default quantization")
        for key in _TEXTS:
            value = getattr(self, key)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{key} must be text, got {value!r}")
        if self.memory_gb is not None and type(self.memory_gb) is not int:
            raise ValueError(f"memory_gb must be a whole number, got {self.memory_gb!r}")
        if not isinstance(self.quantizations, Mapping):
            raise ValueError(f"quantizations must be a mapping, got {self.quantizations!r}")
        for name, known in self.quantizations.items():
            _check_quantization(str(name), known)
        if self.pattern is not None and set("{}") & set(self.pattern.replace("{quantization}", "")):
            raise ValueError(f"pattern may hold no other braces than {{quantization}}, got {self.pattern!r}")
        if self.repo is not None:
            self.file()

    def file(self, quantization: str | None = None) -> RemoteFile:
        """The file for a quantization, the default if None.

        Raises
        ------
        ModelFileError
            This model has no such quantization, or lies on this machine.
        """
        if self.repo is None or self.default is None:
            raise ModelFileError(
                f"{self.name} is a file on this machine, {self.path}; it has no quantizations"
            )
        wanted = quantization or self.default
        known = {key.lower(): (key, value) for key, value in self.quantizations.items()}
        if wanted.lower() in known:
            found = known[wanted.lower()][1]
            return RemoteFile(self.repo, found["file"], found.get("bytes"), found.get("sha256"))
        if self.pattern is None:
            choices = ", ".join(self.quantizations)
            raise ModelFileError(f"{self.name} has no quantization {wanted}; choose one of {choices}")
        case = str.lower if self.default.islower() else str.upper
        return RemoteFile(self.repo, self.pattern.format(quantization=case(wanted)))


_TEXTS = ("repo", "pattern", "default", "path", "draft", "licence", "template", "notes", "checked")


def _check_quantization(name: str, known: object) -> None:
    """Refuse what a person mistyped."""
    if not isinstance(known, Mapping) or not isinstance(known.get("file"), str):
        raise ValueError(f"quantization {name} must be a mapping with a file, got {known!r}")
    if unknown := set(known) - {"file", "bytes", "sha256"}:
        raise ValueError(f"quantization {name} has {unknown.pop()!r}, which means nothing")
    n_bytes, sha256 = known.get("bytes"), known.get("sha256")
    if n_bytes is not None and (type(n_bytes) is not int or n_bytes < 1):
        raise ValueError(f"bytes of {name} must be a whole number above 0, got {n_bytes!r}")
    if sha256 is not None and (not isinstance(sha256, str) or not _SHA256.fullmatch(sha256)):
        raise ValueError(f"sha256 of {name} must be 64 hexadecimal digits in quotes, got {sha256!r}")


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
        close = difflib.get_close_matches(name, self.entries, n=3, cutoff=0.5)
        meant = f"did you mean {', '.join(close)}?" if close else "`llamaspec models list` shows the names"
        raise ModelFileError(f"no file and no model is called {name}; {meant}")

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
    entries = _read(_supplied_list(), is_own=False)
    own = own_list()
    return Catalog({**entries, **(_read(own, is_own=True) if own.exists() else {})})


def add_own(entry: Entry) -> Path:
    """Write an entry into the user's list, in place of one of the same name."""
    listed = _own_entries()
    left_out = ("name", "is_own")
    listed[entry.name] = {
        key: value for key, value in asdict(entry).items() if value not in (None, {}) and key not in left_out
    }
    return _write_own(listed)


def remove_own(name: str) -> bool:
    """Take an entry out of the user's list; answers whether it was there."""
    listed = _own_entries()
    existed = listed.pop(name, None) is not None
    if existed:
        _write_own(listed)
    return existed


def _supplied_list() -> Path:
    """In the installed package, or at the top of the source tree."""
    package = Path(str(files("llamaspec")))
    installed = package / "models.yaml"
    return installed if installed.exists() else package.parent / "models.yaml"


def _own_entries() -> dict[str, Any]:
    path = own_list()
    if not path.exists():
        return {}
    _read(path, is_own=True)  # complains of what would be lost
    import yaml

    return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})


def _write_own(listed: Mapping[str, Any]) -> Path:
    import yaml

    path = own_list()
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:  # in one step: a reader finds the old list or the new one
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(yaml.safe_dump(dict(listed), sort_keys=False), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise ModelFileError(
            f"cannot write {path}: {error.strerror}; set LLAMASPEC_CONFIG to a folder of yours"
        ) from error
    return path


def _read(path: Path, *, is_own: bool) -> dict[str, Entry]:
    import yaml  # 40 ms, which commands that are given files do not need

    try:
        listed = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return {str(name): _entry(str(name), what, is_own) for name, what in listed.items()}
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise ModelFileError(f"{path}{place}: this is not YAML; mend or delete it") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise ModelFileError(f"{path} has an entry that cannot be understood: {error}; mend it") from error


def _entry(name: str, what: object, is_own: bool) -> Entry:
    if not isinstance(what, Mapping):
        raise ValueError(f"{name} must be a mapping, got {what!r}")
    known = {field.name for field in fields(Entry)} - {"name", "is_own"}
    if unknown := [str(key) for key in what if key not in known]:
        raise ValueError(f"{name}: {unknown[0]} means nothing")
    try:
        return Entry(name=name, is_own=is_own, **what)
    except (ValueError, ModelFileError) as error:
        raise ValueError(f"{name}: {str(error).replace('; ', ', ')}") from error
