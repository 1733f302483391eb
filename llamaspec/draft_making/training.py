"""Training for a number of minutes, with a loss of whole distributions over large vocabularies.

The learning rate depends on the elapsed share of the time, so it is fully decayed at the end on any machine.
Muon trains the layers' matrices, AdamW the rest. The caller draws the batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

N_ROWS = 1024  # positions whose logits exist at once
WARMUP, DECAY_FROM, LEAST_RATE = 0.02, 0.4, 0.02  # shares of the time; and of the peak learning rate
_LEAST = 1e-6  # minimum probability of all other tokens together


def loss_of(features: Tensor, weight: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
    """Return the mean of KL(p || q) in nats, with one more token that stands for all that are not recorded.

    With k = 1 and a probability of 1, this is the cross-entropy of plain training.

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
    """A loss whose gradient is computed on the way forward, a block of positions at a time.

    The logits of a batch would be by far the largest array of training. Here only `N_ROWS` positions exist at
    once, and none is computed twice.
    """

    @staticmethod
    def forward(ctx, features, weight, ids, log_p):  # type: ignore[no-untyped-def]
        """Return the loss; keep the gradients for `backward`."""
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
        """Scale the gradients that were computed on the way forward."""
        grad_features, grad_weight = ctx.saved_tensors
        return grad_features * upstream, grad_weight * upstream, None, None


def _block(logits: Tensor, ids: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of some positions, and its gradient by the logits [n, V].

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


@dataclass(frozen=True)
class Plan:
    """How long and how hard to train."""

    minutes: float
    rate: float  # peak learning rate of the matrices, in AdamW's units
    batch_tokens: int = 4096
    report_seconds: float = 100.0


@dataclass(frozen=True)
class Progress:
    """One progress report."""

    done: float  # share of the training time
    steps: int
    loss: float  # mean since the last report
    tokens_per_second: float

    def __str__(self) -> str:
        return (
            f"{100 * self.done:5.1f}%  step {self.steps:5d}  loss {self.loss:.4f}"
            f"  {self.tokens_per_second:.0f} tok/s"
        )


def train(
    model: nn.Module,
    plan: Plan,
    batch_loss: Callable[[float], Tensor],
    report: Callable[[Progress], None],
    checkpoint: Path,
) -> None:
    """Train a model in place for `plan.minutes`.

    Resumes from the checkpoint if it exists, and writes it before every report.

    Parameters
    ----------
    batch_loss : callable
        Draws a batch and returns its loss; receives the elapsed share of the time.
    """
    optimizers = _optimizers(model, plan.rate)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    steps, losses, done = 0, [], 0.0
    if checkpoint.exists():
        done, steps = _restore(checkpoint, model, optimizers)
    started = time.monotonic() - 60 * plan.minutes * done
    reported = time.monotonic()
    try:
        while (done := (time.monotonic() - started) / (60 * plan.minutes)) < 1:
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
            if now - reported > plan.report_seconds:
                speed = len(losses) * plan.batch_tokens / (now - reported)
                _save(checkpoint, model, optimizers, done, steps)
                report(Progress(done, steps, math.fsum(losses) / len(losses), speed))
                reported, losses = time.monotonic(), []
    except KeyboardInterrupt:
        if steps:
            _save(checkpoint, model, optimizers, done, steps)
        raise


def _rate_share(done: float) -> float:
    """Return the learning rate as a share of the peak."""
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
    """Replace the checkpoint atomically, so that an interruption leaves the last one intact."""
    unfinished = path.with_suffix(".part")
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"model": model.state_dict(), "movers": states, "done": done, "steps": steps}, unfinished)
    unfinished.replace(path)


def _restore(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[float, int]:
    """Load a checkpoint; return the elapsed share of the time, and the steps."""
    device = next(model.parameters()).device
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, its in zip(optimizers, state["movers"], strict=True):
        optimizer.load_state_dict(its)
    return float(state["done"]), int(state["steps"])
