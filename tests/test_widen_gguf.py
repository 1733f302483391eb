"""A widened model is the same function: logits against the source's, on tiny models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plain_llama import PlainLlama
from tiny_models import Recipe, write_llama
from widen_gguf import quantize
from widening.plan import Plan, Widening
from widening.source import Source, UnsuitableFileError
from widening.write import write

TEXT = b"def tiny(model):\n    return model + 1\n"
TIED = Recipe(dtype="q8_0", tied=True)
SEPARATE = Recipe(seed=4, dtype="f32")


def widened(tmp_path: Path, recipe: Recipe, widening: Widening) -> tuple[Path, Path]:
    source = write_llama(tmp_path / "source.gguf", recipe)
    wide = tmp_path / "wide.gguf"
    write(Plan(Source(source), widening), wide, lambda name, n_bytes: None)
    return source, wide


@pytest.mark.parametrize("recipe", [TIED, SEPARATE])
@pytest.mark.parametrize(
    "widening",
    [
        Widening(2, dtype="F32"),
        Widening(3, dtype="F32"),
        Widening(1, n_layers=5, dtype="F32"),
        Widening(2, n_vocabulary=1000, dtype="F32"),
        Widening(2, n_layers=3, n_vocabulary=500, dtype="F16"),
    ],
    ids=lambda widening: widening.label,
)
def test_the_scores_are_those_of_the_source(recipe: Recipe, widening: Widening, tmp_path: Path) -> None:
    source, wide = widened(tmp_path, recipe, widening)
    with PlainLlama(source) as narrow, PlainLlama(wide) as wider:
        tokens = narrow.tokenize(TEXT)
        assert wider.tokenize(TEXT) == tokens
        expected, found = narrow.logits(tokens), wider.logits(tokens)
    n = expected.shape[1]
    # The source's quantised kernels round the activations, the wide floats do not.
    tolerance = 0.5 if recipe.dtype == "q8_0" else 0.05
    assert np.abs(found[:, :n] - expected).max() < tolerance
    assert np.abs(found[:, :n] - expected).mean() < tolerance / 5
    if widening.n_vocabulary:
        assert found.shape[1] == widening.n_vocabulary
        assert found[:, n:].max() < found[:, :n].min() - 10


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_it_can_be_quantised(kind: str, tmp_path: Path) -> None:
    _, wide = widened(tmp_path, SEPARATE, Widening(4))
    with PlainLlama(wide) as floats, PlainLlama(quantize(wide, kind)) as quantized:
        tokens = floats.tokenize(TEXT)
        difference = np.abs(floats.logits(tokens) - quantized.logits(tokens)).mean()
    assert 0 < difference < {"Q8_0": 0.3, "Q4_0": 3.0}[kind]


def test_what_cannot_be_widened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsuitableFileError, match="is not a file"):
        Source(tmp_path / "missing.gguf")
    source = Source(write_llama(tmp_path / "source.gguf"))
    with pytest.raises(UnsuitableFileError, match="layers already"):
        Plan(source, Widening(n_layers=1))
    with pytest.raises(ValueError, match="factor"):
        Widening(0)
