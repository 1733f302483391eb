"""The metadata of a GGUF file, checked before llama.cpp reads it and aborts on damage.

No read goes beyond the end of the file, so a hostile file does no harm. A trial finds the damage that these
checks miss (`llama/trial.py`). `gguf.GGUFReader` would take seconds for a vocabulary.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llamaspec.errors import ModelFileError, printable
from llamaspec.files import part_names, read_beginning, regular_file

ARCHITECTURE = "general.architecture"
TOKENS = "tokenizer.ggml.tokens"
SHARED_HEAD = "gemma4-assistant"  # a prediction head with its own weights, over the target's KV cache
EAGLE3, DFLASH = "eagle3", "dflash"  # drafts that read hidden rows of several layers
PARTS = frozenset(
    {SHARED_HEAD, EAGLE3, DFLASH}
)  # architectures that cannot be evaluated without their target
_HEAD = struct.Struct("<4sIqq")  # magic, version, tensors, metadata entries
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")  # the type and the number of its values
_STRING, _ARRAY = 8, 9
_SCALARS = {  # by gguf_type
    kind: struct.Struct(f"<{code}") for kind, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_MAX_DIMENSIONS = 4
# Matrices of which an evaluation only takes rows, or that a convolution uses.
_NOT_MULTIPLIED = re.compile(
    r"(position_embd|token_types|per_layer_token_embd|blk\.\d+\.(ssm_conv1d(_[qkv])?|shortconv\.conv))\.weight"
)
_MAX_STRINGS = 1 << 22  # in an array
_MAX_LAYERS = 4096
_INTERVALS = {  # by default, one of this many layers has attention and the others keep states
    "qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "minimax-01": 8,
}  # fmt: skip
_WINDOW_PERIODS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
}  # one of so many has no window; usually 4
_RANGES = {  # of integers
    "block_count": (1, _MAX_LAYERS),
    "context_length": (1, 1 << 30),
    "embedding_length": (1, 1 << 24),
    "expert_count": (0, 1 << 16),
    "vocab_size": (2, 1 << 28),
}


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Facts about a tensor."""

    sizes: tuple[int, ...]  # the first is that of a row
    kind: int  # a ggml_type
    offset: int = 0  # in bytes, from the beginning of all tensors

    @property
    def n_dimensions(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)


@dataclass(slots=True)
class GgufFile:
    """The content of a file up to its end, or up to the first damage."""

    metadata: dict[str, Any] = field(default_factory=dict)  # strings, numbers, and lists of numbers by layer
    tensors: dict[str, TensorFacts] = field(default_factory=dict)  # by name
    has_all_metadata: bool = False
    tokens_at: tuple[int, int] = (0, 0)  # [start, end) of the vocabulary's strings, in bytes
    data_start: int = 0  # where the tensors begin, in bytes

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture; empty if the file has none."""
        return self.text(ARCHITECTURE)

    def text(self, key: str) -> str:
        """Return a string from the metadata; empty if there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str, default: int = 0) -> int:
        """Return an integer from the metadata. The key may lack the architecture, as in block_count."""
        for name in (f"{self.architecture}.{key}", key):
            if type(value := self.metadata.get(name)) is int:
                return value
        return default


def check_gguf(path: Path) -> None:
    """Raise ModelFileError if a file is not a GGUF model; only its first bytes are read."""
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
    except ValueError as error:  # a null character
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
            f"{path} has GGUF version {version}, which llama.cpp does not read; convert it again"
        )
    if n_tensors == 0:
        raise ModelFileError(f"{path} holds only a vocabulary and no weights; give the model itself")


def check_metadata(path: Path) -> None:
    """Raise ModelFileError for impossible metadata. If it cannot be read to its end, llama.cpp refuses it."""
    try:
        found = read_gguf(path, with_tokens=True)
    except OSError:
        return
    fault = metadata_fault(found) if found.has_all_metadata else None
    if fault is not None:
        raise ModelFileError(f"{path} is damaged: {fault}; download or convert it again")


