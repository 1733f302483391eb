"""Blocks: one request for a whole draft, drawn from its rows in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fakes import Asleep, Length, answered, tokens
from llamaspec.drafters.block import BlockDrafter, BlockShape
from llamaspec.drafters.hidden import RowWindow
from llamaspec.drafters.model import DeferredPrompt
from llamaspec.errors import ContextFullError, EvaluationAbortedError, EvaluationError
from llamaspec.sampling.acceptance_rules import Coupled
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import (
    MTP,
    NO_TOKENS,
    Draft,
    Evaluation,
    Forward,
    ForwardRequest,
    HiddenRows,
    Logits,
    Rows,
    Source,
)

V, MASK = 6, 5
CONTEXT = tokens(1, 2, 3)


def drafter_of(**shape: Any) -> BlockDrafter:
    sampler = Sampler(Sampling(temperature=0), 2)
    drafter = BlockDrafter(
        BlockShape(V, 4, MASK, **shape), RowWindow(MTP, 0), sampler, Coupled(), SeededStreams(0), MTP
    )
    drafter.committed(CONTEXT[:2], np.zeros((2, 3), dtype=np.float32), 0)
    return drafter


def scores(*best: int) -> Logits:
    """Return logits whose greatest ones are those of some tokens."""
    return np.eye(V, dtype=np.float32)[list(best)] * 5


def drafted(drafter: BlockDrafter, n: int, logits: Logits, rows: Rows | None = None) -> Draft:
    asked, hidden = list[ForwardRequest](), None if rows is None else HiddenRows(2, rows)

    def answer(request: ForwardRequest) -> Forward:
        asked.append(request)
        return Forward(logits, 0.0, 0, Evaluation(4), hidden)

    draft: Draft = answered(drafter.propose(CONTEXT, Length(n)), answer)
    (request,) = asked
    assert request.tokens.tolist() == CONTEXT.tolist()
    assert (request.n_logits, request.draft.tolist()) == (1, [MASK] * 3)
    return draft


@pytest.mark.parametrize(("from_anchor", "expected"), [(False, [1, 2, 3]), (True, [0, 1, 2, 3])])
def test_a_block_is_one_request(from_anchor: bool, expected: list[int]) -> None:
    draft = drafted(drafter_of(from_anchor=from_anchor), 9, scores(0, 1, 2, 3))
    assert draft.tokens.tolist() == expected
    assert draft.source is Source.BLOCK
    assert drafted(drafter_of(from_anchor=from_anchor), 2, scores(0, 1, 2, 3)).tokens.tolist() == expected[:2]


def test_no_request_if_the_policy_wants_no_draft() -> None:
    assert list(drafter_of().propose(CONTEXT, Length(0))) == []


def test_the_confidence_is_the_models_own() -> None:
    rows = np.array([[0.1], [0.2], [0.3], [0.4]], dtype=np.float32)
    draft = drafted(drafter_of(has_confidence=True, from_anchor=True), 9, scores(0, 1, 2, 3), rows)
    assert draft.confidences == pytest.approx((0.1, 0.2, 0.3, 0.4))


def test_a_lattice_is_walked_along_the_drawn_tokens() -> None:
    """Two candidates for each position; the better one depends on the candidate before."""
    lattice = np.array(
        [[0, 0, 0, 0, 0, 0], [3, 4, 1, 9, 1, 9], [0, 1, 9, 1, 1, 9], [2, 5, 9, 1, 1, 9]], dtype=np.float32
    )
    draft = drafted(drafter_of(n_candidates=2), 9, np.empty((0, V), dtype=np.float32), lattice)
    assert draft.tokens.tolist() == [4, 1, 5]
    assert draft.distributions[1].tokens.tolist() == [1]


@pytest.mark.parametrize(("fault", "is_used"), [(EvaluationError("x"), False), (ContextFullError("x"), True)])
def test_a_failure_ends_the_use_of_the_model_unless_its_context_is_full(
    fault: Exception, is_used: bool
) -> None:
    drafter = drafter_of()
    assert not len(answered(drafter.propose(CONTEXT, Length(2)), lambda _: fault))
    assert drafter.reads_rows is is_used


def test_an_aborted_evaluation_is_raised() -> None:
    with pytest.raises(EvaluationAbortedError):
        answered(drafter_of().propose(CONTEXT, Length(2)), lambda _: EvaluationAbortedError("x"))


@pytest.mark.parametrize(("n_chunk", "processed"), [(0, [2]), (1, [1, 2])])
def test_a_sleeping_model_processes_the_prompt_when_it_drafts(n_chunk: int, processed: list[int]) -> None:
    """In chunks, if the policy wants that; then there is no draft in the rounds before."""
    drafter, reading, asked = drafter_of(), Asleep(n_chunk), list[ForwardRequest]()
    drafter.deferred = DeferredPrompt(reading, lambda _: 0)

    def answer(request: ForwardRequest) -> Forward:
        asked.append(request)
        return Forward(scores(0, 1, 2, 3), 0.1, 0, Evaluation(4))

    answered(drafter.prepare(CONTEXT), answer)
    assert (asked, reading.n_unread) == ([], 3)
    assert not len(answered(drafter.propose(CONTEXT, Length(0)), answer))
    assert not asked, "the policy wants no draft"
    n_without = len(processed) if n_chunk else 0
    drafts = [answered(drafter.propose(CONTEXT, Length(9)), answer) for _ in range(n_without + 1)]
    assert [len(draft) for draft in drafts] == [0] * n_without + [3]
    assert [len(each.tokens) for each in asked] == [*processed, 3]
    assert asked[0].draft is NO_TOKENS
    assert reading.n_read == sum(processed)
