"""A completion of another scope costs what it costs with empty caches, whatever drafts."""

from __future__ import annotations

import pytest

from forward_requests import Count
from llamaspec import FixedLength, LlamaModel, Pair, open_pair
from llamaspec.values import EVERYONE, NO_SCOPE, Scope, TokenArray, scope_of
from model_store import ModelStore
from test_oracles import CPU, PROMPTS, files_with_rows

PROMPT = "".join(PROMPTS)


@pytest.mark.parametrize("kind", ["step35", "eagle3", "dspark", "gemma4", "jamba"])
def test_another_scope_costs_what_empty_caches_cost(store: ModelStore, evaluated: Count, kind: str) -> None:
    own = {
        "gemma4": (store.path("gemma4"), store.path("gemma4-assistant")),
        "jamba": (store.path("jamba"), None),
    }
    with open_pair(*(own.get(kind) or files_with_rows(store, kind)), target_options=CPU) as pair:

        def cost(scope: str) -> int:
            evaluated.taken()
            pair.stream(PROMPT, scope=scope, policy=FixedLength(2), seed=1, max_tokens=6).run()
            return evaluated.taken()

        cold, other, again, everyone, known = (cost(scope) for scope in ("a", "b", "a", EVERYONE, "c"))
    assert cold == other == everyone > 100
    assert max(again, known) < cold / 2


def test_what_is_cached_is_asked_for_the_scope(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the length policy learns of a cached prompt decides when the draft processes it."""
    asked = dict[LlamaModel, Scope]()

    def n_cached(self: LlamaModel, tokens: TokenArray, scope: Scope = NO_SCOPE) -> int:
        asked[self] = scope
        return 0

    monkeypatch.setattr(LlamaModel, "n_cached", n_cached)
    tiny.stream(PROMPT, scope="a", max_tokens=1).run()
    assert asked == dict.fromkeys(tiny.models, scope_of("a"))
