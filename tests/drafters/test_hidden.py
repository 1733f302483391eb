"""Drafters that read hidden rows: which rows they keep, and what they send to the draft model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fake_constraint import Steps
from fakes import Asleep, Length, answered, tokens
from llamaspec.drafters.hidden import KEPT_ROWS, HiddenDrafter, RecentRows, RowWindow
from llamaspec.drafters.model import DeferredPrompt, SameTokens
from llamaspec.errors import LlamaspecError, RowsMissingError
from llamaspec.protocols import SequenceConstraint
from llamaspec.sampling.acceptance_rules import Coupled
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import MTP, Draft, Evaluation, Forward, ForwardRequest, HiddenRows, TokenArray

V, WIDTH = 4, 3


def rows_at(start: int, n: int) -> np.ndarray:
    return np.repeat(np.arange(start, start + n, dtype=np.float32)[:, None], WIDTH, axis=1)


def test_kept_rows_are_right_and_enough() -> None:
    """Compared with a dictionary of all rows."""
    rng = np.random.default_rng(0)
    kept, right, n = RecentRows(), dict[int, np.ndarray](), 0
    for _ in range(400):
        start = n + int(rng.random() < 0.05) * 7  # tokens shared with another sequence
        rows = rng.standard_normal((int(rng.choice([1, 4, 17, 512])), WIDTH)).astype(np.float32)
        kept.add(start, rows)
        right = dict(enumerate(rows, start)) if start > n else right | dict(enumerate(rows, start))
        n = start + len(rows)
        assert kept.end == n
        assert kept.first >= min(right)
        assert kept.end - kept.first >= min(KEPT_ROWS, len(right))
        known = kept.known
        for p in (kept.first, (kept.first + n) // 2, n - 1):
            assert (known.part(p, p + 1)[0] == right[p]).all()


class Asked:
    """Answers a drafter as a model would that has cached `n_cached` tokens; notes its requests."""

    def __init__(self, n_cached: int = 1) -> None:
        self.n_cached, self.requests = n_cached, list[ForwardRequest]()

    def answer(self, request: ForwardRequest) -> Forward | LlamaspecError:
        hidden = request.hidden
        assert hidden is not None
        first = max(self.n_cached, hidden.begin) - 1
        n_text = len(request.tokens) - len(hidden.own)
        is_cached = self.n_cached >= len(request.tokens) - request.n_logits and not request.n_scored
        if not is_cached and (hidden.target.start > first or hidden.target.end < n_text - 1):
            return RowsMissingError(first + 1)
        self.requests.append(request)
        logits = np.full((request.n_scored, V), -9.0, dtype=np.float32)
        logits[:, len(request.tokens) % V] = 9.0
        own = HiddenRows(len(request.tokens) - 1, np.full((1, WIDTH), -len(request.tokens), np.float32))
        return Forward(logits, 0.0, 0, Evaluation(1), own)

    def draft(self, drafter: HiddenDrafter, context: TokenArray, n: int = 3) -> Draft:
        draft: Draft = self.run(drafter.propose(context, Length(n)))
        return draft

    def run(self, coroutine: Generator[ForwardRequest, Any, Any]) -> Any:
        return answered(coroutine, self.answer)


def drafter_of(constraint: SequenceConstraint | None = None) -> HiddenDrafter:
    sampler = Sampler(Sampling(temperature=0), 2, constraint)
    window = RowWindow(MTP, 1)
    return HiddenDrafter(
        SameTokens(V, V), 64, sampler, Coupled(), SeededStreams(0), model=MTP, row_window=window
    )


def sent(requests: Sequence[ForwardRequest]) -> list[tuple[int, int, int, list[float]]]:
    """Number of tokens, the first one that is seen, the first row, and the own rows of each request."""
    return [
        (
            len(each.tokens),
            each.hidden.begin,
            each.hidden.target.start,
            [float(row[0]) for row in each.hidden.own],
        )
        for each in requests
        if each.hidden is not None
    ]


def test_a_draft_continues_with_the_models_own_rows() -> None:
    drafter, asked = drafter_of(), Asked()
    drafter.committed(tokens(1, 2, 3), rows_at(0, 3), 0)
    draft = asked.draft(drafter, tokens(1, 2, 3, 0))
    assert draft.tokens.tolist() == [0, 1, 2]
    assert sent(asked.requests) == [(4, 1, 0, []), (5, 1, 0, [-4]), (6, 1, 0, [-4, -5])]
    assert (asked.requests[0].hidden.target.rows == rows_at(0, 3)).all()  # type: ignore[union-attr]


def test_the_row_that_a_forced_token_left_out_is_computed() -> None:
    """The constraint allows only one fourth token, for which the model is not asked."""
    drafter, asked = drafter_of(Steps(V)), Asked()
    drafter.committed(tokens(1), rows_at(0, 1), 0)
    draft = asked.draft(drafter, tokens(1, 2), 5)
    assert draft.tokens.tolist() == [2, 3, 0, 2, draft.tokens[-1]], "after a 0 only a 2 is allowed"
    assert [(n, own) for n, _, _, own in sent(asked.requests)] == [
        (2, []), (3, [-2]), (4, [-2, -3]), (5, [-2, -3, -4]), (6, [-2, -3, -4, -5]),
    ]  # fmt: skip


def test_without_the_row_before_the_last_token_there_is_no_draft() -> None:
    drafter, asked = drafter_of(), Asked()
    assert not asked.draft(drafter, tokens(1, 2))
    drafter.committed(tokens(1), rows_at(0, 1), 0)
    assert not asked.draft(drafter, tokens(1, 2, 3))
    assert asked.draft(drafter, tokens(1, 2))


def test_a_model_that_lacks_older_rows_sees_only_the_tokens_behind_them() -> None:
    drafter, asked = drafter_of(), Asked()
    drafter.committed(tokens(1), rows_at(0, 1), 0)
    drafter.committed(tokens(2, 3), rows_at(4, 2), 4)
    draft = asked.draft(drafter, tokens(1, 1, 1, 1, 2, 3, 0), 1)
    assert len(draft) == 1
    assert sent(asked.requests) == [(7, 5, 4, [])]
    assert drafter.fault is None


def test_a_prompt_whose_rows_are_missing_is_no_fault() -> None:
    drafter, asked = drafter_of(), Asked()
    asked.run(drafter.prepare(tokens(1, 2, 3)))
    assert drafter.fault is None
    asked.n_cached = 4
    drafter.committed(tokens(3), rows_at(2, 1), 2)
    assert asked.draft(drafter, tokens(1, 2, 3, 0), 1)


def test_after_a_fault_no_more_rows_are_wanted() -> None:
    drafter = drafter_of()
    assert drafter.reads_rows
    drafter.fault = "broken"
    assert not drafter.reads_rows


@pytest.mark.parametrize(("n_cached", "first"), [(1, 0), (2, 1), (4, 3), (9, 3)])
def test_the_first_row_is_the_one_before_the_first_token_that_is_not_cached(
    n_cached: int, first: int
) -> None:
    """The model has been asked, so it holds what it has cached."""
    prompt = tokens(1, 2, 3, 1, 0)
    assert Asked(n_cached).run(drafter_of().first_row(prompt)) == first


def test_a_sleeping_model_sees_only_the_end_of_the_prompt() -> None:
    """While it sleeps, it processes nothing, and wants no rows but the last ones, which are kept."""
    prompt, reading, asked = tokens(*[1, 2, 3] * 500), Asleep(), Asked(1)
    first = len(prompt) - 1 - KEPT_ROWS
    drafter = replace(
        drafter_of(),
        context_size=2000,
        sampler=Sampler(Sampling(temperature=0), len(prompt)),
        deferred=DeferredPrompt(reading, lambda tokens: len(prompt) - KEPT_ROWS),
        row_window=RowWindow(MTP, 1, is_asleep=True),
    )
    assert asked.run(drafter.first_row(prompt)) == first
    asked = Asked()
    for n in (700, len(prompt)):
        asked.run(drafter.prepare(prompt[:n]))
    drafter.committed(prompt[first:-1], rows_at(first, KEPT_ROWS), first)
    assert not asked.requests
    assert reading.n_unread == KEPT_ROWS
    assert len(asked.draft(drafter, prompt, 1)) == 1
    assert [(n, begin) for n, begin, _, _ in sent(asked.requests)] == [
        (len(prompt) - 1, first + 1), (len(prompt), first + 1)
    ]  # fmt: skip
