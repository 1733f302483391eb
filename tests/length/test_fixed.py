"""Fixed lengths and upper limits."""

from __future__ import annotations

import pytest

from llamaspec.length.automatic import AutoLength
from llamaspec.length.fixed import AtMost, FixedLength
from llamaspec.values import Draft, Evaluation, Round


def test_a_fixed_length_is_reached_and_verified_whole() -> None:
    sequence = FixedLength(2).start_sequence(drops=True)
    assert [sequence.wants_more(Draft.certain([1] * n)) for n in range(4)] == [True, True, False, False]
    assert sequence.n_verified(Draft.certain([1, 1])) == 2
    assert not FixedLength(0).start_sequence().wants_more(Draft())
    with pytest.raises(ValueError, match="must be >= 0, got -1"):
        FixedLength(-1)


def test_within_an_upper_limit_the_policy_decides() -> None:
    policy = AutoLength()
    sequence = AtMost(1, policy).start_sequence(drops=True)
    for width in (1, 1, 2, 2):
        sequence.observe(Round(Draft(), 0, 0, Evaluation(width), verify_seconds=0.01))
    assert policy.shared.costs.n_timed == 4
    policy.shared.credit = -1.0  # no time for timing widths
    assert sequence.wants_more(Draft())
    assert not sequence.wants_more(Draft.certain([1]))
    assert (sequence.timed_width(), sequence.n_verified(Draft())) == (None, 0)
    sequence.observe(Round(Draft(), 0, 0, Evaluation(1), verify_seconds=0.01))
    policy.shared.credit = 1.0
    assert sequence.timed_width() == 4
    sequence.close()
    assert policy.shared.n_sequences == 0
    assert not AtMost(0, FixedLength(5)).start_sequence().wants_more(Draft())
