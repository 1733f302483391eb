"""What a GGUF file says of its model, read before llama.cpp does, which would abort or explain itself badly.

Never reads beyond the end of the file, so that a hostile file does no harm; what these checks do not know, a
trial finds (`llama/trial.py`). `gguf.GGUFReader` is not used here: it takes seconds for a vocabulary.
"""

from __future__ import annotations

import math
import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamaspec.errors import ModelFileError, printable
from llamaspec.files import PartName, read_beginning

_HEAD = struct.Struct("<4sIqq")  # magic, version, tensors, metadata entries
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY, _FLOATS = 8, 9, (6, 12)
_SCALARS = {  # by gguf_type
    kind: struct.Struct(f"<{code}") for kind, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_TOKENS = "tokenizer.ggml.tokens"
_MOST_DIMENSIONS = 4
_MOST_STRINGS = 1 << 22  # of an array
_MOST_LAYERS = 4096
_INTERVALS = {  # one of so many layers attends and the others keep states, if the file does not say it
    "qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "minimax-01": 8,
}  # fmt: skip
_RANGES = {  # of whole numbers, by the end of their keys
    "block_count": (1, _MOST_LAYERS),
    "context_length": (1, 1 << 30),
    "embedding_length": (1, 1 << 24),
    "expert_count": (0, 1 << 16),
    "vocab_size": (2, 1 << 28),
}


@dataclass(slots=True)
class GgufFile:
    """What was found before the end of the file, or before something that cannot be read."""

    texts: dict[str, str] = field(default_factory=dict)  # metadata by key
    numbers: dict[str, int] = field(default_factory=dict)
    floats: dict[str, float] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)  # of arrays
    arrays: dict[str, list[int]] = field(default_factory=dict)  # of whole numbers, one for each layer
    tokens: list[bytes] | None = None  # of the vocabulary, if asked for
    names: set[str] = field(default_factory=set)  # of tensors
    has_all_metadata: bool = False

    @property
    def architecture(self) -> str:
        """As llama.cpp names it; empty if it is not said."""
        return self.texts.get("general.architecture", "")

    def number(self, key: str, default: int = 0) -> int:
        """A number of this architecture, such as block_count."""
        return self.numbers.get(f"{self.architecture}.{key}", default)


def check_gguf(path: Path) -> None:
    """Raise ModelFileError for what is not a whole GGUF model; looks at the first bytes only."""
    try:
        header = read_beginning(path, _HEAD.size)
    except FileNotFoundError:
        raise ModelFileError(f"no such model file: {path}; check the path") from None
    except IsADirectoryError:
        raise ModelFileError(f"{path} is a directory; name the .gguf file inside it") from None
    except OSError as error:
        raise ModelFileError(
            f"cannot read {path}: {error.strerror or error}; name a readable file"
        ) from error
    except ValueError as error:  # a character that no path has
        raise ModelFileError(f"no file has the path {printable(str(path))}; check it") from error
    if header[:4] != b"GGUF":
        raise ModelFileError(
            f"{path} is not a GGUF file; convert the model with llama.cpp's convert_hf_to_gguf.py"
        )
    if len(header) < _HEAD.size:
        raise ModelFileError(f"{path} is cut short; download it again")
    _, version, n_tensors, n_entries = _HEAD.unpack(header)
    if version not in (2, 3) or n_entries < 0 or n_tensors < 0:
        raise ModelFileError(
            f"{path} has GGUF version {version}, which llama.cpp does not read; convert it anew"
        )
    if n_tensors == 0:
        raise ModelFileError(f"{path} holds only a vocabulary and no weights; give the model itself")


def check_metadata(path: Path) -> None:
    """Raise ModelFileError for metadata of no sound model; llama.cpp judges what cannot be read."""
    try:
        found = read_gguf(path, with_tokens=True)
    except OSError:
        return
    fault = _fault(found) if found.has_all_metadata else None
    if fault is not None:
        raise ModelFileError(f"{path} is damaged: {fault}; download or convert it again")


