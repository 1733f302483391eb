"""The key/value memory as a cache of token sequences, one for each lane.

Before an evaluation every lane is cut back to what it shares with the asked sequence. A lane also takes
over, without computing, what another lane already knows. A memory that cannot forget a part is cleared
and read again: slow, never wrong. tests/llama/test_model.py compares cached with fresh answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_cpp import llama_cpp as lib

from llamaspec.values import NO_TOKENS, Ask, TokenArray


class LaneMemory:
    """What each lane of a context holds.

    Parameters
    ----------
    context : llama_context pointer
        Of a model with a memory.
    n_lanes : int
        Lanes are numbered 0 to n_lanes - 1.
    """

    def __init__(self, context: Any, n_lanes: int) -> None:
        self._memory = lib.llama_get_memory(context)
        self._held: list[TokenArray] = [NO_TOKENS] * n_lanes
        self._settled = True  # no evaluation was interrupted, so nothing lies behind what is held

    def keep(self, asks: Sequence[Ask]) -> list[int]:
        """Cut every asked lane back to a beginning of its sequence, as long as it can stay.

        Returns
        -------
        list of int
            For each ask, how many tokens the lane still holds; at most len(tokens) - n, since the last n
            must be evaluated for their scores. Asks that go on alike from there keep equally many.
        """
        kept = [self._best_lane(ask)[1] for ask in asks]
        kept = _levelled(asks, kept)
        for ask, n in zip(asks, kept, strict=True):
            self._take_over(ask, n)
        kept = [self._forget_behind(ask.lane, n) for ask, n in zip(asks, kept, strict=True)]
        # A memory that could not forget a part holds nothing now; the asks that share with it follow.
        kept = [self._forget_behind(ask.lane, n) for ask, n in zip(asks, _levelled(asks, kept), strict=True)]
        self._settled = False
        return kept

    def remember(self, asks: Sequence[Ask]) -> None:
        """Note that the asked sequences have been evaluated."""
        for ask in asks:
            self._held[ask.lane] = ask.tokens
        self._settled = True

    def clear(self) -> None:
        """Forget everything."""
        lib.llama_memory_clear(self._memory, True)
        self._held = [NO_TOKENS] * len(self._held)
        self._settled = True

    def _best_lane(self, ask: Ask) -> tuple[int, int]:
        """The lane that knows most of a sequence, its own if equal, and how much of it."""
        best, n_best = ask.lane, shared(self._held[ask.lane], ask.tokens)
        for lane, held in enumerate(self._held):
            if lane != ask.lane and (n := shared(held, ask.tokens)) > n_best:
                best, n_best = lane, n
        return best, min(n_best, len(ask.tokens) - ask.n)

    def _take_over(self, ask: Ask, n: int) -> None:
        """Let the ask's lane hold the first `n` tokens, if another lane does and its own does not."""
        source, n_known = self._best_lane(ask)
        if source == ask.lane or n <= shared(self._held[ask.lane], ask.tokens) or n > n_known:
            return
        lib.llama_memory_seq_rm(self._memory, ask.lane, -1, -1)
        lib.llama_memory_seq_cp(self._memory, source, ask.lane, 0, n)
        self._held[ask.lane] = ask.tokens[:n]

    def _forget_behind(self, lane: int, n: int) -> int:
        """Forget what a lane holds from position `n` on; answers how much it holds then."""
        n = min(n, len(self._held[lane]))
        if n == len(self._held[lane]) and self._settled:
            return n
        self._held[lane] = self._held[lane][:n]
        if n == 0 or not lib.llama_memory_seq_rm(self._memory, lane, n, -1):
            lib.llama_memory_seq_rm(self._memory, lane, -1, -1)
            self._held[lane] = NO_TOKENS
        return len(self._held[lane])


def shared(a: TokenArray, b: TokenArray) -> int:
    """Length of the common beginning of two sequences."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _levelled(asks: Sequence[Ask], kept: list[int]) -> list[int]:
    """Lower what is kept until asks that share a token beyond the lower of two keep equally many.

    llama.cpp evaluates a position once for several lanes only if their memories end at the same place.
    """
    kept = list(kept)
    changed = True
    while changed:
        changed = False
        for i, a in enumerate(asks):
            for j, b in enumerate(asks):
                if kept[i] > kept[j] and shared(a.tokens, b.tokens) > kept[j]:
                    kept[i], changed = kept[j], True
    return kept
