"""Give a Llama a prediction head (MTP), trained on a CPU in minutes: a target for `--draft mtp`.

\b
    python scripts/train_mtp_target.py              # the embedded target, into build/models/mtp-target.gguf
    python scripts/widen_gguf.py build/models/mtp-target.gguf --layers 10 --quantize Q4_0

The model stays as it is; one layer more learns from its hidden rows what it says next. The file is of the
architecture step35 (`step35.py`). After Ctrl-C the same command resumes. It needs the ``train`` extra. The
file's name and the share of its draft tokens that is accepted go to stdout.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import click
import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

import step35
from demo_corpus import collect
from llamaspec import FixedLength, Sampling, demo_target, open_pair
from llamaspec.draft_making.student import RMS_EPSILON, ROPE_BASE, Llama, Norm, Shape, TransformerBlock
from llamaspec.draft_making.training import Plan, train
from plain_llama import PlainLlama
from widening import Source, UnsuitableFileError

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "scripts" / "prompts.yaml"
GREEDY, N_CHECKED = Sampling(temperature=0.0), 4  # draft tokens of a round
LENGTH, BATCH = 256, 2048  # tokens of a window and of a training step
N_STEPS = 3  # draft tokens behind each position that the head is trained for
SCORED_SHARE = 0.35  # of the positions: the scores of a whole vocabulary cost more than the layers
LATER = 0.8  # weight of each step's loss against the one before: a later token is drafted less often


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", type=Path, default=demo_target())
@click.option("--out", type=Path, default=ROOT / "build" / "models" / "mtp-target.gguf", show_default=True)
@click.option("--minutes", type=float, default=15.0, show_default=True, help="Training time; more helps.")
@click.option("--seed", type=int, default=20261122, show_default=True)
def main(source: Path, out: Path, minutes: float, seed: int) -> None:
    """Train a head for SOURCE, by default the embedded target."""
    try:
        file = Source(source)
        trunk = load(file)
    except UnsuitableFileError as error:
        sys.exit(f"train_mtp_target: {error}")
    torch.manual_seed(seed)
    head, ids = Head(trunk), read_corpus(source)
    chance = np.random.default_rng(seed)

    def batch_loss(_done: float) -> Tensor:
        starts = chance.integers(0, len(ids) - LENGTH, size=BATCH // LENGTH)
        return loss(
            head, trunk, torch.from_numpy(np.stack([ids[start : start + LENGTH] for start in starts]))
        )

    out.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = out.with_suffix(".checkpoint")
    plan = Plan(minutes, rate=4e-3, batch_tokens=BATCH, report_seconds=30.0)
    train(head, plan, batch_loss, lambda progress: print(progress, file=sys.stderr), checkpoint)
    step35.write(out, file, head.tensors())
    checkpoint.unlink(missing_ok=True)
    print(out)
    print(json.dumps({"accepted": accepted(out)}))


def accepted(path: Path) -> list[float]:
    """The share of the first, second, … draft tokens that greedy texts keep, as llama.cpp computes them."""
    kept = Counter[int]()
    drafted = 0
    with open_pair(path, "mtp") as pair:
        for entry in yaml.safe_load(PROMPTS.read_text()):
            stream = pair.stream(entry["text"], sampling=GREEDY, max_tokens=96, policy=FixedLength(N_CHECKED))
            for round_ in stream.run().rounds:
                if len(round_.draft) == N_CHECKED:
                    drafted += 1
                    kept.update(range(round_.n_accepted))
    return [round(kept[i] / drafted, 3) for i in range(N_CHECKED)]


def read_corpus(source: Path) -> NDArray[np.int64]:
    """The corpus as ids [N], by the model's own vocabulary."""
    documents, _ = collect()
    with PlainLlama(source) as model:
        return np.concatenate([model.tokenize(document.text.encode()) for document in documents]).astype(
            np.int64
        )


def load(source: Source) -> Llama:
    """A Llama GGUF as a frozen model in torch, so that the head sees the hidden rows that llama.cpp gives it.

    Raises
    ------
    UnsuitableFileError
        It is no Llama as the embedded target is: tied, without grouped heads, with its constants.
    """
    sizes = source.sizes
    is_plain = (
        not source.has("output.weight")
        and sizes.n_kv_heads == sizes.n_heads
        and sizes.head_size * sizes.n_heads == sizes.width
        and np.isclose(sizes.epsilon, RMS_EPSILON)
        and source.number("llama.rope.freq_base", ROPE_BASE) == ROPE_BASE
    )
    if not is_plain:
        raise UnsuitableFileError(f"{source.path} is not of the shape of the embedded target")
    n_context = int(source.number("llama.context_length"))
    shape = Shape(sizes.n_layers, sizes.width, sizes.n_heads, sizes.n_ffn, sizes.n_vocabulary, n_context)
    model = Llama(shape)

    def tensor(*names: str) -> Tensor:
        return torch.from_numpy(np.concatenate([source.weight(f"{name}.weight") for name in names]))

    state = {"embedding.weight": tensor("token_embd"), "final_norm.weight": tensor("output_norm")}
    for i in range(sizes.n_layers):
        for ours, theirs in BLOCK.items():
            state[f"blocks.{i}.{ours}.weight"] = tensor(*(f"blk.{i}.{name}" for name in theirs))
    model.load_state_dict(state)
    return model.requires_grad_(False)


