"""The replay of edits without a model: known answers, known costs."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import tokens
from llamaspec.length.fixed import FixedLength
from llamaspec.length.policy import AutoLength
from llamaspec.measure.bench import read_tasks
from llamaspec.pair import demo_target
from llamaspec.values import LONGEST_COPY, Source
from replay_edits import (
    CURVES,
    HOLD_OUT,
    IDEAL,
    REAL,
    Edit,
    costs_of,
    edited,
    edits,
    fastest,
    losses,
    play,
    right_copies,
)

FILE = tokens(*range(100, 160))
EDIT = Edit("edit", FILE, np.concatenate((FILE[:30], tokens(7), FILE[30:])))
COSTS = costs_of(CURVES["F16"], LONGEST_COPY + 1)


def test_every_edit_of_the_benchmark_has_its_answer() -> None:
    for answers in (IDEAL, REAL):
        found = edits(demo_target(), answers)
        assert [edit.name for edit in found] == [task.name for task in read_tasks(names=["edits"])]
        assert all(len(edit.answer) > 200 for edit in found)
    assert len(edits(demo_target(), HOLD_OUT)) == 4
    assert edited("Do it.\n\n```\na b a\n```", [("a", "c"), ("b", "d e")]) == "```\nc d e c\n```"


def test_costs_go_on_beyond_the_last_width() -> None:
    assert costs_of({1: 1, 2: 1.5, 4: 2.5}, 6).tolist() == [1, 1, 1.5, 2, 2.5, 3, 3.5]


@pytest.mark.parametrize(
    ("n_right", "expected"),
    [
        ([0, 0, 0, 0], 4.0),
        ([3, 2, 1, 0], 2.5),  # all at once
        ([1, 0, 0, 0], 3.5),  # two, then one by one
        ([0, 2, 1, 0], 3.0),  # the last three together
    ],
)
def test_perfect_foresight(n_right: list[int], expected: float) -> None:
    assert fastest(n_right, costs_of({1: 1, 2: 1.5, 4: 2.5}, 6))[0] == expected


def test_a_replay_costs_what_its_rounds_cost() -> None:
    plain = play(EDIT, COSTS, FixedLength(0))
    assert plain.cost == pytest.approx(61)
    assert (len(plain.rounds), plain.n_drafted) == (61, 0)
    one = play(EDIT, COSTS, FixedLength(1))
    assert one.cost == pytest.approx(one.n_drafted * COSTS[2] + (len(one.rounds) - one.n_drafted) * COSTS[1])
    assert len(one.rounds) + one.n_accepted == 61
    auto = play(EDIT, COSTS, AutoLength(sources={Source.NGRAM}))
    best = fastest(right_copies(EDIT), COSTS)
    assert fastest([60] * 61, COSTS)[0] < best[0] < auto.cost < one.cost
    assert sum(losses(auto, best)) == pytest.approx(auto.cost - best[0])
    assert losses(plain, best)[0] == 0.0


def test_what_is_copied_is_right_up_to_the_edit() -> None:
    right = right_copies(EDIT)
    assert right[4:30] == [26 - i for i in range(26)]
    assert right[30:33] == [0, 0, 29], "the new token, a guess, and the rest"
