"""Prefixes outside of the KV cache, in memory: kept there they cost evaluations nothing.

The oldest go first. Knows nothing of llama.cpp: contents are bytes. When prefixes are put aside is the
KV cache's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from llamaspec.llama.cached_sequence import CachedSequence, shared
from llamaspec.llama.cells import Bytes
from llamaspec.llama.compaction import Moved
from llamaspec.llama.held_cells import HeldCells
from llamaspec.values import TokenArray

MOST = 256  # prefixes
COPIED = 32  # cells that are copied, at most, for each token that need not be read: assumed


class Parked(NamedTuple):
    """A prefix."""

    tokens: TokenArray  # [n] int32
    content: Bytes  # of its cells


class ParkedPrefixes:
    """Prefixes of together at most as many tokens as there are cells."""

    def __init__(self, held: HeldCells) -> None:
        self._held = held
        self._n_tokens = held.size
        self._parked: list[Parked] = []  # the last used last

    def put_aside(self, sequences: Sequence[CachedSequence]) -> None:
        """Empty some sequences and keep what they held; one that cannot be copied out stays."""
        for sequence in sequences:
            content = self._held.cells.copy_out(sequence.number, 0)
            if content is not None:
                self.add(sequence.tokens[: sequence.n].copy(), content)
                self._held.cut(sequence, 0)

    def fetch(
        self, sequence: CachedSequence, tokens: TokenArray, others: Sequence[CachedSequence], room: int
    ) -> None:
        """Let a sequence hold the prefix that shares most of some tokens, if no other knows as much.

        `room`: empty cells that nobody has reserved.
        """
        found = self.best(tokens)
        if found is None or len(found.tokens) > room:
            return
        n_shared = shared(found.tokens, tokens)
        if COPIED * n_shared < len(found.tokens):  # it is copied as a whole
            return
        if n_shared > max(other.shared(tokens) for other in others):
            self._held.fill(sequence, found.tokens, found.content)
            if sequence.n == n_shared:  # else the rest of it may still be wanted
                self.remove(found)

    def add(self, tokens: TokenArray, content: Bytes) -> None:
        """Keep a prefix, and none that it contains."""
        others = [one for one in self._parked if shared(one.tokens, tokens) < len(one.tokens)]
        parked = [*others, Parked(tokens, content)][-MOST:]
        n_left = self._n_tokens
        for i in reversed(range(len(parked))):
            n_left -= len(parked[i].tokens)
            if n_left < 0:
                parked = parked[i + 1 :]
                break
        self._parked = parked

    def best(self, tokens: TokenArray) -> Parked | None:
        """The prefix that shares most of some tokens."""
        return max(self._parked, key=lambda one: shared(one.tokens, tokens), default=None)

    def remove(self, parked: Parked) -> None:
        """Keep it no longer."""
        self._parked = [one for one in self._parked if one is not parked]

    def clear(self) -> None:
        """Keep none."""
        self._parked = []

    def moved(self) -> Iterator[Moved]:
        """All, the last used first, as what is taken out of a cache."""
        for i, (tokens, content) in enumerate(reversed(self._parked)):
            sequence = CachedSequence(-1 - i)
            sequence.append(tokens, np.zeros_like(tokens))
            yield Moved(sequence, len(tokens), None, 0, content)
