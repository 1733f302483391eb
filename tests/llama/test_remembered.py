"""What a model remembers it does not evaluate: over random calls, for every kind of memory."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec import Ask
from llamaspec.llama import model as model_module
from llamaspec.llama.trie import Trie, merge
from model_store import OpenModel

N_CALLS = 60


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "jamba", "lfm2"])
def test_the_rest_is_evaluated(opened: OpenModel, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[int] = []

    def counted(*arguments: object, **settings: object) -> Trie:
        trie = merge(*arguments, **settings)  # type: ignore[arg-type]
        evaluated.append(len(trie.nodes))
        return trie

    monkeypatch.setattr(model_module, "merge", counted)
    model, random = opened(kind), np.random.default_rng(1)
    tokens = np.array([2], dtype=np.int32)
    for _ in range(N_CALLS):
        kept = tokens[: random.integers(1, len(tokens) + 1)] if random.random() < 0.4 else tokens
        new = random.integers(2, 6, size=random.integers(0, 8), dtype=np.int32)
        tokens = np.concatenate([kept, new])[:200]
        remembered = model.remembered(tokens)
        model.logits([Ask(0, tokens, 1)])
        assert evaluated.pop() == len(tokens) - remembered
