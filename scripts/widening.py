"""Exact widening of Llama models: every tensor of the wide model as a function of the source's.

Widening by r repeats every hidden unit r times. With W' = tile(W, (r, r)) a product grows by r; here the
norms (always float32) give the factor back, and the hidden state is r times as large, which a norm does not
see. So no matrix is ever divided: its numbers are the source's own, and it quantises to the same blocks.

Heads are repeated in their places, so that those of keys and values may be repeated less often than those of
queries: several queries then share a key, as in models of today, and the KV cache stays small. A prediction
head begins with a matrix over two norms, whose product is a hidden state: these norms give nothing back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType
from rich.console import Console
from rich.progress import track

Array = npt.NDArray[np.float32]

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LAYER_TENSORS = {"attn_norm.weight", "ffn_norm.weight"}
LAYER_TENSORS |= {f"{name}.{part}" for name in MATRICES for part in ("weight", "bias")}
GLOBAL_TENSORS = {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"}
JOIN = "nextn.eh_proj.weight"  # [E, 2E]: reads the norm of an embedding, and that of a hidden row behind it
BEFORE_A_HIDDEN_STATE = ("nextn.enorm", "nextn.hnorm")
HEAD_TENSORS = {JOIN, *(f"{name}.weight" for name in BEFORE_A_HIDDEN_STATE)}
RESIDUAL_WRITERS = ("attn_output", "ffn_down")
KEYS_AND_VALUES = ("attn_k.", "attn_v.")
ARCHITECTURES = ("llama", "step35")  # the second is a Llama with a prediction head: step35.py
DROPPED = (
    "GGUF.",
    *("general." + name for name in ("architecture", "size_label", "parameter_count", "file_type")),
    *("general." + name for name in ("quantization_version", "quantized_by")),
)
FILE_TYPES = {"F32": 0, "F16": 1}  # llama.cpp's numbers


class UnsuitableFileError(Exception):
    """The file cannot be widened; the message is one line."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama model."""

    n_layers: int  # without those of prediction heads
    n_heads_behind: int  # prediction heads, one layer each
    width: int
    n_ffn: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    n_turned: int  # numbers of a head that the position turns
    n_vocabulary: int
    epsilon: float  # of every RMS norm


class Source:
    """A Llama GGUF, memory-mapped; also with a prediction head.

    Raises
    ------
    UnsuitableFileError
        The file is damaged, not a dense Llama, or in a type that cannot be read back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except (ValueError, IndexError) as error:
            raise UnsuitableFileError(f"{path} is no complete GGUF file ({error})") from error
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        architecture = self.reader.get_field("general.architecture")
        self.architecture = str(architecture.contents()) if architecture else "nothing"
        if self.architecture not in ARCHITECTURES:
            raise UnsuitableFileError(f"{path} is of architecture {self.architecture}, not a Llama")
        known = GLOBAL_TENSORS | LAYER_TENSORS | HEAD_TENSORS
        for name in self.tensors:
            if re.sub(r"^blk\.\d+\.", "", name) not in known:
                raise UnsuitableFileError(f"{path} has tensor {name}, of which no widening is known")
        self.sizes = self._read_sizes()

    def _read_sizes(self) -> Sizes:
        width, n_heads = int(self._size("embedding_length")), int(self._size("attention.head_count"))
        head_size = int(self._size("attention.key_length", width // n_heads))
        n_heads_behind = int(self._size("nextn_predict_layers", 0))
        return Sizes(
            n_layers=int(self._size("block_count")) - n_heads_behind,
            n_heads_behind=n_heads_behind,
            width=width,
            n_ffn=int(self._size("feed_forward_length")),
            n_heads=n_heads,
            n_kv_heads=int(self._size("attention.head_count_kv", n_heads)),
            head_size=head_size,
            n_turned=int(self._size("rope.dimension_count", head_size)),
            n_vocabulary=int(self.tensors["token_embd.weight"].shape[1]),
            epsilon=float(self._size("attention.layer_norm_rms_epsilon")),
        )

    def _size(self, key: str, default: float | None = None) -> float:
        """A number of the metadata that belongs to the architecture."""
        return self.number(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the metadata."""
        field = self.reader.get_field(key)
        value = default if field is None else field.contents()
        if not isinstance(value, (int, float)):
            raise UnsuitableFileError(f"{self.path} has no single number as {key}, but {value!r}")
        return value

    def has(self, name: str) -> bool:
        """Whether the file holds a tensor of this name."""
        return name in self.tensors

    def weight(self, name: str) -> Array:
        """One tensor as float32: [n_out, n_in] or [n]."""
        tensor = self.tensors[name]
        try:
            return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise UnsuitableFileError(f"{self.path}: {error}; start from a float or Q8_0 file") from error


