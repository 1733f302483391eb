"""Finished sequences in main memory: their tokens and the content of their KV cells.

The store is a tree, as in SGLang's RadixAttention (arXiv 2312.07104). A node holds some tokens that follow
those of its parent, so a common beginning of several sequences is stored once, and a conversation that grows
adds only its new tokens. If layers keep states, a node holds a whole sequence, because a state cannot be cut.
Each node belongs to a scope, and is found only by sequences that the scope serves. At a limit in bytes, the
least recently used leaves are dropped. What a closed model leaves stays until this room is needed, for the
next time that it is opened. Only the compute thread calls this module, except `drop_left`.
tests/llama/test_prefix_store.py.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from llamaspec.values import NO_SCOPE, NO_TOKENS, Scope, TokenArray, n_common, serves

REPLACED = -(1 << 62)  # the last use of a node that is the first to go

Bytes = npt.NDArray[np.uint8]
P = ParamSpec("P")
R = TypeVar("R")


class Checkpoint(NamedTuple):
    """The recurrent state after the first `n` tokens of a sequence."""

    n: int
    state: Bytes


@dataclass(slots=True, eq=False)
class Node:
    """Tokens that follow those of the parent, and the content of their KV cells."""

    parent: Node | None
    tokens: TokenArray  # [n]
    content: Bytes
    scope: Scope = NO_SCOPE
    is_whole: bool = False  # the content is a state, which cannot be cut
    is_shared: bool = False  # several sequences may begin with it, so it stays if one of them is stored
    checkpoints: tuple[Checkpoint, ...] = ()  # earlier states
    last_used: int = 0
    children: list[Node] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Bytes of memory."""
        return self.tokens.nbytes + self.content.nbytes + sum(each.state.nbytes for each in self.checkpoints)

    def n_usable(self, tokens: TokenArray) -> int:
        """Return how many of the node's tokens can serve a sequence that continues with `tokens`."""
        n = n_common(self.tokens, tokens)
        if not self.is_whole or n == len(self.tokens):
            return n
        return max((each.n for each in self.checkpoints if each.n <= n), default=0)

    def below(self) -> Iterator[Node]:
        """Yield all nodes below this one, each after its parent."""
        waiting = list(self.children)
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children


class KnownPrefix(NamedTuple):
    """The longest stored beginning of a sequence: all tokens of `nodes`, except perhaps of the last one."""

    nodes: tuple[Node, ...] = ()
    n: int = 0  # tokens


@dataclass(slots=True, eq=False)
class _Room:
    """Memory that several stores share, up to a limit."""

    limit: int  # bytes
    n_bytes: int = 0
    n_lent: int = 0  # bytes of states that running sequences keep
    roots: list[Node] = field(default_factory=list)
    left: dict[str, Node] = field(default_factory=dict)  # roots of closed stores, the first closed one first
    lock: threading.RLock = field(default_factory=threading.RLock)
    clock: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def counted_bytes(self) -> int:
        """Return the bytes of all nodes."""
        return sum(node.n_bytes for root in self.roots for node in root.below())

    @property
    def n_over(self) -> int:
        """Return the bytes over the limit; negative if there is room."""
        return self.n_bytes + self.n_lent - self.limit

    def drop(self, root: Node) -> None:
        """Give up a root, and free the nodes below it at once, although they refer to each other."""
        nodes = [*root.below()]
        self.n_bytes -= sum(node.n_bytes for node in nodes)
        for node in (root, *nodes):
            node.children.clear()
        self.roots.remove(root)


