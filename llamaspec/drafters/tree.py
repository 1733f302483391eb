"""Trees of draft tokens from a small model: it reads a whole level in one step.

The candidates of a position are the greatest log q + g, with the noise g that the target will draw with;
the first is what a chain would draft. Where no tree may grow this is the drafter of chains.
Only the coupled rule verifies trees. tests/drafters/test_tree.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.tree_growth import CONTEXT, CandidateTree, Growth, TreeGrowth, TreeLength
from llamaspec.errors import ContextFullError, ScoresError
from llamaspec.protocols import Drafting, RowLength
from llamaspec.sampling.candidates import candidates
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import ForwardRequest, TokenArray

DEEPEST = 64  # draft tokens that a tree may have in a row


@dataclass(slots=True)
class TreeDrafter(ModelDrafter):
    """Draws draft tokens from a model: chains, or trees where the text's length policy lets them grow."""

    trees: TreeLength = field(kw_only=True)

    def propose(self, context: TokenArray, length: RowLength) -> Drafting:
        """A tree, or a chain."""
        has_room = len(context) + DEEPEST <= self.context_size
        can_grow = has_room and not self.is_silent and self.tokens is None and self.constraint is None
        growth = self.trees.tree(TreeGrowth) if can_grow else None
        return ModelDrafter.propose(self, context, length) if growth is None else self._grow(context, growth)

    def _grow(self, context: TokenArray, growth: Growth) -> Drafting:
        known, tree = self.known(context), CandidateTree()
        sampler = Sampler(self.sampling, self.n_prompt)
        while (nodes := growth.expand(tree)) and not self.is_silent:
            try:
                forward = yield self._request(known, tree, nodes)
            except ContextFullError:
                break
            except ScoresError:
                self.is_silent = True
                break
            for node, row in zip(nodes, forward.logits, strict=True):
                logits = row[: self.n_drawn]
                path = np.concatenate([known, _path(tree, node)])
                tree.add(node, *candidates(logits, sampler, path, self.streams, growth.n_candidates))
        return tree.draft(growth.keep(tree), self.source)

    def _request(self, context: TokenArray, tree: CandidateTree, nodes: Sequence[int]) -> ForwardRequest:
        """Let the model read some tokens of the tree, each behind those before it."""
        if nodes[0] == CONTEXT:
            return ForwardRequest(self.model, context)
        n_read = len(tree.read)
        tree.read += nodes
        place = {node: i for i, node in enumerate(tree.read)}
        draft = np.array([tree.tokens[node] for node in tree.read], dtype=np.int32)
        parents = np.array([place.get(tree.parents[node], CONTEXT) for node in tree.read], dtype=np.int32)
        return ForwardRequest(self.model, context, 0, draft, parents, n_read)


def _path(tree: CandidateTree, node: int) -> TokenArray:
    path: list[int] = []
    while node != CONTEXT:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return np.array(path[::-1], dtype=np.int32)
