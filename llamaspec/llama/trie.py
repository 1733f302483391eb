"""What several asks have in common is evaluated once: the trie of the positions that are still to do.

Knows neither llama.cpp nor memory. One ask gives a chain, asks with a common beginning give a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llamaspec.values import Ask


@dataclass(slots=True)
class Node:
    """One position to evaluate."""

    token: int
    position: int
    lanes: list[int] = field(default_factory=list)  # of all asks that pass through it
    wanted: bool = False  # whether somebody wants its scores


@dataclass(frozen=True, slots=True)
class Trie:
    """Positions in an order in which every one follows those it depends on."""

    nodes: list[Node]
    paths: list[list[int]]  # for each ask, the indices of the nodes whose scores it wants: n of them


def merge(asks: Sequence[Ask], kept: Sequence[int], *, shares: bool = True) -> Trie:
    """Merge the parts of the asks that no memory holds.

    Parameters
    ----------
    asks : sequence of Ask
    kept : sequence of int
        For each ask, how many of its first tokens the memory holds. Asks that share the token after it
        keep equally many.
    shares : bool
        False where a position must not belong to several lanes: then nothing is merged.
    """
    nodes: list[Node] = []
    children: dict[tuple[int, int], int] = {}  # (parent node, or -1 - root; token) -> node
    paths = []
    for i, (ask, n_kept) in enumerate(zip(asks, kept, strict=True)):
        parent = -1 - (_root(asks, kept, i) if shares else i)
        path = []
        for position, token in enumerate(ask.tokens[n_kept:].tolist(), n_kept):
            node = children.get((parent, token))
            if node is None:
                node = children[parent, token] = len(nodes)
                nodes.append(Node(token, position))
            nodes[node].lanes.append(ask.lane)
            path.append(node)
            parent = node
        scored = path[len(path) - ask.n :]
        for node in scored:
            nodes[node].wanted = True
        paths.append(scored)
    return Trie(nodes, paths)


def _root(asks: Sequence[Ask], kept: Sequence[int], i: int) -> int:
    """The first ask whose kept tokens are the same as those of ask `i`."""
    mine = asks[i].tokens[: kept[i]]
    for j in range(i):
        if kept[j] == kept[i] and bool((asks[j].tokens[: kept[j]] == mine).all()):
            return j
    return i
