"""Trees of draft tokens in a KV cache: every branch has a sequence of llama.cpp's of its own.

llama.cpp needs no mask for a tree: a position belongs to the sequences of all leaves above it, and sees
what its sequence holds. The first branch is the row's own sequence; the others hold the text before the
tree too, and keep it from round to round, so that only what is new has to be shared. Tokens stand before
their children, so the cells of every path ascend. tests/llama/test_branches.py compares with chains,
tests/llama/test_kv_cache.py checks every cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llamaspec.values import NO_TOKENS, ForwardRequest, TokenArray


@dataclass(slots=True, eq=False)
class Branch:
    """A sequence of llama.cpp's beside that of a row: it holds the beginning of the row's text."""

    number: int  # llama.cpp's seq_id
    n: int = 0  # tokens of the text


@dataclass(slots=True, eq=False)
class CachedTree:
    """The draft tokens that are cached behind the text of a sequence."""

    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    parents: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    cells: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K] ascending
    through: list[int] = field(default_factory=list)  # [K] a seq_id that holds the path to each
    tips: dict[int, int] = field(default_factory=dict)  # seq_id -> the last token of its branch; -1 = none

    def path(self, i: int) -> list[int]:
        """Indices of the tokens from the text to token `i`, with it."""
        path: list[int] = []
        while i >= 0:
            path.append(i)
            i = int(self.parents[i])
        return path[::-1]

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The longest path that some tokens begin with."""
        path: list[int] = []
        for token in tokens:
            parent = path[-1] if path else -1
            same = ((self.parents == parent) & (self.tokens == token)).nonzero()[0]
            if not len(same):
                break
            path.append(int(same[0]))
        return path

    def begins(self, request: ForwardRequest) -> bool:
        """Whether these are the draft tokens that a request knows."""
        n = request.n_read
        return (
            n == len(self.tokens) > 0
            and bool((self.tokens == request.draft[:n]).all())
            and request.parents is not None
            and bool((self.parents == request.parents[:n]).all())
        )


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """What an evaluation adds to a tree."""

    n_old: int  # tokens of the tree that are cached
    tokens: TokenArray  # [K] of the whole tree
    parents: TokenArray  # [K]
    depths: list[int]  # [K] tokens of the tree before each
    owners: list[list[int]]  # [K - n_old] seq_ids that each new token belongs to
    tips: dict[int, int]  # seq_id -> last token, afterwards
    new: dict[
        int, int
    ]  # seq_id of a branch that begins -> the cached token that it begins behind; -1 = the text

    @property
    def numbers(self) -> list[int]:
        """All seq_ids; new text before the tree belongs to each."""
        return list(self.tips)


def n_leaves(parents: TokenArray) -> int:
    """Branches of a tree."""
    return len(parents) - len(set(parents.tolist()) - {-1})


def grown(tree: CachedTree, request: ForwardRequest, own: int, free: Sequence[int]) -> Growth:
    """The tree that a request makes of a cached one.

    Parameters
    ----------
    own : int
        The seq_id of the row.
    free : sequence of int
        Others, for branches that begin.
    """
    assert request.parents is not None
    parents: list[int] = request.parents.tolist()
    n_old, unused = len(tree.tokens), list(free)
    tips = dict(tree.tips) or {own: -1}
    old_tips = {tip: number for number, tip in tips.items()}
    owners: list[list[int]] = [[] for _ in parents[n_old:]]
    new: dict[int, int] = {}
    inner = set(parents)
    for leaf in range(n_old, len(parents)):
        if leaf in inner:
            continue
        path = [leaf]
        while parents[path[-1]] >= n_old:
            path.append(parents[path[-1]])
        before = parents[path[-1]]  # the last cached token of the branch
        number = old_tips.pop(before, None)
        if number is None:
            number = unused.pop(0)
            new[number] = before
        tips[number] = leaf
        for i in path:
            owners[i - n_old].append(number)
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return Growth(n_old, request.draft, request.parents, depths, owners, tips, new)
