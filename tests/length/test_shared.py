"""What rows know together, against a ledger that sees each evaluation whole, with all of its rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from llamaspec.length.acceptance import Acceptance
from llamaspec.length.allocator import Pledge
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.cost_model import CostModel
from llamaspec.length.prior import FREE_LOG_ODDS, LOG_ODDS, LearnedPrior
from llamaspec.length.regret_budget import RegretBudget
from llamaspec.length.shared import Shared
from llamaspec.values import NO_DRAFT, Draft, Round, Source

CURVE = CostCurve((1, 2, 4, 8, 16), (0.020, 0.022, 0.023, 0.036, 0.050), 0.002)


def shared(sources: Sequence[Source] = (Source.MODEL,)) -> Shared:
    return Shared(CostModel(LearnedPrior.of_probe(CURVE)), 16, sources, LOG_ODDS)


class Ledger:
    """Costs, gains and what is known of plain decoding, booked evaluation by evaluation."""

    def __init__(self) -> None:
        self.costs, self.budget = CostModel(LearnedPrior.of_probe(CURVE)), RegretBudget()
        self.knows_plain, self.n_tokens, self.n_since_plain = False, 0, 0
        self.is_sure = False  # of the latest evaluation

    def rate(self, n_rows: int) -> float:
        """Plain tokens per second."""
        return n_rows / (self.costs.batch_seconds([n_rows])[0] + n_rows * self.costs.overhead_seconds)

    def enter(self, rounds: Sequence[Round], n_unread: int) -> list[float]:
        """All rounds of one evaluation; the seconds that each is judged by."""
        costs, first, n_rows = self.costs, rounds[0], len(rounds)
        is_drafted = any(len(round_.draft) for round_ in rounds)
        self.is_sure = False
        steps = [costs.narrow_steps(first.n_priced_steps, first.n_draft_scored)]
        verifying = min(first.verify_seconds, 1.3 * costs.seconds(first.width))
        if first.n_beside:
            verifying = costs.seconds(first.width - first.n_beside)
        else:
            costs.observe_verify(first.width, first.verify_seconds)
        drafting, overheads, judged = [0.0], list[float](), list[float]()
        for i, round_ in enumerate(rounds):
            if i:
                steps.append(costs.narrow_steps(round_.n_priced_steps, round_.n_draft_scored))
            n_steps = steps[i]
            own = (
                min(round_.draft_seconds, 1.3 * costs.drafting_seconds(n_steps, n_unread)) if n_steps else 0.0
            )
            if n_steps and not max(drafting):  # rows draft in step: the others' seconds are the same
                costs.observe_draft(n_steps, n_unread, round_.draft_seconds)
            besides = round_.overhead_seconds + (0.0 if n_steps else round_.draft_seconds)
            overheads.append(costs.observe_overhead(besides, drafted=len(round_.draft) > 0))
            drafting.append(own)
            judged.append(verifying + own + n_rows * overheads[-1])
        n_made = sum(round_.n_accepted + 1 for round_ in rounds)
        self.n_tokens += n_made
        self.n_since_plain += 1
        if self.knows_plain and is_drafted:
            seconds = verifying + max(drafting) + sum(overheads)
            alone = 1.0 / self.rate(1)
            self.budget.book(n_made, seconds * self.rate(n_rows) * alone, alone)
        is_narrow = first.width <= max(n_rows, costs.cheapest_width(n_rows) or 0)
        if is_narrow and not (is_drafted or first.n_beside):
            self.is_sure = not costs.is_surprised
            self.knows_plain = not costs.looks_foreign(1) and (self.knows_plain or self.is_sure)
            self.n_since_plain = 0
        return judged


def evaluation_of(rng: np.random.Generator, number: int) -> list[Round]:
    """Rounds of one to three rows, some of them hiccups, some padded, some plain, some beside a prompt."""
    n_rows, is_plain = int(rng.integers(1, 4)), number < 3 or bool(rng.random() < 0.2)
    lengths = [0 if is_plain else int(rng.integers(0, 4)) for _ in range(n_rows)]
    n_beside = int(rng.choice([0, 0, 0, 1, 60]))
    width = sum(lengths) + n_rows + (n_beside or int(rng.choice([0, 0, 1])))
    verify = float(np.interp(width, CURVE.widths, CURVE.verify_seconds)) * float(rng.choice([0.9, 1.1, 4.0]))
    rounds = []
    for n in lengths:
        n_steps = n and int(rng.choice([0, n, 2 * n]))
        rounds.append(
            Round(
                Draft(np.zeros(n, np.int32), (), tuple(rng.random(n).tolist())),
                tuple(range(int(rng.integers(0, n + 1)))),
                0,
                width,
                n_rows,
                number,
                n_steps,
                0.002 * n * float(rng.choice([1.0, 6.0])),
                verify,
                float(rng.choice([0.0001, 0.002])),
                n_draft_scored=n_steps and n_steps + int(rng.choice([0, 3])),
                n_beside=n_beside,
            )
        )
    return rounds


@pytest.mark.parametrize("seed", range(6))
def test_evaluations_are_learnt_and_booked_once(seed: int) -> None:
    rng, found, ledger = np.random.default_rng(seed), shared(), Ledger()
    for number in range(1, 60):
        rounds, n_unread = evaluation_of(rng, number), int(rng.choice([0, 0, 5]))
        if number % 9 == 0:
            found.wants_plain = True
        wanted = found.wants_plain
        said = [found.observe(round_, n_unread) for round_ in rounds]
        assert said == pytest.approx(ledger.enter(rounds, n_unread))
        assert (found.knows_plain, found.n_tokens) == (ledger.knows_plain, ledger.n_tokens)
        assert found.n_since_plain == ledger.n_since_plain
        assert found.wants_plain == (wanted if ledger.n_since_plain else not ledger.is_sure)
        assert found.budget.gain == pytest.approx(ledger.budget.gain)
        assert found.costs.n_timed == ledger.costs.n_timed
        assert found.costs.draft_step_seconds() == pytest.approx(ledger.costs.draft_step_seconds())
        assert found.allocator.latest == number
    assert found.budget.gain


def test_an_evaluation_that_a_row_left_is_followed_by_the_next() -> None:
    """Its number may come again, where a scheduler's numbers begin anew: more rounds than rows."""
    found, plain = shared(), Round(NO_DRAFT, (), 0, 1, evaluation=7, verify_seconds=0.02)
    for _ in range(3):
        found.observe(plain, 0)
    assert found.costs.n_timed == {1: 3}
    pledge = Pledge(n_draft=3)
    found.start_row(pledge)
    found.observe(replace(plain, n_rows=2, width=2, evaluation=8), 0)
    assert (found.costs.n_timed, pledge.n_draft) == ({1: 3, 2: 1}, 0)
    found.observe(plain, 0)
    assert found.costs.n_timed == {1: 4, 2: 1}


