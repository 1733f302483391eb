"""What rows know together: pledges and prices by hand, and a ledger that sees each evaluation whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest

from llamaspec.length import cost_model
from llamaspec.length.acceptance import Acceptance
from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.cost_model import CostModel
from llamaspec.length.prior import FREE_LOG_ODDS, LOG_ODDS
from llamaspec.length.regret_budget import ALLOWED, SAVED, RegretBudget
from llamaspec.length.row_length import AutoRow
from llamaspec.length.shared import HOPE, Pledge, Shared
from llamaspec.values import NO_DRAFT, Draft, Round, Source
from simulated import machine, text
from simulator import play_rows

CURVE = CostCurve((1, 2, 4, 8, 16), (0.020, 0.022, 0.023, 0.036, 0.050), 0.002)
STEPS = CostCurve((1, 2, 3, 4, 5, 6, 7, 8), (1.0, 1.1, 1.2, 1.3, 2.3, 2.4, 2.5, 2.6), 0.2)


def shared(
    *pledges: Pledge,
    curve: CostCurve | None = CURVE,
    longest: int = 16,
    sources: Sequence[Source] = (Source.MODEL,),
    allowed: Collection[int] | None = None,
) -> Shared:
    found = Shared(CostModel(curve, allowed), longest, sources, LOG_ODDS)
    found.pledges += pledges
    found.budget.left = min(found.budget.left, longest)  # no width is hoped to be cheaper than believed
    return found


def pledge(n_draft: int, is_drafting: bool = False) -> Pledge:
    return Pledge(n_draft, is_drafting, is_asking=True, last_evaluation=1)


def plain(evaluation: int, n_rows: int = 1, **settings: float) -> Round:
    """One token of each row, as fast as believed."""
    settings = {"width": n_rows, "verify_seconds": 0.02, **settings}
    return Round(NO_DRAFT, (), 0, n_rows=n_rows, evaluation=evaluation, **settings)  # type: ignore[arg-type]


def drafted(n: int) -> Draft:
    return Draft(np.zeros(n, np.int32), (), (0.5,) * n)


def test_one_row_pays_for_its_own_positions() -> None:
    """However many it has already: prices are those of all that it may draft."""
    for own in (pledge(0), pledge(2, is_drafting=True)):
        assert shared(own, curve=STEPS, longest=3).level_seconds(own) == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_a_position_is_priced_behind_those_that_are_pledged() -> None:
    """Two rows with one position each, one with a token more: the next position is the fifth."""
    own = pledge(0)
    among = shared(own, pledge(0), pledge(1), curve=STEPS, longest=2)
    assert among.level_seconds(own) == pytest.approx([0.0, 1.0, 1.1])


def test_rows_that_are_level_share_a_step_of_the_curve() -> None:
    """Three rows from 3 positions on to 6."""
    own = pledge(0, is_drafting=True)
    among = shared(own, pledge(0, True), pledge(0, True), curve=STEPS, longest=1)
    assert among.level_seconds(own) == pytest.approx([0.0, (2.4 - 1.2) / 3])


def test_rows_behind_are_level_and_those_ahead_are_not() -> None:
    """Of three others that draft, two have no more tokens than this one; one that has enough is not level."""
    own = pledge(1, is_drafting=True)
    among = shared(own, pledge(0, True), pledge(1, True), pledge(2, True), pledge(0), longest=2)
    base, one, two = among.costs.batch_seconds([7, 10, 13])  # 5 rows, 2 tokens; then 3 at once
    assert among.level_seconds(own) == pytest.approx([0.0, (one - base) / 3, (two - base) / 3])


def test_the_longest_draft_is_the_last_that_is_priced() -> None:
    own = pledge(1)
    for longest in (0, 1, 5):
        assert len(shared(own, curve=STEPS, longest=longest).level_seconds(own)) == longest + 1


def test_further_where_it_could_be_paid_for_if_each_position_cost_as_much_as_one_alone() -> None:
    known, own = CostCurve((1, 2, 4), (1.0, 1.1, 1.3), 0.2), pledge(0, is_drafting=True)
    for left, priced in ((7.9, 8), (10.9, 10), (40.0, 16)):
        among = shared(own, curve=known, longest=15)
        among.budget.left = left
        assert len(among.level_seconds(own)) == priced


def test_who_may_lose_much_hopes_that_widths_not_timed_are_cheap() -> None:
    known, own = CostCurve((1, 2, 4), (1.0, 1.1, 1.3), 0.2), pledge(0, is_drafting=True)
    among = shared(own, curve=known, longest=15)
    among.budget.left = 15.0
    believed = among.level_seconds(own)
    among.budget.left = 15.1
    hoped = among.level_seconds(own)
    cheaper = [(1.0 + b) / (1.0 + a) for a, b in zip(hoped, believed, strict=False)]
    assert cheaper[0] == 1.0
    assert max(cheaper[1], cheaper[3]) < 1.05 < 1.25 < cheaper[7]  # widths 2 and 4 are known, 8 is not
    assert hoped[1:8] == pytest.approx(
        [seconds - 1.0 for seconds in among.costs.batch_seconds(range(1, 9), -HOPE)[1:]]
    )


def test_no_further_than_twice_the_known_widths() -> None:
    """A position more may always be tried; rows that are level go there together."""
    known = CostCurve((1, 2, 4), (1.0, 1.1, 1.3), 0.2)
    own, other = pledge(0, is_drafting=True), pledge(0, is_drafting=True)
    alone = shared(own, curve=known, longest=15)
    assert alone.costs.reach == 8
    assert len(alone.level_seconds(own)) == 8
    assert len(shared(own, other, curve=known, longest=15).level_seconds(own)) == 4
    many = [pledge(1) for _ in range(6)]
    assert len(shared(own, *many, curve=known, longest=15).level_seconds(own)) == 2
    assert CostModel().reach == 2


def test_padding_is_free_beyond_what_is_known() -> None:
    """Where one draft token needs 12 positions, eleven may be drafted."""
    own = pledge(0)
    seconds = shared(own, curve=CostCurve((1, 2), (1.0, 1.1), 0.2), allowed={1, 12}).level_seconds(own)
    assert len(seconds) == 12
    assert seconds[1] > 0.1
    assert seconds[1:] == [seconds[1]] * 11


def test_rows_share_a_draft_step_with_those_that_have_not_had_enough() -> None:
    own, paused = pledge(2, is_drafting=True), Pledge(1, is_drafting=True)
    among = shared(own, pledge(0, True), pledge(3), pledge(5, True), paused)
    assert (among.n_drafting(own), among.n_drafting(among.pledges[2])) == (3, 4)
    assert shared().n_drafting(own) == 1


def test_rows_are_expected_that_took_part_in_one_of_the_last_two_evaluations() -> None:
    rows = [Pledge(last_evaluation=n) for n in (-1, 6, 7, 8, 9)]
    asking = Pledge(is_asking=True)
    among = shared(*rows, asking)
    among.observe(plain(9), 0)
    assert among.present() == [rows[3], rows[4], asking]
    assert among.n_rows == 3
    fresh = shared(Pledge(), Pledge(last_evaluation=0))
    assert fresh.present() == fresh.pledges[1:]
    assert shared().n_rows == 1


def test_a_row_that_paused_is_not_expected() -> None:
    own, paused = pledge(0), Pledge(5, is_drafting=True, last_evaluation=4)
    among = shared(own, paused, curve=STEPS, longest=2)
    among.observe(plain(9, verify_seconds=1.0), 0)
    assert among.present() == [own]
    among.budget.left = 0.0
    assert among.level_seconds(own) == pytest.approx([0.0, 0.1, 0.2])


def test_the_rate_of_plain_decoding_counts_all_rows_and_what_they_need_besides_the_models() -> None:
    among = shared(curve=STEPS)
    assert (among.plain_rate(1), among.plain_rate(2)) == pytest.approx((1.0, 2 / 1.1))
    among.costs.observe_overhead(0.05, drafted=False)
    assert among.plain_rate(2) == pytest.approx(2 / (1.1 + 2 * 0.05))
    assert shared(allowed={1}).plain_rate(2) == 0.0


def test_an_evaluation_begins_new_rounds() -> None:
    """Rows that drafted will do so again; whoever goes on first finds it so."""
    among = shared(pledge(2, is_drafting=False), pledge(0, is_drafting=True), pledge(1, is_drafting=True))
    among.observe(plain(5, n_rows=3), 0)
    pledges = [(p.n_draft, p.is_drafting) for p in among.pledges]
    assert pledges == [(0, True), (0, False), (0, True)]
    among.pledges[0].n_draft = 4
    among.observe(plain(5, n_rows=3), 0)
    assert among.pledges[0].n_draft == 4


class Ledger:
    """Costs and gains, booked evaluation by evaluation; rows that draft do so in step."""

    def __init__(self, curve: CostCurve | None = CURVE) -> None:
        self.costs, self.budget = CostModel(curve), RegretBudget()
        self.knows_plain, self.wants_plain = False, False
        self.n_tokens = self.n_since_plain = 0

    def enter(self, rounds: Sequence[Round], n_unread: Sequence[int]) -> None:
        """All rounds of one evaluation."""
        first, n_rows = rounds[0], len(rounds)
        self.n_since_plain += 1
        verifying = self._verify(first, n_rows)
        drafting, overheads, plain_seconds = self._rows(rounds, n_unread)
        self.n_tokens += sum(round_.n_accepted + 1 for round_ in rounds)
        if not self.knows_plain:
            return
        longest = [max(drafting[: i + 1]) - max([0.0, *drafting[:i]]) for i in range(n_rows)]
        is_plain = self._is_plain(first, n_rows)
        for i, round_ in enumerate(rounds):
            besides = plain_seconds[i] if is_plain else verifying + n_rows * overheads[i]
            spent = (besides + n_rows * longest[i]) / plain_seconds[i]
            self.budget.book(round_.n_accepted + 1, spent, n_rows, is_plain=is_plain)

    def _is_plain(self, first: Round, n_rows: int) -> bool:
        return first.width - first.n_beside <= max(n_rows, self.costs.cheapest_width(n_rows) or 0)

    def _verify(self, first: Round, n_rows: int) -> float:
        """Learn what the target took; what is booked of it."""
        if first.n_beside:
            return self.costs.seconds(first.width - first.n_beside)
        believed = self.costs.seconds(first.width)
        self.costs.observe_verify(first.width, first.verify_seconds)
        if self._is_plain(first, n_rows):
            self.knows_plain, self.n_since_plain = True, 0
            self.wants_plain = self.costs.is_surprised
            self.budget.correct(self.costs.seconds(first.width) / believed, n_rows)
        return min(first.verify_seconds, 1.3 * believed)

    def _rows(
        self, rounds: Sequence[Round], n_unread: Sequence[int]
    ) -> tuple[list[float], list[float], list[float]]:
        """Learn the rest; what is booked of each row's drafting and overhead; a plain evaluation then."""
        drafting, overheads, plain_seconds = list[float](), list[float](), list[float]()
        costs, n_rows = self.costs, len(rounds)
        for round_, unread in zip(rounds, n_unread, strict=True):
            n_steps = costs.narrow_steps(round_.n_priced_steps, round_.n_draft_scored)
            usual = 1.3 * costs.drafting_seconds(n_steps, unread)
            if n_steps and not any(drafting):  # rows draft in step: the others' seconds are the same
                costs.observe_draft(n_steps, unread, round_.draft_seconds)
            drafting.append(min(round_.draft_seconds, usual) if n_steps else 0.0)
            besides = round_.overhead_seconds + (0.0 if n_steps else round_.draft_seconds)
            overheads.append(costs.observe_overhead(besides, drafted=n_steps > 0 or len(round_.draft) > 0))
            plain_seconds.append(costs.batch_seconds([n_rows])[0] + n_rows * costs.overhead_seconds)
        return drafting, overheads, plain_seconds