def read_gguf(path: Path, *, with_tokens: bool = False) -> GgufFile:
    """Look at a file; OSError if it cannot be read."""
    found = GgufFile()
    with (
        path.open("rb") as file,
        suppress(struct.error, KeyError, ValueError, OverflowError),  # cut short, empty, damaged
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        _Reader(content, with_tokens=with_tokens).read(found)
    return found


def file_parts(path: Path) -> list[Path]:
    """A file, and the other parts of the same model that lie beside it."""
    found = PartName.read(path.name)
    if found is None:
        return [path]
    parts = (path.with_name(name) for name in found.all_names if name != path.name)
    return [path, *(part for part in parts if part.is_file())]


def check_parts(path: Path) -> None:
    """Raise ModelFileError for a part of a model that is not the first, or lacks other parts beside it.

    The name counts that is given, also of a link. A file with such a name that is whole is accepted.
    """
    found = PartName.read(path.name)
    if found is None:
        return
    first = path.with_name(found.all_names[0])
    missing = next((name for name in found.all_names if not path.with_name(name).is_file()), None)
    if (missing is None and path == first) or read_gguf(path).numbers.get("split.count", 0) < 2:
        return
    remedy = f"{missing} is not beside it; put all parts into one folder" if missing else f"name {first}"
    raise ModelFileError(f"{path} is part {found.part} of {found.n_parts} of a model; {remedy}")


def kv_row_sizes(found: GgufFile) -> list[tuple[int, int]]:
    """Elements of a key and of a value that each layer caches for one token: [n_layers].

    By llama.cpp's own rules for the same metadata. Layers with a sliding window keep all tokens.
    """
    n_layers = max(1, found.number("block_count") - found.number("nextn_predict_layers"))

    def by_layer(key: str, default: list[int]) -> list[int]:
        """The number of each layer; a file may give one for all."""
        name = f"{found.architecture}.{key}"
        if name in found.numbers:
            return [found.numbers[name]] * n_layers
        values = found.arrays.get(name, [])
        return values[:n_layers] if len(values) >= n_layers else default

    none = [0] * n_layers
    heads = by_layer("attention.head_count", none)
    heads_kv = by_layer("attention.head_count_kv", heads)
    usual = [found.number("embedding_length") // max(1, heads[0])] * n_layers
    slides = by_layer("attention.sliding_window_pattern", none)
    sizes = []
    for kind in ("key_length", "value_length"):
        whole = by_layer(f"attention.{kind}", usual)
        window = by_layer(f"attention.{kind}_swa", whole)
        sizes.append([window[i] if slides[i] else whole[i] for i in range(n_layers)])
    if found.number("attention.key_length_mla"):  # latent attention makes its values from the cached keys
        sizes[1] = none
    indexer = by_layer("attention.indexer.key_length", none)  # further keys, of sparse attention
    interval = found.number("full_attention_interval", _INTERVALS.get(found.architecture, 1))
    has_state = by_layer("attention.recurrent_layers", [(i + 1) % max(1, interval) for i in range(n_layers)])
    n_shared = found.number("attention.shared_kv_layers")  # the last layers, which read those of others
    return [
        (n * key + index, n * value) if i + n_shared < n_layers and not has_state[i] else (0, 0)
        for i, (n, key, value, index) in enumerate(zip(heads_kv, *sizes, indexer, strict=True))
    ]


def _fault(found: GgufFile) -> str | None:
    """What is wrong with the metadata, if anything is."""
    alignment = found.numbers.get("general.alignment", 32)
    if alignment < 8 or alignment & (alignment - 1):
        return f"general.alignment is {alignment}"
    if "general.alignment" in {*found.texts, *found.floats}:
        return "general.alignment is no whole number"
    for key, value in found.floats.items():
        if not math.isfinite(value):
            return f"{key} is {value}"
    for key, number in found.numbers.items():
        within = _RANGES.get(key.removeprefix(f"{found.architecture}."))
        if within is not None and not within[0] <= number <= within[1]:
            return f"{key} is {number}, not from {within[0]} to {within[1]}"
    used, count = found.number("expert_used_count"), found.number("expert_count")
    if used > count:
        return f"it uses {used} of {count} experts"
    if found.tokens is not None and len(found.tokens) < 2:
        return f"its vocabulary has {len(found.tokens)} tokens"
    if found.tokens is not None and len(found.tokens) != len(set(found.tokens)):
        n = len(found.tokens)
        return f"{n - len(set(found.tokens))} of its {n} tokens are there twice"
    return None


class _Reader:
    """Reads on from one place to the next."""

    def __init__(self, content: mmap.mmap, *, with_tokens: bool) -> None:
        self._content, self._with_tokens = content, with_tokens
        self._at = 0

    def read(self, found: GgufFile) -> None:
        """Note everything."""
        _, _, n_tensors, n_entries = _HEAD.unpack_from(self._content)
        self._at = _HEAD.size
        for _ in range(n_entries):
            self._entry(found)
        found.has_all_metadata = True
        for _ in range(n_tensors):
            name, n_dimensions = self._string().decode(errors="replace"), self._number(_U32)
            if n_dimensions > _MOST_DIMENSIONS:
                raise ValueError("no tensor has so many dimensions")
            self._skip(8 * n_dimensions + 12)  # sizes, type, place
            found.names.add(name)

    def _entry(self, found: GgufFile) -> None:
        key, kind = self._string().decode(errors="replace"), self._number(_U32)
        if kind == _STRING:
            found.texts[key] = self._string().decode(errors="replace")
        elif kind == _ARRAY:
            self._array(key, found)
        else:
            value = self._number(_SCALARS[kind])
            if isinstance(value, float):
                found.floats[key] = value
            elif not isinstance(value, bool):
                found.numbers[key] = value

    def _array(self, key: str, found: GgufFile) -> None:
        kind, n = self._number(_U32), self._number(_U64)
        found.lengths[key] = n
        if kind != _STRING:
            start, scalar = self._at, _SCALARS[kind]
            self._skip(n * scalar.size)
            if kind not in _FLOATS and n <= _MOST_LAYERS:
                values = scalar.iter_unpack(self._content[start : self._at])
                found.arrays[key] = [int(value) for (value,) in values]
        elif n > _MOST_STRINGS:
            raise ValueError(f"no vocabulary has {n} tokens")
        elif key == _TOKENS and self._with_tokens:
            found.tokens = [self._string() for _ in range(n)]
        else:
            content, at, unpack = self._content, self._at, _U64.unpack_from
            for _ in range(n):  # as fast as it goes
                at += 8 + unpack(content, at)[0]
            self._at = at

    def _string(self) -> bytes:
        n = self._number(_U64)
        start = self._at
        self._skip(n)
        return self._content[start : self._at]

    def _number(self, kind: struct.Struct) -> Any:
        (number,) = kind.unpack_from(self._content, self._at)
        self._at += kind.size
        return number

    def _skip(self, n: int) -> None:
        self._at += n
        if self._at > len(self._content):
            raise ValueError("the file is cut short")
