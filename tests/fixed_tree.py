"""A length policy whose trees of draft tokens always have the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamaspec.length.tree import CONTEXT, CandidateTree
from llamaspec.values import Draft, Round


def depth(tree: CandidateTree, node: int) -> int:
    """Draft tokens before one."""
    return len(tree.path(node)) - 1


@dataclass(frozen=True, slots=True)
class FixedTree:
    """Always the same tree: `widths[d]` children for every token of level d. At most 4."""

    widths: tuple[int, ...]

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> FixedTree:
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
        last = max(depth(tree, i) for i in kept)
        if last + 1 >= len(self.widths) or any(depth(tree, i) == last for i in tree.read):
            return []
        return [i for i in kept if depth(tree, i) == last]

    def keep(self, tree: CandidateTree) -> Sequence[int]:
        """As wide as each level may be."""
        kept: list[int] = []
        for i, parent in enumerate(tree.parents):
            if tree.ranks[i] < self.widths[depth(tree, i)] and (parent < 0 or parent in kept):
                kept.append(i)
        return kept

    @property
    def reading(self) -> None:
        """None: the draft model processes the prompt at once."""

    def wants_more(self, draft: Draft) -> bool:
        """Where no tree can grow, a chain as deep."""
        return len(draft) < len(self.widths)

    def n_verified(self, draft: Draft) -> int:
        """All."""
        return len(draft)

    def width(self, n_positions: int) -> int:
        """No padding."""
        return n_positions

    def observe(self, round_: Round) -> None:
        """Learns nothing."""

    def close(self) -> None:
        """Nothing to do."""
