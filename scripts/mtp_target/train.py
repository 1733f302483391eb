"""Train a head for some minutes on the corpus and on what the trunk writes; the trunk stays as it is."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from llamaspec.draft_making.student import Llama
from llamaspec.draft_making.training import Plan
from mtp_target import torch_head
from mtp_target.torch_head import LATER, Head
from mtp_target.trunk import teach

CLIP = 1.0  # of the gradients' norm


def run(
    head: Head, trunk: Llama, plan: Plan, next_batch: Callable[[float], Tensor], report: Callable[[str], None]
) -> None:
    """Train `head` in place for `plan.minutes`; `next_batch` is told the elapsed share."""
    matrices = [p for p in head.parameters() if p.ndim == 2]
    norms = [p for p in head.parameters() if p.ndim == 1]
    movers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=plan.rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(norms, lr=plan.rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    started = reported = time.monotonic()
    steps = 0
    while (done := (time.monotonic() - started) / (60 * plan.minutes)) < 1:
        for mover in movers:
            for group in mover.param_groups:
                group["lr"] = plan.rate * plan.rate_share(done)
        losses = step(head, trunk, next_batch(done)[:, :-1])
        torch.nn.utils.clip_grad_norm_(head.parameters(), CLIP)
        for mover in movers:
            mover.step()
            mover.zero_grad(set_to_none=True)
        steps += 1
        if time.monotonic() - reported > plan.report_seconds:
            told = " ".join(f"{loss:.3f}" for loss in losses)
            report(f"{100 * done:5.1f}%  step {steps:5d}  KL of each draft token {told}")
            reported = time.monotonic()


def step(head: Head, trunk: Llama, tokens: Tensor) -> list[float]:
    """Compute the gradients of one batch; the loss of every draft token, in nats."""
    losses = torch_head.losses(head, trunk, tokens, teach(trunk, tokens))
    total = sum(LATER**k * loss for k, loss in enumerate(losses))
    assert isinstance(total, Tensor)
    total.backward()
    return [loss.item() for loss in losses]