def test_a_prompt_read_beside_says_nothing_of_plain_decoding() -> None:
    found = shared()
    found.observe(Round(NO_DRAFT, (), 0, 16, evaluation=1, verify_seconds=0.05), 0)
    assert not found.knows_plain
    found.observe(Round(NO_DRAFT, (), 0, 1, evaluation=2, verify_seconds=0.02), 0)
    assert found.knows_plain
    foreign = shared()
    foreign.observe(Round(NO_DRAFT, (), 0, 1, evaluation=1, verify_seconds=0.2), 0)
    assert not foreign.knows_plain  # the probe was another machine's: one timing more


def test_a_text_that_begins_alone_has_a_budget_of_its_own() -> None:
    found = shared()
    found.n_tokens = 500
    found.start_row(Pledge())
    assert found.budget.left(500 + 96, 1) == pytest.approx(1.6)
    found.n_tokens = 900
    found.start_row(Pledge())
    assert found.budget.left(500 + 192 + 50, 2) == pytest.approx(3.2 + 1.0)
    assert found.allocator.n_rows == 1
    assert len(found.allocator.pledges) == 2


def test_what_a_source_begins_with() -> None:
    """Copies and forced tokens cost no step; the first of the others is the one that drafts."""
    found = shared([Source.NGRAM, Source.STAGE, Source.GRAMMAR, Source.MTP])
    assert (found.drafting, shared([Source.STORE]).drafting) == (Source.STAGE, Source.MODEL)
    assert (found.knows_plain, found.wants_plain, found.grows_trees) == (False, False, True)
    for source in Source:
        is_free = source in (Source.NGRAM, Source.STORE, Source.GRAMMAR)
        usual, level, slope = FREE_LOG_ODDS if is_free else LOG_ODDS
        beliefs = found.usual[source], found.calibrations[source]
        assert [(belief.level, belief.slope) for belief in beliefs] == [(usual, 0.0), (level, slope)]


@pytest.mark.parametrize("source", [Source.MODEL, Source.NGRAM])
def test_what_a_round_says_of_acceptance(source: Source) -> None:
    """A text learns half of each token from its confidence, whether it was verified or not."""
    found, expected = shared(), shared()
    of_text, same = Acceptance(0.1).of_text(), Acceptance(0.1).of_text()
    usual, calibration = expected.usual[source], expected.calibrations[source]
    draft = Draft(np.zeros(3, np.int32), (), (0.9, 0.4, 0.7), source)
    for path in ((0,), (), (0, 1, 2)):
        found.learn_acceptance(Round(draft, path, 0, 4), of_text)
        for confidence in draft.confidences:
            same.learn(calibration.probability(confidence), count=0.5)
        for i in range(min(len(path) + 1, 3)):
            for belief, settings in ((usual, {}), (calibration, {"confidence": draft.confidences[i]})):
                belief.pass_tokens(1)
                belief.learn(i < len(path), **settings)
            same.learn(i < len(path), count=0.5)
    assert of_text.probability(z=1.0) == pytest.approx(same.probability(z=1.0))
    for each in Source:  # nothing is said of other sources
        assert found.usual[each].probability(z=1.0) == pytest.approx(expected.usual[each].probability(z=1.0))
        beliefs = found.calibrations[each], expected.calibrations[each]
        assert beliefs[0].probability(0.8, 1.0) == pytest.approx(beliefs[1].probability(0.8, 1.0))


def test_what_a_tree_says_of_acceptance() -> None:
    """Of each position, whether its best candidate was taken: that is what a chain would have."""
    found, usual = shared(), Acceptance(LOG_ODDS[0])
    of_text, same = Acceptance(0.1).of_text(), Acceptance(0.1).of_text()
    draft = Draft(np.arange(4, dtype=np.int32), (), (0.6, 0.5, 0.2, 0.2), parents=np.array([-1, 0, 0, -1]))
    found.learn_acceptance(Round(draft, (0, 2), 0, 5), of_text)
    for is_first in (True, False):
        usual.pass_tokens(1)
        usual.learn(is_first)
        same.learn(is_first)
    assert found.usual[Source.MODEL].probability(z=1.0) == pytest.approx(usual.probability(z=1.0))
    assert of_text.probability(z=1.0) == pytest.approx(same.probability(z=1.0))
    assert found.trees.shares[0] > 0.45
