"""Teach a shallow draft the distributions of its target.

The one idea: a draft is accepted where it agrees with its target, right or wrong, so it learns the
target's whole distribution (forward KL) instead of the text; first on the corpus, then also on text
that the target wrote, because that is where it will be asked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from demo_pair.corpus import EOS_ID
from demo_pair.lessons import WindowPlan, teacher, windows
from llamaspec.draft_making.student import Llama, Shape
from llamaspec.draft_making.training import loss_of

N_PROMPT = 64  # corpus tokens before the target takes over
TEMPERATURES = (0.3, 0.6, 0.8, 1.0)
OWN_TEXT_FROM = 0.6  # share of the time after which half of each batch is the target's own text


def shallow_copy_of(target: Llama, layers: tuple[int, ...]) -> Llama:
    """Return a model with the target's embedding, final norm and the given layers."""
    sizes = {**vars(target.shape), "n_layers": len(layers)}
    draft = Llama(Shape(**sizes))
    draft.embedding.load_state_dict(target.embedding.state_dict())
    draft.final_norm.load_state_dict(target.final_norm.state_dict())
    for block, layer in zip(draft.layers(), layers, strict=True):
        block.load_state_dict(copy.deepcopy(target.layers()[layer].state_dict()))
    return draft


class KeyValues:
    """Keys and values of the positions computed so far, one pair of arrays per layer."""

    def __init__(self, shape: Shape, n_sequences: int, n_positions: int) -> None:
        size = (shape.n_layers, n_sequences, shape.n_heads, n_positions, shape.head_size)
        self.keys = torch.zeros(size, dtype=torch.bfloat16)
        self.values = torch.zeros(size, dtype=torch.bfloat16)
        self.n_filled = 0

    def hidden(self, model: Llama, tokens: Tensor) -> Tensor:
        """As `Llama.hidden`, of tokens [B, T] behind those before: all are new, or T is 1."""
        start, end = self.n_filled, self.n_filled + tokens.shape[1]
        turn, x = model.turns[:, start:end], model.embedding(tokens).to(torch.bfloat16)
        for layer, block in enumerate(model.layers()):
            q, k, v = block.project(x, turn)
            self.keys[layer, :, :, start:end], self.values[layer, :, :, start:end] = k, v
            keys, values = self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
            x = block.finish(x, scaled_dot_product_attention(q, keys, values, is_causal=end - start > 1))
        self.n_filled = end
        out: Tensor = model.final_norm(x)
        return out


@torch.no_grad()
def write_text(target: Llama, prompts: Tensor, length: int, seed: int) -> Tensor:
    """Continue `prompts` [B, T] to [B, length + 1]; row i at temperature i mod 4."""
    chance = torch.Generator().manual_seed(seed)
    rows = len(prompts)
    temperatures = torch.tensor(TEMPERATURES).repeat(rows)[:rows, None]  # [B, 1]
    known = KeyValues(target.shape, rows, length)
    out = torch.full((rows, length + 1), EOS_ID)
    out[:, : prompts.shape[1]] = prompts
    fresh = prompts
    with torch.autocast("cpu", torch.bfloat16):
        for position in range(prompts.shape[1], length + 1):
            scores = target.logits(known.hidden(target, fresh)[:, -1])
            fresh = torch.multinomial(softmax(scores / temperatures, -1), 1, generator=chance)
            out[:, position : position + 1] = fresh
    return out


def batches(
    corpus_ids: NDArray[np.int64], own: NDArray[np.int64], plan: WindowPlan, chance: np.random.Generator
) -> Callable[[float], Tensor]:
    """Corpus windows, and from `OWN_TEXT_FROM` on half of the rows from `own` [M, length + 1]."""
    rows = plan.batch_tokens // plan.long

    def batch(done: float) -> Tensor:
        n_own = rows // 2 if done >= OWN_TEXT_FROM else 0
        picked = torch.from_numpy(own[chance.integers(0, len(own), size=n_own)])
        return torch.cat((windows(corpus_ids, rows - n_own, plan.long, chance), picked))

    return batch


def teacher_loss(draft: Llama, target: Llama) -> Callable[[Tensor], Tensor]:
    """Mean KL(target || draft) of a batch, in nats per position."""
    target_weight = target.embedding.weight.detach().to(torch.bfloat16)
    target_hidden, draft_hidden = (torch.compile(model.hidden, dynamic=False) for model in (target, draft))

    def loss(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = target_hidden(batch[:, :-1]).flatten(0, 1)
            features = draft_hidden(batch[:, :-1]).flatten(0, 1)
        return loss_of(features, draft.embedding.weight, teacher(wanted, target_weight))

    return loss
