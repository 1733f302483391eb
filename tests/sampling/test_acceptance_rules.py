"""The acceptance rules for a single token; tests/engine/test_exact_law.py proves them for drafts."""

from __future__ import annotations

import numpy as np
import pytest

from llamaspec.protocols import Stream
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.values import Distribution, Draft

TINY = 5e-324  # the smallest positive number
X, OTHER = 3, 8
CASES = [  # p(x), q(x), min(1, p(x) / q(x))
    (0.5, 0.25, 1.0),
    (0.25, 0.5, 0.5),
    (0.3, 0.3, 1.0),
    (0.0, 0.5, 0.0),
    (0.5, TINY, 1.0),
    (TINY, TINY, 1.0),
    (TINY, 2 * TINY, 0.5),
    (TINY, 1.0, TINY),
    (1.0, 0.1, 1.0),
    (0.5, 0.0, 1.0),
    (0.0, 0.0, 1.0),
]


def giving(x: float) -> Distribution:
    """Return a distribution in which token X has this probability; 0 = it does not contain X."""
    tokens = np.array([X, OTHER], np.int32)
    probabilities = np.array([x, 1.0 - x])
    return Distribution(tokens[probabilities > 0], probabilities[probabilities > 0])


def test_only_the_coupled_rule_drops() -> None:
    assert {name: rule.drops for name, rule in RULES.items()} == {
        "coupled": True,
        "rejection": False,
        "block": False,
    }


@pytest.mark.parametrize(("p", "q", "expected"), CASES)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_acceptance_is_the_quotient(rule: str, p: float, q: float, expected: float) -> None:
    for drawn in (X, OTHER):
        assert RULES[rule].acceptance(X, giving(q), giving(p), drawn) == expected


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_acceptance_is_known_under_the_coupled_rule(p: float) -> None:
    """For any p and q."""
    acceptance = RULES["coupled"].acceptance
    assert acceptance(X, giving(0.5), giving(p), X) == 1.0
    assert acceptance(X, giving(0.5), giving(p), OTHER) == 0.0


class Asked:
    """Random streams that always accept, and record the probabilities."""

    chances: tuple[float, ...] = ()

    def choose(self, distribution: Distribution, stream: Stream, position: int, attempt: int = 0) -> int:
        return int(distribution.tokens[0])

    def chance(self, probability: float, stream: Stream, position: int, attempt: int = 0) -> bool:
        self.chances += (probability,)
        return True


@pytest.mark.parametrize(("p", "q", "expected"), [case for case in CASES if case[1] and case[0]])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_single_token_is_accepted_with_this_probability(
    rule: str, p: float, q: float, expected: float
) -> None:
    class Same:
        def after(self, i: int) -> Distribution:
            return giving(p)

    streams = Asked()
    draft = Draft(np.array([X], np.int32), (giving(q),), (q,))
    assert RULES[rule].verify(draft, Same(), streams, 1).n_accepted == 1
    assert streams.chances in ((), (expected,))
    assert streams.chances or expected == 1.0