def _locked(method: Callable[Concatenate[PrefixStore, P], R]) -> Callable[Concatenate[PrefixStore, P], R]:
    """Let one thread at a time change the stores that share a limit."""

    @functools.wraps(method)
    def locked(store: PrefixStore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with store._room.lock:
            return method(store, *args, **kwargs)

    return locked


class PrefixStore:
    """The stored sequences of one model, in at most `limit` bytes; 0 = nothing is stored.

    With `limit_of`, it shares the limit of that store. They share no content, because the models differ.
    """

    def __init__(self, limit: int = 0, *, limit_of: PrefixStore | None = None) -> None:
        self._room: _Room = _Room(limit) if limit_of is None else limit_of._room
        self.root = Node(None, NO_TOKENS, np.empty(0, dtype=np.uint8))
        self._room.roots.append(self.root)
        self._n_lent = 0

    @property
    def limit(self) -> int:
        """Maximum number of bytes of all stores that share the limit."""
        return self._room.limit

    @property
    def n_bytes(self) -> int:
        """Bytes in all stores that share the limit."""
        return self._room.n_bytes

    @property
    def n_left(self) -> int:
        """Bytes that closed stores have left."""
        room = self._room
        with room.lock:
            return sum(node.n_bytes for root in room.left.values() for node in root.below())

    def find(self, tokens: TokenArray, scope: Scope = NO_SCOPE) -> KnownPrefix:
        """Return the longest stored beginning of the tokens of a sequence of some scope."""
        best, waiting = KnownPrefix(), [(self.root, KnownPrefix())]
        while waiting:
            node, found = waiting.pop()
            for child in node.children:
                if not serves(child.scope, scope):
                    continue
                n = child.n_usable(tokens[found.n :])
                longer = KnownPrefix((*found.nodes, child), found.n + n)
                if longer.n > best.n:
                    best = longer
                if n == len(child.tokens):
                    waiting.append((child, longer))
        return best

    def put(
        self,
        tokens: TokenArray,
        block: int,
        copy: Callable[[int, int], Bytes | None],
        scope: Scope = NO_SCOPE,
    ) -> None:
        """Store a sequence in nodes of at most `block` tokens.

        `copy(start, end)` returns the content of a range of positions. It is called only for positions that
        are not stored yet. If it returns None, the sequence is stored only up to there.
        """
        if not self.limit:
            return
        found = self.find(tokens, scope)
        self.touch(found)
        if found.n == len(tokens):
            return
        parent, n = self.root, 0
        for node in found.nodes:  # the last node may contain other tokens, too
            if n + len(node.tokens) <= found.n:
                parent, n = node, n + len(node.tokens)
        for start in range(n, len(tokens), block):
            new = tokens[start : start + block].copy()
            content = copy(start, start + len(new))
            if content is None or not self.add(node := Node(parent, new, content, scope)):
                return
            parent = node

    @_locked
    def put_whole(
        self,
        tokens: TokenArray,
        content: Bytes,
        checkpoints: tuple[Checkpoint, ...] = (),
        *,
        is_shared: bool = False,
        scope: Scope = NO_SCOPE,
    ) -> None:
        """Store a sequence whose content cannot be cut, and drop the beginnings of it in the same scope.

        A beginning `is_shared` is not dropped. Another sequence of which only the end differs, after its last
        checkpoint, is the first to go: usually the answer of a turn, which the template has written anew.
        """
        if not self.limit:
            return
        for node in [each for each in self.root.children if each.scope == scope]:
            n = n_common(node.tokens, tokens)
            if n == len(node.tokens) and (not node.is_shared or n == len(tokens)):
                self._remove(node)
            elif not is_shared and node.checkpoints and n >= node.checkpoints[-1].n:
                node.last_used = REPLACED
        node = Node(self.root, tokens.copy(), content, scope, is_whole=True, is_shared=is_shared)
        node.checkpoints = checkpoints
        self.add(node)

    def n_shared(self, tokens: TokenArray, scope: Scope = NO_SCOPE) -> int:
        """Return how many of the first tokens one of the stored sequences has, wherever its states are."""
        nodes = [each for each in self.root.children if serves(each.scope, scope)]
        return max((n_common(each.tokens, tokens) for each in nodes), default=0)

    def touch(self, found: KnownPrefix) -> None:
        """Record a use of the nodes."""
        now = next(self._room.clock)
        for node in found.nodes:
            node.last_used = now

    @_locked
    def add(self, node: Node) -> bool:
        """Add a node to its parent, and drop leaves over the limit; False if the node itself was dropped."""
        assert node.parent is not None
        room = self._room
        node.last_used = next(room.clock)
        node.parent.children.append(node)
        room.n_bytes += node.n_bytes
        while room.n_over > 0:
            if self._drop_leaf(room.roots) is node:
                return False
        return True

    @_locked
    def lend(self, n_bytes: int) -> None:
        """Leave room to states that a sequence in a context keeps; negative: take it back."""
        room = self._room
        self._n_lent += n_bytes
        room.n_lent += n_bytes
        while room.n_over > 0 and room.n_bytes:
            self._drop_leaf(room.roots)

    @_locked
    def add_older(self, node: Node, last_used: int) -> Node | None:
        """Add a node that is older than all others here; return it, or the same one that is here already.

        None if its parent was dropped, or there is no room: it drops only what closed stores have left.
        `last_used` is negative.
        """
        parent, room = node.parent, self._room
        if parent is None or not self._holds(parent):
            return None
        for child in parent.children:
            alike = child.is_shared == node.is_shared and child.scope == node.scope
            if alike and np.array_equal(child.tokens, node.tokens):
                return child
        if not self.has_room(node.n_bytes):
            return None
        while room.n_over + node.n_bytes > 0:
            self._drop_leaf(room.left.values())
        node.last_used = last_used
        parent.children.append(node)
        room.n_bytes += node.n_bytes
        return node

    def has_room(self, n_bytes: int) -> bool:
        """Whether `n_bytes` fit into the limit beside what is here, without what closed stores have left."""
        n_missing = self._room.n_over + n_bytes
        return n_missing <= 0 or n_missing <= self.n_left

    def by_last_use(self) -> list[tuple[Node, int]]:
        """Return all nodes, each after its parent and with the latest use of a sequence that has it.

        The most recently used sequences come first.
        """
        newest: dict[Node, int] = {}
        nodes = list(self.root.below())
        for node in reversed(nodes):
            newest[node] = max([node.last_used, *(newest[child] for child in node.children)])
        # Stable: parents stay before children.
        return sorted(((node, newest[node]) for node in nodes), key=lambda found: -found[1])

    @_locked
    def close(self) -> None:
        """Drop everything, leave the shared limit to the other stores, and store nothing from now on."""
        self.clear()
        self._leave_room()

    @_locked
    def leave(self, key: str) -> None:
        """Leave everything to the next store that takes this key, and store nothing from now on.

        Of several stores with the same key, what the last one leaves stays.
        """
        room, root = self._room, self.root
        if key in room.left:
            room.drop(room.left.pop(key))
        self._leave_room()
        room.roots.append(root)
        room.left[key] = root

    @_locked
    def take(self, key: str) -> None:
        """Continue with what another store has left under a key, if there is any, instead of what is here."""
        if (root := self._room.left.pop(key, None)) is not None:
            self._room.drop(self.root)
            self.root = root

    @_locked
    def drop_left(self, n_bytes: int) -> int:
        """Drop what closed stores have left, the first closed one first, until `n_bytes` are freed.

        Return the number of freed bytes. May be called in any thread.
        """
        room = self._room
        n_before = room.n_bytes
        while room.left and n_before - room.n_bytes < n_bytes:
            room.drop(room.left.pop(next(iter(room.left))))
        return n_before - room.n_bytes

    @_locked
    def clear(self) -> None:
        """Drop everything."""
        self.root.children.clear()
        self._room.n_bytes = self._room.counted_bytes()

    @_locked
    def fault(self) -> str | None:
        """Return how the recorded size of the stores that share the limit is wrong; None if it is right."""
        n_bytes = self._room.counted_bytes()
        return None if n_bytes == self.n_bytes else f"{n_bytes} bytes in the store, {self.n_bytes} recorded"

    def _leave_room(self) -> None:
        self._room.roots.remove(self.root)
        self._room.n_lent -= self._n_lent  # contexts that are still open give it back to the new room
        self.root = Node(None, NO_TOKENS, np.empty(0, dtype=np.uint8))
        self._room = _Room(0, n_lent=self._n_lent, roots=[self.root])

    def _drop_leaf(self, roots: Iterable[Node]) -> Node:
        """Drop the least recently used leaf below some roots, and return it."""
        leaves = [each for root in roots for each in root.below() if not each.children]
        oldest = min(leaves, key=lambda leaf: leaf.last_used)
        self._remove(oldest)
        return oldest

    def _holds(self, node: Node) -> bool:
        """Whether a node is in the store."""
        while node.parent is not None and node in node.parent.children:
            node = node.parent
        return node is self.root

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        leaf.parent.children.remove(leaf)
        self._room.n_bytes -= leaf.n_bytes