BLOCK = {  # torch's names, and llama.cpp's of the parts
    "attention_norm": ("attn_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "attention_out": ("attn_output",),
    "ffn_norm": ("ffn_norm",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}


class Head(nn.Module):
    """Two norms, the matrix that joins embedding and hidden row, and one layer.

    It starts as the trunk's last layer over the hidden rows and a little of the embedding.
    """

    def __init__(self, trunk: Llama) -> None:
        super().__init__()
        width = trunk.shape.width
        self.embedding_norm, self.hidden_norm = Norm(width), Norm(width)
        self.join = nn.Linear(2 * width, width, bias=False)
        self.block = TransformerBlock(trunk.shape)
        self.block.load_state_dict(trunk.layers()[-1].state_dict())
        with torch.no_grad():
            self.join.weight.copy_(torch.cat([0.5 * torch.eye(width), torch.eye(width)], dim=1))

    def steps(self, embeddings: Tensor, rows: Tensor, turn: Tensor) -> list[Tensor]:
        """The rows that each draft step leaves, [B, T, E]; row p of each says what token p + 1 is.

        The head at position p reads token p and a hidden row of position p - 1: step 1 the trunk's, a later
        step the one that the step before it left. As in llama.cpp's KV cache, a later step attends to the
        text with the entries of step 1, and to the draft tokens before it with their own (training-time test,
        EAGLE-3: Li et al. 2503.01840).

        Parameters
        ----------
        embeddings : Tensor
            [B, T, E] of the tokens.
        rows : Tensor
            [B, T, E] the trunk's hidden row of the position before each token.
        turn : Tensor
            [2, T, head/2] cosines and sines.
        """
        cache: list[tuple[Tensor, Tensor]] = []
        left: list[Tensor] = []
        for _ in range(N_STEPS):
            x = self.join(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(rows)], dim=-1))
            q, k, v = self.block.project(x, turn)
            cache.append((k, v))
            left.append(self.block.finish(x, attend(q, cache)))
            rows = one_later(left[-1])
        return left

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """The weights under llama.cpp's names, without the number of the layer."""
        own = {
            "nextn.enorm": self.embedding_norm,
            "nextn.hnorm": self.hidden_norm,
            "nextn.eh_proj": self.join,
        }
        found = {name: module.weight for name, module in own.items()}
        for ours, theirs in BLOCK.items():
            weight = self.block.get_submodule(ours).weight
            found |= zip(theirs, weight.chunk(len(theirs)), strict=True)
        return {f"{name}.weight": weight.detach().contiguous().numpy() for name, weight in found.items()}


def attend(q: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
    """What the last step sees: text up to its own draft tokens, then one entry of each later step."""
    n_own, length = len(cache) - 1, q.shape[2]
    first_k, first_v = cache[0]
    scores = q @ first_k.transpose(-1, -2)  # [B, heads, T, T]
    seen = torch.ones(length, length, dtype=torch.bool).tril(-n_own)
    scores = scores.masked_fill(~seen, -1e9)
    own = [[entry.roll(n_own - step, 2) for entry in cache[step]] for step in range(1, n_own + 1)]
    scores = torch.cat([scores, *((q * key).sum(-1, keepdim=True) for key, _ in own)], dim=-1)
    weights = torch.softmax(scores.float() * q.shape[-1] ** -0.5, dim=-1).to(first_v.dtype)
    y = weights[..., :length] @ first_v
    for i, (_, value) in enumerate(own):
        y = y + weights[..., length + i : length + i + 1] * value
    return y


def one_later(rows: Tensor) -> Tensor:
    """Each position gets the row of the one before; the first has none."""
    return torch.cat([torch.zeros_like(rows[:, :1]), rows[:, :-1]], dim=1)


def loss(head: Head, trunk: Llama, tokens: Tensor) -> Tensor:
    """KL(trunk || head) of a batch [B, T] in nats, at random positions; the steps' means, weighted."""
    weight = trunk.embedding.weight.to(torch.bfloat16)  # [V, E]
    length = tokens.shape[1]
    with torch.autocast("cpu", torch.bfloat16):
        rows = trunk.rows(tokens)
        embeddings = trunk.embedding(tokens).to(torch.bfloat16)
        left = head.steps(embeddings, one_later(rows), trunk.turns[:, :length])
        # Before N_STEPS a step would read a row from before the text.
        positions = N_STEPS + torch.randperm(length - N_STEPS)[: int(SCORED_SHARE * length)]

        def log_p(rows: Tensor) -> Tensor:
            return log_softmax((trunk.final_norm(rows[:, positions]) @ weight.T).float(), dim=-1).flatten(
                0, 1
            )

        wanted = log_p(rows)
        total = torch.zeros(())
        for step, guessed in enumerate(left):
            each = kl_div(log_p(guessed), wanted, log_target=True, reduction="batchmean")
            total = total + LATER**step * each
        return total


if __name__ == "__main__":
    main()
