"""A small Llama in torch, laid out so that llama.cpp computes the same function from the same weights.

The one idea: RoPE turns interleaved pairs, as llama.cpp's ``llama`` architecture does, so nothing is
permuted on export. Matrices that are read by the same input are kept as one (q, k, v; gate, up).

It does not know about data, training or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

ROPE_BASE = 10_000.0
RMS_EPSILON = 1e-5


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


class KeyValues:
    """Keys and values of the positions computed so far, one pair of arrays per layer."""

    def __init__(self, shape: Shape, n_rows: int, n_positions: int) -> None:
        size = (shape.n_layers, n_rows, shape.n_heads, n_positions, shape.head_size)
        self.keys = torch.zeros(size, dtype=torch.bfloat16)
        self.values = torch.zeros(size, dtype=torch.bfloat16)
        self.n_filled = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new positions of one layer; return all of that layer so far."""
        end = self.n_filled + k.shape[2]
        self.keys[layer, :, :, self.n_filled : end] = k
        self.values[layer, :, :, self.n_filled : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Block(nn.Module):
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

    def forward(self, x: Tensor, turn: Tensor, memory: KeyValues | None = None, layer: int = 0) -> Tensor:
        """Map [B, T, width] to the same; `turn` is [2, T, head/2], cosines and sines."""
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.n_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, T, head]
        q, k = rotate(q, turn), rotate(k, turn)
        if memory is not None:
            k, v = memory.extend(layer, k, v)
        # With a memory either everything is new (causal) or one position sees all before it.
        y = scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.attention_out(y.transpose(1, 2).reshape(rows, length, width))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(silu(gate) * up)
        return out


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the pairs (0, 1), (2, 3), … of the last axis."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = turn[0].to(x.dtype), turn[1].to(x.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Llama(nn.Module):
    """The whole model; `hidden` stops before the output matrix, which is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.n_vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.final_norm = Norm(shape.width)
        half = shape.head_size // 2
        rates = ROPE_BASE ** (-torch.arange(half).float() / half)
        angles = torch.outer(torch.arange(shape.n_context).float(), rates)
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self._initialise()

    def layers(self) -> list[Block]:
        """Return the blocks under their own type."""
        return cast("list[Block]", list(self.blocks))

    def _initialise(self) -> None:
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.layers():
            for name, parameter in block.named_parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 * 0.8)
                if name.startswith(("attention_out", "down")):
                    nn.init.zeros_(parameter)

    def hidden(
        self, tokens: Tensor, memory: KeyValues | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """Map ids [B, T] to normalised features [B, T, width]; bfloat16 needs autocast around it."""
        start = memory.n_filled if memory is not None else 0
        turn = self.turns[:, start : start + tokens.shape[1]]
        x = self.embedding(tokens).to(dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, turn, memory, layer)
        if memory is not None:
            memory.n_filled += tokens.shape[1]
        out: Tensor = self.final_norm(x)
        return out

    def logits(self, features: Tensor) -> Tensor:
        """Scores of every token from features, float32."""
        return (features @ self.embedding.weight.to(features.dtype).T).float()
