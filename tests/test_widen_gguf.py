"""A widened model is the same function: logits against the source's, on tiny models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

import step35
from forward_requests import EXACT, text
from llamaspec import ModelOptions, open_pair
from llamaspec.values import MTP, TARGET, Forward, ForwardRequest, Logits
from plain_llama import PlainLlama
from tiny_models import Recipe, truncated, write_llama, write_mamba
from widen_gguf import quantize
from widening import Source, Widening, write

SCRIPT = Path(__file__).parents[1] / "scripts" / "widen_gguf.py"
TEXT = b"def tiny(model):\n    return model + 1\n"
TIED = Recipe(dtype="q8_0", tied=True)
SEPARATE = Recipe(seed=4, dtype="f32")
GROUPED = Recipe(seed=5, width=96, n_heads=6, n_kv_heads=2)


def widened(source: Path, widening: Widening) -> Path:
    wide = source.with_name(f"{source.stem}-{widening.label}.gguf")
    write(Source(source), widening, wide)
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
    # The source's quantised kernels round the activations, the wide floats do not.
    tolerance = 0.5 if recipe.dtype == "q8_0" else 0.05
    assert np.abs(found - expected).max() < tolerance
    assert np.abs(found - expected).mean() < tolerance / 5


def test_a_head_over_the_same_llama_drafts_the_same_when_it_is_wide(tmp_path: Path) -> None:
    """The head is the Llama's last layer, over the embedding and a little more."""
    path, width = write_llama(tmp_path / "llama.gguf", SEPARATE), SEPARATE.width
    source, layer = Source(path), f"blk.{SEPARATE.n_layers - 1}."
    own = [name for name in source.tensors if name.startswith(layer)]
    head = {name.removeprefix(layer): source.weight(name) for name in own}
    rows = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32)
    head["nextn.eh_proj.weight"] = np.concatenate([np.eye(width, dtype=np.float32), 0.1 * rows], axis=1)
    for name in ("enorm", "hnorm"):
        head[f"nextn.{name}.weight"] = np.linspace(0.5, 1.5, width, dtype=np.float32)
    headed = tmp_path / "headed.gguf"
    step35.write(headed, source, head)
    with PlainLlama(path) as one, PlainLlama(headed) as two:
        np.testing.assert_allclose(one.logits(one.tokenize(TEXT)), two.logits(two.tokenize(TEXT)), atol=1e-2)

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
    for widening in (
        Widening(dtype="F32"),
        Widening(2, n_layers=4, dtype="F32"),
    ):  # the head itself is quantised
        options = ModelOptions(threads=1, **EXACT)  # type: ignore[arg-type]
        with open_pair(widened(headed, widening), "mtp", target_options=options) as pair:
            found.append(pair.run(asking()))
    np.testing.assert_allclose(found[0], found[1], atol=5e-3)


def test_the_numbers_of_a_quantised_source_are_kept_to_the_bit(tmp_path: Path) -> None:
    """Repeating is all that happens to a matrix, so even its blocks come back when it is quantised again."""
    source = write_llama(tmp_path / "source.gguf", Recipe(dtype="q8_0"))
    quantized = quantize(widened(source, Widening(1, dtype="F32")), "Q8_0")
    with PlainLlama(source) as one, PlainLlama(quantized) as two:
        tokens = one.tokenize(TEXT)
        np.testing.assert_array_equal(one.logits(tokens), two.logits(tokens))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{source}", "-r", "2", "--layers", "3", "--quantize", "Q8_0"], ""),
        (["{source}", "--layers", "1"], "has 2 layers already"),
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
    command = [sys.executable, str(SCRIPT), *words, "--folder", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    names = sorted(path.name for path in tmp_path.glob("out/*"))
    if told:
        assert (result.returncode, result.stderr.count("\n"), names) == (1, 1, [])
        assert told in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        assert names == ["source-x2-L3-F16.gguf", "source-x2-L3-Q8_0.gguf"]
