"""The first difference of two vocabularies, and pairs whose vocabularies differ only in length."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaspec import Completion, FixedLength, LlamaModel, ModelOptions, PairError, open_pair
from llamaspec.llama.vocabulary import MAX_SIZE_DIFFERENCE, LlamaVocabulary, check_pair, difference
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import BYTES, Vocabulary, sentencepiece_vocabulary


def model(store: ModelStore, vocabulary: Vocabulary) -> Path:
    return store.path("llama", Recipe(vocabulary=vocabulary))


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (BYTES.renamed(70, "other"), "token 70 is 'D' in the target and 'other' in the draft"),
        (BYTES.longer(5).renamed(287, "zzz"), "and 'zzz' in the draft"),
        # The first of several differences.
        (BYTES.renamed(287, "zzz").renamed(280, "yyy"), "token 280 is 'Ġself' in the target and 'yyy'"),
        # Spellings beyond ASCII are shown, not escaped.
        (BYTES.renamed(70, "über"), "'über' in the draft"),
        (sentencepiece_vocabulary(), "token 0 is '<s>' in the target and '<unk>' in the draft"),
        (
            BYTES.longer(MAX_SIZE_DIFFERENCE + 1),
            "288 and 417 tokens; token 288 is '<extra_0>' in the draft only",
        ),
    ],
)
def test_the_first_difference_is_named(store: ModelStore, draft: Vocabulary, says: str) -> None:
    with LlamaModel(model(store, BYTES)) as one, LlamaModel(model(store, draft)) as other:
        found = difference(one.vocabulary, other.vocabulary)
        assert says in (found or "")
        one.vocabulary.spellings = b""  # unknown: the tokens are compared one by one
        assert difference(one.vocabulary, other.vocabulary) == found
        with pytest.raises(PairError, match="choose a draft of the same model family"):
            check_pair(one.vocabulary, other.vocabulary)


PADDED = BYTES.longer(MAX_SIZE_DIFFERENCE)
ONE_THREAD = ModelOptions(threads=1)


@pytest.mark.parametrize("pair", [(BYTES, BYTES), (BYTES, PADDED), (PADDED, BYTES)])
def test_vocabularies_that_begin_alike_are_compared_at_once(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, pair: tuple[Vocabulary, Vocabulary]
) -> None:
    """Asking llama.cpp for 2 x 150,000 tokens took longer than reading the context's memory."""
    with LlamaModel(model(store, pair[0])) as one, LlamaModel(model(store, pair[1])) as other:
        assert one.vocabulary.spellings[8:].startswith(one.vocabulary.text(0))
        monkeypatch.setattr(LlamaVocabulary, "text", None)
        assert difference(one.vocabulary, other.vocabulary) is None


def text_of(target: Path, draft: Path) -> Completion:
    with open_pair(target, draft, target_options=ONE_THREAD, draft_options=ONE_THREAD) as pair:
        return pair.stream("the", seed=1, max_tokens=60, policy=FixedLength(4)).run()


def test_a_draft_may_have_unused_tokens_at_the_end(store: ModelStore) -> None:
    """It must not draft them, because the target does not have them."""
    completion = text_of(model(store, BYTES), model(store, PADDED))
    drafted = [token for round_ in completion.rounds for token in round_.draft.tokens.tolist()]
    assert len(drafted) > 30
    assert max(drafted) < len(BYTES)


def test_a_target_may_have_unused_tokens_at_the_end(store: ModelStore) -> None:
    """A random model generates them. The draft model cannot evaluate them, so plain decoding continues."""
    completion = text_of(model(store, PADDED), model(store, BYTES))
    assert max(completion.tokens) >= len(BYTES)
    assert len(completion.tokens) == 60


def test_a_refused_pair_leaves_nothing_open(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    close = LlamaModel.close

    def noted(self: LlamaModel) -> None:
        closed.append(self.path)
        close(self)

    monkeypatch.setattr(LlamaModel, "close", noted)

    def refused(*vocabularies: object) -> None:
        raise PairError("no")

    monkeypatch.setattr("llamaspec.drafters.common_vocabulary.CommonTokens", refused)
    target, draft = model(store, BYTES), model(store, BYTES.renamed(70, "other"))
    with pytest.raises(PairError):
        open_pair(target, draft)
    assert sorted(closed) == sorted([target, draft])
