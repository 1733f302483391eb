"""Make a small Llama GGUF file as costly as a large one, without changing its text.

Repeating every hidden unit r times gives the same function at r² times the cost. Appended layers that add
nothing cost more still. So the gain from drafting can be measured without a download, on a target of
realistic cost. If you publish such figures, say that the target is widened.

With W' = tile(W, (r, r)) a product grows by r. The norms (always float32) divide by r. The hidden state is r
times as large, which a norm removes. So no matrix is divided, and it quantises to the same blocks as the
source's. Heads of keys and values can be repeated less often than heads of queries. Several queries then
share a key, as in current models, and the KV cache stays small.

The script prints the names of the files. It does not write a file that is newer than its source again.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, LlamaFileType
from rich.console import Console
from rich.progress import track

from llamaspec import LlamaspecError, demo_target
from llamaspec.llama import runtime

Array = npt.NDArray[np.float32]

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LAYER_TENSORS = {"attn_norm.weight", "ffn_norm.weight"}
LAYER_TENSORS |= {f"{name}.{part}" for name in MATRICES for part in ("weight", "bias")}
GLOBAL_TENSORS = {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"}
RESIDUAL_WRITERS = ("attn_output", "ffn_down")
KEYS_AND_VALUES = ("attn_k.", "attn_v.")
ARCHITECTURE = "llama"
DROPPED = (
    "GGUF.",
    *("general." + name for name in ("architecture", "size_label", "parameter_count", "file_type")),
    *("general." + name for name in ("quantization_version", "quantized_by")),
)
FILE_TYPES = {"F32": 0, "F16": 1}  # llama.cpp's numbers
KINDS = {
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
}
EXAMPLES = """\b
Examples:
  python scripts/widen_gguf.py --layers 16 --quantize Q4_0 --quantize Q8_0
  python scripts/widen_gguf.py --kv-factor 4 --layers 10 --quantize Q4_0 --quantize Q8_0

\b
Both targets are 8 times as wide as the embedded one and have 50 times its weights. The second has grouped
queries, so its KV cache has a realistic size: 40 KB per token. Use it for long contexts."""


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a Llama model."""

    n_layers: int
    width: int
    n_ffn: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    n_turned: int  # dimensions of a head that RoPE rotates
    n_vocabulary: int
    epsilon: float  # of every RMS norm


