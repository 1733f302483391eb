"""Products of every type and instruction set, against plain products in double precision."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.library import (
    FLOATS,
    GROUP,
    HALVES,
    LEVELS,
    QUANTIZED,
    Bytes,
    Float32,
    Float64,
    Library,
    at_level,
    levels_here,
    multiply,
    open_library,
    random_weights,
    set_halves,
    true_weights,
)  # fmt: skip

TOLERANCE = 1e-6  # of the sum of absolute products: 256 additions of float32
SHAPES = ((48, 512, 5), (37, 768, 70), (3, 256, 2), (16, 256, GROUP), (17, 1024, 1), (1, 2304, 7))


@pytest.fixture(scope="module")
def library() -> Library:
    return open_library()


def columns(n: int, n_inputs: int, rng: np.random.Generator) -> Float32:
    return rng.normal(size=(n, n_inputs)).astype(np.float32)


def check(rows: Bytes, kind: Type, out: Float32, x: Float64) -> None:
    w = true_weights(kind, rows)
    error = np.abs(out - x @ w.T) / (np.abs(x) @ np.abs(w).T + 1e-30)
    assert error.max() < TOLERANCE


@pytest.mark.parametrize("kind", [*QUANTIZED, *FLOATS])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_right_on_every_instruction_set(
    library: Library, kind: Type, shape: tuple[int, int, int]
) -> None:
    n_rows, n_inputs, n = shape
    rng = np.random.default_rng([*shape, int(kind)])
    rows, x = random_weights(kind, n_rows, n_inputs, rng), columns(n, n_inputs, rng)
    found = {}
    for level in levels_here(library):
        with at_level(library, level):
            found[level], quantized = multiply(library, kind, rows, x)
        check(rows, kind, found[level], quantized)
        assert np.abs(quantized - x).max() <= np.abs(x).max() / 127  # half a step of 1 / 127, and some
    first, *others = found.values()
    for other in others:
        assert np.array_equal(first.view(np.int32), other.view(np.int32))  # the same bits


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("fill", [0x00, 0x3F, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("scale", [0.0, -0.0, 2.0**-24, 60000.0, -1.0])
def test_extreme_blocks(library: Library, kind: Type, fill: int, scale: float) -> None:
    """All scales and quants at their limits; half floats zero, subnormal, and nearly the greatest."""
    length, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.full((20, 512 // length, n_bytes), fill, np.uint8)
    for at in HALVES[kind]:
        set_halves(blocks, at, scale)
    if kind is Type.MXFP4:
        blocks[:, :, 0] = [[0, 1, 2, 127, 200, 3, 100, 128, 0, 1, 2, 127, 200, 3, 100, 128]]
    rows, rng = blocks.reshape(20, -1), np.random.default_rng(fill)
    for level in levels_here(library):
        with at_level(library, level):
            out, x = multiply(library, kind, rows, columns(3, 512, rng))
        check(rows, kind, out, x)


@pytest.mark.parametrize("kind", [kind for kind in QUANTIZED if HALVES[kind]])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_reaches_its_row_alone(library: Library, kind: Type, bad: float) -> None:
    rng = np.random.default_rng(3)
    rows = random_weights(kind, 33, 512, rng)
    length, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    set_halves(rows.reshape(33, 512 // length, n_bytes)[20:21, :1], HALVES[kind][0], bad)
    for level in levels_here(library):
        with at_level(library, level):
            out, x = multiply(library, kind, rows, columns(2, 512, rng))
        assert not np.isfinite(out[:, 20]).any()
        others = np.delete(np.arange(33), 20)
        check(rows[others], kind, out[:, others], x)


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q8_0, Type.F16])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_activation_that_is_not_finite_reaches_its_column_alone(
    library: Library, kind: Type, bad: float
) -> None:
    rng = np.random.default_rng(4)
    rows, x = random_weights(kind, 32, 512, rng), columns(3, 512, rng)
    right, _ = multiply(library, kind, rows, x)
    x[1, 77] = bad
    for level in levels_here(library):
        with at_level(library, level):
            out, _ = multiply(library, kind, rows, x)
        assert not np.isfinite(out[1]).any()
        assert np.array_equal(out[[0, 2]], right[[0, 2]])


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q4_0, Type.Q8_0])
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e-30, 1e30])
def test_activations_of_any_size(library: Library, kind: Type, size: float) -> None:
    rng = np.random.default_rng(5)
    rows = random_weights(kind, 32, 512, rng)
    x = (columns(2, 512, rng) * np.float32(size)).astype(np.float32)
    out, _ = multiply(library, kind, rows, x)
    right = x.astype(np.float64) @ true_weights(kind, rows).T
    limit = np.abs(x).max() * np.abs(true_weights(kind, rows)).sum(1).max()
    assert np.abs(out - right).max() <= limit / 100 + 1e-30


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from([*QUANTIZED, *FLOATS]),
    n_rows=st.integers(1, 80),
    n=st.integers(1, GROUP + 6),
    n_threads=st.integers(1, 8),
    chunk=st.integers(1, 6).map(lambda n: 16 * n),
    level=st.sampled_from(LEVELS),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_same_bits_at_every_width(
    kind: Type, n_rows: int, n: int, n_threads: int, chunk: int, level: str, seed: int
) -> None:
    """A column alone gives the bits that it gives among others, in any chunks, on any number of threads."""
    library, rng = open_library(), np.random.default_rng(seed)
    rows, x = random_weights(kind, n_rows, 512, rng), columns(n, 512, rng)
    with at_level(library, level):
        together, _ = multiply(library, kind, rows, x, n_threads=n_threads, chunk=chunk)
        some = rng.integers(0, n, 3)
        alone = np.concatenate([multiply(library, kind, rows, x[i : i + 1])[0] for i in some])
    assert np.array_equal(together[some].view(np.int32), alone.view(np.int32))


def test_long_rows_of_floats_are_added_in_parts(library: Library) -> None:
    """Sums wait in memory after 1,024 inputs, also beside the last, shorter part."""
    rng = np.random.default_rng(6)
    for n in (1, 13, GROUP):
        rows, x = random_weights(Type.F16, 21, 2 * 1024 + 48, rng), columns(n, 2 * 1024 + 48, rng)
        out, _ = multiply(library, Type.F16, rows, x)
        check(rows, Type.F16, out, x.astype(np.float64))


def test_rows_may_lie_apart(library: Library) -> None:
    rng = np.random.default_rng(7)
    wide, x = random_weights(Type.Q6_K, 40, 512, rng), columns(3, 256, rng)
    rows = wide[:, : wide.shape[1] // 2]
    out, quantized = multiply(library, Type.Q6_K, rows, x)
    check(np.ascontiguousarray(rows), Type.Q6_K, out, quantized)


def test_types_and_lengths_that_are_not_covered(library: Library) -> None:
    x, out = np.ones((1, 256), np.float32), np.zeros(16, np.float32)
    for kind, n_inputs in ((Type.IQ2_XS, 256), (Type.F16, 24), (Type.Q4_K, 128)):
        assert not library.call("multiply", int(kind), x, 512, 16, n_inputs, x, 1, out, 1, 16, None)
