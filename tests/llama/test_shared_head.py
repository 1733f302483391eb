"""A head that uses the target's KV cache (Gemma 4's assistant), on the real llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from command import invoke
from fakes import tokens
from forward_requests import TOLERANCE, assert_same, text
from head_requests import Asking, drafted_side_by_side, drafting, evaluating, opened, reading
from llamaspec import ModelOptions, Pair, open_pair
from llamaspec.drafters.hidden import NO_ROWS
from llamaspec.errors import EvaluationAbortedError, ModelFileError, PairError
from llamaspec.llama.heads import SharedHead
from llamaspec.values import MTP, TARGET, ForwardRequest, HiddenInput, HiddenRows, Source
from model_store import ModelStore
from tiny_models import Recipe

CLOSE = TOLERANCE["gemma3"]


@contextmanager
def opened_pair(store: ModelStore, **options: object) -> Iterator[Pair]:
    with opened((store.path("gemma4"), store.path("gemma4-assistant")), **options) as pair:
        yield pair


def test_rejected_draft_tokens_are_not_seen(store: ModelStore) -> None:
    """They stay in the target's cache until its next request, and the head's request comes first."""
    begin = text(30)

    def verifying(n_accepted: int) -> Asking:
        draft = tokens(5, 6, 7)
        yield from reading(begin, draft[:2])
        verified = ForwardRequest(TARGET, begin, draft=draft, rows_from=len(begin) - 1)
        rows = yield from evaluating(verified)
        after = np.concatenate([begin, draft[:n_accepted], tokens(9)])
        return (yield from drafting(after, tokens(4, 8), rows))

    with opened_pair(store) as pair, opened_pair(store) as other:
        for n_accepted in range(4):
            pair.forget()
            other.forget()
            after = np.concatenate([begin, tokens(5, 6, 7)[:n_accepted], tokens(9)])
            expected = other.run(reading(after, tokens(4, 8)))
            for answer, right in zip(pair.run(verifying(n_accepted)), expected, strict=True):
                assert_same(answer, right, CLOSE)


def test_it_keeps_only_the_hidden_row_of_a_draft_token(store: ModelStore) -> None:
    with opened_pair(store) as pair:
        one, other = (pair.run(reading(text(30), tokens(first, 8)))[2] for first in (5, 6))
        assert np.abs(one - other).max() > 5 * CLOSE


def test_the_cache_and_the_hidden_row_matter(store: ModelStore) -> None:
    with opened_pair(store) as pair:
        read = text(30)
        right = pair.run(reading(read, tokens(5)))
        changed = read.copy()
        changed[5] += 1
        for other in pair.run(reading(changed, tokens(5))), pair.run(reading(read[1:], tokens(5))):
            assert all(np.abs(a - b).max() > 5 * CLOSE for a, b in zip(right, other, strict=True))


def test_the_text_is_the_targets_own_beside_other_completions(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, shapes = SharedHead.evaluate, set[tuple[int, int]]()

    def seen(self: SharedHead, batch: Any) -> Any:
        answers = evaluate(self, batch)
        shapes.update((len(logits), len(rows)) for logits, rows in answers)
        return answers

    monkeypatch.setattr(SharedHead, "evaluate", seen)
    prompts = [text(n, seed) for n, seed in ((12, 0), (40, 1), (25, 0), (3, 2))]
    with opened_pair(store, n_ctx=256, n_cells=512) as pair:
        for temperature in (0.0, 1.0):
            found = drafted_side_by_side(pair, prompts, temperature)
            assert max(round_.n_sequences for completion in found for round_ in completion.rounds) > 1
            assert {round_.source for completion in found for round_ in completion.rounds} == {Source.MTP}
    assert shapes == {(1, 1)}, "one row of logits and one hidden row for each sequence"


def test_a_sequence_that_the_target_drops_in_between_is_prepared_again(store: ModelStore) -> None:
    with opened_pair(store) as pair:
        assert pair.heads is not None
        pair.target.forward(ForwardRequest(TARGET, text(19), n_logits=0))
        hidden = HiddenInput(1, HiddenRows(18, np.ones((1, 64), dtype=np.float32)), NO_ROWS)
        wanted = ForwardRequest(MTP, text(20), hidden=hidden)
        assert pair.heads.prepare([(-1, wanted, 0)]) == [19]
        pair.target.forget()
        with pytest.raises(EvaluationAbortedError):
            pair.heads.evaluate([(-1, wanted)])


def test_another_target(store: ModelStore) -> None:
    files = store.path("llama"), store.path("gemma4-assistant")
    with pytest.raises(PairError, match="made for another target"):
        open_pair(*files, target_options=ModelOptions(threads=1))
    wider = store.path("gemma4", Recipe(width=128))
    with pytest.raises(PairError, match="made for another target"):
        open_pair(wider, files[1], target_options=ModelOptions(threads=1))


def test_it_cannot_be_opened_as_a_model(store: ModelStore) -> None:
    path = store.path("gemma4-assistant")
    with pytest.raises(ModelFileError, match="only a part of a model"):
        open_pair(path, target_options=ModelOptions(threads=1))


def test_doctor_knows_it(store: ModelStore) -> None:
    files = "--target", store.path("gemma4"), "--draft", store.path("gemma4-assistant")
    answer = invoke("doctor", *files, "--threads", "1", "--json")
    found = {finding["topic"]: finding for finding in answer.json["findings"]}
    assert "reads the target's KV cache" in found["draft"]["text"]
    assert answer.json["problems"] == 0
