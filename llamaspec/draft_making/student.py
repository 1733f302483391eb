"""A small Llama in torch, and its export to a GGUF file with the same function in llama.cpp.

RoPE rotates interleaved pairs, like llama.cpp's ``llama`` architecture, so the export permutes nothing.
Matrices with the same input are stored as one (q, k, v; gate, up). In the file, matrices are Q8_0, which
nearly preserves the trained function, and norms are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

ROPE_BASE = 10_000.0
RMS_EPSILON = 1e-5
_QUANTIZATION_VERSION = 2  # ggml's current layout of quantised blocks
_VOCABULARY = "tokenizer."  # how its metadata begins


@dataclass(frozen=True)
class Shape:
    """The sizes of one model."""

    n_layers: int
    width: int = 256
    n_heads: int = 4
    n_ffn: int = 704
    n_vocab: int = 8192
    n_context: int = 1024

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.width // self.n_heads

    @property
    def n_parameters(self) -> int:
        """Number of parameters in the matrices."""
        layer = 4 * self.width**2 + 3 * self.width * self.n_ffn
        return self.n_vocab * self.width + self.n_layers * layer


class Norm(nn.Module):
    """RMS normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis in float32, return it in the type of `x`."""
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + RMS_EPSILON)
        return (x32 * scale * self.weight).to(x.dtype)


class TransformerBlock(nn.Module):
    """One layer: attention, then a gated feed-forward, each behind its norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n_heads = shape.n_heads
        self.attention_norm = Norm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn_norm = Norm(shape.width)
        self.gate_up = nn.Linear(shape.width, 2 * shape.n_ffn, bias=False)
        self.down = nn.Linear(shape.n_ffn, shape.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Map [B, T, width] to the same; `turn` is [2, T, head/2], cosines and sines."""
        qkv = self.qkv(self.attention_norm(x)).view(*x.shape[:2], 3, self.n_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, T, head] each
        attention = scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        x = x + self.attention_out(attention.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(silu(gate) * up)
        return out


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), … of the last axis."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = turn[0].to(x.dtype), turn[1].to(x.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Llama(nn.Module):
    """The whole model; `hidden` stops before the output matrix, which is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.n_vocab, shape.width)
        self.blocks = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.n_layers))
        self.final_norm = Norm(shape.width)
        half = shape.head_size // 2
        rates = ROPE_BASE ** (-torch.arange(half).float() / half)
        angles = torch.outer(torch.arange(shape.n_context).float(), rates)
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())), persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.layers():
            for name, parameter in block.named_parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 * 0.8)
                if name.startswith(("attention_out", "down")):
                    nn.init.zeros_(parameter)

    def layers(self) -> list[TransformerBlock]:
        """Return the blocks under their own type."""
        return cast("list[TransformerBlock]", list(self.blocks))

    def hidden(self, tokens: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Map ids [B, T] to normalised features [B, T, width]; bfloat16 needs autocast around it."""
        turn = self.turns[:, : tokens.shape[1]]
        x: Tensor = self.embedding(tokens).to(dtype)
        for block in self.blocks:
            x = block(x, turn)
        out: Tensor = self.final_norm(x)
        return out

    def logits(self, features: Tensor) -> Tensor:
        """Scores of every token from features, float32."""
        return (features @ self.embedding.weight.to(features.dtype).T).float()


def write_model(path: Path, model: Llama, describe: Callable[[GGUFWriter], None]) -> None:
    """Write a model atomically; `describe` adds the vocabulary, a name and other metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write to another file and rename it: a process that has mapped the old file keeps it intact.
    partial = path.with_suffix(".partial")
    try:
        writer = GGUFWriter(partial, "llama")
        shape = model.shape
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


def copy_vocabulary(writer: GGUFWriter, source: Path) -> None:
    """Add the vocabulary and the chat template of another file."""
    for key, field in GGUFReader(source).fields.items():
        if not key.startswith(_VOCABULARY):
            continue
        kind, value = field.types[0], field.contents()
        if kind == GGUFValueType.ARRAY:
            writer.add_key_value(key, value, kind, sub_type=field.types[-1])
        else:
            writer.add_key_value(key, value, kind)


def _tensors(model: Llama) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every weight under llama.cpp's name; llama.cpp uses the embedding as output matrix."""
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
    array: NDArray[np.float32] = weight.detach().cpu().float().contiguous().numpy()
    return array
