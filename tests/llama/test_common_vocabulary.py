"""Pairs with different vocabularies on the real llama.cpp: the text is always the target's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from llamaspec import FixedLength, LlamaModel, ModelOptions, NoDrafter, Pair, Sampling, open_pair
from llamaspec.drafters.common_vocabulary import CommonTokens
from llamaspec.sampling.acceptance_rules import RULES
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import BYTES, sentencepiece_vocabulary
from vocabularies import spelled

ONE_THREAD = ModelOptions(threads=1, gpu_layers=0)
PIECES = sentencepiece_vocabulary()
TARGET = Recipe(dtype="q8_0")
SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(temperature=1.0),
    Sampling(temperature=1.5, top_k=None, top_p=None, min_p=None),
    Sampling(repeat_penalty=1.3, frequency_penalty=0.2, logit_bias={5: 2.0}),
)
PAIRS = {  # target, draft
    "shuffled": (TARGET, TARGET.draft(0.03, shuffled=3)),
    "more tokens": (TARGET, replace(TARGET.draft(), vocabulary=BYTES.longer(300))),
    "fewer tokens": (Recipe(dtype="q8_0", vocabulary=BYTES.longer(300)), TARGET),
    "one is other": (TARGET, replace(TARGET.draft(), vocabulary=BYTES.renamed(70, "other"))),
    "sentencepiece draft": (TARGET, Recipe(dtype="q8_0", vocabulary=PIECES)),
    "sentencepiece target": (Recipe(dtype="q8_0", vocabulary=PIECES), TARGET),
}


@contextmanager
def opened(store: ModelStore, name: str) -> Iterator[Pair]:
    files = [store.path("llama", recipe) for recipe in PAIRS[name]]
    with open_pair(*files, target_options=ONE_THREAD, draft_options=ONE_THREAD) as pair:
        assert pair.common is not None
        yield pair


@pytest.mark.parametrize("name", list(PAIRS))
def test_same_seed_same_tokens(store: ModelStore, name: str) -> None:
    """Random models generate odd bytes, parts of characters and special tokens."""
    n_drafted = 0
    with opened(store, name) as pair:
        for seed, sampling in enumerate(SAMPLINGS):
            for n_draft in (1, 4):
                texts = []
                for drafter in (NoDrafter(), None):
                    pair.forget()
                    prompt, policy = "the 👩 end", FixedLength(n_draft)
                    text = pair.stream(
                        prompt, sampling=sampling, seed=seed, max_tokens=40, policy=policy, drafter=drafter
                    ).run()
                    texts.append(text.tokens)
                assert texts[0] == texts[1]
                n_drafted += text.summary.n_drafted
    assert n_drafted > 40


@pytest.mark.parametrize("rule", list(RULES))
def test_a_target_with_permuted_token_ids_drafts_for_itself(store: ModelStore, rule: str) -> None:
    """All draft tokens are accepted. Wrong ids would not change the text, but the acceptance rate."""
    files = store.path("llama", TARGET), store.path("llama", Recipe(dtype="q8_0", shuffled=5))
    with open_pair(*files, target_options=ONE_THREAD, draft_options=ONE_THREAD) as pair:
        for seed, sampling in enumerate(SAMPLINGS):
            pair.forget()
            policy = FixedLength(4)
            found = pair.stream(
                "the end", sampling=sampling, seed=seed, max_tokens=40, policy=policy, rule=rule
            ).run()
            assert found.summary.n_verified >= 20
            assert found.summary.acceptance_rate == 1


@pytest.mark.parametrize("name", ["shuffled", "sentencepiece draft"])
def test_a_constraint_is_kept(store: ModelStore, name: str) -> None:
    with opened(store, name) as pair:
        constraint = pair.grammar("start: /[a-e]{30}/")
        texts = [
            pair.stream(
                "x", seed=2, max_tokens=30, policy=FixedLength(3), drafter=drafter, constraint=constraint
            )
            .run()
            .text
            for drafter in (NoDrafter(), None)
        ]
    assert texts[0] == texts[1]
    assert texts[0]
    assert set(texts[0]) <= set("abcde")


@pytest.mark.parametrize(
    "text", ["def f(self):\n    return the end\n", "naïve – “quoted” €", "日本👩‍👩‍👧", "  a  b \n\n c"]
)
def test_a_text_keeps_its_bytes(store: ModelStore, text: str) -> None:
    """Each family converts the text of the other."""
    files = store.path("llama", TARGET), store.path("llama", Recipe(vocabulary=PIECES))
    with LlamaModel(files[0], ONE_THREAD) as bytes_, LlamaModel(files[1], ONE_THREAD) as pieces:
        for target, draft in ((bytes_.vocabulary, pieces.vocabulary), (pieces.vocabulary, bytes_.vocabulary)):
            read = CommonTokens(target, draft).translate(target.tokenize(text.encode()))
            assert read[0] == draft.bos
            assert spelled(draft, read[1:]).lstrip(b" ") == text.encode().lstrip(b" ")
