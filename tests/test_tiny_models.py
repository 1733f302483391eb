"""The tiny models are real: llama.cpp loads every kind, its scores are alive, its tokenizer round-trips."""

from __future__ import annotations

from dataclasses import replace
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_recipe_gives_the_same_bytes(kind: str, tmp_path: Path) -> None:
    write, recipe = tiny.WRITERS[kind], tiny.Recipe(seed=5, dtype="q4_0", noise=0.1)
    one = write(tmp_path / "one.gguf", recipe).read_bytes()
    assert one == write(tmp_path / "two.gguf", recipe).read_bytes()
    assert one != write(tmp_path / "three.gguf", replace(recipe, seed=6)).read_bytes()


def test_a_likely_end_comes_and_an_impossible_one_does_not(tmp_path: Path) -> None:
    recipe = tiny.Recipe(end_score=12)
    with PlainLlama(tiny.write_llama(tmp_path / "ends.gguf", recipe)) as model:
        assert BYTES.eos in model.greedy(model.tokenize(TEXT), 40)
    with PlainLlama(tiny.write_llama(tmp_path / "endless.gguf")) as model:
        assert BYTES.eos not in model.greedy(model.tokenize(TEXT), 200)
