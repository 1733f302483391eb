"""Writes a trained model as a GGUF file that stock llama.cpp loads.

Matrices as Q8_0 (one byte and a sixteenth per weight, and nearly the trained function), norms as float32.
The vocabulary is the caller's: that of a target is copied whole, so that the two fit each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray
from torch import Tensor

from llamaspec.distil.model import RMS_EPSILON, ROPE_BASE, Llama, Shape

_QUANTIZATION_VERSION = 2  # ggml's current layout of quantised blocks
_VOCABULARY = "tokenizer."  # how its entries begin

Describe = Callable[[GGUFWriter], None]  # adds entries of the metadata


def write_model(path: Path, model: Llama, describe: Describe) -> int:
    """Write `model` to `path` in one step; return the size in bytes.

    Parameters
    ----------
    path : Path
    model : Llama
    describe : callable
        Adds the vocabulary, a name and what else there is to say.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: whoever has the old file mapped keeps it whole.
    partial = path.with_suffix(".partial")
    try:
        writer = GGUFWriter(partial, "llama")
        _add_shape(writer, model.shape)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_size_label(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
        writer.add_quantization_version(_QUANTIZATION_VERSION)
        describe(writer)
        for name, weight in _tensors(model):
            if weight.ndim == 1:
                writer.add_tensor(name, weight)
                continue
            blocks = gguf.quants.quantize(weight, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path.stat().st_size


def copy_vocabulary(writer: GGUFWriter, source: Path) -> None:
    """Add the whole vocabulary of another file, its chat template with it."""
    for key, field in GGUFReader(source).fields.items():
        if not key.startswith(_VOCABULARY):
            continue
        kind, value = field.types[0], field.contents()
        if kind == GGUFValueType.ARRAY:
            writer.add_key_value(key, value, kind, sub_type=field.types[-1])
        else:
            writer.add_key_value(key, value, kind)


def _add_shape(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.n_context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.n_ffn)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_heads)
    writer.add_layer_norm_rms_eps(RMS_EPSILON)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_vocab_size(shape.n_vocab)


def _tensors(model: Llama) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every weight under llama.cpp's name; without an output matrix it reuses the embedding."""
    yield "token_embd.weight", _array(model.embedding.weight)
    yield "output_norm.weight", _array(model.final_norm.weight)
    for i, block in enumerate(model.layers()):
        for part, rows in zip("qkv", np.split(_array(block.qkv.weight), 3), strict=True):
            yield f"blk.{i}.attn_{part}.weight", rows
        for part, rows in zip(("gate", "up"), np.split(_array(block.gate_up.weight), 2), strict=True):
            yield f"blk.{i}.ffn_{part}.weight", rows
        yield f"blk.{i}.attn_norm.weight", _array(block.attention_norm.weight)
        yield f"blk.{i}.attn_output.weight", _array(block.attention_out.weight)
        yield f"blk.{i}.ffn_norm.weight", _array(block.ffn_norm.weight)
        yield f"blk.{i}.ffn_down.weight", _array(block.down.weight)


def _array(weight: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = weight.detach().float().contiguous().numpy()
    return array
