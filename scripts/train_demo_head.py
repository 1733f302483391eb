"""Train an EAGLE-3 draft for the embedded target, on a CPU, from text that comes with Python.

\b
    python scripts/train_demo_head.py --out build/demo-pair/eagle3.gguf

The corpus is that of train_demo_pair.py, without the same modules. The target evaluates windows of it, and
the draft learns the target's distributions: for its first token from the target's rows, for the next ones
from its own rows, as it will draft. scripts/draft_prices.py shows how often the target accepts its tokens.
After Ctrl-C, the same command resumes. The script needs the ``train`` extra.

Reference: Li et al., EAGLE-3, arXiv 2503.01840 (training-time test).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter, dequantize
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention, silu

from distil_draft import log
from gguf_writing import copy_vocabulary, write_gguf
from llamaspec import LlamaModel, demo_target
from small_llama import Llama, Norm, Shape, array_of, describe_layers, rotate, train
from train_demo_pair import ABOUT, LICENCE, LONG_FROM, ROOT, SHORT, TARGET, collect

LAYERS = (2, 5, 7)  # of the target, whose inputs the draft reads; llama.cpp returns no output of the last one
DEPTH, FADING = 3, 0.8  # tokens drafted in training; weight of each, relative to the one before
BATCH, SCORED = 2048, 768  # tokens of a step; of these, positions whose drafts are scored, drawn at random
RATE = 4e-3  # peak learning rate
HEAD = Shape(n_layers=1, n_ffn=TARGET.n_ffn)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=Path, default=ROOT / "build" / "demo-pair" / "eagle3.gguf", show_default=True)
@click.option("--minutes", type=float, default=15.0, show_default=True, help="Training time.")
@click.option("--seed", type=int, default=20261128, show_default=True)
def main(out: Path, minutes: float, seed: int) -> None:
    """Train and write the draft."""
    torch.manual_seed(seed)
    documents = collect()
    random.Random(seed).shuffle(documents)
    with LlamaModel(demo_target()) as model:
        ids = np.concatenate([model.vocabulary.tokenize(document.text.encode()) for document in documents])
    log(f"the corpus has {len(ids)} tokens")
    target, head, checkpoint = read_target(demo_target()), Head(HEAD), out.with_suffix(".checkpoint")
    # A resumed run draws other windows than the first part.
    chance = np.random.default_rng((seed, checkpoint.exists()))

    def batch_loss(done: float) -> Tensor:
        length = SHORT if done < LONG_FROM else TARGET.n_context - 1
        starts = chance.integers(0, len(ids) - length - 1, size=BATCH // length)
        tokens = torch.from_numpy(np.stack([ids[start : start + length + 1] for start in starts]))
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(head, target, tokens.long())

    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    train(
        head, batch_loss, lambda line, _: log(line), checkpoint, minutes=minutes, rate=RATE,
        batch_tokens=BATCH, report_seconds=30.0,
    )  # fmt: skip
    write_gguf(out, "eagle3", tensors_of(head), describe)
    checkpoint.unlink(missing_ok=True)
    log(f"wrote {out}")


class Head(nn.Module):
    """An EAGLE-3 draft. A position holds a token and the hidden row of the token before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.n_heads = shape.n_heads
        self.fuse = nn.Linear(len(LAYERS) * width, width, bias=False)
        self.token_norm, self.row_norm = Norm(width), Norm(width)
        self.qkv = nn.Linear(2 * width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.ffn_norm, self.output_norm = Norm(width), Norm(width)
        self.gate_up = nn.Linear(width, 2 * shape.n_ffn, bias=False)
        self.down = nn.Linear(shape.n_ffn, width, bias=False)
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(
        self, embedded: Tensor, rows: Tensor, turn: Tensor, seen: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the draft's own rows, before the norm of the output: [B, T, width].

        `seen` has the keys and values of the steps before, and receives those of this one.
        """
        inputs = torch.cat((self.token_norm(embedded), self.row_norm(rows)), dim=-1)
        qkv = self.qkv(inputs).view(*inputs.shape[:2], 3, self.n_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, T, head] each
        seen.append((rotate(k, turn), v))
        mixed = _attended(rotate(q, turn), seen).transpose(1, 2).reshape(rows.shape)
        x = rows + self.attention_out(mixed)
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(silu(gate) * up)
        return out


def _attended(q: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend to the text before the draft, and to the draft's tokens, one of each step.

    The draft of step s (from 1) at position i follows a text that ends at position i - s + 1. Before its own
    token, it has those of earlier steps: of step r at position i - s + r.
    """
    n_steps, length = len(seen), q.shape[2]
    if n_steps == 1:
        out: Tensor = scaled_dot_product_attention(q, *seen[0], is_causal=True)
        return out
    key, value = seen[0]
    visible = torch.ones(length, length, dtype=torch.bool).tril(1 - n_steps)
    scores = (q @ key.transpose(-1, -2)).float().masked_fill(~visible, -torch.inf)
    others = [[_later(part, n_steps - step) for part in seen[step - 1]] for step in range(2, n_steps + 1)]
    drafted = [(q * own).sum(-1, keepdim=True).float() for own, _ in others]
    shares = torch.softmax(torch.cat((scores, *drafted), dim=-1) / q.shape[-1] ** 0.5, dim=-1).to(q.dtype)
    mixed = shares[..., :length] @ value
    for i, (_, own) in enumerate(others):
        mixed = mixed + shares[..., length + i, None] * own
    return mixed


def _later(x: Tensor, n: int) -> Tensor:
    """Move positions [.., T, width] by `n`; the first ones are zeros."""
    return pad(x, (0, 0, n, 0))[..., : x.shape[-2], :]


def loss_of(head: Head, target: Llama, tokens: Tensor) -> Tensor:
    """Return the weighted cross-entropy of DEPTH draft tokens after some texts in windows [B, T + 1]."""
    n_windows, length = tokens.shape[0], tokens.shape[1] - 1
    at = torch.randint(n_windows, (SCORED,)), torch.randint(DEPTH - 1, length, (SCORED,))
    with torch.no_grad():
        rows, features = _evaluated(target, tokens)
        p = torch.softmax(target.logits(features[:, 1:][at]), dim=-1)
        embedded = target.embedding(tokens[:, 1:]).to(rows.dtype)
    turn, seen = target.turns[:, :length], list[tuple[Tensor, Tensor]]()
    own, total = head.fuse(rows[:, :-1]), torch.zeros(())
    for step in range(DEPTH):
        own = head(embedded, own if step == 0 else _later(own, 1), turn, seen)
        total = total + FADING**step * cross_entropy(target.logits(head.output_norm(own[at])), p)
    return total / sum(FADING**step for step in range(DEPTH))


def _evaluated(target: Llama, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs of LAYERS side by side, and the features before the output."""
    x: Tensor = target.embedding(tokens).to(torch.bfloat16)
    turn, rows = target.turns[:, : tokens.shape[1]], []
    for layer, block in enumerate(target.blocks):
        if layer in LAYERS:
            rows.append(x)
        x = block(x, turn)
    return torch.cat(rows, dim=-1), target.final_norm(x)


def read_target(path: Path) -> Llama:
    """Read a model that `write_model` has written."""
    found = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in GGUFReader(path).tensors
    }
    model = Llama(TARGET).requires_grad_(False)
    model.embedding.weight.copy_(found["token_embd.weight"])
    model.final_norm.weight.copy_(found["output_norm.weight"])
    for i, block in enumerate(model.layers()):
        layer = {name: found[f"blk.{i}.{name}.weight"] for name in _LAYER}
        block.qkv.weight.copy_(torch.cat([layer[f"attn_{part}"] for part in "qkv"]))
        block.gate_up.weight.copy_(torch.cat([layer["ffn_gate"], layer["ffn_up"]]))
        block.attention_norm.weight.copy_(layer["attn_norm"])
        block.attention_out.weight.copy_(layer["attn_output"])
        block.ffn_norm.weight.copy_(layer["ffn_norm"])
        block.down.weight.copy_(layer["ffn_down"])
    return model


_LAYER = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def describe(writer: GGUFWriter) -> None:
    """Add the metadata."""
    writer.add_name("llamaspec demo EAGLE-3 draft")
    writer.add_description(f"EAGLE-3 draft for the target of llamaspec's demonstration pair. {ABOUT}")
    writer.add_license("mit")
    writer.add_license_name(LICENCE)
    describe_layers(writer, HEAD)
    writer.add_array("eagle3.target_layers", [*LAYERS])
    writer.add_uint32("eagle3.target_hidden_size", TARGET.width)
    copy_vocabulary(writer, demo_target())


def tensors_of(head: Head) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield each tensor with llama.cpp's name. The embedding and the output are the target's."""
    yield "fc.weight", array_of(head.fuse.weight)
    yield "output_norm.weight", array_of(head.output_norm.weight)
    yield "blk.0.attn_norm.weight", array_of(head.token_norm.weight)
    yield "blk.0.attn_norm_2.weight", array_of(head.row_norm.weight)
    for part, rows in zip("qkv", np.split(array_of(head.qkv.weight), 3), strict=True):
        yield f"blk.0.attn_{part}.weight", rows
    yield "blk.0.attn_output.weight", array_of(head.attention_out.weight)
    yield "blk.0.ffn_norm.weight", array_of(head.ffn_norm.weight)
    for part, rows in zip(("gate", "up"), np.split(array_of(head.gate_up.weight), 2), strict=True):
        yield f"blk.0.ffn_{part}.weight", rows
    yield "blk.0.ffn_down.weight", array_of(head.down.weight)


if __name__ == "__main__":
    main()