def evaluation_of(rng: np.random.Generator, number: int) -> list[Round]:
    """Rounds of one to three rows, some of them hiccups, some padded, some plain, some beside a prompt.

    Of some drafts only the first tokens are verified, or none: the next one is a shadow.
    """
    n_rows, is_plain = int(rng.integers(1, 4)), number < 3 or bool(rng.random() < 0.2)
    lengths = [0 if is_plain else int(rng.integers(0, 4)) for _ in range(n_rows)]
    n_beside, n_padding = int(rng.choice([0, 0, 0, 1, 60])), int(rng.choice([0, 0, 1]))
    if number == 1:
        n_rows, lengths, n_beside, n_padding = 1, [0], 0, 0
    width = sum(lengths) + n_rows + (n_beside or n_padding)
    verify = float(np.interp(width, CURVE.widths, CURVE.verify_seconds)) * float(rng.choice([0.9, 1.1, 4.0]))
    rounds = []
    for n in lengths:
        n_made = n + (int(rng.choice([0, 1, 2])) if number > 2 else 0)
        n_steps = n_made and int(rng.choice([0, n_made, 2 * n_made]))
        n_accepted = int(rng.integers(0, n + 1))
        rounds.append(
            Round(
                Draft(np.zeros(n, np.int32), (), tuple(rng.random(n).tolist())),
                tuple(range(n_accepted)),
                0,
                width,
                n_rows,
                number,
                n_steps,
                0.002 * n_made * float(rng.choice([1.0, 6.0])),
                verify,
                float(rng.choice([0.0001, 0.002])),
                n_draft_scored=n_steps and n_steps + int(rng.choice([0, 3])),
                n_beside=n_beside,
                n_dropped=n_made - n,
                shadow=(0.3, 1.0) if n_made > n and n_accepted == n else None,
            )
        )
    return rounds


