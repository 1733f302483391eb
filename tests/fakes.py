"""Hand-written stand-ins for the protocols: models, drafters and policies of a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llamaspec.protocols import LengthPolicy
from llamaspec.values import NO_DRAFT, Ask, Distribution, Draft, Logits, Round, TokenArray


@dataclass
class FakeModel:
    """A pure function of the sequence: its scores are drawn from a generator seeded with the tokens."""

    seed: int = 0
    vocabulary_size: int = 3
    context_size: int = 64
    spread: float = 1.5
    asked: list[int] = field(default_factory=list)  # positions scored by each call

    def logits(self, asks: Sequence[Ask]) -> list[Logits]:
        self.asked.append(sum(ask.n for ask in asks))
        return [self._scores(ask) for ask in asks]

    def row(self, tokens: TokenArray) -> Logits:
        """Scores after all of `tokens`: float32 [V]."""
        random = np.random.default_rng([self.seed, *tokens.tolist()])
        return (random.standard_normal(self.vocabulary_size) * self.spread).astype(np.float32)

    def _scores(self, ask: Ask) -> Logits:
        assert 0 <= ask.n <= len(ask.tokens) <= self.context_size
        first = len(ask.tokens) - ask.n + 1
        rows = [self.row(ask.tokens[: first + i]) for i in range(ask.n)]
        return np.array(rows, dtype=np.float32).reshape(ask.n, self.vocabulary_size)


class CountingUp:
    """Guesses that each token is one more than the last, without chance, as an n-gram drafter would."""

    def __init__(self, vocabulary_size: int = 3) -> None:
        self.vocabulary_size = vocabulary_size

    def prepare(self, context: TokenArray) -> None:
        pass

    def propose(self, context: TokenArray, policy: LengthPolicy) -> Draft:
        draft = NO_DRAFT
        while policy.wants_more(draft):
            token = (int(context[-1]) + len(draft) + 1) % self.vocabulary_size
            draft = draft.plus(token, Distribution.certain(token), 0.6)
        return draft


class DropsUnlikely:
    """Guesses two tokens and leaves unjudged what the drafter itself thinks little of, and all behind it."""

    def wants_more(self, draft: Draft) -> bool:
        return len(draft) < 2

    def n_to_verify(self, draft: Draft) -> int:
        unlikely = [i for i, confidence in enumerate(draft.confidences) if confidence < 0.55]
        return unlikely[0] if unlikely else len(draft)

    def width(self, n_guesses: int) -> int:
        return n_guesses + 1

    def observe(self, round_: Round) -> None:
        assert round_.n_accepted <= round_.n_verified <= len(round_.drafted)


class UntilToken:
    """Guesses until a certain token was guessed: a length that depends on what the draft says."""

    def __init__(self, token: int, longest: int = 3) -> None:
        self.token, self.longest = token, longest

    def wants_more(self, draft: Draft) -> bool:
        return len(draft) < self.longest and (len(draft) == 0 or int(draft.tokens[-1]) != self.token)

    def n_to_verify(self, draft: Draft) -> int:
        return len(draft)

    def width(self, n_guesses: int) -> int:
        return n_guesses + 2  # padded

    def observe(self, round_: Round) -> None:
        pass