class _Source:
    """A Llama GGUF, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"{path} is no complete GGUF file ({error}); download or copy it again"
            ) from error
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        architecture = self.reader.get_field("general.architecture")
        found = str(architecture.contents()) if architecture else "nothing"
        if found != ARCHITECTURE:
            raise ValueError(f"{path} is of architecture {found}; name a Llama")
        known = GLOBAL_TENSORS | LAYER_TENSORS
        for name in self.tensors:
            if re.sub(r"^blk\.\d+\.", "", name) not in known:
                raise ValueError(f"{path} has the tensor {name}, which cannot be widened; name a dense Llama")
        self.sizes = self._read_sizes()

    def _read_sizes(self) -> _Sizes:
        width, n_heads = int(self._size("embedding_length")), int(self._size("attention.head_count"))
        head_size = int(self._size("attention.key_length", width // n_heads))
        return _Sizes(
            n_layers=int(self._size("block_count")),
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
        """Return a number of the architecture's metadata."""
        key = f"{ARCHITECTURE}.{key}"
        field = self.reader.get_field(key)
        value = default if field is None else field.contents()
        if not isinstance(value, (int, float)):
            raise ValueError(f"{self.path} must have a number as {key}, got {value!r}")
        return value

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor of this name."""
        return name in self.tensors

    def weight(self, name: str) -> Array:
        """Return a tensor as float32: [n_out, n_in] or [n]."""
        tensor = self.tensors[name]
        try:
            return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: {error}; name a float or Q8_0 file") from error


@dataclass(frozen=True)
class Widening:
    """How a model is widened.

    Raises
    ------
    ValueError
        A number is out of range.
    """

    factor: int = 1  # repetitions of every hidden unit
    n_layers: int | None = None  # append layers that add nothing up to this number; None = append none
    dtype: str = "F16"  # of the matrices: F16 or F32
    kv_factor: int | None = None  # repetitions of the heads of keys and values; None = `factor`

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"--factor must be >= 1, got {self.factor}")
        if self.factor % self.n_kv:
            raise ValueError(f"--kv-factor must divide {self.factor}, got {self.kv_factor}")

    @property
    def n_kv(self) -> int:
        """Return the number of repetitions of the heads of keys and values."""
        return self.kv_factor or self.factor

    @property
    def label(self) -> str:
        """Return a short name for files, such as x8-kv4-L16-F16."""
        heads = f"-kv{self.n_kv}" if self.n_kv != self.factor else ""
        layers = f"-L{self.n_layers}" if self.n_layers else ""
        return f"x{self.factor}{heads}{layers}-{self.dtype}"


@dataclass(frozen=True)
class _Target:
    """One tensor of the wide model, before it is computed."""

    name: str
    shape: tuple[int, ...]
    origin: str  # name of the source's tensor
    is_silent: bool = False  # all zeros, so that its layer adds nothing


def write(source: Path, widening: Widening, path: Path) -> None:
    """Write the wide model. The file gets its name when it is complete.

    Raises
    ------
    ValueError
        The source is damaged, not a dense Llama, in a type that cannot be dequantised, or has more layers
        than `widening` asks for.
    """
    wide = _Wide(_Source(source), widening)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(unfinished, ARCHITECTURE)
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
    """Computes every tensor of the wide model from a source and a widening."""

    def __init__(self, source: _Source, widening: Widening) -> None:
        self.source, self.widening = source, widening
        self.n_layers = widening.n_layers or source.sizes.n_layers
        self.width = source.sizes.width * widening.factor  # of the hidden state
        if self.n_layers < source.sizes.n_layers:
            raise ValueError(
                f"--layers must be >= {source.sizes.n_layers}, as in {source.path}, got {self.n_layers}"
            )

    def type_of(self, target: _Target) -> GGMLQuantizationType:
        """Return the type of a tensor; vectors stay float32, as llama.cpp wants them."""
        is_half = len(target.shape) == 2 and self.widening.dtype == "F16"
        return GGMLQuantizationType.F16 if is_half else GGMLQuantizationType.F32

    def targets(self) -> Iterator[_Target]:
        """Yield every tensor of the wide model, in the order of the file."""
        sizes = self.source.sizes
        vocabulary = (sizes.n_vocabulary, self.width)
        output = "output.weight" if self.source.has("output.weight") else "token_embd.weight"
        yield _Target("token_embd.weight", vocabulary, "token_embd.weight")
        yield _Target("output.weight", vocabulary, output)
        yield _Target("output_norm.weight", (self.width,), "output_norm.weight")
        if self.source.has("rope_freqs.weight"):
            shape = self.source.weight("rope_freqs.weight").shape
            yield _Target("rope_freqs.weight", shape, "rope_freqs.weight")
        for layer in range(self.n_layers):
            yield from self._layer(layer)

    def _layer(self, layer: int) -> Iterator[_Target]:
        n_layers = self.source.sizes.n_layers
        origin, is_silent = f"blk.{layer % n_layers}.", layer >= n_layers
        for name in self.source.tensors:
            if name.startswith(origin):
                part = name.removeprefix(origin)
                adds_nothing = is_silent and part.startswith(RESIDUAL_WRITERS)
                yield _Target(f"blk.{layer}.{part}", self._shape(part, name), name, adds_nothing)

    def _shape(self, part: str, origin: str) -> tuple[int, ...]:
        """Return the shape of a widened tensor of a layer."""
        factor, width = self.widening.factor, self.width
        sizes = [int(n) * factor for n in reversed(self.source.tensors[origin].shape)]  # GGUF: n_in first
        if part.startswith(KEYS_AND_VALUES):
            sizes[0] = sizes[0] // factor * self.widening.n_kv
        if part.startswith(RESIDUAL_WRITERS) or "norm" in part:
            sizes[0] = width
        elif len(sizes) == 2:
            sizes[1] = width
        return tuple(sizes)

    def compute(self, target: _Target) -> Array:
        """Compute one tensor, float32 [target.shape]."""
        out = np.zeros(target.shape, dtype=np.float32)
        if target.is_silent:
            return out
        weight, factor = self.source.weight(target.origin), self.widening.factor
        if target.name == "rope_freqs.weight":
            return weight
        if target.name in ("token_embd.weight", "output.weight"):
            out[:] = np.tile(weight, (1, factor)) * (factor if target.name == "token_embd.weight" else 1)
        elif "norm" in target.name:
            out[:] = np.tile(weight, factor) / factor
        else:
            wide = self._repeated(target.name, weight)
            if wide.ndim == 1 and any(name in target.name for name in RESIDUAL_WRITERS):
                wide *= factor  # a bias is added to the hidden state, which is larger by the factor
            out[tuple(slice(n) for n in wide.shape)] = wide
        return out

    def _repeated(self, name: str, weight: Array) -> Array:
        """Repeat all units of a layer's matrix [n_out, n_in] or bias [n_out]."""
        factor, size = self.widening.factor, self.source.sizes.head_size
        if ".attn_output." in name and weight.ndim == 2:  # its input is the heads
            return np.tile(_heads_repeated(weight.T, size, factor).T, (factor, 1))
        if ".attn_output." in name or ".attn_" not in name:
            return np.tile(weight, (factor,) * weight.ndim)
        n = factor if ".attn_q." in name else self.widening.n_kv
        heads = _heads_repeated(weight, size, n)
        return np.tile(heads, (1, factor)) if weight.ndim == 2 else heads

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        """Write the source's metadata, with the sizes of the wide model."""
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
        """Return the metadata that widening changes."""
        factor, sizes = self.widening.factor, self.source.sizes
        numbers = {
            "block_count": self.n_layers,
            "embedding_length": self.width,
            "feed_forward_length": sizes.n_ffn * factor,
            "attention.head_count": sizes.n_heads * factor,
            "attention.head_count_kv": sizes.n_kv_heads * self.widening.n_kv,
            "attention.key_length": sizes.head_size,
            "attention.value_length": sizes.head_size,
            "rope.dimension_count": sizes.n_turned,
            # A norm adds this to the mean of squares, which is larger by the square of the factor.
            "attention.layer_norm_rms_epsilon": sizes.epsilon * factor**2,
            "vocab_size": sizes.n_vocabulary,
        }
        changed: dict[str, Any] = {f"{ARCHITECTURE}.{key}": value for key, value in numbers.items()}
        if name := self.source.reader.get_field("general.name"):
            changed["general.name"] = f"{name.contents()} widened {self.widening.label}"
        return changed