@dataclass(frozen=True)
class Widening:
    """What to make of a source.

    Raises
    ------
    ValueError
        A number is out of range.
    """

    factor: int = 1  # how often every hidden unit is repeated
    n_layers: int | None = None  # with layers that add nothing up to this number
    dtype: str = "F16"  # of the matrices: F16 or F32
    kv_factor: int | None = None  # how often heads of keys and values are repeated; None = as all else

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"the factor must be >= 1, got {self.factor}")
        if self.factor % self.n_kv:
            raise ValueError(f"the factor of keys and values must divide {self.factor}, got {self.kv_factor}")

    @property
    def n_kv(self) -> int:
        """How often heads of keys and values are repeated."""
        return self.kv_factor or self.factor

    @property
    def label(self) -> str:
        """A short name for files: x8-kv4-L16-F16."""
        heads = f"-kv{self.n_kv}" if self.n_kv != self.factor else ""
        layers = f"-L{self.n_layers}" if self.n_layers else ""
        return f"x{self.factor}{heads}{layers}-{self.dtype}"


@dataclass(frozen=True)
class Target:
    """One tensor of the wide model, before it is computed."""

    name: str
    shape: tuple[int, ...]
    origin: str  # the source's tensor
    is_silent: bool = False  # of a layer that adds nothing: all zeros