def read_gguf(path: Path, *, with_tokens: bool = False, until: str | None = None) -> GgufFile:
    """Read the metadata up to an entry, or all; OSError if the file cannot be read.

    The strings of the vocabulary are left out unless `with_tokens`.
    """
    found = GgufFile()
    with (
        regular_file(path) as file,
        suppress(struct.error, KeyError, ValueError, OverflowError),  # truncated, empty or damaged
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        reader = _Reader(content)
        _, _, n_tensors, n_entries = reader.unpack(_HEAD)
        for _ in range(n_entries):
            key, (kind,), start = reader.text(), reader.unpack(_U32), reader.at
            value = reader.value(kind, keeps_strings=with_tokens and key == TOKENS)
            if key == TOKENS:
                found.tokens_at = start + _ARRAY_HEAD.size, reader.at
            if value is not None:
                found.metadata[key] = value
            if key == until:
                return found
        found.has_all_metadata = True
        for _ in range(n_tensors):
            name, (n_dimensions,) = reader.text(), reader.unpack(_U32)
            if n_dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"no tensor has {n_dimensions} dimensions")
            sizes = tuple(reader.unpack(_U64)[0] for _ in range(n_dimensions))
            (kind,), (offset,) = reader.unpack(_U32), reader.unpack(_U64)
            found.tensors[name] = TensorFacts(sizes, kind, offset)
        alignment = max(1, found.number("general.alignment", 32))
        found.data_start = -(-reader.at // alignment) * alignment
    return found


def read_numbers(path: Path, found: GgufFile, name: str) -> list[int]:
    """Return a small tensor of 64-bit integers; empty if the file is too short. May raise OSError."""
    tensor = found.tensors[name]
    n, form = math.prod(tensor.sizes), struct.Struct("<q")
    with path.open("rb") as file:
        file.seek(found.data_start + tensor.offset)
        content = file.read(n * form.size)
    return [number for (number,) in form.iter_unpack(content)] if len(content) == n * form.size else []


def needs_target(path: Path) -> bool:
    """Whether a file cannot be evaluated without its target; False if it cannot be read."""
    with suppress(OSError):  # loading the file will raise an error that says why
        return read_gguf(path, until=ARCHITECTURE).architecture in PARTS
    return False


def file_parts(path: Path) -> list[Path]:
    """Return a file and the other parts of the same model in its folder."""
    others = (path.with_name(name) for name in part_names(path.name) if name != path.name)
    return [path, *(part for part in others if part.is_file())]


def check_parts(path: Path) -> None:
    """Raise ModelFileError if a file is a part of a model but not the first, or if other parts are missing.

    The given name decides, even if it is a link. A whole model may have a name like that of a part.
    """
    names = part_names(path.name)
    missing = next((name for name in names if not path.with_name(name).is_file()), None)
    is_first = path.name in names[:1] and missing is None
    if is_first or path.name not in names or read_gguf(path).number("split.count") < 2:
        return
    first, part = path.with_name(names[0]), names.index(path.name) + 1
    remedy = f"{missing} is missing; put all parts into one folder" if missing else f"name {first}"
    raise ModelFileError(f"{path} is part {part} of {len(names)} of a model; {remedy}")


def kv_row_sizes(found: GgufFile) -> list[tuple[int, int]]:
    """Return the lengths of the key and the value that each layer caches for a token: [n_layers].

    The rules are llama.cpp's. Layers with a sliding window keep all tokens.
    """
    n_layers = max(1, found.number("block_count") - found.number("nextn_predict_layers"))
    by_layer, none = partial(_by_layer, found), [0] * n_layers
    heads_kv, slides = _kv_heads(found, n_layers), by_layer("attention.sliding_window_pattern", none)
    sizes = [_head_sizes(found, kind, slides) for kind in ("key_length", "value_length")]
    if found.number("attention.key_length_mla"):  # latent attention computes values from the cached keys
        sizes[1] = none
    indexer = by_layer("attention.indexer.key_length", none)  # additional keys of sparse attention
    interval = found.number("full_attention_interval", _INTERVALS.get(found.architecture, 1))
    has_state = by_layer("attention.recurrent_layers", [(i + 1) % max(1, interval) for i in range(n_layers)])
    n_shared = found.number("attention.shared_kv_layers")  # the last layers, which use the cache of others
    return [
        (n * key + index, n * value) if i + n_shared < n_layers and not has_state[i] else (0, 0)
        for i, (n, key, value, index) in enumerate(zip(heads_kv, *sizes, indexer, strict=True))
    ]


def key_sizes(found: GgufFile, n_layers: int) -> dict[bool, int]:
    """Return the length of a token's keys in the last layer without a sliding window, and (True) with one."""
    slides = _by_layer(found, "attention.sliding_window_pattern", [0] * n_layers)
    heads_kv, sizes = _kv_heads(found, n_layers), _head_sizes(found, "key_length", slides)
    return {bool(slides[i]): heads_kv[i] * sizes[i] for i in range(n_layers)}


def _by_layer(found: GgufFile, key: str, default: list[int]) -> list[int]:
    """Return a number for each layer; a file may give one for all."""
    value, n_layers = found.metadata.get(f"{found.architecture}.{key}"), len(default)
    if type(value) is int:
        return [value] * n_layers
    if isinstance(value, list) and len(value) >= n_layers and not isinstance(value[0], float):
        return value[:n_layers]
    return default


def _kv_heads(found: GgufFile, n_layers: int) -> list[int]:
    """Return the number of heads of keys and values in each layer."""
    return _by_layer(
        found, "attention.head_count_kv", _by_layer(found, "attention.head_count", [0] * n_layers)
    )


def _head_sizes(found: GgufFile, kind: str, slides: list[int]) -> list[int]:
    """Return the "key_length" or "value_length" of a head in each layer, of which some `slides`."""
    n_heads = _by_layer(found, "attention.head_count", [0] * len(slides))[0]
    usual = [found.number("embedding_length") // max(1, n_heads)] * len(slides)
    whole = _by_layer(found, f"attention.{kind}", usual)
    window = _by_layer(found, f"attention.{kind}_swa", whole)
    return [window[i] if slides[i] else whole[i] for i in range(len(slides))]


def heads_per_key(found: GgufFile) -> int:
    """Return how many heads share a key; 1 if there are none, or layers differ."""
    n_heads = found.number("attention.head_count")
    return max(1, n_heads // max(1, found.number("attention.head_count_kv", n_heads)))


def windowed_share(found: GgufFile) -> float:
    """Return the share of layers whose attention has a sliding window, in a model that has such layers."""
    pattern = found.metadata.get(f"{found.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list) and pattern:
        return sum(map(bool, pattern)) / len(pattern)
    period = pattern if type(pattern) is int and pattern > 1 else _WINDOW_PERIODS.get(found.architecture, 4)
    return 1.0 - 1.0 / period


def multiplied_types(parts: Iterable[GgufFile]) -> frozenset[int]:
    """Return the types (ggml_type) of all matrices that a model multiplies with, from all parts of its file.

    The embedding of the tokens counts only if it is the output matrix, too.
    """
    tensors = {name: facts for part in parts for name, facts in part.tensors.items()}
    if "output.weight" in tensors:
        tensors.pop("token_embd.weight", None)
    return frozenset(
        facts.kind
        for name, facts in tensors.items()
        if facts.n_dimensions in (2, 3) and name.endswith(".weight") and not _NOT_MULTIPLIED.fullmatch(name)
    )


def active_parameters(found: GgufFile, n_parameters: int) -> int | None:
    """Return how many parameters of a mixture of experts a token uses; None for other models.

    These are all but the matrices (gate, up, down) of unused experts, computed from sizes in the metadata.
    """
    n_experts, n_used = found.number("expert_count"), found.number("expert_used_count")
    width, n_layers = found.number("embedding_length"), found.number("block_count")
    inner = found.number("expert_feed_forward_length") or found.number("feed_forward_length")
    if not (n_experts and n_used and width and n_layers and inner):
        return None
    n_sparse = n_layers - found.number("leading_dense_block_count")
    n_sparse //= max(1, found.number("interleave_moe_layer_step"))
    active = n_parameters - 3 * width * inner * (n_experts - n_used) * n_sparse
    return active if 0 < active < n_parameters else None


def metadata_fault(found: GgufFile) -> str | None:
    """Describe the first impossible entry of the metadata; None if there is none."""
    alignment = found.metadata.get("general.alignment", 32)
    if type(alignment) is not int:
        return "general.alignment is not an integer"
    if alignment < 8 or alignment & (alignment - 1):
        return f"general.alignment is {alignment}"
    for key, value in found.metadata.items():
        if isinstance(value, float) and not math.isfinite(value):
            return f"{key} is {value}"
    for key, (least, most) in _RANGES.items():
        if not least <= (number := found.number(key, least)) <= most:
            return f"{found.architecture}.{key} is {number}, not from {least} to {most}"
    used, count = found.number("expert_used_count"), found.number("expert_count")
    if used > count:
        return f"it uses {used} of {count} experts"
    tokens = found.metadata.get(TOKENS)
    if isinstance(tokens, list):
        n, n_different = len(tokens), len(set(tokens))
        if n < 2:
            return f"its vocabulary has {n} tokens"
        if n_different < n:
            return f"{n - n_different} of its {n} tokens are duplicates"
    return None


class _Reader:
    """Reads one value after another; ValueError at the end of the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, 0

    @property
    def at(self) -> int:
        """Bytes read so far."""
        return self._at

    def value(self, kind: int, *, keeps_strings: bool) -> Any:
        """Read a value of a GGUF type; None for a long array, or one of strings unless `keeps_strings`."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.unpack(_SCALARS[kind])[0]
        kind, n = self.unpack(_ARRAY_HEAD)
        if kind != _STRING:
            scalar, start = _SCALARS[kind], self._at
            self.skip(n * scalar.size)
            if n > _MAX_LAYERS:
                return None
            return [value for (value,) in scalar.iter_unpack(self._content[start : self._at])]
        if n > _MAX_STRINGS:
            raise ValueError(f"no vocabulary has {n} tokens")
        if keeps_strings:
            return [self.string() for _ in range(n)]
        content, at, unpack = self._content, self._at, _U64.unpack_from
        for _ in range(n):  # inlined: a vocabulary has 150,000 strings
            at += 8 + unpack(content, at)[0]
        self._at = at
        return None

    def text(self) -> str:
        """Read a string as UTF-8."""
        return self.string().decode(errors="replace")

    def string(self) -> bytes:
        """Read a string."""
        (n,) = self.unpack(_U64)
        self.skip(n)
        return self._content[self._at - n : self._at]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        """Read numbers."""
        numbers = form.unpack_from(self._content, self._at)
        self._at += form.size
        return numbers

    def skip(self, n: int) -> None:
        """Skip `n` bytes."""
        self._at += n
        if self._at > len(self._content):
            raise ValueError("the file is truncated")
