"""Trees of draft tokens: which candidates the draft reads next, and which the target verifies.

A tree grows by levels: each is one step of the draft, which reads several tokens at once. Knows neither
models nor tokens' meaning. tests/length/test_tree.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from llamaspec.protocols import RowLength
from llamaspec.values import Draft, Round, Source

CONTEXT = -1  # in place of a draft token: what stands before all of them


@dataclass(slots=True, eq=False)
class CandidateTree:
    """Everything that a draft offers in a round; the children of a token stand best first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # index of the one before; -1 = the context
    confidences: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # among its siblings, from 0
    depths: list[int] = field(default_factory=list)  # tokens before it
    read: list[int] = field(default_factory=list)  # those that the draft model has read, in this order

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, tokens: Sequence[int], confidences: Sequence[float]) -> None:
        """What may follow one of them, or the context."""
        self.tokens += tokens
        self.confidences += confidences
        self.parents += [parent] * len(tokens)
        self.depths += [self.depths[parent] + 1 if parent >= 0 else 0] * len(tokens)
        self.ranks += range(len(tokens))

    def draft(self, kept: Sequence[int], source: Source) -> Draft:
        """Some of them, with all that stand before these: first the branch of the best ones.

        So accepted tokens mostly lie next to each other in the KV cache.
        """
        order: list[int] = []
        stack = sorted((i for i in kept if self.parents[i] < 0), reverse=True)
        below: dict[int, list[int]] = {}
        for i in kept:
            below.setdefault(self.parents[i], []).append(i)
        while stack:
            i = stack.pop()
            order.append(i)
            stack += sorted(below.get(i, ()), reverse=True)
        place = {i: n for n, i in enumerate(order)}
        parents = np.array([place.get(self.parents[i], CONTEXT) for i in order], dtype=np.int32)
        return Draft(
            np.array([self.tokens[i] for i in order], dtype=np.int32),
            (),
            tuple(self.confidences[i] for i in order),
            source,
            parents,
        )


class Growth(Protocol):
    """How the tree of one round grows."""

    @property
    def n_candidates(self) -> int:
        """How many are wanted of each distribution."""

    def expand(self, tree: CandidateTree) -> Sequence[int]:
        """Which tokens the draft reads next, in one step; first the context alone; none = enough."""

    def keep(self, tree: CandidateTree) -> Sequence[int]:
        """Which tokens the target verifies: a token only together with those before it."""


@runtime_checkable
class TreeLength(RowLength, Protocol):
    """A row's length that also lets trees grow."""

    def tree(self) -> Growth | None:
        """How a tree grows in the coming round; None where a chain is as good."""


@dataclass(frozen=True, slots=True)
class FixedTree:
    """Always the same tree: `widths[d]` children for every token of level d. For tests and comparisons."""

    widths: tuple[int, ...]

    @property
    def n_candidates(self) -> int:
        """The widest."""
        return max(self.widths, default=0)

    def start_row(self) -> FixedTree:
        """Itself: it has no state."""
        return self

    def tree(self) -> FixedTree:
        """Itself."""
        return self

    def expand(self, tree: CandidateTree) -> Sequence[int]:
        """All of the next level."""
        if not len(tree):
            return [CONTEXT] if self.widths else []
        kept = self.keep(tree)
        last = max(tree.depths[i] for i in kept)
        if last + 1 >= len(self.widths) or any(tree.depths[i] == last for i in tree.read):
            return []
        return [i for i in kept if tree.depths[i] == last]

    def keep(self, tree: CandidateTree) -> Sequence[int]:
        """As wide as each level may be."""
        kept: list[int] = []
        for i, parent in enumerate(tree.parents):
            if tree.ranks[i] < self.widths[tree.depths[i]] and (parent < 0 or parent in kept):
                kept.append(i)
        return kept

    def wants_more(self, draft: Draft) -> bool:
        """Where no tree can grow, a chain as deep."""
        return len(draft) < len(self.widths)

    def width(self, n_positions: int) -> int:
        """No padding."""
        return n_positions

    def observe(self, round_: Round) -> None:
        """Learns nothing."""

    def close(self) -> None:
        """Nothing to do."""
