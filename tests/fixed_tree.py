"""A length policy whose trees of draft tokens all have the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamaspec.length.tree import CONTEXT, CandidateTree
from llamaspec.values import Draft, Round


def depth(tree: CandidateTree, node: int) -> int:
    """Return the number of draft tokens before a node."""
    return len(tree.path(node)) - 1


@dataclass(frozen=True, slots=True)
class FixedTree:
    """Gives every tree the same shape: `widths[d]` children, at most 4, for every token of level d."""

    widths: tuple[int, ...]

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> FixedTree:
        """Return the policy itself, which has no state."""
        return self

    def tree(self) -> FixedTree:
        """Return the policy itself."""
        return self

    def expand(self, tree: CandidateTree) -> Sequence[int]:
        """Expand all nodes of the last level."""
        if not len(tree):
            return [CONTEXT] if self.widths else []
        kept = self.keep(tree)
        last = max(depth(tree, i) for i in kept)
        if last + 1 >= len(self.widths) or any(depth(tree, i) == last for i in tree.evaluated):
            return []
        return [i for i in kept if depth(tree, i) == last]

    def keep(self, tree: CandidateTree) -> Sequence[int]:
        """Keep the best candidates of each level."""
        kept: list[int] = []
        for i, parent in enumerate(tree.parents):
            if tree.ranks[i] < self.widths[depth(tree, i)] and (parent < 0 or parent in kept):
                kept.append(i)
        return kept

    @property
    def reading(self) -> None:
        """None: the draft model processes the prompt at once."""

    def wants_more(self, draft: Draft) -> bool:
        """Draft a chain of the same depth if the memory has no trees."""
        return len(draft) < len(self.widths)

    def n_verified(self, draft: Draft) -> int:
        """Verify all tokens."""
        return len(draft)

    def timed_width(self) -> None:
        """Time nothing."""

    def observe(self, round_: Round) -> None:
        """Learn nothing."""

    def close(self) -> None:
        """Do nothing."""
