"""Completions have the target's distribution with drafts that read hidden rows, by enumeration.

As in test_exact_law.py, every outcome of every draw is enumerated; for the coupled rule, every noise table.
The fake drafts compare the rows of every request with those of the target, in all branches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from exact_law import (
    DROPPING,
    LENGTHS,
    SAMPLINGS,
    THREE,
    Models,
    coupled,
    error_of,
    same_tokens,
)
from fakes import FakeModel, Length, hidden_rows, tokens
from llamaspec.drafters.block import BlockDrafter, BlockShape
from llamaspec.drafters.hidden import HiddenDrafter, RowWindow
from llamaspec.errors import ScoresError
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import MTP, TARGET, ForwardRequest, HiddenRows, Logits

PROMPT = tokens(1, 2)  # the second token has a row before it
V, MASK = 3, 0
HiddenReader = HiddenDrafter | BlockDrafter


def check_rows(request: ForwardRequest) -> None:
    """Check that a request has the rows of its tokens."""
    hidden = request.hidden
    assert hidden is not None
    path, target, own = request.tokens, hidden.target, hidden.own
    n_text = len(path) - len(own)
    assert target.start == 0
    assert target.end == n_text - 1
    assert np.array_equal(target.rows, hidden_rows(path, 0, n_text - 1))
    if len(own):
        assert np.array_equal(own, hidden_rows(path, n_text - 1, len(path) - 1))


class FakeHead(FakeModel):
    """Drafts one token after the other."""

    def logits(self, request: ForwardRequest) -> Logits:
        check_rows(request)
        return super().logits(request)


@dataclass
class FakeBlocks(FakeModel):
    """Computes a row for each position of a block, whatever is drawn there, or a lattice of candidates."""

    n_candidates: int | None = None

    def logits(self, request: ForwardRequest) -> Logits:
        check_rows(request)
        assert (request.draft == MASK).all()
        if self.n_candidates is not None:
            return np.empty((0, V), dtype=np.float32)
        # Rows of positions in the text are those after a text of that length.
        return np.array(
            [self.after(np.append(request.tokens, np.int32(100 + i))) for i in range(request.n_scored)]
        )

    def rows(self, request: ForwardRequest) -> HiddenRows:
        """Return confidences [B, 1], or for each position k candidates and their k * k scores."""
        random = np.random.default_rng([self.seed, zlib.crc32(request.tokens.tobytes())])
        n, k = request.n_scored, self.n_candidates
        if k is None:
            rows = random.random((n, 1), dtype=np.float32)
        else:
            candidates = np.array([random.permutation(V)[:k] for _ in range(n)], dtype=np.float32)
            scores = random.standard_normal((n, k * k), dtype=np.float32)
            rows = np.concatenate((candidates, scores), axis=1)
        return HiddenRows(len(request.tokens) - 1, rows)


def block_drafter(*chance: Any, **shape: Any) -> BlockDrafter:
    sampling, rule, streams = chance
    sampler = Sampler(sampling, len(PROMPT))
    return BlockDrafter(BlockShape(V, 4, MASK, **shape), RowWindow(MTP, 0), sampler, rule, streams, MTP)


def head_drafter(*chance: Any) -> HiddenDrafter:
    sampling, rule, streams = chance
    sampler, words = Sampler(sampling, len(PROMPT)), same_tokens(THREE[TARGET])
    return HiddenDrafter(words, 64, sampler, rule, streams, model=MTP, row_window=RowWindow(MTP, 1))


@dataclass(frozen=True)
class Kind:
    """A draft, and how its drafter is made for a sampling, a rule and random streams."""

    draft: FakeModel
    drafter: Callable[..., HiddenReader]

    @property
    def models(self) -> Models:
        return {TARGET: THREE[TARGET], MTP: self.draft}

    def make(self, *chance: Any) -> HiddenReader:
        """Return a drafter that knows the rows of the prompt."""
        drafter = self.drafter(*chance)
        drafter.committed(PROMPT[:1], hidden_rows(PROMPT, 0, 1), 0)
        return drafter


KINDS = {
    "EAGLE-3": Kind(FakeHead(2), head_drafter),
    "DFlash": Kind(FakeBlocks(3), block_drafter),
    "DSpark": Kind(FakeBlocks(4), partial(block_drafter, from_anchor=True, has_confidence=True)),
    "DFlash2": Kind(FakeBlocks(5, n_candidates=2), partial(block_drafter, n_candidates=2)),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("length", list(LENGTHS))
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_is_the_targets(rule: str, sampling: str, length: str, kind: str) -> None:
    each, chain = KINDS[kind], SAMPLINGS[sampling]
    error = error_of(each.models, each.make, LENGTHS[length], RULES[rule], chain, prompt=PROMPT)
    assert error < 1e-12


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("length", [*LENGTHS, *DROPPING])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_coupled_text_is_the_same_for_every_noise(sampling: str, length: str, kind: str) -> None:
    each, policy = KINDS[kind], (LENGTHS | DROPPING)[length]
    assert [*coupled(each.models, each.make, policy, SAMPLINGS[sampling], prompt=PROMPT)]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["EAGLE-3", "DFlash"])
def test_a_draft_that_fails_keeps_the_law(kind: str, rule: str) -> None:
    """It fails behind any token but 0: an EAGLE-3 draft perhaps behind one that it drew."""
    fine, drafters = KINDS[kind], list[HiddenReader]()

    def logits(request: ForwardRequest) -> Logits:
        if request.tokens[len(PROMPT) :].any():
            raise ScoresError("scores that are not numbers")
        return type(fine.draft).logits(draft, request)

    def drafter(*chance: Any) -> HiddenReader:
        drafters.append(fine.drafter(*chance))
        return drafters[-1]

    draft = replace(fine.draft)
    draft.logits = logits  # type: ignore[method-assign]
    failing = Kind(draft, drafter)
    assert error_of(failing.models, failing.make, Length(3), RULES[rule], prompt=PROMPT) < 1e-12
    assert {each.fault for each in drafters} == {None, "scores that are not numbers"}
    assert {each.reads_rows for each in drafters} == {True, False}
