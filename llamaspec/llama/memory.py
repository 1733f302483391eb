"""The key/value memory as a cache of token sequences, one for each lane.

Before an evaluation every lane is cut back to what it shares with the asked sequence. A lane also takes
over, without computing, what another lane already knows. A memory that cannot forget a part goes back to a
snapshot, or is cleared and read again: slower, never wrong. tests/llama/test_model.py compares with fresh
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_cpp import llama_cpp as lib

from llamaspec.llama.snapshots import SPACING, Snapshots
from llamaspec.values import NO_TOKENS, Ask, TokenArray


class LaneMemory:
    """What each lane of a context holds.

    Parameters
    ----------
    context : llama_context pointer
        Of a model with a memory.
    n_lanes : int
        Lanes are numbered 0 to n_lanes - 1.
    shares : bool
        Whether a position may belong to several lanes. llama.cpp's recurrent states get that wrong.
    window : int, optional
        How many positions some layers look back, if not all. llama.cpp may give away the places of
        positions that lie outside, and then a lane cannot go back there.
    snapshots : Snapshots, optional
        For a memory that cannot forget a part.
    """

    def __init__(
        self,
        context: Any,
        n_lanes: int,
        *,
        shares: bool = True,
        window: int | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._memory = lib.llama_get_memory(context)
        self._shares = shares
        self._window = window
        self._snapshots = snapshots
        self._held: list[TokenArray] = [NO_TOKENS] * n_lanes
        self._settled = True  # no evaluation was interrupted, so nothing lies behind what is held
        self._n_states_back = int(lib.llama_n_rs_seq(context))  # that llama.cpp keeps of a lane
        self._n_last = 0  # tokens of the last evaluation, after which nothing was taken back
        self._batch_size = int(lib.llama_n_batch(context))

    def keep(self, asks: Sequence[Ask]) -> list[int]:
        """Cut every asked lane back to a beginning of its sequence, as long as it can stay.

        Returns
        -------
        list of int
            For each ask, how many tokens the lane still holds; at most len(tokens) - n, since the last n
            must be evaluated for their scores. Asks that go on alike from there keep equally many.
        """
        kept = self._levelled(asks, [self._best_lane(ask)[1] for ask in asks])
        for ask, n in zip(asks, kept, strict=True):
            self._take_over(ask, n)
        # llama.cpp evaluates a position for several lanes only if their memories begin at the same place.
        window = self._window if len(asks) == 1 else None
        while True:
            held = [self._forget_behind(ask, n, window) for ask, n in zip(asks, kept, strict=True)]
            kept = self._levelled(asks, held)
            if kept == held:
                break
        if self._snapshots is not None:
            for ask, n in zip(asks, kept, strict=True):
                self._snapshots.take(ask.lane, n, will_judge=ask.n - 1 > self._n_states_back)
        self._settled = False
        return kept

    def known(self, tokens: TokenArray) -> int:
        """How many of the first tokens are held by a lane that can go back to there."""
        return max(self._reachable(lane, shared(held, tokens)) for lane, held in enumerate(self._held))

    def has_much_to_repeat(self, asks: Sequence[Ask]) -> bool:
        """Whether so much must be read again that it pays to do that first, and to take a snapshot there.

        Else the same tokens would be read again after the next wrong guess, and more with every round.
        """
        if self._snapshots is None or len(asks) != 1 or not 1 < asks[0].n < len(asks[0].tokens):
            return False
        sure = asks[0].tokens[: -asks[0].n]
        return len(sure) - self.known(sure) >= SPACING

    def _reachable(self, lane: int, n: int) -> int:
        """How many of the first `n` tokens that a lane holds remain when it is cut to them."""
        if self._shares or self._can_cut_state(lane, n):
            return n
        return self._snapshots.nearest(lane, n) if self._snapshots is not None else 0

    def remember(self, asks: Sequence[Ask]) -> None:
        """Note that the asked sequences have been evaluated."""
        for ask in asks:
            n_read = len(ask.tokens) - len(self._held[ask.lane])
            if n_read:
                self._n_last = (n_read - 1) % self._batch_size + 1
            self._held[ask.lane] = ask.tokens.copy()  # the asker may reuse its array
        self._settled = True

    def clear(self) -> None:
        """Forget everything."""
        self._held = [NO_TOKENS] * len(self._held)
        if self._snapshots is not None:
            self._snapshots.clear()
        lib.llama_memory_clear(self._memory, True)
        self._settled, self._n_last = True, 0

    def try_snapshot(self) -> tuple[int, float]:
        """Bytes of a snapshot of lane 0, and seconds to take it and put it back; zeros without any."""
        if self._snapshots is None:
            return 0, 0.0
        return self._snapshots.size(0), self._snapshots.try_once(len(self._held[0]))

    def _levelled(self, asks: Sequence[Ask], kept: list[int]) -> list[int]:
        return levelled(asks, kept) if self._shares else kept

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
        self._held[ask.lane] = NO_TOKENS  # first, so that an interruption in between does no harm
        lib.llama_memory_seq_rm(self._memory, ask.lane, -1, -1)
        lib.llama_memory_seq_cp(self._memory, source, ask.lane, 0, n)
        self._held[ask.lane] = ask.tokens[:n].copy()

    def _forget_behind(self, ask: Ask, n: int, window: int | None) -> int:
        """Forget what a lane holds besides the first `n` tokens of an ask; answers how many it holds then."""
        held = self._held[ask.lane]
        n = min(n, shared(held, ask.tokens))  # another lane may have taken over the place it counted on
        can_cut = n > 0 and (self._shares or self._can_cut_state(ask.lane, n))
        self._held[ask.lane] = NO_TOKENS
        # Also where nothing seems to lie behind: an interrupted evaluation leaves positions unnoted.
        if not can_cut or not self._cut(ask.lane, n, window):
            n = self._go_back(ask.lane, n)
        if n < len(held):
            self._n_last = 0
        if self._snapshots is not None:
            self._snapshots.forget_behind(ask.lane, n)
        self._held[ask.lane] = held[:n]
        return n

    def _can_cut_state(self, lane: int, n: int) -> bool:
        """Whether the memory has the state after the first `n` tokens of what a lane holds.

        llama.cpp keeps states of the last evaluation only, but says yes to going back further, and then
        has a wrong one.
        """
        n_back = len(self._held[lane]) - n
        return self._settled and n_back <= max(0, min(self._n_states_back, self._n_last - 1))

    def _go_back(self, lane: int, n: int) -> int:
        """Put a lane back to a snapshot of at most `n` tokens, or empty it; answers how many it holds."""
        if self._snapshots is not None:
            n = self._snapshots.nearest(lane, n)
            if n and self._snapshots.restore(lane, n) and lib.llama_memory_seq_rm(self._memory, lane, n, -1):
                return n
        lib.llama_memory_seq_rm(self._memory, lane, -1, -1)
        return 0

    def _cut(self, lane: int, n: int, window: int | None) -> bool:
        """Cut a lane to `n` positions; answers whether all are there that the next position looks at."""
        if not lib.llama_memory_seq_rm(self._memory, lane, n, -1):
            return False
        if self._window is None:
            return True
        first_seen = 0 if window is None else max(0, n + 1 - window)
        return bool(0 <= lib.llama_memory_seq_pos_min(self._memory, lane) <= first_seen)


def shared(a: TokenArray, b: TokenArray) -> int:
    """Length of the common beginning of two sequences."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def levelled(asks: Sequence[Ask], kept: list[int]) -> list[int]:
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
