"""What is known of a model under a name: values of the lists of models, which refuse what cannot be.

Types are checked where a list is read (`hub/catalog.py`), here what types cannot say. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llamaspec.errors import ModelFileError
from llamaspec.hub.remote import MAX_BYTES, SHA256, RemoteFile, quoted

_NOT_IN_A_LIST = ("name", "is_own")  # of an entry's fields


@dataclass(frozen=True, slots=True)
class Quantization:
    """One file of a model on the hub.

    Raises
    ------
    ValueError
        The size or the hash cannot be one.
    """

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
    """What is known of a model under a name.

    Raises
    ------
    ValueError
        It says neither where on the hub the model is nor where on this machine, or names what cannot be.
    """

    name: str
    repo: str | None = None
    pattern: str | None = None  # of file names, with {quantization}
    default: str | None = None  # quantization
    quantizations: Mapping[str, Quantization] = field(default_factory=dict)
    path: str | None = None  # a file on this machine, instead of one on the hub
    draft: str | None = None  # name of another entry
    heads: bool | None = None  # whether its files have prediction heads; None = not known
    licence: str | None = None
    memory_gb: int | None = None
    template: str | None = None
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
        if self.pattern is not None and set("{}") & set(self.pattern.replace("{quantization}", "")):
            raise ValueError(
                f"pattern may hold no other braces than {{quantization}}, got {quoted(self.pattern)}"
            )
        if self.repo is not None:
            try:
                for quantization in (None, *self.quantizations):
                    self.file(quantization)
            except ModelFileError as error:
                raise ValueError(str(error)) from error

    def file(self, quantization: str | None = None) -> RemoteFile:
        """The file for a quantization, the default if None.

        Raises
        ------
        ModelFileError
            This model has no such quantization, or lies on this machine.
        """
        if self.repo is None or self.default is None:
            where = quoted(str(self.path))
            raise ModelFileError(
                f"{quoted(self.name)} is a file on this machine, {where}; it has no quantizations"
            )
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
            raise ModelFileError(f"{quoted(self.name)} has no usable file: {error}; name another") from error
        choices = quoted(", ".join(self.quantizations))
        raise ModelFileError(
            f"{quoted(self.name)} has no quantization {quoted(wanted)}; choose one of {choices}"
        )

    def own_file(self) -> Path:
        """The file on this machine of an entry with a path; it need not exist.

        Raises
        ------
        ModelFileError
            The path begins with the home folder of nobody.
        """
        assert self.path is not None
        return expanded(self.path)


def expanded(path: str) -> Path:
    """A path as people write it, with ~.

    Raises
    ------
    ModelFileError
        It begins with the home folder of nobody.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = quoted(path.partition("/")[0])
        raise ModelFileError(f"there is no home folder {user} for {quoted(path)}; check the path") from error


def as_listed(entry: Entry) -> dict[str, Any]:
    """What a list says of an entry: nothing that is not known."""
    content = {key: value for key, value in asdict(entry).items() if value not in (None, {})}
    quantizations = {
        name: {key: value for key, value in known.items() if value is not None}
        for name, known in content.pop("quantizations", {}).items()
    }
    kept = {key: value for key, value in content.items() if key not in _NOT_IN_A_LIST}
    return {**kept, **({"quantizations": quantizations} if quantizations else {})}
