"""Finds out why a prompt could not reuse the KV cache of the conversation that it continues.

Nothing behind the first token that differs is found in the KV cache: with a time stamp or an identifier at
its beginning, a prompt is processed as a whole in each turn. Only prompts are compared, so the result does
not depend on what the cache still holds. tests/serve/test_prefixes.py.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.values import TokenArray, n_common

N_PROMPTS = 16  # that are kept
N_LOST = 128  # tokens processed again, below which nothing is logged
N_SHOWN = 24  # characters of each excerpt
RUN = 16  # tokens that two prompts do not share by chance
N_RUNS = 8  # runs to look for


class PrefixWatch:
    """Remembers the last prompts."""

    def __init__(self, vocabulary: LlamaVocabulary) -> None:
        self._vocabulary = vocabulary
        self._prompts: deque[TokenArray] = deque(maxlen=N_PROMPTS)

    def compare(self, prompt: TokenArray) -> str | None:
        """Keep a prompt; if it continues an earlier one but begins differently, return the difference."""
        n_shared = [n_common(each, prompt) for each in self._prompts]
        n = max(n_shared, default=len(prompt))
        before = self._prompts[n_shared.index(n)] if n_shared else prompt
        self._prompts.appendleft(prompt)
        n_lost = len(before) - n
        if n_lost < N_LOST or not _goes_on(before[n:], prompt[n:]):
            return None
        begin, old, new = (
            self._text(tokens) for tokens in (prompt[max(0, n - RUN) : n], before[n:], prompt[n:])
        )
        return (
            f'prefix differs at token {n:,} of {len(prompt):,}: behind "{begin[-N_SHOWN:]}" came '
            f'"{old[:N_SHOWN]}", now "{new[:N_SHOWN]}"; {n_lost:,} tokens are read again'
        )

    def _text(self, tokens: TokenArray) -> str:
        pieces = (
            self._vocabulary.piece(token) or self._vocabulary.text(token) for token in tokens[:RUN].tolist()
        )
        return b"".join(pieces).decode(errors="replace")


def _goes_on(old: TokenArray, new: TokenArray) -> bool:
    """Whether most of the old tokens are among the new ones, elsewhere."""
    places, content = np.linspace(RUN, len(old) - RUN, N_RUNS, dtype=int), new.tobytes()
    return 2 * sum(old[place : place + RUN].tobytes() in content for place in places) >= N_RUNS
