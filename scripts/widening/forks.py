"""Whether two models say the same: along the greedy text of the first, what would the second choose?

Both read the same tokens one at a time, so up to the first difference this is what each generates by
itself, and behind it every position still counts. Nothing is drawn; nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plain_llama import PlainLlama

NEAR_TIE = 0.05  # two choices whose scores lie closer than this may change places by rounding


@dataclass(frozen=True, slots=True)
class Fork:
    """A position where the second model would have chosen another token."""

    prompt: bytes
    n_same: int  # tokens of this prompt's text before it
    gap: float  # how much higher the first model scores its own choice


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a comparison found."""

    n_tokens: int
    largest_error: float  # between scores of the same token
    forks: tuple[Fork, ...]

    @property
    def holds(self) -> bool:
        """Whether the texts are the same, but for near ties."""
        return all(fork.gap < NEAR_TIE for fork in self.forks)

    def __str__(self) -> str:
        errors = f"scores differ by {self.largest_error:.2g} at most"
        if not self.forks:
            return f"the same {self.n_tokens} greedy tokens; {errors}"
        first, gap = self.forks[0], max(fork.gap for fork in self.forks)
        return (
            f"{len(self.forks)} of {self.n_tokens} greedy choices differ, over gaps of {gap:.2g} at most, "
            f"the first at token {first.n_same} of {first.prompt.decode(errors='replace')!r}; {errors}"
        )


def compare(
    first: Path, second: Path, prompts: Sequence[bytes], n_tokens: int, n_threads: int = 1
) -> Agreement:
    """Follow the first model's greedy text behind every prompt with both.

    Raises
    ------
    ValueError
        A file does not load, or the two tokenize a prompt differently.
    """
    forks: list[Fork] = []
    errors: list[float] = []
    with PlainLlama(first, n_threads=n_threads) as one, PlainLlama(second, n_threads=n_threads) as two:
        for prompt in prompts:
            tokens = one.tokenize(prompt)
            if two.tokenize(prompt) != tokens:
                raise ValueError(f"{first} and {second} make different tokens of {prompt!r}")
            a, b = one.logits(tokens)[-1], two.logits(tokens)[-1]
            for i in range(n_tokens):
                errors.append(float(np.abs(a - b).max()))
                if a.argmax() != b.argmax():
                    forks.append(Fork(prompt, i, float(a.max() - a[b.argmax()])))
                token = [int(a.argmax())]
                a, b = one.extend(token)[-1], two.extend(token)[-1]
    return Agreement(len(errors), max(errors), tuple(forks))
