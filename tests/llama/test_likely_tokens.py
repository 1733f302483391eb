"""A draft scores only likely tokens, with the bits of a whole evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamaspec import FixedLength, ModelOptions, NoDrafter, Sampling, open_pair
from llamaspec.kernels import library
from llamaspec.llama import likely_tokens, runtime
from llamaspec.llama.likely_tokens import N_FIRST, N_LAST, N_RARE, WINDOW, LikelyTokens
from llamaspec.values import TARGET, ForwardRequest, TokenArray
from model_store import ModelStore, OpenModel
from tiny_models import Recipe
from tiny_vocabulary import BYTES

V = 151_936
with_kernels = pytest.mark.skipif(runtime.kernels().level is None, reason="the kernels are off")
LARGE = BYTES.longer(1001 - len(BYTES))  # the last panel has 9 rows


def tokens(*ids: int) -> TokenArray:
    return np.array(ids, dtype=np.int32)


def rows(*sequences: TokenArray, n_rows: int = V, eos: int = 140_000) -> list[int] | None:
    """Return the first row of each panel."""
    panels = LikelyTokens.of(n_rows, eos).panels(sequences)
    return None if panels is None else (16 * panels).tolist()


def test_likely_are_the_first_and_last_tokens_the_end_and_those_of_the_texts() -> None:
    first, last = [*range(0, N_FIRST, 16)], [*range(V - N_LAST, V, 16)]
    assert rows(tokens(3, 100_000), tokens(90_015)) == [*first, 90_000, 100_000, 140_000, *last]
    assert rows(tokens(3), eos=-1) == [*first, *last]


def test_all_are_likely_if_the_end_of_a_text_has_many_others() -> None:
    some, more = (100_000 + 16 * np.arange(n, dtype=np.int32) for n in (N_RARE, N_RARE + 1))
    common = np.ones(WINDOW, dtype=np.int32)
    assert rows(np.tile(some, 2)) is not None
    assert rows(more) is None
    assert rows(common, np.concatenate([common, more])) is None
    assert rows(np.concatenate([more, common])) is not None


def test_small_vocabularies_are_scored_whole() -> None:
    assert rows(tokens(1), n_rows=49_152, eos=2) is None


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 128 + 16 tokens of a tiny vocabulary be likely."""
    monkeypatch.setattr(likely_tokens, "N_FIRST", 128)
    monkeypatch.setattr(likely_tokens, "N_LAST", 16)
    monkeypatch.setattr(likely_tokens, "N_RARE", 1000)


@with_kernels
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_likely_tokens_have_the_same_bits_and_others_no_score(
    opened: OpenModel, few: None, dtype: str, threads: int
) -> None:
    model = opened("llama", Recipe(dtype=dtype, vocabulary=LARGE), n_ctx=64, threads=threads)
    texts = [tokens(1, 2, 500, 501), tokens(1, 2, 700)]
    whole = [model.forward(ForwardRequest(TARGET, text)).copy() for text in texts]
    is_likely = np.zeros(len(LARGE), dtype=bool)
    for first in (*range(0, 128, 16), 496, 688, 992):
        is_likely[first : first + 16] = True
    model.forget()
    batch = [(number, ForwardRequest(TARGET, text, likely_only=True)) for number, text in enumerate(texts)]
    model.prepare([(*each, 0) for each in batch])
    for found, right in zip(model.evaluate(batch), whole, strict=True):
        assert np.array_equal(found[:, is_likely], right[:, is_likely])
        assert np.isneginf(found[:, ~is_likely]).all()
    with library.only_panels(np.array([3, 4], dtype=np.int32), len(LARGE)):
        found = model.forward(ForwardRequest(TARGET, texts[0]))[0]
    assert np.flatnonzero(np.isfinite(found)).tolist() == [*range(48, 80)]
    mixed = [batch[0], (1, ForwardRequest(TARGET, texts[1]))]
    model.prepare([(*each, 0) for each in mixed])
    assert all(np.isfinite(each).all() for each in model.evaluate(mixed))


@with_kernels
def test_the_text_stays_the_same(store: ModelStore, few: None) -> None:
    recipe, options = Recipe(dtype="q8_0", vocabulary=LARGE, spread=5.0), ModelOptions(threads=1, n_ctx=256)
    files = store.path("llama", recipe), store.path("llama", recipe.draft(noise=0.01))
    accepted = list[int]()
    with open_pair(*files, target_options=options, draft_options=options, ngram=False) as pair:
        for seed, temperature in enumerate((0.0, 0.8, 1.5)):
            asked: dict[str, Any] = {
                "sampling": Sampling(temperature=temperature),
                "seed": seed,
                "max_tokens": 48,
            }
            plain = pair.stream("def main", drafter=NoDrafter(), **asked).run()
            found = pair.stream("def main", policy=FixedLength(3), **asked).run()
            assert found.tokens == plain.tokens
            assert max(plain.tokens) > 128
            accepted.append(found.summary.n_accepted)
    assert all(accepted)
