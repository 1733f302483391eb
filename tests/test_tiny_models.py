"""The tiny models are real: llama.cpp loads every kind, its scores are alive, its tokenizer round-trips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tiny_models as tiny
from plain_llama import PlainLlama
from tiny_vocabulary import BYTES, sentencepiece_vocabulary

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


@pytest.mark.parametrize("dtype", list(tiny.TYPES))
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_recipe_gives_the_same_bytes(kind: str, dtype: str, tmp_path: Path) -> None:
    write, recipe = tiny.WRITERS[kind], tiny.Recipe(seed=5, dtype=dtype, noise=0.1)
    one = write(tmp_path / "one.gguf", recipe).read_bytes()
    assert one == write(tmp_path / "two.gguf", recipe).read_bytes()
    assert one != write(tmp_path / "three.gguf", replace(recipe, seed=6)).read_bytes()


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0"])
def test_quantised_matrices_change_the_scores_little(dtype: str, tmp_path: Path) -> None:
    with PlainLlama(tiny.write_llama(tmp_path / "f32.gguf")) as model:
        prompt = model.tokenize(TEXT)
        exact = model.logits(prompt)
    with PlainLlama(tiny.write_llama(tmp_path / "q.gguf", tiny.Recipe(dtype=dtype))) as model:
        error = np.abs(model.logits(prompt) - exact).mean()
    assert 0 < error < {"f16": 0.02, "q8_0": 0.2, "q4_0": 2.0}[dtype]


def test_noise_sets_how_often_a_draft_agrees(tmp_path: Path) -> None:
    recipe = tiny.Recipe(seed=3)
    with PlainLlama(tiny.write_llama(tmp_path / "target.gguf", recipe)) as target:
        tokens = target.tokenize(TEXT)
        tokens += target.greedy(tokens, 150)
        choices = target.logits(tokens).argmax(axis=1)
    agreement = []
    for noise in (0.0, 0.01, 0.1, 0.5):
        with PlainLlama(tiny.write_llama(tmp_path / "draft.gguf", recipe.draft(noise))) as draft:
            agreement.append(float((draft.logits(tokens).argmax(axis=1) == choices).mean()))
    assert agreement[0] == 1
    assert agreement[1] > 0.8
    assert 0.2 < agreement[2] < 0.65
    assert agreement[3] < 0.15


def test_a_likely_end_comes_and_an_impossible_one_does_not(tmp_path: Path) -> None:
    recipe = tiny.Recipe(end_score=12)
    with PlainLlama(tiny.write_llama(tmp_path / "ends.gguf", recipe)) as model:
        assert BYTES.eos in model.greedy(model.tokenize(TEXT), 40)
    with PlainLlama(tiny.write_llama(tmp_path / "endless.gguf")) as model:
        assert BYTES.eos not in model.greedy(model.tokenize(TEXT), 200)


def test_byte_level_text_comes_back_and_characters_are_split(tmp_path: Path) -> None:
    with PlainLlama(tiny.write_llama(tmp_path / "model.gguf")) as model:
        tokens = model.tokenize(TEXT)
        pieces = [model.piece(token) for token in tokens]
        raw = model.tokenize(bytes(range(256)))
        assert b"".join(map(model.piece, model.tokenize(b""))) == b""
    assert tokens[0] == BYTES.bos
    assert b"".join(pieces) == TEXT
    assert "é".encode() in pieces  # one merge makes it whole
    assert {b"\xe2", b"\xf0"} < set(pieces)  # the first bytes of € and of the llama stand alone
    assert {b" the", b" and"} < set(pieces)  # merges of merges
    assert len(raw) > 128  # invalid UTF-8 does not abort the process


def test_sentencepiece_text_comes_back_behind_a_space(tmp_path: Path) -> None:
    recipe = tiny.Recipe(vocabulary=sentencepiece_vocabulary())
    with PlainLlama(tiny.write_llama(tmp_path / "model.gguf", recipe)) as model:
        tokens = model.tokenize(TEXT)
        pieces = [model.piece(token) for token in tokens]
    assert tokens[0] == recipe.vocabulary.bos
    assert b"".join(pieces) == b" " + TEXT
    assert {b"\xe2", "é".encode()} < set(pieces)


def test_vocabularies_can_differ_in_one_token_or_in_length(tmp_path: Path) -> None:
    recipe = tiny.Recipe(vocabulary=BYTES.renamed(40, "Q!").longer(12))
    with PlainLlama(tiny.write_llama(tmp_path / "model.gguf", recipe)) as model:
        assert model.n_vocabulary == len(BYTES) + 12
        assert model.piece(40) == b"Q!"
        assert model.piece(41) == BYTES.tokens[41].encode()