@pytest.mark.parametrize("seed", range(6))
def test_evaluations_are_learnt_and_booked_once(seed: int) -> None:
    rng, rows, ledger = np.random.default_rng(seed), [Pledge() for _ in range(3)], Ledger()
    found = shared(*rows)
    for number in range(1, 60):
        rounds = evaluation_of(rng, number)
        n_unread = [int(rng.choice([0, 0, 5])) for _ in rounds]
        if number % 9 == 0:
            found.wants_plain = True
        wanted = found.wants_plain
        for row in rows:
            row.has_drafted = False
        for row, round_ in zip(rows, rounds, strict=False):
            row.is_asking, row.n_draft, row.has_drafted = True, len(round_.draft), round_.n_draft_steps > 0
        for row, round_, unread in zip(rows, rounds, n_unread, strict=False):
            found.observe(round_, unread)
            row.is_asking, row.last_evaluation = False, number
        ledger.enter(rounds, n_unread)
        assert (found.knows_plain, found.n_tokens) == (ledger.knows_plain, ledger.n_tokens)
        assert found.n_since_plain == ledger.n_since_plain
        assert found.wants_plain == (wanted if ledger.n_since_plain else ledger.wants_plain)
        assert found.budget.gain == pytest.approx(ledger.budget.gain)
        assert found.budget.left == pytest.approx(ledger.budget.left)
        assert found.costs.n_timed == ledger.costs.n_timed
        assert found.costs.overhead_seconds == pytest.approx(ledger.costs.overhead_seconds)
        assert found.costs.draft_step_seconds() == pytest.approx(ledger.costs.draft_step_seconds())
        assert found.costs.seconds(5) == pytest.approx(ledger.costs.seconds(5))
    assert found.budget.gain


