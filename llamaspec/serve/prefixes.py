"""Tells what broke the prefix of a conversation that goes on.

Behind the first token that differs nothing comes out of the KV cache: a time stamp or an identifier at the
beginning of a prompt costs reading all of it in each turn. Only prompts are compared, so what is told holds
whether or not the cache still had them. tests/serve/test_prefixes.py.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.values import TokenArray, n_common

N_PROMPTS = 16  # that are remembered
N_LOST = 128  # tokens that must be read again to be worth a line
N_SHOWN = 24  # characters of each excerpt
RUN = 16  # tokens that an old and a new prompt have in common by no accident
N_RUNS = 8  # that are looked for


class PrefixWatch:
    """Remembers the last prompts."""

    def __init__(self, vocabulary: LlamaVocabulary) -> None:
        self._vocabulary = vocabulary
        self._prompts: deque[TokenArray] = deque(maxlen=N_PROMPTS)

    def compare(self, prompt: TokenArray) -> str | None:
        """Remember a prompt; where it goes on from an earlier one but begins otherwise, say what differs."""
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
