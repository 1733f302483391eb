"""Write a trained model as a GGUF file that stock llama.cpp loads.

The one idea: matrices as Q8_0 (one byte and a sixteenth per weight, and nearly the trained function),
norms as float32, the vocabulary in full in both files, so that target and draft fit each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from demo_pair.chat_template import CHAT_TEMPLATE
from demo_pair.corpus import BOS_ID, EOS_ID, KEPT_OUT
from demo_pair.model import RMS_EPSILON, ROPE_BASE, Llama, Shape

_QUANTIZATION_VERSION = 2  # ggml's current layout of quantised blocks


@dataclass(frozen=True)
class Label:
    """What a file says about itself."""

    name: str
    description: str


def write(path: Path, model: Llama, tokenizer: Tokenizer, label: Label) -> int:
    """Write `model` to `path`; return the size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: whoever has the old file mapped keeps it whole.
    partial = path.with_suffix(".partial")
    writer = GGUFWriter(partial, "llama")
    _add_label(writer, label, model)
    _add_shape(writer, model.shape)
    _add_vocabulary(writer, tokenizer)
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
    return path.stat().st_size


def _add_label(writer: GGUFWriter, label: Label, model: Llama) -> None:
    n_parameters = sum(p.numel() for p in model.parameters())
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(label.name)
    writer.add_description(label.description)
    writer.add_license("mit")
    writer.add_license_name(
        "weights: MIT; trained on text under PSF-2.0 (Python's standard library) "
        "and BSD-3-Clause (docstrings of numpy and torch)"
    )
    writer.add_size_label(f"{n_parameters / 1e6:.1f}M")
    writer.add_tags(["python", "speculative-decoding", "demo", "kept out: " + " ".join(KEPT_OUT)])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(_QUANTIZATION_VERSION)


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


def _add_vocabulary(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    state = json.loads(tokenizer.to_str())
    by_id = sorted(state["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in by_id])
    writer.add_token_types(
        [TokenType.CONTROL if i in (BOS_ID, EOS_ID) else TokenType.NORMAL for _, i in by_id]
    )
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


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