class Watched(AutoLength):
    """Keeps each round, how much of its text the draft had not read, and how many rows are said to draft."""

    def __init__(self, curve: CostCurve) -> None:
        super().__init__(curve)
        self.rounds = list[tuple[Round, int, int]]()

    def start_row(self, *, drops: bool = False) -> AutoRow:
        watched = self

        class Row(AutoRow):
            def observe(self, round_: Round) -> None:
                n_unread = self.n_unread
                super().observe(round_)
                watched.rounds.append((round_, n_unread, watched.shared.n_drafted))

        return Row(self.shared, drops=drops)


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("name", ["informed", "stretches"])
@pytest.mark.parametrize("seed", [9, 10])
def test_rows_that_decide_for_themselves_are_booked_as_they_should_be(
    seed: int, name: str, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has a part in the draft steps, they say themselves; their rounds show it."""
    monkeypatch.setattr(cost_model, "STALE", 0.0)  # else prices are as old as whoever asked last left them
    on = machine("f16", 0.6)
    policy, ledger = Watched(on.curve()), Ledger(on.curve())
    play_rows(policy, on, [text(name, n) for n in range(n_rows)], seed=seed)
    n_shadows = n_parted = 0
    while policy.rounds:
        n = policy.rounds[0][0].n_rows
        rounds, n_unread, n_drafted = zip(*policy.rounds[:n], strict=True)
        del policy.rounds[:n]
        ledger.enter(rounds, n_unread)
        assert set(n_drafted) == {max(sum(round_.n_draft_steps > 0 for round_ in rounds), 1)}
        n_shadows += sum(round_.shadow is not None for round_ in rounds)
        n_parted += len({round_.n_draft_steps > 0 for round_ in rounds}) == 2
    assert n_shadows > 5
    assert n_parted > 1 or n_rows == 1
    assert policy.shared.budget.gain == pytest.approx(ledger.budget.gain)
    assert policy.shared.costs.n_timed == ledger.costs.n_timed
    assert policy.shared.costs.draft_step_seconds() == pytest.approx(ledger.costs.draft_step_seconds())


@pytest.mark.parametrize("n_drafting", [0, 1, 2, 3])
def test_the_rows_of_an_evaluation_are_booked_what_it_took(n_drafting: int) -> None:
    """Together, whoever drafts: 2 steps of 2 ms, 6 positions, and 0.4 ms of each row besides."""
    rows = [pledge(2) for _ in range(3)]
    found = shared(*rows)
    found.observe(plain(1, overhead_seconds=0.0004), 0)
    before, n_made = found.budget.gain, 0
    believed = found.costs.seconds(6)
    for row in rows[:n_drafting]:
        row.has_drafted = True
    for i, row in enumerate(rows):
        n_steps, n_accepted = (2, (2, 0, 1)[i]) if i < n_drafting else (0, 0)
        found.observe(
            Round(drafted(n_steps), tuple(range(n_accepted)), 0, 6, 3, 2, n_steps, 0.002 * n_steps, believed,
                  0.0004), 0
        )  # fmt: skip
        row.last_evaluation = 2
        n_made += n_accepted + 1
    seconds = believed + 0.004 * (n_drafting > 0) + 3 * 0.0004
    assert found.budget.gain - before == pytest.approx(n_made - seconds * found.plain_rate(3), rel=1e-6)


@pytest.mark.parametrize(
    ("of_draft", "of_target", "booked"),
    [(1.2, 1.25, 0.0024 + 0.0275), (7.0, 1.0, 0.0026 + 0.022), (1.0, 7.0, 0.002 + 0.0286)],
)
def test_what_a_hiccup_took_is_not_booked(of_draft: float, of_target: float, booked: float) -> None:
    """At most 1.3 times what it should have taken: of the target 22 ms, of the draft 2 ms."""
    found = shared(pledge(1))
    found.observe(plain(1), 0)
    before = found.budget.gain
    found.observe(Round(drafted(1), (), 0, 2, 1, 2, 1, 0.002 * of_draft, 0.022 * of_target), 0)
    assert found.budget.gain - before == pytest.approx(1.0 - booked * found.plain_rate(1))


def test_a_draft_of_which_nothing_is_verified_loses_its_steps() -> None:
    found = shared(pledge(0))
    found.observe(plain(1), 0)
    before = found.budget.gain
    found.observe(replace(plain(2), n_draft_steps=1, draft_seconds=0.002, n_dropped=1, shadow=(0.4, 1.0)), 0)
    assert found.budget.gain - before == pytest.approx(-0.1)
    assert (found.n_since_plain, found.costs.n_timed) == (0, {1: 2})  # plain decoding was timed besides


@pytest.mark.parametrize("n_verified", [0, 1, 3])
def test_draft_tokens_that_were_dropped_took_a_step_each(n_verified: int) -> None:
    """Four steps of 2 ms, whatever was verified of their tokens."""
    found, width = shared(pledge(0)), n_verified + 1
    found.observe(plain(1), 0)
    for number in range(2, 12):
        seconds = found.costs.seconds(width)
        found.observe(
            Round(drafted(n_verified), (), 0, width, 1, number, 4, 0.008, seconds, n_draft_scored=4,
                  n_dropped=4 - n_verified), 0
        )  # fmt: skip
    assert found.costs.draft_step_seconds() == pytest.approx(0.002)


def test_what_a_row_needs_for_a_draft_is_not_what_plain_decoding_needs() -> None:
    """Also where nothing of the draft is verified: 2 ms besides the models, and 0.3 ms without a draft."""
    found = shared(pledge(0))
    found.observe(plain(1, overhead_seconds=0.0003), 0)
    tried = plain(2, n_draft_steps=1, draft_seconds=0.002, overhead_seconds=0.002, n_dropped=1)
    found.observe(tried, 0)
    assert found.costs.overhead_seconds == 0.0003


def test_a_row_that_paused_has_no_part_in_later_draft_steps() -> None:
    row, paused = pledge(2), Pledge(has_drafted=True, last_evaluation=1)
    found = shared(row, paused)
    found.observe(plain(1), 0)
    before, row.has_drafted, seconds = found.budget.gain, True, found.costs.seconds(3)
    found.observe(Round(drafted(2), (), 0, 3, 1, 5, 2, 0.004, seconds), 0)
    assert found.budget.gain - before == pytest.approx(1.0 - (seconds + 0.004) * found.plain_rate(1))
    assert found.n_drafted == 1


def test_draft_steps_that_one_row_made_alone_are_booked() -> None:
    """One row has enough after 1 step, the other after 5: together they took 5, of 2 ms each."""
    rows = pledge(1), pledge(5)
    found = shared(*rows)
    found.observe(plain(1), 0)
    before, seconds = found.budget.gain, found.costs.seconds(8)
    for row in rows:
        row.has_drafted = True
    for n_steps in (1, 5):
        found.observe(Round(drafted(n_steps), (), 0, 8, 2, 2, n_steps, 0.002 * n_steps, seconds), 0)
    assert (found.n_drafted, rows[0].has_drafted) == (2, False)
    assert found.budget.gain - before == pytest.approx(2.0 - (seconds + 0.010) * found.plain_rate(2))


def test_an_evaluation_of_rows_that_no_allowed_width_holds_is_not_booked() -> None:
    """What plain decoding of these rows would take is not known."""
    found = shared(allowed={1})
    found.observe(plain(1), 0)
    for _ in range(2):
        found.observe(plain(2, n_rows=2), 0)
    assert (found.budget.gain, found.n_tokens) == (0.0, 3)


def test_padding_that_plain_decoding_has_too_is_no_loss() -> None:
    """Of three rows, padded to four positions: a draft token that takes the fourth costs nothing."""
    found = shared(allowed={1, 4, 8})
    for n_drafted, evaluation in ((0, 1), (1, 2)):
        before = found.budget.gain
        for n, n_accepted in ((n_drafted, n_drafted), (0, 0), (0, 0)):
            path = tuple(range(n_accepted))
            found.observe(Round(drafted(n), path, 0, 4, 3, evaluation, verify_seconds=0.023), 0)
        assert found.n_since_plain == 0
    assert found.budget.gain - before == pytest.approx(1.0)


def test_an_evaluation_that_a_row_left_is_followed_by_the_next() -> None:
    """Its number may come again, where a scheduler's numbers begin anew: more rounds than rows."""
    found = shared()
    for _ in range(3):
        found.observe(plain(7), 0)
    assert found.costs.n_timed == {1: 3}
    row = Pledge(n_draft=3)
    found.start_row(row)
    found.observe(plain(8, n_rows=2), 0)
    assert (found.costs.n_timed, row.n_draft) == ({1: 3, 2: 1}, 0)
    found.observe(plain(7), 0)
    assert found.costs.n_timed == {1: 4, 2: 1}


def test_a_prompt_read_beside_says_nothing_of_plain_decoding() -> None:
    found = shared()
    found.observe(plain(1, width=16, n_beside=15, verify_seconds=0.05), 0)
    assert (found.knows_plain, found.costs.n_timed, found.n_since_plain) == (False, {}, 1)
    found.observe(plain(2), 0)
    assert (found.knows_plain, found.n_since_plain) == (True, 0)
    found.observe(plain(3, width=16, n_beside=15, verify_seconds=0.05), 0)
    assert (found.budget.gain, found.n_since_plain) == (0.0, 1)  # and is not booked


def test_plain_decoding_that_surprises_is_timed_again() -> None:
    """The probe was another machine's, or something held the evaluation up."""
    found = shared()
    found.observe(plain(1, verify_seconds=0.2), 0)
    assert found.wants_plain
    found.observe(plain(2, verify_seconds=0.2), 0)
    assert not found.wants_plain
    found.observe(plain(3, verify_seconds=0.6), 0)
    assert found.wants_plain


def test_texts_that_always_run_together_find_out_what_plain_decoding_takes() -> None:
    found = shared(curve=None)
    for evaluation in (1, 2):
        for _ in range(2):
            found.observe(plain(evaluation, n_rows=2), 0)
    assert found.knows_plain


def test_a_text_that_begins_alone_has_a_budget_of_its_own() -> None:
    found = shared()
    first, second = Pledge(), Pledge()
    assert (first.n_draft, first.is_drafting, first.is_asking, first.has_drafted) == (0, False, False, False)
    found.budget.left = -5.0
    found.start_row(first)
    assert found.budget.left == ALLOWED
    found.budget.left = -5.0
    found.start_row(second)
    assert found.budget.left == -5.0
    assert found.pledges == [first, second]
    found.pledges.clear()
    found.budget.left = 99.0
    found.start_row(first)
    assert found.budget.left == ALLOWED + SAVED


def test_what_a_source_begins_with() -> None:
    """Copies and forced tokens cost no step; the first of the others is the one that drafts."""
    found = shared(sources=[Source.NGRAM, Source.STAGE, Source.GRAMMAR, Source.MTP])
    assert (found.drafting, shared(sources=[Source.STORE]).drafting) == (Source.STAGE, Source.MODEL)
    assert (found.knows_plain, found.wants_plain, found.branches) == (False, False, True)
    assert (found.n_tokens, found.n_since_plain, found.n_rows) == (0, 0, 1)
    for source in Source:
        is_free = source in (Source.NGRAM, Source.STORE, Source.GRAMMAR)
        usual, level, slope = FREE_LOG_ODDS if is_free else LOG_ODDS
        beliefs = found.usual[source], found.calibrations[source]
        assert [(belief.level, belief.slope) for belief in beliefs] == [(usual, 0.0), (level, slope)]


@pytest.mark.parametrize("source", [Source.MODEL, Source.NGRAM])
def test_what_a_round_says_of_acceptance(source: Source) -> None:
    """Of tokens that were verified, up to the first that was rejected, and of a shadow behind them."""
    found, expected = shared(), shared()
    of_text, same = Acceptance(0.1).of_text(), Acceptance(0.1).of_text()
    usual, calibration = expected.usual[source], expected.calibrations[source]
    draft = Draft(np.zeros(3, np.int32), (), (0.9, 0.4, 0.7), source)
    for path, shadow in (((0,), None), ((), None), ((0, 1, 2), (0.3, 0.6)), ((0, 1, 2), None)):
        found.learn_acceptance(Round(draft, path, 0, 4, shadow=shadow), of_text)
        seen = [(draft.confidences[i], float(i < len(path))) for i in range(min(len(path) + 1, 3))]
        for confidence, accepted in [*seen, shadow] if shadow else seen:
            for belief, settings in ((usual, {}), (calibration, {"confidence": confidence})):
                belief.pass_tokens(1)
                belief.learn(accepted, **settings)
            same.learn(accepted)
    assert of_text.probability(z=1.0) == pytest.approx(same.probability(z=1.0))
    for each in Source:  # nothing is said of other sources
        assert found.usual[each].probability(z=1.0) == pytest.approx(expected.usual[each].probability(z=1.0))
        beliefs = found.calibrations[each], expected.calibrations[each]
        assert beliefs[0].probability(0.8, 1.0) == pytest.approx(beliefs[1].probability(0.8, 1.0))


def test_a_shadow_teaches_where_nothing_was_verified() -> None:
    found, of_text = shared(), Acceptance(0.1).of_text()
    before = found.usual[Source.MODEL].level, of_text.level
    found.learn_acceptance(replace(plain(1), shadow=(0.7, 1.0)), of_text)
    assert found.usual[Source.MODEL].level > before[0]
    assert of_text.level > before[1]


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
