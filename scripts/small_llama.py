"""A small Llama in torch: the model, its training, and its export to a GGUF file.

RoPE rotates interleaved pairs, as llama.cpp's `llama` architecture does, so the export permutes nothing.
Matrices with the same input are one parameter (q, k, v; gate, up). In the file, matrices are Q8_0, which
changes the function little, and norms are float32.

Training takes a given number of minutes. The learning rate follows the elapsed share of that time, so on any
machine it has decayed at the end. Muon trains the matrices of the layers, AdamW everything else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch
from gguf import GGUFWriter
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import log_softmax, scaled_dot_product_attention, silu

from gguf_writing import write_gguf

ROPE_BASE = 10_000.0
RMS_EPSILON = 1e-5
N_ROWS = 1024  # positions whose logits exist at once
WARMUP, DECAY_FROM = 0.02, 0.4  # shares of the time
LEAST_RATE = 0.02  # share of the peak learning rate
_LEAST = 1e-6  # minimum probability of all tokens together that are not recorded


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
    """One layer: attention, then a gated feed-forward network, each after its norm."""

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
        """Map [B, T, width] to [B, T, width]; `turn` holds cosines and sines: [2, T, head/2]."""
        qkv = self.qkv(self.attention_norm(x)).view(*x.shape[:2], 3, self.n_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, T, head] each
        attention = scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        x = x + self.attention_out(attention.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(silu(gate) * up)
        return out


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the last axis."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = turn[0].to(x.dtype), turn[1].to(x.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Llama(nn.Module):
    """The whole model. Its output matrix is its embedding; `hidden` stops before it."""

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
        """Return the blocks with their own type."""
        return cast("list[TransformerBlock]", list(self.blocks))

    def hidden(self, tokens: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Map ids [B, T] to normalised features [B, T, width]; call it under autocast for bfloat16."""
        turn = self.turns[:, : tokens.shape[1]]
        x: Tensor = self.embedding(tokens).to(dtype)
        for block in self.blocks:
            x = block(x, turn)
        out: Tensor = self.final_norm(x)
        return out

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of all tokens, float32."""
        return (features @ self.embedding.weight.to(features.dtype).T).float()


def loss_of(features: Tensor, weight: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
    """Return the mean of KL(p || q) in nats; all tokens that are not recorded count as one.

    With k = 1 and a probability of 1, this is the cross-entropy of ordinary training.

    Parameters
    ----------
    features : [N, width]
    weight : [V, width]
        The output matrix.
    ids : [N, k] int64
        The teacher's most probable tokens.
    log_p : [N, k] float32
        Natural logarithms of their probabilities.
    """
    out: Tensor = _LossInChunks.apply(features, weight, ids, log_p)
    return out


class _LossInChunks(torch.autograd.Function):
    """A loss that computes its gradient in the forward pass, a block of positions at a time.

    The logits of a whole batch would be by far the largest array of training. Here, only those of `N_ROWS`
    positions exist at once, and none are computed twice.
    """

    @staticmethod
    def forward(ctx, features, weight, ids, log_p):  # type: ignore[no-untyped-def]
        """Return the loss; save the gradients for `backward`."""
        weight16 = weight.to(torch.bfloat16)
        grad_features = torch.empty_like(features)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), device=features.device)
        for start in range(0, len(features), N_ROWS):
            part = slice(start, start + N_ROWS)
            loss, grad16 = _block(features[part] @ weight16.T, ids[part], log_p[part])
            total += loss
            grad_features[part] = grad16 @ weight16
            grad_weight += (grad16.T @ features[part]).float()
        scale = 1.0 / len(features)
        ctx.save_for_backward(grad_features * scale, grad_weight * scale)
        return total * scale

    @staticmethod
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        """Scale the gradients from the forward pass."""
        grad_features, grad_weight = ctx.saved_tensors
        return grad_features * upstream, grad_weight * upstream, None, None


def _block(logits: Tensor, ids: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of some positions, and its gradient with respect to the logits: [n, V].

    The gradient is q - p for the recorded tokens, and q - p_rest q / q_rest for the others.
    """
    log_q = log_softmax(logits.float(), dim=-1)
    q, p = log_q.exp(), log_p.exp()
    p_rest = (1.0 - p.sum(-1, keepdim=True)).clamp(min=_LEAST)
    q_rest = (1.0 - q.gather(-1, ids).sum(-1, keepdim=True)).clamp(min=_LEAST)
    loss = (p * (log_p - log_q.gather(-1, ids))).sum() + (p_rest * (p_rest / q_rest).log()).sum()
    gradient = q * (1.0 - p_rest / q_rest)
    gradient.scatter_(-1, ids, q.gather(-1, ids) - p)
    return loss, gradient.to(torch.bfloat16)


