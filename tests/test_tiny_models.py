"""The tiny models are real: llama.cpp loads every kind, its scores are alive, its tokenizer round-trips."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tiny_models as tiny
from plain_llama import PlainLlama
from tiny_vocabulary import BYTES

TEXT = "def the_café(€): and in\n  résumé 日本 🦙\n".encode()
KINDS = list(tiny.WRITERS)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_finite_and_lively(kind: str, tmp_path: Path) -> None:
    path = tiny.WRITERS[kind](tmp_path / "model.gguf")
    assert path.stat().st_size < 900_000
    with PlainLlama(path) as model:
        prompt = model.tokenize(TEXT)
        text = model.greedy(prompt, 60)
        scores = model.logits([*prompt, *text]).astype(np.float64)
    assert np.isfinite(scores).all()
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    entropy = float(-(p * np.log(p + 1e-300)).sum(axis=1).mean())
    assert 2 < entropy < 3.2
    assert len(set(text)) > 20
    assert p[:, BYTES.eos].max() < 1e-4
