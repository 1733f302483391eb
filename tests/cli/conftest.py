"""Fixtures that several tests of commands share."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec import LlamaModel
from llamaspec.measure.machine import LoadWatch
from llamaspec.values import ForwardRequest, Logits


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no other program use the machine: what is measured beside them is not kept."""
    monkeypatch.setattr(LoadWatch, "n_taken", lambda _: 0.0)


@pytest.fixture
def biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine that rounds wider batches very differently."""
    honest = LlamaModel.evaluate

    def biased(self: LlamaModel, batch: list[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        answers = honest(self, batch, n_padding)
        if batch[0][1].n_scored == 1:
            return answers
        return [np.roll(answer, 1, axis=1) for answer in answers]

    monkeypatch.setattr(LlamaModel, "evaluate", biased)
