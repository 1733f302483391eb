"""A constraint whose results are easy to check by hand."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fakes import tokens
from llamaspec.values import NO_TOKENS, TokenArray


@dataclass(frozen=True)
class Steps:
    """No token comes twice in a row; 0 is followed by 2 alone; `end`, if any, ends the text."""

    vocabulary_size: int = 3
    end: int | None = None

    def start_sequence(self) -> Steps:
        return self

    def allowed(self, generated: TokenArray) -> TokenArray:
        if self.end is not None and self.end in generated.tolist():
            return NO_TOKENS
        if not self._is_right(generated.tolist()):
            return NO_TOKENS
        last = generated[-1:].tolist()
        return tokens(2) if last == [0] else tokens(*({*range(self.vocabulary_size)} - {*last}))

    def forced(self, generated: TokenArray) -> TokenArray:
        return tokens(2) if generated[-1:].tolist() == [0] and len(self.allowed(generated)) else NO_TOKENS

    def is_complete(self, generated: TokenArray) -> bool:
        return self._is_right(generated.tolist())

    def _is_right(self, path: list[int]) -> bool:
        return all(a != b and (a != 0 or b == 2) for a, b in pairwise(path))