def train(
    model: nn.Module,
    batch_loss: Callable[[float], Tensor],
    report: Callable[[str, float], None],
    checkpoint: Path,
    *,
    minutes: float,
    rate: float,
    batch_tokens: int,
    report_seconds: float = 100.0,
) -> None:
    """Train a model in place; resume from the checkpoint if there is one. It is written before each report.

    Parameters
    ----------
    batch_loss : callable
        Draws a batch and returns its loss; receives the elapsed share of the time.
    report : callable
        Receives a line of progress, and the number of tokens for which there is time left.
    rate : float
        The peak learning rate of the matrices, in AdamW's units.
    """
    optimizers = _optimizers(model, rate)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    steps, losses, done = 0, [], 0.0
    if checkpoint.exists():
        done, steps = _restore(checkpoint, model, optimizers)
    started = time.monotonic() - 60 * minutes * done
    reported = time.monotonic()
    try:
        while (done := (time.monotonic() - started) / (60 * minutes)) < 1:
            for optimizer, rates in zip(optimizers, peaks, strict=True):
                for group, peak in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = peak * _rate_share(done)
            loss = batch_loss(done)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            steps += 1
            losses.append(loss.item())
            now = time.monotonic()
            if now - reported > report_seconds:
                speed = len(losses) * batch_tokens / (now - reported)
                _save(checkpoint, model, optimizers, done, steps)
                loss_mean = math.fsum(losses) / len(losses)
                line = f"{100 * done:5.1f}%  step {steps:5d}  loss {loss_mean:.4f}  {speed:.0f} tok/s"
                report(line, (1 - done) * 60 * minutes * speed)
                reported, losses = time.monotonic(), []
    except KeyboardInterrupt:
        if steps:
            _save(checkpoint, model, optimizers, done, steps)
        raise


def _rate_share(done: float) -> float:
    """Return the learning rate as a share of the peak, after a share of the time."""
    if done < WARMUP:
        return max(LEAST_RATE, done / WARMUP)
    if done < DECAY_FROM:
        return 1.0
    return max(0.0, 1.0 - done) / (1.0 - DECAY_FROM) * (1.0 - LEAST_RATE) + LEAST_RATE


def _optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    matrices, embeddings, norms = list[Any](), list[Any](), list[Any]()
    for name, parameter in model.named_parameters():
        kind = norms if parameter.ndim == 1 else embeddings if name == "embedding.weight" else matrices
        kind.append(parameter)
    groups = [{"params": embeddings, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=1.4 * rate, betas=(0.9, 0.95)),
    ]


def _save(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], done: float, steps: int
) -> None:
    """Replace the checkpoint in one step, so an interruption leaves the old one intact."""
    unfinished = path.with_suffix(".part")
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"model": model.state_dict(), "optimizers": states, "done": done, "steps": steps}, unfinished)
    unfinished.replace(path)


def _restore(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[float, int]:
    """Load a checkpoint; return the elapsed share of the time, and the number of steps."""
    device = next(model.parameters()).device
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    return float(state["done"]), int(state["steps"])


def write_model(path: Path, model: Llama, describe: Callable[[GGUFWriter], None]) -> None:
    """Write a model in one step; `describe` adds the vocabulary, a name and other metadata."""

    def add_metadata(writer: GGUFWriter) -> None:
        describe_layers(writer, model.shape)
        writer.add_size_label(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")
        describe(writer)

    write_gguf(path, "llama", _tensors(model), add_metadata)


def describe_layers(writer: GGUFWriter, shape: Shape) -> None:
    """Add the sizes of a model's layers."""
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
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)


def _tensors(model: Llama) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield each tensor with llama.cpp's name; without an output matrix, llama.cpp uses the embedding."""
    yield "token_embd.weight", array_of(model.embedding.weight)
    yield "output_norm.weight", array_of(model.final_norm.weight)
    for i, block in enumerate(model.layers()):
        for part, rows in zip("qkv", np.split(array_of(block.qkv.weight), 3), strict=True):
            yield f"blk.{i}.attn_{part}.weight", rows
        for part, rows in zip(("gate", "up"), np.split(array_of(block.gate_up.weight), 2), strict=True):
            yield f"blk.{i}.ffn_{part}.weight", rows
        yield f"blk.{i}.attn_norm.weight", array_of(block.attention_norm.weight)
        yield f"blk.{i}.attn_output.weight", array_of(block.attention_out.weight)
        yield f"blk.{i}.ffn_norm.weight", array_of(block.ffn_norm.weight)
        yield f"blk.{i}.ffn_down.weight", array_of(block.down.weight)


def array_of(weight: Tensor) -> NDArray[np.float32]:
    """Return the numbers of a tensor."""
    array: NDArray[np.float32] = weight.detach().cpu().float().contiguous().numpy()
    return array
