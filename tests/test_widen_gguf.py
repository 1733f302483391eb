"""A widened model is the same function: logits against the source's, on tiny models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import gguf
import numpy as np
import pytest

from forward_requests import EXACT, text
from llamaspec import ModelOptions, open_pair
from llamaspec.values import MTP, TARGET, Forward, ForwardRequest, Logits
from mtp_target import export
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
        Widening(2, dtype="F32", n_experts=6, n_used=2),
        Widening(2, n_layers=3, dtype="F16", n_experts=4),
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


def with_head(tmp_path: Path, recipe: Recipe) -> tuple[Path, Path]:
    """A Llama, and the same with a prediction head: its last layer, over the embedding and a little more."""
    path, width = write_llama(tmp_path / "llama.gguf", recipe), recipe.width
    source = Source(path)
    layer = f"blk.{recipe.n_layers - 1}."
    head = {
        name.removeprefix(layer): source.weight(name) for name in source.tensors if name.startswith(layer)
    }
    rows = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32)
    head["nextn.eh_proj.weight"] = np.concatenate([np.eye(width, dtype=np.float32), 0.1 * rows], axis=1)
    for name in ("enorm", "hnorm"):
        head[f"nextn.{name}.weight"] = np.linspace(0.5, 1.5, width, dtype=np.float32)
    export.write(tmp_path / "headed.gguf", source, head)
    return path, tmp_path / "headed.gguf"


@pytest.mark.parametrize("recipe", [TIED, SEPARATE])
def test_a_llama_with_a_head_says_what_the_llama_says(recipe: Recipe, tmp_path: Path) -> None:
    """As another architecture: heads turn their halves against each other, where a Llama turns neighbours."""
    path, headed = with_head(tmp_path, recipe)
    with PlainLlama(path) as one, PlainLlama(headed) as two:
        tokens = one.tokenize(TEXT)
        assert two.tokenize(TEXT) == tokens
        # Tied, the output is repacked for another kernel, which rounds the activations.
        tolerance = 0.5 if recipe.dtype == "q8_0" else 1e-2
        np.testing.assert_allclose(one.logits(tokens), two.logits(tokens), atol=tolerance)


@pytest.mark.parametrize("widening", [Widening(3, dtype="F32"), Widening(2, n_layers=4, dtype="F32")])
def test_a_wide_head_drafts_what_the_source_drafts(widening: Widening, tmp_path: Path) -> None:
    _, headed = with_head(tmp_path, SEPARATE)
    floats, wide = tmp_path / "floats.gguf", tmp_path / "wide.gguf"  # the head itself is quantised
    for path, made in ((floats, Widening(dtype="F32")), (wide, widening)):
        write(Plan(Source(headed), made), path, lambda name, n_bytes: None)

    def asking() -> Generator[ForwardRequest, Forward, list[Logits]]:
        """The head's scores behind a text, and behind draft tokens."""
        read = text(40)
        yield ForwardRequest(TARGET, read, n_logits=0)
        answers = []
        for n in range(3):
            forward = yield ForwardRequest(MTP, np.concatenate([read, text(41 + n)[40:]]))
            answers.append(forward.logits.copy())
        return answers

    found = []
    for path in (floats, wide):
        with open_pair(path, "mtp", target_options=ModelOptions(threads=1, **EXACT)) as pair:  # type: ignore[arg-type]
            found.append(pair.run(asking()))
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, atol=5e-3)


def test_keys_and_values_that_are_shared_take_less_room(tmp_path: Path) -> None:
    _, wide = widened(tmp_path, SEPARATE, Widening(4, kv_factor=2))
    fields = gguf.GGUFReader(wide).fields
    heads = [fields[f"llama.attention.{key}"].contents() for key in ("head_count", "head_count_kv")]
    assert heads == [8, 4]


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
    with pytest.raises(ValueError, match="cannot use 4"):
        Widening(2, n_experts=3)
    headed = Source(with_head(tmp_path, SEPARATE)[1])
    for widening in (Widening(2, n_vocabulary=1000), Widening(2, n_experts=8)):
        with pytest.raises(UnsuitableFileError, match="can be added"):
            Plan(headed, widening)
    with pytest.raises(ValueError, match="must divide 4, got 3"):
        Widening(4, kv_factor=3)
