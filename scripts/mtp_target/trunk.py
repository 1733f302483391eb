"""A Llama GGUF as a frozen model in torch, and what a prediction head learns from it.

The one idea: the file's own numbers are the weights, so the head sees the hidden rows that llama.cpp will
give it, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llamaspec.draft_making.student import RMS_EPSILON, ROPE_BASE, Llama, Shape
from widening import Source, UnsuitableFileError


@dataclass(frozen=True)
class Lesson:
    """What the trunk says of a batch of texts [B, T]."""

    rows: Tensor  # [B, T, E] hidden rows before the last norm
    features: Tensor  # [B, T, E] the same behind it


def load(source: Source) -> Llama:
    """The model of a file, frozen.

    Raises
    ------
    UnsuitableFileError
        It is no Llama as the demonstration pair's are: tied, without grouped heads, with their constants.
    """
    sizes = source.sizes
    plain = (
        not source.has("output.weight")
        and sizes.n_kv_heads == sizes.n_heads
        and sizes.head_size * sizes.n_heads == sizes.width
        and np.isclose(sizes.epsilon, RMS_EPSILON)
        and source.number("llama.rope.freq_base", ROPE_BASE) == ROPE_BASE
    )
    if not plain:
        raise UnsuitableFileError(f"{source.path} is not of the shape of scripts/train_demo_pair.py's models")
    model = Llama(
        Shape(
            n_layers=sizes.n_layers,
            width=sizes.width,
            n_heads=sizes.n_heads,
            n_ffn=sizes.n_ffn,
            n_vocab=sizes.n_vocabulary,
            n_context=int(source.number("llama.context_length")),
        )
    )
    model.load_state_dict(_state(source))
    return model.requires_grad_(False)


def _state(source: Source) -> dict[str, Tensor]:
    """The weights under torch's names: queries, keys and values in one matrix, gate and up in another."""

    def tensor(*names: str) -> Tensor:
        return torch.from_numpy(np.concatenate([source.weight(f"{name}.weight") for name in names]))

    state = {"embedding.weight": tensor("token_embd"), "final_norm.weight": tensor("output_norm")}
    for i in range(source.sizes.n_layers):
        for ours, theirs in {
            "attention_norm": ("attn_norm",),
            "qkv": ("attn_q", "attn_k", "attn_v"),
            "attention_out": ("attn_output",),
            "ffn_norm": ("ffn_norm",),
            "gate_up": ("ffn_gate", "ffn_up"),
            "down": ("ffn_down",),
        }.items():
            state[f"blocks.{i}.{ours}.weight"] = tensor(*(f"blk.{i}.{name}" for name in theirs))
    return state


@torch.no_grad()
def teach(model: Llama, tokens: Tensor) -> Lesson:
    """Read texts [B, T]."""
    with torch.autocast("cpu", torch.bfloat16):
        turn = model.turns[:, : tokens.shape[1]]
        x = model.embedding(tokens).to(torch.bfloat16)
        for block in model.layers():
            x = block(x, turn)
        return Lesson(x, model.final_norm(x))
