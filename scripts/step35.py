"""A Llama and a prediction head as one file of the architecture step35, which llama.cpp runs with heads.

Step 3.5 without gates, experts and windows is a Llama, but for one thing: it turns the halves of a head
against each other (NEOX) where Llama turns neighbours. So the rows of queries and keys change places, and
the trunk computes what the Llama computes, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from widening import Source

ARCHITECTURE = "step35"
CHANGED = ("GGUF.", "llama.", "general.architecture", "general.name", "general.size_label")


def write(path: Path, source: Source, head: dict[str, NDArray[np.float32]]) -> None:
    """Write the file.

    Parameters
    ----------
    path : Path
    source : Source
        The Llama.
    head : dict
        Tensors of the head under llama.cpp's names, without the number of the layer: "attn_q.weight".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    writer = GGUFWriter(unfinished, ARCHITECTURE)
    try:
        _add_metadata(writer, source)
        for name, data, kind in _tensors(source, head):
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _add_metadata(writer: GGUFWriter, source: Source) -> None:
    for key, field in source.reader.fields.items():
        if not key.startswith(CHANGED):
            kinds = field.types
            writer.add_key_value(key, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    name = source.reader.get_field("general.name")
    writer.add_name(f"{name.contents() if name else source.path.stem} with a prediction head")
    sizes = source.sizes
    n_blocks, n_context = sizes.n_layers + 1, int(source.number("llama.context_length"))
    base = float(source.number("llama.rope.freq_base", 10_000.0))
    numbers: dict[str, Any] = {
        "block_count": n_blocks,
        "nextn_predict_layers": 1,
        "context_length": n_context,
        "embedding_length": sizes.width,
        "feed_forward_length": sizes.n_ffn,
        "expert_feed_forward_length": sizes.n_ffn,
        "attention.head_count": sizes.n_heads,
        "attention.head_count_kv": sizes.n_kv_heads,
        "attention.key_length": sizes.head_size,
        "attention.value_length": sizes.head_size,
        "attention.layer_norm_rms_epsilon": sizes.epsilon,
        "attention.sliding_window": n_context,  # none; but llama.cpp wants some layer to have one
        "rope.freq_base": base,
        "rope.freq_base_swa": base,
        "rope.dimension_count": sizes.head_size,  # without a window, half of it
        "vocab_size": sizes.n_vocabulary,
    }
    for key, value in numbers.items():
        kind = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
        writer.add_key_value(f"{ARCHITECTURE}.{key}", value, kind)
    writer.add_array(f"{ARCHITECTURE}.attention.sliding_window_pattern", [True] * n_blocks)


def _tensors(
    source: Source, head: dict[str, NDArray[np.float32]]
) -> Iterator[tuple[str, NDArray[Any], GGMLQuantizationType]]:
    """Every tensor of the file: the source's as they are stored, the head's as Q8_0."""
    heads = source.sizes.n_heads, source.sizes.n_kv_heads
    for name, tensor in source.tensors.items():
        yield name, _turned(name, tensor.data, heads), tensor.tensor_type
    if not source.has("output.weight"):
        embedding = source.tensors["token_embd.weight"]
        yield "output.weight", embedding.data, embedding.tensor_type
    for part, weight in head.items():
        name = f"blk.{source.sizes.n_layers}.{part}"
        kind = GGMLQuantizationType.F32 if weight.ndim == 1 else GGMLQuantizationType.Q8_0
        yield name, gguf.quants.quantize(_turned(name, weight, heads), kind), kind


def _turned(name: str, rows: NDArray[Any], heads: tuple[int, int]) -> NDArray[Any]:
    """Rows of queries and keys: in each head the even ones first, then the odd ones."""
    for part, n_heads in zip(("attn_q.", "attn_k."), heads, strict=True):
        if part in name:
            pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])
            return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
    return rows
