"""Attention of every instruction set, against softmax in double precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from kernels.library import Float32, Float64, Library, at_level, brain, levels_here, open_library

TOLERANCE = 4e-6
TYPES = {np.dtype(np.float16): Type.F16, np.dtype(np.uint16): Type.BF16, np.dtype(np.uint8): Type.Q8_0}


@dataclass(frozen=True)
class Case:
    q: Float32  # [n, heads, key length]
    k: npt.NDArray[Any]  # [cells, kv heads, key length] f16 or bf16, or [cells, kv heads, bytes] q8_0
    v: npt.NDArray[Any]  # the same with the value length
    mask: npt.NDArray[np.float16] | None = None  # [n, cells]
    sinks: Float32 | None = None  # [heads]
    slopes: Float32 | None = None  # [heads]
    scale: float = 1.0
    softcap: float = 0.0

    def found(self, library: Library, n_threads: int = 1) -> Float32:
        (n, n_heads, length), n_cells = self.q.shape, len(self.v)
        n_kv, value_length = numbers(self.v[0]).shape
        out = np.full((n, n_heads, value_length), np.nan, np.float32)
        kinds = [int(TYPES[x.dtype]) for x in (self.k, self.v)]
        assert library.call(
            "attend", *kinds, self.q, self.k, self.v, self.mask, self.sinks, self.slopes, self.scale,
            self.softcap, n, n_heads, n_kv, length, value_length, n_cells, n_threads, out,
        )  # fmt: skip
        return out

    def right(self) -> Float64:
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (np.repeat(numbers(x), group, axis=1) for x in (self.k, self.v))
        scores = np.einsum("nhd,chd->nhc", self.q.astype(np.float64), k) * self.scale
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        if self.mask is not None:
            slopes = 1.0 if self.slopes is None else self.slopes.astype(np.float64)[None, :, None]
            scores = scores + slopes * self.mask.astype(np.float64)[:, None]
        weights = np.exp(scores)
        total = weights.sum(-1)
        if self.sinks is not None:
            total = total + np.exp(self.sinks.astype(np.float64))
        with np.errstate(invalid="ignore"):
            return np.asarray(np.einsum("nhc,chd->nhd", weights / total[..., None], v), np.float64)


def numbers(x: npt.NDArray[Any]) -> Float64:
    if x.dtype == np.uint8:
        return np.asarray(dequantize(x, Type.Q8_0), np.float64)
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def cells(x: Float64, kind: str) -> npt.NDArray[Any]:
    if kind == "q":
        return np.asarray(quantize(x.astype(np.float32), Type.Q8_0))
    return x.astype(np.float16) if kind == "h" else brain(x)


def random_case(
    shape: tuple[int, int, int, int, int, int], *, kinds: str = "hh", seed: int = 0, sees: float = 0.6
) -> Case:
    n, n_heads, n_kv, *lengths, n_cells = shape
    length, value_length = (
        -(-x // 32) * 32 if kind == "q" else x for x, kind in zip(lengths, kinds, strict=True)
    )
    rng = np.random.default_rng(seed)
    k, v = (
        cells(rng.normal(size=(n_cells, n_kv, size)), kind)
        for kind, size in zip(kinds, (length, value_length), strict=True)
    )
    visible = rng.random((n, n_cells)) < sees
    visible[:, 0] = True
    q = rng.normal(size=(n, n_heads, length)).astype(np.float32)
    return Case(q, k, v, np.where(visible, 0, -np.inf).astype(np.float16), scale=length**-0.5)


SHAPES = (
    (1, 12, 2, 128, 128, 700),
    (5, 4, 4, 64, 80, 33),
    (9, 14, 2, 64, 64, 300),
    (30, 6, 1, 32, 48, 500),
    (2, 48, 1, 16, 16, 20),
    (3, 16, 1, 576, 512, 90),  # latent attention
)


@pytest.fixture(scope="module")
def library() -> Library:
    return open_library()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kinds", ["hh", "hb", "bh", "bb", "qq", "hq", "qb"])
@pytest.mark.parametrize("feature", ["plain", "sinks", "slopes", "softcap", "no mask"])
def test_attention(library: Library, shape: tuple[int, ...], kinds: str, feature: str) -> None:
    case, rng = random_case(shape, kinds=kinds), np.random.default_rng(1)  # type: ignore[arg-type]
    n_heads = shape[1]
    if feature == "sinks":
        case = replace(case, sinks=(4 * rng.normal(size=n_heads)).astype(np.float32))
    elif feature == "slopes":
        assert case.mask is not None
        biased = case.mask + rng.normal(size=case.mask.shape).astype(np.float16)
        case = replace(case, mask=biased, slopes=rng.random(n_heads).astype(np.float32))
    elif feature == "softcap":
        case = replace(case, softcap=0.5)
    elif feature == "no mask":
        case = replace(case, mask=None)
    found = {}
    for level in levels_here(library):
        with at_level(library, level):
            # The library takes the scale that llama.cpp has divided by the softcap.
            given = replace(case, scale=case.scale / (case.softcap or 1.0))
            found[level] = given.found(library)
            alone = [
                replace(
                    given, q=given.q[i : i + 1], mask=None if given.mask is None else given.mask[i : i + 1]
                )
                for i in range(len(given.q))
            ]
            one_by_one = np.concatenate([each.found(library, n_threads=3) for each in alone])
        assert np.abs(found[level] - case.right()).max() < TOLERANCE
        assert np.array_equal(one_by_one.view(np.int32), found[level].view(np.int32))
    first, *others = found.values()
    for other in others:
        assert np.array_equal(first.view(np.int32), other.view(np.int32))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kinds", ["hh", "qq"])
def test_it_does_not_matter_where_cells_lie(library: Library, shape: tuple[int, ...], kinds: str) -> None:
    """Cells of other sequences between, even with values that are not numbers, change no bit."""
    case, rng = random_case(shape, kinds=kinds), np.random.default_rng(2)  # type: ignore[arg-type]
    assert case.mask is not None
    (n, n_cells), places = (
        case.mask.shape,
        np.sort(rng.permutation(2 * case.mask.shape[1])[: case.mask.shape[1]]),
    )
    # All bits set are not a number, nor is a q8_0 scale of these.
    k, v = (np.full((2 * n_cells, x[0].nbytes), 255, np.uint8).view(x.dtype) for x in (case.k, case.v))
    k, v = k.reshape(-1, *case.k.shape[1:]), v.reshape(-1, *case.v.shape[1:])
    mask = np.full((n, 2 * n_cells), -np.inf, np.float16)
    k[places], v[places], mask[:, places] = case.k, case.v, case.mask
    for level in levels_here(library):
        with at_level(library, level):
            assert np.array_equal(case.found(library), replace(case, k=k, v=v, mask=mask).found(library))


def test_another_sequence_that_is_not_a_number_is_no_concern(library: Library) -> None:
    """Two sequences in one evaluation; the cells of one are NaN."""
    case = random_case((2, 4, 2, 32, 32, 64), sees=1.0)
    assert case.mask is not None
    mask = case.mask.copy()
    mask[0, 32:], mask[1, :32] = -np.inf, -np.inf
    k, v = case.k.copy(), case.v.copy()
    k[32:], v[32:] = np.nan, np.nan
    for level in levels_here(library):
        with at_level(library, level):
            found = replace(case, k=k, v=v, mask=mask).found(library)
            alone = replace(
                case, q=case.q[:1], k=case.k[:32], v=case.v[:32], mask=mask[:1, :32].copy()
            ).found(library)
        assert np.array_equal(found[:1], alone)
        assert np.isnan(found[1]).all()


def test_a_position_that_sees_nothing(library: Library) -> None:
    case = random_case((3, 4, 2, 32, 32, 40))
    assert case.mask is not None
    case.mask[1] = -np.inf
    assert not case.found(library)[1].any()
    case.mask[:] = -np.inf
    assert not case.found(library).any()


def test_scores_that_differ_much(library: Library) -> None:
    case = replace(random_case((4, 4, 2, 32, 32, 100)), scale=20.0)
    scores = case.found(library)
    assert np.isfinite(scores).all()
