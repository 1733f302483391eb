"""A widened model is the same function: its logits are those of the source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from plain_llama import PlainLlama
from tiny_models import Recipe, truncated, write_llama, write_mamba
from widen_gguf import Widening, main, quantize, write

TEXT = b"def tiny(model):\n    return model + 1\n"
TIED = Recipe(dtype="q8_0", tied=True)
SEPARATE = Recipe(seed=4, dtype="f32")
GROUPED = Recipe(seed=5, width=96, n_heads=6, n_kv_heads=2)


def widened(source: Path, widening: Widening) -> Path:
    wide = source.with_name(f"{source.stem}-{widening.label}.gguf")
    write(source, widening, wide)
    return wide


@pytest.mark.parametrize("recipe", [TIED, SEPARATE, GROUPED])
@pytest.mark.parametrize(
    "widening",
    [
        Widening(3, dtype="F32"),
        Widening(4, dtype="F32", kv_factor=2),
        Widening(2, n_layers=3, dtype="F16"),
    ],
    ids=lambda widening: widening.label,
)
def test_the_scores_are_those_of_the_source(recipe: Recipe, widening: Widening, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source.gguf", recipe)
    with PlainLlama(source) as narrow, PlainLlama(widened(source, widening)) as wider:
        tokens = narrow.tokenize(TEXT)
        assert wider.tokenize(TEXT) == tokens
        expected, found = narrow.logits(tokens), wider.logits(tokens)
    # Quantised kernels round the activations of the source; float kernels do not round those of the wide
    # model.
    tolerance = 0.5 if recipe.dtype == "q8_0" else 0.05
    assert np.abs(found - expected).max() < tolerance
    assert np.abs(found - expected).mean() < tolerance / 5


def test_the_numbers_of_a_quantised_source_are_kept_to_the_bit(tmp_path: Path) -> None:
    """Widening only repeats a matrix, so quantising again gives the same blocks."""
    source = write_llama(tmp_path / "source.gguf", Recipe(dtype="q8_0"))
    quantized = quantize(widened(source, Widening(1, dtype="F32")), "Q8_0")
    with PlainLlama(source) as one, PlainLlama(quantized) as two:
        tokens = one.tokenize(TEXT)
        np.testing.assert_array_equal(one.logits(tokens), two.logits(tokens))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{source}", "-r", "2", "--layers", "3", "--quantize", "Q8_0"], ""),
        (["{source}", "--layers", "1"], "--layers must be >= 2"),
        (["{source}", "-r", "4", "--kv-factor", "3"], "must divide 4, got 3"),
        (["{mamba}"], "architecture mamba"),
        (["{cut}"], "no complete GGUF"),
    ],
)
def test_the_command(arguments: list[str], told: str, tmp_path: Path) -> None:
    places = {"source": write_llama(tmp_path / "source.gguf", TIED)}
    places["mamba"] = write_mamba(tmp_path / "mamba.gguf")
    places["cut"] = truncated(places["source"], tmp_path / "cut.gguf")
    words = [argument.format(**places) for argument in arguments]
    result = CliRunner().invoke(main, [*words, "--folder", str(tmp_path / "out")])
    names = sorted(path.name for path in tmp_path.glob("out/*"))
    if told:
        assert (result.exit_code, result.output.count("\n"), names) == (1, 1, [])
        assert told in result.output
    else:
        assert result.exit_code == 0, result.output
        assert names == ["source-x2-L3-F16.gguf", "source-x2-L3-Q8_0.gguf"]
