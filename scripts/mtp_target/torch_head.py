"""A prediction head (MTP) in torch, trained as it is used: its later draft tokens read its own hidden rows.

The head at position p reads token p and the hidden row of position p - 1, and says what follows. Step 1 has
the trunk's rows; step k those that step k - 1 left one position earlier. As in llama.cpp's KV cache, step k
attends to the text with the trunk's rows, and to the draft tokens before it with the head's own
(training-time test, EAGLE-3: Li et al. 2503.01840).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, silu

from llamaspec.draft_making.student import Block, Llama, Norm, Shape, rotate
from mtp_target.trunk import Lesson

N_STEPS = 3  # draft tokens behind each position
SCORED_SHARE = 0.35  # of the positions: the scores of a whole vocabulary cost more than the layers
LATER = 0.8  # weight of each step's loss against the one before: a later token is drafted less often


class Head(nn.Module):
    """Two norms, the matrix that joins embedding and hidden row, and one layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding_norm = Norm(shape.width)
        self.hidden_norm = Norm(shape.width)
        self.join = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.block = Block(shape)

    @classmethod
    def over(cls, trunk: Llama) -> Head:
        """A head that starts as the trunk's last layer over its hidden rows and a little of the embedding."""
        head, width = cls(trunk.shape), trunk.shape.width
        head.block.load_state_dict(trunk.layers()[-1].state_dict())
        with torch.no_grad():
            head.join.weight.copy_(torch.cat([0.5 * torch.eye(width), torch.eye(width)], dim=1))
        return head

    def steps(self, embeddings: Tensor, rows: Tensor, turn: Tensor) -> list[Tensor]:
        """The rows that each step leaves, [B, T, E]; row p of step k says what token p + 1 is.

        Parameters
        ----------
        embeddings : Tensor
            [B, T, E] of the tokens.
        rows : Tensor
            [B, T, E] the trunk's hidden row of the position before each token.
        turn : Tensor
            [2, T, head/2] cosines and sines.
        """
        cache = _Cache()
        left: list[Tensor] = []
        for _ in range(N_STEPS):
            joined = torch.cat([self.embedding_norm(embeddings), self.hidden_norm(rows)], dim=-1)
            left.append(self._layer(self.join(joined), turn, cache))
            rows = _one_later(left[-1])
        return left

    def _layer(self, x: Tensor, turn: Tensor, cache: _Cache) -> Tensor:
        block = self.block
        batch, length, width = x.shape
        qkv = block.qkv(block.attention_norm(x)).view(batch, length, 3, block.n_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, T, head]
        y = cache.attend(rotate(q, turn), rotate(k, turn), v)
        x = x + block.attention_out(y.transpose(1, 2).reshape(batch, length, width))
        gate, up = block.gate_up(block.ffn_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + block.down(silu(gate) * up)
        return out


class _Cache:
    """Keys and values of the steps so far, the first of which saw the trunk's rows."""

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What step k sees: text up to k - 1 positions before it, then one entry of each later step."""
        self._steps.append((k, v))
        n_own, length = len(self._steps) - 1, q.shape[2]
        first_k, first_v = self._steps[0]
        scores = q @ first_k.transpose(-1, -2)  # [B, heads, T, T]
        seen = torch.ones(length, length, dtype=torch.bool).tril(-n_own)
        scores = scores.masked_fill(~seen, -1e9)
        own = [_later(entry, n_own - step) for step, entry in enumerate(self._steps[1:], 1)]
        scores = torch.cat([scores, *((q * key).sum(-1, keepdim=True) for key, _ in own)], dim=-1)
        weights = torch.softmax(scores.float() * q.shape[-1] ** -0.5, dim=-1).to(v.dtype)
        y = weights[..., :length] @ first_v
        for i, (_, value) in enumerate(own):
            y = y + weights[..., length + i : length + i + 1] * value
        return y


def _later(entry: tuple[Tensor, Tensor], n: int) -> tuple[Tensor, Tensor]:
    """Keys and values of `n` positions before each."""
    return (torch.roll(entry[0], n, 2), torch.roll(entry[1], n, 2)) if n else entry


def _one_later(rows: Tensor) -> Tensor:
    """Each position gets the row of the one before; the first has none."""
    return torch.cat([torch.zeros_like(rows[:, :1]), rows[:, :-1]], dim=1)


def losses(head: Head, trunk: Llama, tokens: Tensor, lesson: Lesson) -> list[Tensor]:
    """Mean KL(trunk || head) of every step over a batch [B, T], in nats, at positions drawn at random."""
    weight = trunk.embedding.weight.to(torch.bfloat16)  # [V, E]
    with torch.autocast("cpu", torch.bfloat16):
        embeddings = trunk.embedding(tokens).to(torch.bfloat16)
        left = head.steps(embeddings, _one_later(lesson.rows), trunk.turns[:, : tokens.shape[1]])
        length = tokens.shape[1]
        # Before N_STEPS a step would read a row from before the text.
        positions = N_STEPS + torch.randperm(length - N_STEPS)[: int(SCORED_SHARE * length)]
        wanted = log_softmax((lesson.features[:, positions] @ weight.T).float(), dim=-1)
        said = (
            log_softmax((trunk.final_norm(rows[:, positions]) @ weight.T).float(), dim=-1) for rows in left
        )
        return [
            kl_div(guess.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")
            for guess in said
        ]
