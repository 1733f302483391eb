"""A widened model is the same function: logits against the source's, on tiny models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llamaspec.llama.attention import AttentionShape, model_size
from plain_llama import PlainLlama
from tiny_models import Recipe, truncated, write_llama, write_mamba
from tiny_vocabulary import BYTES
from widening.compare import compare
from widening.plan import Plan, Widening
from widening.quantize import quantize
from widening.source import Source, UnsuitableFileError
from widening.write import write

SCRIPT = Path(__file__).parents[1] / "scripts" / "widen_gguf.py"
TEXT = b"def tiny(model):\n    return model + 1\n"
TIED = Recipe(dtype="q8_0", tied=True)
SEPARATE = Recipe(seed=4, dtype="f32")
GROUPED = Recipe(seed=5, width=96, n_heads=6, n_kv_heads=2)


def widened(tmp_path: Path, recipe: Recipe, widening: Widening) -> tuple[Path, Path]:
    source = write_llama(tmp_path / "source.gguf", recipe)
    wide = tmp_path / "wide.gguf"
    write(Plan(Source(source), widening), wide, lambda name, n_bytes: None)
    return source, wide


@pytest.mark.parametrize("recipe", [TIED, SEPARATE, GROUPED])
@pytest.mark.parametrize(
    "widening",
    [
        Widening(2, dtype="F32"),
        Widening(3, dtype="F32"),
        Widening(4, dtype="F32", kv_factor=2),
        Widening(3, dtype="F32", kv_factor=1),
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


def test_keys_and_values_that_are_shared_take_less_room(tmp_path: Path) -> None:
    _, wide = widened(tmp_path, SEPARATE, Widening(4, kv_factor=2))
    found = model_size(wide)
    assert found is not None
    assert found.shape == AttentionShape(n_layers=2, n_heads=8, n_kv_heads=4, head_size=32)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_it_can_be_quantised(kind: str, tmp_path: Path) -> None:
    _, wide = widened(tmp_path, SEPARATE, Widening(4))
    with PlainLlama(wide) as floats, PlainLlama(quantize(wide, kind)) as quantized:
        tokens = floats.tokenize(TEXT)
        difference = np.abs(floats.logits(tokens) - quantized.logits(tokens)).mean()
    assert 0 < difference < {"Q8_0": 0.3, "Q4_0": 3.0}[kind]


def test_the_numbers_of_a_quantised_source_are_kept_to_the_bit(tmp_path: Path) -> None:
    """Repeating is all that happens to a matrix, so even its blocks come back when it is quantised again."""
    source, wide = widened(tmp_path, Recipe(dtype="q8_0"), Widening(1, dtype="F32"))
    with PlainLlama(source) as one, PlainLlama(quantize(wide, "Q8_0")) as two:
        tokens = one.tokenize(TEXT)
        np.testing.assert_array_equal(one.logits(tokens), two.logits(tokens))


def test_a_comparison_follows_the_first_text_and_names_forks(tmp_path: Path) -> None:
    source, wide = widened(tmp_path, SEPARATE, Widening(3, n_layers=4, n_vocabulary=600, dtype="F32"))
    same = compare(source, wide, [TEXT, b"import os"], 20)
    assert same.n_tokens == 40
    assert same.holds
    assert same.largest_error < 0.05
    assert same.padding_margin is not None
    assert same.padding_margin > 10
    other = compare(source, write_llama(tmp_path / "other.gguf", SEPARATE.draft(0.5)), [TEXT], 20)
    assert not other.holds
    assert other.forks[0].gap > 0.05
    assert f"the first at token {other.forks[0].n_same} of" in str(other)


def test_padding_avoids_the_spellings_of_the_source(tmp_path: Path) -> None:
    """llama.cpp ends the process when two tokens are spelt alike."""
    recipe = Recipe(vocabulary=BYTES.renamed(100, "<padding 1>"))
    _, wide = widened(tmp_path, recipe, Widening(n_vocabulary=300))
    with PlainLlama(wide) as model:
        assert model.n_vocabulary == 300


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{source}", "-r", "2", "--layers", "3", "--quantize", "Q8_0", "--check", "--threads", "1"], ""),
        (["{source}", "--layers", "1"], "has 2 layers already"),
        (["{source}", "-r", "0"], "the factor must be >= 1"),
        (["{folder}"], "is not a file"),
        (["{mamba}"], "architecture mamba"),
        (["{cut}"], "no complete GGUF"),
    ],
)
def test_the_command(arguments: list[str], told: str, tmp_path: Path) -> None:
    places = {
        "source": write_llama(tmp_path / "source.gguf", TIED),
        "mamba": write_mamba(tmp_path / "mamba.gguf"),
        "folder": tmp_path,
    }
    places["cut"] = truncated(places["source"], tmp_path / "cut.gguf")
    words = [argument.format(**places) for argument in arguments]
    command = [sys.executable, str(SCRIPT), *words, "--folder", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if told:
        assert result.returncode == 1
        assert told in result.stderr
        assert result.stderr.count("\n") == 1
        assert not list(tmp_path.glob("out/*"))
    else:
        assert result.returncode == 0, result.stderr
        names = [Path(line).name for line in result.stdout.splitlines()]
        assert names == ["source-x2-L3-F16.gguf", "source-x2-L3-Q8_0.gguf"]
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)


def test_what_cannot_be_widened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsuitableFileError, match="is not a file"):
        Source(tmp_path / "missing.gguf")
    source = Source(write_llama(tmp_path / "source.gguf"))
    with pytest.raises(UnsuitableFileError, match="layers already"):
        Plan(source, Widening(n_layers=1))
    with pytest.raises(ValueError, match="factor"):
        Widening(0)
    with pytest.raises(ValueError, match="must divide 4, got 3"):
        Widening(4, kv_factor=3)
