"""What is learned from a batch, as losses of whole distributions over large vocabularies.

A goal answers for some rows of logits with their loss and its gradient; `loss_of` asks it for a block of rows
at a time, so that the logits of a batch never exist together. It does not know about models or data.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

N_ROWS = 1024  # whose logits exist at once
_LEAST = 1e-6  # probability of all tokens that are not among the best


class Goal(Protocol):
    """What the model is to say at every position."""

    def __call__(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return the summed loss of these rows, and its gradient by their logits."""


def _next_token_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of rows [R, V] against ids [R, 1], and its gradient by the logits."""
    log_q = log_softmax(logits.float(), dim=-1)
    hit = torch.arange(logits.shape[1], device=logits.device) == targets
    loss = -torch.where(hit, log_q, 0.0).sum()
    return loss, (log_q.exp() - hit.float()).to(torch.bfloat16)


def _teacher_rows(logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed KL(p || q) of rows [R, V], and its gradient by the draft's logits."""
    log_q = log_softmax(logits.float(), dim=-1)
    log_p = log_softmax(teacher_logits.float(), dim=-1)
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(), (log_q.exp() - p).to(torch.bfloat16)


def _best_token_rows(logits: Tensor, ids: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed KL(p || q) of rows [R, V] and its gradient by the logits.

    Over the teacher's best tokens [R, k], and one that stands for all others. The gradient is q - p for the
    best tokens, q - p_rest q / q_rest for the others.
    """
    log_q = log_softmax(logits.float(), dim=-1)
    q, p = log_q.exp(), log_p.exp()
    p_rest = (1.0 - p.sum(-1, keepdim=True)).clamp(min=_LEAST)
    q_rest = (1.0 - q.gather(-1, ids).sum(-1, keepdim=True)).clamp(min=_LEAST)
    loss = (p * (log_p - log_q.gather(-1, ids))).sum() + (p_rest * (p_rest / q_rest).log()).sum()
    gradient = q * (1.0 - p_rest / q_rest)
    gradient.scatter_(-1, ids, q.gather(-1, ids) - p)
    return loss, gradient.to(torch.bfloat16)


class NextToken:
    """The goal of plain training: the token that came next."""

    rows = staticmethod(_next_token_rows)

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets.unsqueeze(1)  # [N, 1] ids

    def __call__(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return the summed loss of these rows, and its gradient by their logits."""
        out: tuple[Tensor, Tensor] = self.rows(logits, self.targets[part])
        return out


class TeacherDistribution:
    """The goal of distillation beside a teacher in torch: its whole distribution (forward KL)."""

    rows = staticmethod(_teacher_rows)

    def __init__(self, features: Tensor, weight: Tensor) -> None:
        self.features = features  # [N, width] bfloat16, the target's
        self.weight = weight  # [V, width] bfloat16, the target's output matrix

    def __call__(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return the summed loss of these rows, and its gradient by their logits."""
        out: tuple[Tensor, Tensor] = self.rows(logits, self.features[part] @ self.weight.T)
        return out


class BestTokens:
    """The goal of distillation from a recorded teacher: its most probable tokens (forward KL)."""

    def __init__(self, ids: Tensor, log_p: Tensor) -> None:
        self.ids = ids  # [N, k] int64
        self.log_p = log_p  # [N, k] float32

    def __call__(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return the summed loss of these rows, and its gradient by their logits."""
        return _best_token_rows(logits, self.ids[part], self.log_p[part])


def compile_goals() -> None:
    """Make the two older goals faster from here on; needs a C++ compiler."""
    NextToken.rows = staticmethod(torch.compile(_next_token_rows))
    TeacherDistribution.rows = staticmethod(torch.compile(_teacher_rows))


class _LossInChunks(torch.autograd.Function):
    """A loss whose gradient is computed on the way forward, a block of rows at a time.

    The logits of a batch would be the largest array of training by far; here only `N_ROWS` of them
    exist at once, and none are computed twice.
    """

    @staticmethod
    def forward(ctx, features, weight, goal):  # type: ignore[no-untyped-def]
        """Return the loss; keep the gradients for `backward`."""
        weight16 = weight.to(torch.bfloat16)
        grad_features = torch.empty_like(features)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), device=features.device)
        for start in range(0, len(features), N_ROWS):
            part = slice(start, start + N_ROWS)
            loss, grad16 = goal(features[part] @ weight16.T, part)
            total += loss
            grad_features[part] = grad16 @ weight16
            grad_weight += (grad16.T @ features[part]).float()
        scale = 1.0 / len(features)
        ctx.save_for_backward(grad_features * scale, grad_weight * scale)
        return total * scale

    @staticmethod
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        """Scale the gradients that were computed on the way forward."""
        grad_features, grad_weight = ctx.saved_tensors
        return grad_features * upstream, grad_weight * upstream, None


def loss_of(features: Tensor, weight: Tensor, goal: Goal) -> Tensor:
    """Mean loss per row of `features` [N, width] under the output matrix `weight`."""
    out: Tensor = _LossInChunks.apply(features, weight, goal)
    return out
