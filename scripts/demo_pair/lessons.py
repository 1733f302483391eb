"""What these scripts' models learn beside `draft_making.training`: plain text, or a teacher in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import log_softmax

from llamaspec.draft_making.student import Llama
from llamaspec.draft_making.training import Goal, Plan, loss_of


@dataclass(frozen=True)
class WindowPlan(Plan):
    """A plan whose windows are short at first: short ones learn faster from little data."""

    long_from: float = 0.0  # share of the time after which the windows are long
    short: int = 256  # positions of a window
    long: int = 1024  # positions of a window, and of the model's context

    def length(self, done: float) -> int:
        """Return the positions of a window at the elapsed share `done`."""
        return self.short if done < self.long_from else self.long


def windows(ids: NDArray[np.int64], rows: int, length: int, chance: np.random.Generator) -> Tensor:
    """Random segments of the stream, [rows, length + 1]."""
    starts = chance.integers(0, len(ids) - length - 1, size=rows)
    return torch.from_numpy(np.stack([ids[s : s + length + 1] for s in starts]))


def next_token(targets: Tensor) -> Goal:
    """The goal of plain training: cross-entropy against the tokens [N] that came next."""

    def goal(logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = _next_token_rows(logits, targets[part].unsqueeze(1))
        return out

    return goal


def teacher(features: Tensor, weight: Tensor) -> Goal:
    """The goal of distillation: forward KL against the teacher's features [N, width] and output matrix."""

    def goal(logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = _teacher_rows(logits, features[part] @ weight.T)
        return out

    return goal


@torch.compile
def _next_token_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of rows [R, V] against ids [R, 1], and its gradient by the logits."""
    log_q = log_softmax(logits.float(), dim=-1)
    hit = torch.arange(logits.shape[1], device=logits.device) == targets
    loss = -torch.where(hit, log_q, 0.0).sum()
    return loss, (log_q.exp() - hit.float()).to(torch.bfloat16)


@torch.compile
def _teacher_rows(logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Summed KL(p || q) of rows [R, V], and its gradient by the draft's logits."""
    log_q = log_softmax(logits.float(), dim=-1)
    log_p = log_softmax(teacher_logits.float(), dim=-1)
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(), (log_q.exp() - p).to(torch.bfloat16)


def next_token_loss(model: Llama, hidden: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the loss of plain training; `hidden` is `model.hidden`, compiled or not."""

    def loss(batch: Tensor) -> Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16):
            features = hidden(batch[:, :-1])
        return loss_of(features.flatten(0, 1), model.embedding.weight, next_token(batch[:, 1:].flatten()))

    return loss


@torch.no_grad()
def mean_loss(model: Llama, ids: NDArray[np.int64], length: int, most: int = 32) -> float:
    """Mean next-token loss in nats over at most `most` windows spread evenly over `ids`."""
    starts = np.linspace(0, len(ids) - length - 1, most).astype(int)
    loss = next_token_loss(model, model.hidden)
    parts = [np.stack([ids[s : s + length + 1] for s in starts[i : i + 8]]) for i in range(0, most, 8)]
    return float(np.mean([loss(torch.from_numpy(part)).item() for part in parts]))
