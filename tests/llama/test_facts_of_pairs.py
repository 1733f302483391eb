"""Facts of two files that a pair relies on: where they disagree, the pair works, or one line says why not.

llama.cpp would end the process for most of these pairs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from llamaspec import Completion, FixedLength, ModelOptions, NoDrafter, Sampling, open_pair
from llamaspec.errors import PairError
from model_store import ModelStore
from tiny_hidden import DraftRecipe, write_draft
from tiny_models import Recipe
from tiny_vocabulary import BYTES

KINDS = ("eagle3", "dflash", "dspark", "dflash2")
TARGET = Recipe(spread=0.5)
DRAWN = Sampling(temperature=1.0, top_k=None, top_p=None, min_p=None)
PADDING = 64
OPTIONS = ModelOptions(threads=1, n_ctx=256)


class Pair(NamedTuple):
    """A target, a draft of which a fact disagrees, and what happens."""

    target: Recipe
    draft: DraftRecipe
    says: str | None = None  # the reason why the pair is refused; None if it works
    changed: dict[str, int | float] = {}  # noqa: RUF012  # in the draft's metadata


def padded(n: int) -> Recipe:
    """Return the target with `n` more tokens."""
    return replace(TARGET, vocabulary=BYTES.longer(n))


def of(kind: str, n_more: int = 0, **changes: object) -> DraftRecipe:
    """Return a draft for the target with `n_more` more tokens."""
    return DraftRecipe(padded(n_more), kind, **changes)  # type: ignore[arg-type]


MORE, FEWER = "made for a target with 352 tokens, but", "made for a target with 288 tokens, but"
PAIRS = {
    # A draft that uses the target's output can draft if no tensor of its own has a row for each token.
    "eagle3: more tokens": Pair(TARGET, of("eagle3", PADDING)),
    "eagle3: fewer tokens": Pair(padded(PADDING), of("eagle3")),
    "dflash: more tokens": Pair(TARGET, of("dflash", PADDING)),
    "dflash: fewer tokens": Pair(padded(PADDING), of("dflash")),
    "dspark: more tokens": Pair(TARGET, of("dspark", PADDING), MORE),
    "dspark: fewer tokens": Pair(padded(PADDING), of("dspark"), FEWER),
    "dflash2: more tokens": Pair(TARGET, of("dflash2", PADDING)),
    "dflash2: fewer tokens": Pair(padded(PADDING), of("dflash2"), FEWER),
    **{f"{kind}: more tokens, own output": Pair(TARGET, of(kind, PADDING, own_ends=True)) for kind in KINDS},
    **{f"{kind}: fewer tokens, own output": Pair(padded(PADDING), of(kind, own_ends=True)) for kind in KINDS},
    **{f"{kind}: more tokens, d2t": Pair(TARGET, of(kind, PADDING, n_tokens=200)) for kind in KINDS},
    "eagle3: own embedding": Pair(
        TARGET, of("eagle3", PADDING, own_ends=True, without="output.weight"), MORE
    ),
    "eagle3: d2t without an output": Pair(
        TARGET, of("eagle3", n_tokens=100, without="output.weight"), "of an output that it does not have"
    ),
    # The token of open positions.
    "mask: own": Pair(TARGET, of("dflash", 1, own_ends=True), None, {"tokenizer__ggml__mask_token_id": 288}),
    "mask: beyond the target": Pair(
        TARGET, of("dflash", 1), "uses token 288 for open positions", {"tokenizer__ggml__mask_token_id": 288}
    ),
    # Hidden rows.
    "eagle3: narrower": Pair(TARGET, of("eagle3", width=32, own_ends=True)),
    "eagle3: narrower than the output": Pair(
        TARGET,
        of("eagle3", width=32),
        "has rows of 32 numbers, but the embedding or output of a target with 64",
    ),
    # Positions may differ, because they only change which tokens are drafted.
    **{
        f"{kind}: shorter context": Pair(TARGET, of(kind), None, {"context_length": 16})
        for kind in ("eagle3", "dspark")
    },
    "dflash: another rotation": Pair(TARGET, of("dflash"), None, {"rope__freq_base": 1e6}),
    "other tokens": Pair(
        replace(TARGET, vocabulary=BYTES.renamed(70, "other")),
        of("dflash"),
        "different vocabularies: token 70 is 'other' in the target and 'D' in the draft",
    ),
}


def completion(target: Path, draft: Path | None) -> Completion:
    with open_pair(target, draft, ngram=False, target_options=OPTIONS) as pair:
        drafter = None if draft else NoDrafter()
        return pair.stream(
            "def f(x):", seed=0, max_tokens=60, sampling=DRAWN, policy=FixedLength(3), drafter=drafter
        ).run()


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_works_or_says_why_not(store: ModelStore, tmp_path: Path, name: str) -> None:
    target, draft, says, changed = PAIRS[name]
    files = store.path("llama", target), write_draft(tmp_path / "draft.gguf", draft, **changed)
    if says is not None:
        with pytest.raises(PairError, match=says) as raised:
            open_pair(*files, target_options=OPTIONS)
        assert "\n" not in str(raised.value)
        assert "; " in str(raised.value)
        return
    made = completion(*files)
    assert made.tokens == completion(files[0], None).tokens
    assert made.draft_fault is None
    assert sum(len(round_.draft) for round_ in made.rounds) > 20


@pytest.mark.parametrize(
    ("kind", "own"), [("eagle3", False), ("dflash", False), ("dflash2", False), ("dflash", True)]
)
def test_padding_changes_no_draft(store: ModelStore, kind: str, own: bool) -> None:
    """The logits of a draft with the target's output once began at the wrong numbers."""
    target = store.path("llama", TARGET)
    usual, more = (completion(target, store.draft(of(kind, n, own_ends=own))) for n in (0, PADDING))
    for ours, theirs in zip(more.rounds, usual.rounds, strict=True):
        assert ours.draft.tokens.tolist() == theirs.draft.tokens.tolist()


SHARED = {
    "more tokens": (Recipe(), padded(PADDING), None),
    "fewer tokens": (padded(PADDING), Recipe(), None),
    "smaller keys": (Recipe(n_kv_heads=1), Recipe(), "caches 32 numbers of a key where it reads 64"),
    "shorter keys": (Recipe(head_length=16), Recipe(), "caches 32 numbers of a key where it reads 64"),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_head_over_the_targets_cache(store: ModelStore, name: str) -> None:
    target, head, says = SHARED[name]
    files = store.path("gemma4", target), store.path("gemma4-assistant", replace(head, spread=3.0))
    if says is not None:
        with pytest.raises(PairError, match=says):
            open_pair(*files, target_options=OPTIONS)
        return
    made = completion(*files)
    assert made.tokens == completion(files[0], None).tokens
    assert made.draft_fault is None
    assert sum(len(round_.draft) for round_ in made.rounds) > 20


def test_a_draft_that_scores_none_of_the_allowed_tokens(store: ModelStore) -> None:
    """It has no more to say, which is no fault. It once ended the completion."""
    draft = store.draft(of("eagle3", n_tokens=3))
    with open_pair(store.path("llama", TARGET), draft, ngram=False, target_options=OPTIONS) as pair:
        constraint = pair.grammar("start: /[0-9]+/")
        made = pair.stream("1", seed=0, max_tokens=12, constraint=constraint, policy=FixedLength(3)).run()
    assert made.draft_fault is None
    assert len(made.tokens) == 12