def write(source: Source, widening: Widening, path: Path) -> None:
    """Write the wide model. The file appears under its name when it is complete.

    Raises
    ------
    UnsuitableFileError
        The source has more layers than asked for, or is in a type that cannot be read back.
    """
    wide = _Wide(source, widening)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(unfinished, source.architecture)
    try:
        wide.add_metadata(writer)
        targets = list(wide.targets())
        for target in targets:
            kind = wide.type_of(target)
            n_bytes = int(np.prod(target.shape)) * (2 if kind == GGMLQuantizationType.F16 else 4)
            writer.add_tensor_info(target.name, target.shape, _dtype(kind), n_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for target in track(targets, "widening", console=Console(stderr=True), transient=True):
            dtype = _dtype(wide.type_of(target))
            writer.write_tensor_data(wide.compute(target).astype(dtype, copy=False))
        writer.close()
        unfinished.replace(path)
    finally:
        writer.close()
        unfinished.unlink(missing_ok=True)


def _dtype(kind: GGMLQuantizationType) -> np.dtype[Any]:
    return np.dtype(np.float16 if kind == GGMLQuantizationType.F16 else np.float32)


class _Wide:
    """A source, what to make of it, and every tensor that results."""

    def __init__(self, source: Source, widening: Widening) -> None:
        self.source, self.widening = source, widening
        self.n_layers = widening.n_layers or source.sizes.n_layers
        self.width = source.sizes.width * widening.factor  # of the hidden state
        if self.n_layers < source.sizes.n_layers:
            raise UnsuitableFileError(f"{source.path} has {source.sizes.n_layers} layers already")

    def type_of(self, target: Target) -> GGMLQuantizationType:
        """Vectors stay float32, as llama.cpp has them."""
        is_half = len(target.shape) == 2 and self.widening.dtype == "F16"
        return GGMLQuantizationType.F16 if is_half else GGMLQuantizationType.F32

    def targets(self) -> Iterator[Target]:
        """Every tensor of the wide model, in the order of the file."""
        sizes = self.source.sizes
        vocabulary = (sizes.n_vocabulary, self.width)
        output = "output.weight" if self.source.has("output.weight") else "token_embd.weight"
        yield Target("token_embd.weight", vocabulary, "token_embd.weight")
        yield Target("output.weight", vocabulary, output)
        yield Target("output_norm.weight", (self.width,), "output_norm.weight")
        if self.source.has("rope_freqs.weight"):
            shape = self.source.weight("rope_freqs.weight").shape
            yield Target("rope_freqs.weight", shape, "rope_freqs.weight")
        n_trunk = sizes.n_layers
        for layer in range(self.n_layers):
            yield from self._layer(layer, layer % n_trunk, is_silent=layer >= n_trunk)
        for i in range(sizes.n_heads_behind):
            yield from self._layer(self.n_layers + i, n_trunk + i, is_silent=False)

    def _layer(self, layer: int, source_layer: int, *, is_silent: bool) -> Iterator[Target]:
        origin = f"blk.{source_layer}."
        for name in self.source.tensors:
            if name.startswith(origin):
                part = name.removeprefix(origin)
                adds_nothing = is_silent and part.startswith(RESIDUAL_WRITERS)
                yield Target(f"blk.{layer}.{part}", self._shape(part, name), name, adds_nothing)

    def _shape(self, part: str, origin: str) -> tuple[int, ...]:
        """The shape of a layer's tensor, repeated."""
        factor, width = self.widening.factor, self.width
        if part == JOIN:
            return width, 2 * width
        sizes = [int(n) * factor for n in reversed(self.source.tensors[origin].shape)]  # GGUF: n_in first
        if part.startswith(KEYS_AND_VALUES):
            sizes[0] = sizes[0] // factor * self.widening.n_kv
        if part.startswith(RESIDUAL_WRITERS) or "norm" in part:
            sizes[0] = width
        elif len(sizes) == 2:
            sizes[1] = width
        return tuple(sizes)

    def compute(self, target: Target) -> Array:
        """The numbers of one tensor, float32 [target.shape]."""
        out = np.zeros(target.shape, dtype=np.float32)
        if target.is_silent:
            return out
        weight, factor = self.source.weight(target.origin), self.widening.factor
        if target.name == "rope_freqs.weight":
            return weight
        if target.name in ("token_embd.weight", "output.weight"):
            out[:] = np.tile(weight, (1, factor)) * (factor if target.name == "token_embd.weight" else 1)
        elif "norm" in target.name:
            gives_back = not any(part in target.name for part in BEFORE_A_HIDDEN_STATE)
            out[:] = np.tile(weight, factor) / (factor if gives_back else 1)
        elif target.name.endswith(JOIN):
            halves = weight.reshape(len(weight), 2, -1)
            out[:] = np.tile(halves, (factor, 1, factor)).reshape(out.shape)
        else:
            wide = self._repeated(target.name, weight)
            if wide.ndim == 1 and any(name in target.name for name in RESIDUAL_WRITERS):
                wide *= factor  # a bias is added to a hidden state that is so many times larger
            out[tuple(slice(n) for n in wide.shape)] = wide
        return out

    def _repeated(self, name: str, weight: Array) -> Array:
        """A matrix [n_out, n_in], or a bias [n_out], of a layer with all its units repeated."""
        factor, size = self.widening.factor, self.source.sizes.head_size
        if ".attn_output." in name and weight.ndim == 2:  # reads heads
            return np.tile(_heads_repeated(weight.T, size, factor).T, (factor, 1))
        if ".attn_output." in name or ".attn_" not in name:
            return np.tile(weight, (factor,) * weight.ndim)
        n = factor if ".attn_q." in name else self.widening.n_kv
        heads = _heads_repeated(weight, size, n)
        return np.tile(heads, (1, factor)) if weight.ndim == 2 else heads

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        """The source's metadata, with the sizes of the wide model."""
        changed = self._changed()
        for key, field in self.source.reader.fields.items():
            if key.startswith(DROPPED):
                continue
            value = changed.pop(key, None)
            value = field.contents() if value is None else value
            if value != []:  # the writer has no empty arrays
                kinds = field.types
                writer.add_key_value(key, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
        for key, value in changed.items():
            kind = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
            writer.add_key_value(key, value, kind)
        writer.add_file_type(FILE_TYPES[self.widening.dtype])

    def _changed(self) -> dict[str, Any]:
        """Metadata that widening changes."""
        source, factor, sizes = self.source, self.widening.factor, self.source.sizes
        n_blocks = self.n_layers + sizes.n_heads_behind
        numbers: dict[str, Any] = {
            "block_count": n_blocks,
            "embedding_length": self.width,
            "feed_forward_length": sizes.n_ffn * factor,
            "attention.head_count": sizes.n_heads * factor,
            "attention.head_count_kv": sizes.n_kv_heads * self.widening.n_kv,
            "attention.key_length": sizes.head_size,
            "attention.value_length": sizes.head_size,
            "rope.dimension_count": sizes.n_turned,
            # What a norm adds to the mean of squares, which is larger by the square of the factor.
            "attention.layer_norm_rms_epsilon": sizes.epsilon * factor**2,
            "vocab_size": sizes.n_vocabulary,
        }
        if source.architecture == "step35":
            numbers["expert_feed_forward_length"] = sizes.n_ffn * factor
            numbers["attention.sliding_window_pattern"] = [True] * n_blocks
        changed = {f"{source.architecture}.{key}": value for key, value in numbers.items()}
        if name := source.reader.get_field("general.name"):
            changed["general.name"] = f"{name.contents()} widened {self.widening.label}"
        return changed


def _heads_repeated(rows: Array, size: int, n: int) -> Array:
    """Each head, of `size` rows, n times in a row."""
    heads = rows.reshape(-1, size, *rows.shape[1:])
    return np.repeat(heads, n, axis=0).reshape(-1, *rows.shape[1:])
