"""Draft tokens that a constraint forces."""

from __future__ import annotations

import pytest

from fake_constraint import Steps
from fakes import Length, tokens
from llamaspec.drafters.fallback import ForcedDrafter
from llamaspec.values import Source, TokenArray

N_PROMPT = 2


@pytest.mark.parametrize(
    ("generated", "n", "expected"),
    [((1, 0), 3, [2]), ((1, 0), 0, []), ((1, 2), 3, []), ((), 3, []), ((0, 1), 3, [])],
)
def test_forced_tokens(generated: tuple[int, ...], n: int, expected: list[int]) -> None:
    """The constraint does not see the prompt, which ends with a 0."""
    draft = ForcedDrafter(Steps(), N_PROMPT).propose(tokens(1, 0, *generated), Length(n))
    assert draft.tokens.tolist() == expected
    assert draft.source is Source.GRAMMAR
    assert draft.confidences == (1.0,) * len(expected)


class Forces(Steps):
    """Three tokens at once."""

    def forced(self, generated: TokenArray) -> TokenArray:
        return tokens(2, 1, 2)


@pytest.mark.parametrize("n", range(5))
def test_no_more_forced_tokens_than_wanted(n: int) -> None:
    draft = ForcedDrafter(Forces(), N_PROMPT).propose(tokens(1, 0), Length(n))
    assert draft.tokens.tolist() == [2, 1, 2][:n]
