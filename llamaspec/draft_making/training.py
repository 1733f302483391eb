"""Wall-clock bounded training, with losses of whole distributions over large vocabularies.

A run has a number of minutes, not of steps, so the learning rate is fully decayed at its end on any machine.
Muon trains the layers' matrices, AdamW the rest. A goal returns loss and gradient for part of the logits,
so the logits of a whole batch never exist at once. The caller supplies the batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from llamaspec.draft_making.student import Llama

N_ROWS = 1024  # positions whose logits exist at once
WARMUP, DECAY_FROM, LEAST_RATE = 0.02, 0.4, 0.02  # shares of the time; and of the peak learning rate
_LEAST = 1e-6  # minimum probability of all other tokens together

# (logits, rows) -> summed loss, gradient by the logits
Goal = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def best_tokens(ids: Tensor, log_p: Tensor) -> Goal:
    """The goal of distillation from a recorded teacher: forward KL(p || q) over its most probable tokens.

    One more token stands for all others. The gradient is q - p for the best tokens, and
    q - p_rest q / q_rest for the others.

    Parameters
    ----------
    ids : [N, k] int64
    log_p : [N, k] float32
        Natural logarithms of the teacher's probabilities.
    """

    def goal(logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        best, wanted = ids[part], log_p[part]
        log_q = log_softmax(logits.float(), dim=-1)
        q, p = log_q.exp(), wanted.exp()
        p_rest = (1.0 - p.sum(-1, keepdim=True)).clamp(min=_LEAST)
        q_rest = (1.0 - q.gather(-1, best).sum(-1, keepdim=True)).clamp(min=_LEAST)
        loss = (p * (wanted - log_q.gather(-1, best))).sum() + (p_rest * (p_rest / q_rest).log()).sum()
        gradient = q * (1.0 - p_rest / q_rest)
        gradient.scatter_(-1, best, q.gather(-1, best) - p)
        return loss, gradient.to(torch.bfloat16)

    return goal


def loss_of(features: Tensor, weight: Tensor, goal: Goal) -> Tensor:
    """Return the mean loss over `features` [N, width] under the output matrix `weight`."""
    out: Tensor = _LossInChunks.apply(features, weight, goal)
    return out


class _LossInChunks(torch.autograd.Function):
    """A loss whose gradient is computed on the way forward, a block of positions at a time.

    The logits of a batch would be by far the largest array of training. Here only `N_ROWS` positions exist at
    once, and none is computed twice.
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


@dataclass(frozen=True)
class Plan:
    """How long and how hard to train."""

    minutes: float
    rate: float  # peak learning rate of the matrices, in AdamW's units
    batch_tokens: int = 4096
    report_seconds: float = 100.0

    def rate_share(self, done: float) -> float:
        """Return the learning rate at the elapsed share `done`, as a share of the peak."""
        if done < WARMUP:
            return max(LEAST_RATE, done / WARMUP)
        if done < DECAY_FROM:
            return 1.0
        return max(0.0, 1.0 - done) / (1.0 - DECAY_FROM) * (1.0 - LEAST_RATE) + LEAST_RATE


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


def optimizers(model: Llama, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers; AdamW for embedding and norms."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": [model.embedding.weight], "weight_decay": 0.01},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=1.4 * rate, betas=(0.9, 0.95)),
    ]


def train(
    model: Llama,
    plan: Plan,
    next_batch: Callable[[float], Tensor],
    batch_loss: Callable[[Tensor], Tensor],
    report: Callable[[Progress], None],
    checkpoint: Path | None = None,
) -> None:
    """Train `model` in place for `plan.minutes`; `next_batch` receives the elapsed share.

    Resumes from the checkpoint if it exists, and writes it before every report.
    """
    movers = optimizers(model, plan.rate)
    peaks = [[group["lr"] for group in mover.param_groups] for mover in movers]
    steps, losses, done = 0, [], 0.0
    if checkpoint is not None and checkpoint.exists():
        done, steps = _restore(checkpoint, model, movers)
    started = time.monotonic() - 60 * plan.minutes * done
    reported = time.monotonic()
    try:
        while (done := (time.monotonic() - started) / (60 * plan.minutes)) < 1:
            for mover, rates in zip(movers, peaks, strict=True):
                for group, peak in zip(mover.param_groups, rates, strict=True):
                    group["lr"] = peak * plan.rate_share(done)
            loss = batch_loss(next_batch(done))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for mover in movers:
                mover.step()
                mover.zero_grad(set_to_none=True)
            steps += 1
            losses.append(loss.item())
            now = time.monotonic()
            if now - reported > plan.report_seconds:
                speed = len(losses) * plan.batch_tokens / (now - reported)
                if checkpoint is not None:
                    _save(checkpoint, model, movers, done, steps)
                report(Progress(done, steps, math.fsum(losses) / len(losses), speed))
                reported, losses = time.monotonic(), []
    except KeyboardInterrupt:
        if checkpoint is not None and steps:
            _save(checkpoint, model, movers, done, steps)
        raise


def _save(path: Path, model: Llama, movers: list[torch.optim.Optimizer], done: float, steps: int) -> None:
    """Replace the checkpoint atomically, so that an interruption leaves the last one intact."""
    unfinished = path.with_suffix(".part")
    states = [mover.state_dict() for mover in movers]
    torch.save({"model": model.state_dict(), "movers": states, "done": done, "steps": steps}, unfinished)
    unfinished.replace(path)


def _restore(path: Path, model: Llama, movers: list[torch.optim.Optimizer]) -> tuple[float, int]:
    """Load a checkpoint; return the elapsed share of the time, and the steps."""
    state = torch.load(path, map_location=model.embedding.weight.device, weights_only=True)
    model.load_state_dict(state["model"])
    for mover, its in zip(movers, state["movers"], strict=True):
        mover.load_state_dict(its)
    return float(state["done"]), int(state["steps"])
