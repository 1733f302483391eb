"""Finished texts in main memory: their tokens, and what llama.cpp computed for them.

A tree, as in SGLang's RadixAttention (arXiv 2312.07104). A node holds the content of the KV cells of some
tokens behind its parent's. So texts with a common beginning store it once, and a conversation that grows adds
only what is new. Where layers keep states, a node holds a whole text, because a state cannot be cut. The
store has a limit in bytes; the least recently used leaves go first. Only the compute thread calls it. It
knows no llama.cpp. tests/llama/test_prefix_store.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from llamaspec.llama.sequences import Bytes, HiddenRows
from llamaspec.values import NO_TOKENS, TokenArray, n_common


class Checkpoint(NamedTuple):
    """The state of layers that keep one, after the first `n` tokens of a text."""

    n: int
    state: Bytes


@dataclass(slots=True, eq=False)
class Node:
    """Some tokens behind those of its parent, and what llama.cpp computed for them."""

    parent: Node | None
    tokens: TokenArray  # [n]
    content: Bytes
    hidden: HiddenRows | None = None  # the target's last hidden rows, if a text ended here
    is_whole: bool = False  # the content cannot be cut: it is a state
    checkpoints: tuple[Checkpoint, ...] = ()  # earlier states of a whole text
    last_used: int = 0
    children: list[Node] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes."""
        return self.tokens.nbytes + self.content.nbytes + sum(each.state.nbytes for each in self.checkpoints)

    def n_usable(self, tokens: TokenArray) -> int:
        """How many of its tokens serve a text that goes on with `tokens`."""
        n = n_common(self.tokens, tokens)
        if not self.is_whole or n == len(self.tokens):
            return n
        return max((each.n for each in self.checkpoints if each.n <= n), default=0)


class KnownPrefix(NamedTuple):
    """The longest stored beginning of a text: all tokens of `nodes`, but perhaps only some of the last."""

    nodes: tuple[Node, ...] = ()
    n: int = 0  # tokens


class PrefixStore:
    """The stored texts of all models of a pair, at most `limit` bytes of them; 0 = nothing is stored.

    Each model is an owner of texts, because what one has computed is of no use to another.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.n_bytes = 0
        self._clock = itertools.count(1)
        self._roots: dict[Hashable, Node] = {}  # by owner

    def find(self, owner: Hashable, tokens: TokenArray) -> KnownPrefix:
        """The longest beginning of some tokens that is stored for an owner."""
        best, waiting = KnownPrefix(), [(self.root(owner), KnownPrefix())]
        while waiting:
            node, found = waiting.pop()
            for child in node.children:
                n = child.n_usable(tokens[found.n :])
                longer = KnownPrefix((*found.nodes, child), found.n + n)
                if longer.n > best.n:
                    best = longer
                if n == len(child.tokens):
                    waiting.append((child, longer))
        return best

    def put(
        self,
        owner: Hashable,
        tokens: TokenArray,
        block: int,
        copy: Callable[[int, int], Bytes | None],
        hidden: HiddenRows | None = None,
    ) -> None:
        """Store a text in nodes of at most `block` tokens.

        `copy(start, end)` returns the content of some positions. It is called only for those that are not
        stored yet; if it returns None, the text is stored up to there.
        """
        if not self.limit:
            return
        found = self.find(owner, tokens)
        self.touch(found)
        if found.n == len(tokens):
            return
        parent, n = self.root(owner), 0
        for node in found.nodes:  # the last one may go on otherwise
            if n + len(node.tokens) <= found.n:
                parent, n = node, n + len(node.tokens)
        for start in range(n, len(tokens), block):
            new = tokens[start : start + block].copy()
            content = copy(start, start + len(new))
            if content is None or not self.add(node := Node(parent, new, content)):
                return
            parent = node
        parent.hidden = hidden

    def put_whole(
        self, owner: Hashable, tokens: TokenArray, content: Bytes, checkpoints: tuple[Checkpoint, ...] = ()
    ) -> None:
        """Store a text whose content cannot be cut, in place of those that it begins with."""
        if not self.limit:
            return
        root = self.root(owner)
        for node in [each for each in root.children if n_common(each.tokens, tokens) == len(each.tokens)]:
            self._remove(node)
        self.add(Node(root, tokens.copy(), content, is_whole=True, checkpoints=checkpoints))

    def touch(self, found: KnownPrefix) -> None:
        """Note that what was found is used."""
        now = next(self._clock)
        for node in found.nodes:
            node.last_used = now

    def root(self, owner: Hashable) -> Node:
        """The node before all texts of an owner; it has no tokens."""
        if owner not in self._roots:
            self._roots[owner] = Node(None, NO_TOKENS, np.empty(0, dtype=np.uint8))
        return self._roots[owner]

    def add(self, node: Node) -> bool:
        """Add a node to its parent and drop what is over the limit; False if the node itself is."""
        assert node.parent is not None
        node.last_used = next(self._clock)
        node.parent.children.append(node)
        self.n_bytes += node.n_bytes
        while self.n_bytes > self.limit:
            oldest = min(self._leaves(), key=lambda leaf: leaf.last_used)
            self._remove(oldest)
            if oldest is node:
                return False
        return True

    def nodes(self, owner: Hashable) -> list[Node]:
        """The nodes of an owner, the last used first, but each behind its parent."""
        depths = {node: depth for node, depth in _below(self.root(owner), 0) if depth}
        newest: dict[Node, int] = {}
        for node in sorted(depths, key=lambda each: -depths[each]):
            newest[node] = max([node.last_used, *(newest[child] for child in node.children)])
        return sorted(depths, key=lambda node: (-newest[node], depths[node]))

    def clear(self, owner: Hashable) -> None:
        """Drop the texts of an owner."""
        self.n_bytes -= sum(node.n_bytes for node, _ in _below(self.root(owner), 0))
        del self._roots[owner]

    def _leaves(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from (node for node, depth in _below(root, 0) if depth and not node.children)

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        leaf.parent.children.remove(leaf)
        self.n_bytes -= leaf.n_bytes


def _below(root: Node, depth: int) -> Iterator[tuple[Node, int]]:
    """A node and all that are below it, with their depths."""
    waiting = [(root, depth)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        waiting += [(child, depth + 1) for child in node.children]
