"""Wall-clock bounded training: the share of time that has passed drives the learning rate.

The one idea: a run is told how many minutes it has, not how many steps, so that it ends fully
decayed on any machine. Muon moves the matrices of the layers, AdamW the rest. The seed fixes the
start and the order of the data; how many steps fit, and so the exact weights, depends on the machine.

It does not know what is learned: the caller hands in batches and the loss of a batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamaspec.distil.losses import NextToken, loss_of
from llamaspec.distil.model import Llama


@dataclass(frozen=True)
class Plan:
    """How long and how hard to train."""

    minutes: float
    rate: float  # peak learning rate of the matrices, in AdamW's units
    long_from: float  # share of the time after which the windows are long
    batch_tokens: int = 4096
    short: int = 256  # positions of a window; short ones learn faster from little data
    long: int = 1024  # positions of a window, and of the model's context
    warmup: float = 0.02  # share of the time
    decay_from: float = 0.4  # share of the time after which the rate falls linearly
    report_seconds: float = 100.0

    def length(self, done: float) -> int:
        """Return the positions of a window at the elapsed share `done`."""
        return self.short if done < self.long_from else self.long

    def rate_share(self, done: float) -> float:
        """Return the learning rate at the elapsed share `done`, as a share of the peak."""
        if done < self.warmup:
            return max(0.02, done / self.warmup)
        if done < self.decay_from:
            return 1.0
        return max(0.0, 1.0 - done) / (1.0 - self.decay_from) * 0.98 + 0.02


@dataclass(frozen=True)
class Progress:
    """What one report says."""

    done: float  # share of the time
    steps: int
    loss: float  # mean since the report before
    tokens_per_second: float

    def __str__(self) -> str:
        return (
            f"{100 * self.done:5.1f}%  step {self.steps:5d}  loss {self.loss:.4f}"
            f"  {self.tokens_per_second:.0f} tok/s"
        )


def windows(ids: NDArray[np.int64], rows: int, length: int, chance: np.random.Generator) -> Tensor:
    """Random stretches of the stream, [rows, length + 1]."""
    starts = chance.integers(0, len(ids) - length - 1, size=rows)
    return torch.from_numpy(np.stack([ids[s : s + length + 1] for s in starts]))


def optimizers(model: Llama, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers; AdamW for embedding and norms."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": [model.embedding.weight], "weight_decay": 0.01},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=1.4 * rate,
            betas=(0.9, 0.95),
        ),
    ]


def run(
    model: Llama,
    plan: Plan,
    next_batch: Callable[[float], Tensor],
    batch_loss: Callable[[Tensor], Tensor],
    report: Callable[[Progress], None],
    checkpoint: Path | None = None,
) -> None:
    """Train `model` in place for `plan.minutes`; `next_batch` is told the elapsed share.

    With a checkpoint it goes on where that was left, and writes it before every report.
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
    """Write a checkpoint in one step: who is interrupted keeps the one before."""
    unfinished = path.with_suffix(".part")
    states = [mover.state_dict() for mover in movers]
    torch.save({"model": model.state_dict(), "movers": states, "done": done, "steps": steps}, unfinished)
    unfinished.replace(path)


def _restore(path: Path, model: Llama, movers: list[torch.optim.Optimizer]) -> tuple[float, int]:
    """Go on from a checkpoint: the share of the time that has passed, and the steps."""
    state = torch.load(path, map_location=model.embedding.weight.device, weights_only=True)
    model.load_state_dict(state["model"])
    for mover, its in zip(movers, state["movers"], strict=True):
        mover.load_state_dict(its)
    return float(state["done"]), int(state["steps"])


def next_token_loss(model: Llama, hidden: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the loss of plain training; `hidden` is `model.hidden`, compiled or not."""

    def loss(batch: Tensor) -> Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16):
            features = hidden(batch[:, :-1])
        return loss_of(features.flatten(0, 1), model.embedding.weight, NextToken(batch[:, 1:].flatten()))

    return loss


@torch.no_grad()
def mean_loss(model: Llama, ids: NDArray[np.int64], length: int, most: int = 32) -> float:
    """Mean next-token loss in nats over at most `most` windows spread evenly over `ids`."""
    starts = np.linspace(0, len(ids) - length - 1, most).astype(int)
    loss = next_token_loss(model, model.hidden)
    parts = [np.stack([ids[s : s + length + 1] for s in starts[i : i + 8]]) for i in range(0, most, 8)]
    return float(np.mean([loss(torch.from_numpy(part)).item() for part in parts]))