def _heads_repeated(rows: Array, size: int, n: int) -> Array:
    """Repeat each head, `size` rows, `n` times."""
    heads = rows.reshape(-1, size, *rows.shape[1:])
    return np.repeat(heads, n, axis=0).reshape(-1, *rows.shape[1:])


@click.command(help=__doc__, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=demo_target())
@click.option(
    "--factor", "-r", type=int, default=8, show_default=True, help="Repetitions of every hidden unit."
)
@click.option(
    "--kv-factor",
    type=int,
    help="Repetitions of heads of keys and values, for grouped queries. Default: as --factor.",
)
@click.option("--layers", type=int, help="Append layers that add nothing up to this number.")
@click.option(
    "--quantize",
    "kinds",
    type=click.Choice(list(KINDS)),
    multiple=True,
    help="Also write this quantisation. May be repeated.",
)
@click.option(
    "--folder", type=Path, default=Path("build/models"), show_default=True, help="Folder of the files."
)
def main(
    source: Path,
    factor: int,
    kv_factor: int | None,
    layers: int | None,
    kinds: Sequence[str],
    folder: Path,
) -> None:
    """Widen SOURCE, by default the embedded target."""
    try:
        widening = Widening(factor, layers, kv_factor=kv_factor)
        wide = folder / f"{source.stem}-{widening.label}.gguf"
        if _is_older(wide, source):
            write(source, widening, wide)
        print(wide)
        for kind in kinds:
            print(quantize(wide, kind))
    except (LlamaspecError, ValueError, OSError) as error:
        sys.exit(f"widen_gguf: {error}")


def quantize(path: Path, kind: str) -> Path:
    """Quantise a float file if that is not done yet; return the path of the new file, in the same folder."""
    name = path.stem.removesuffix("-F16").removesuffix("-F32")
    quantized = path.with_name(f"{name}-{kind}.gguf")
    if _is_older(quantized, path):
        from llama_cpp import llama_cpp as lib  # after llamaspec, whose kernels come first

        unfinished = quantized.with_suffix(".part")
        parameters = lib.llama_model_quantize_default_params()
        parameters.ftype, parameters.nthread = KINDS[kind], os.cpu_count() or 1
        runtime.start()
        if lib.llama_model_quantize(os.fsencode(path), os.fsencode(unfinished), ctypes.byref(parameters)):
            raise OSError(f"llama.cpp cannot quantize {path}; is the disk full?")
        unfinished.replace(quantized)
    return quantized


def _is_older(path: Path, source: Path) -> bool:
    return not path.exists() or path.stat().st_mtime <= source.stat().st_mtime


if __name__ == "__main__":
    main()
