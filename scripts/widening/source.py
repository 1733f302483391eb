"""The file that is to be widened: its sizes, its metadata, its weights as float32.

Everything that could go wrong with a user's file is found here, before anything is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

GLOBAL_TENSORS = {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"}
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
ARCHITECTURES = ("llama", "step35")  # the second is a Llama with a prediction head: mtp_target/step35.py
HEAD_TENSORS = {"nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight"}
LAYER_TENSORS = {
    "attn_norm.weight",
    "ffn_norm.weight",
    *(f"{name}.{part}" for name in MATRICES for part in ("weight", "bias")),
}


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
    n_vocabulary: int
    epsilon: float  # of every RMS norm


class Source:
    """A Llama GGUF, memory-mapped; also with a prediction head.

    Raises
    ------
    UnsuitableFileError
        The file is missing, damaged, not a dense Llama, or in a type that cannot be read back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = _open(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        architecture = self.reader.get_field("general.architecture")
        self.architecture = str(architecture.contents()) if architecture else "nothing"
        if self.architecture not in ARCHITECTURES:
            raise UnsuitableFileError(
                f"{path} is of architecture {self.architecture}: "
                f"only {' and '.join(ARCHITECTURES)} can be widened"
            )
        self._refuse_variants()
        self.sizes = self._read_sizes()

    def _refuse_variants(self) -> None:
        if self.size("expert_count", 0):
            raise UnsuitableFileError(
                f"{self.path} is a mixture of experts: only dense models can be widened"
            )
        if self.number("split.count", 1) > 1:
            raise UnsuitableFileError(
                f"{self.path} is one part of several: merge them with llama-gguf-split first"
            )
        if "token_embd.weight" not in self.tensors:
            raise UnsuitableFileError(f"{self.path} holds no weights")
        for name in self.tensors:
            if (
                name not in GLOBAL_TENSORS
                and re.sub(r"^blk\.\d+\.", "", name) not in LAYER_TENSORS | HEAD_TENSORS
            ):
                raise UnsuitableFileError(f"{self.path} has tensor {name}, of which no widening is known")

    def _read_sizes(self) -> Sizes:
        width = int(self.size("embedding_length"))
        n_heads = int(self.size("attention.head_count"))
        n_heads_behind = int(self.size("nextn_predict_layers", 0))
        return Sizes(
            n_layers=int(self.size("block_count")) - n_heads_behind,
            n_heads_behind=n_heads_behind,
            width=width,
            n_ffn=int(self.size("feed_forward_length")),
            n_heads=n_heads,
            n_kv_heads=int(self.size("attention.head_count_kv", n_heads)),
            head_size=int(self.size("attention.key_length", width // n_heads)),
            n_vocabulary=int(self.tensors["token_embd.weight"].shape[1]),
            epsilon=float(self.size("attention.layer_norm_rms_epsilon")),
        )

    def size(self, key: str, default: float | None = None) -> float:
        """A number of the metadata that belongs to the architecture."""
        return self.number(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the metadata."""
        field = self.reader.get_field(key)
        value = default if field is None else field.contents()
        if not isinstance(value, (int, float)):
            raise UnsuitableFileError(f"{self.path} has no single number as {key}, but {value!r}")
        return value

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor is more than plain floats."""
        return any(gguf.GGML_QUANT_SIZES[tensor.tensor_type][0] > 1 for tensor in self.tensors.values())

    def has(self, name: str) -> bool:
        """Whether the file holds a tensor of this name."""
        return name in self.tensors

    def weight(self, name: str) -> Array:
        """One tensor as float32: [n_out, n_in] or [n]."""
        tensor = self.tensors[name]
        return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise UnsuitableFileError(f"{path} is not a file")
    try:
        reader = gguf.GGUFReader(path)
        for tensor in reader.tensors:
            gguf.quants.dequantize(tensor.data[:1], tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsuitableFileError(f"{path}: {error}; start from a float or Q8_0 file") from error
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise UnsuitableFileError(f"{path} is no complete GGUF file ({error})") from error
    return reader
