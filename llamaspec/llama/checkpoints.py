"""The states that a context has copied of its sequence, to return to them.

Some are kept as long as the sequence, for later requests that branch off there. Their bytes count towards the
prefix store's limit, and those of a sequence are at most a share of it; the one whose loss would cost least
goes first. Others are taken before draft tokens are evaluated, and only the latest of these stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_cpp import llama_cpp as lib

from llamaspec.llama.cells import copy_state, put_state
from llamaspec.llama.prefix_store import Checkpoint, PrefixStore

SHARE = 8  # kept states of a sequence take at most 1 / SHARE of the store's limit
MIN_KEPT, MAX_KEPT = 2, 32
_FLAGS = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class Checkpoints:
    """The copied states of one context's sequence."""

    def __init__(self, context: Any, seq_id: int, store: PrefixStore) -> None:
        self._context, self._seq_id, self._store = context, seq_id, store
        self.kept: Sequence[Checkpoint] = ()  # ascending
        self._latest: Sequence[Checkpoint] = ()  # ascending

    def nearest(self, n: int, *, only_kept: bool = False) -> int:
        """Return the position of the last checkpoint within the first `n` tokens; 0 = none."""
        found = self.kept if only_kept else (*self.kept, *self._latest)
        return max((each.n for each in found if each.n <= n), default=0)

    def keep(self, n: int) -> None:
        """Keep the state of now, after `n` tokens, and drop the least useful ones over the limit."""
        new = self._copied(n)
        if new is None:
            return
        n_most = self._store.limit // SHARE // max(1, new.state.nbytes)
        kept = [*self.kept, new]
        while len(kept) > min(max(MIN_KEPT, n_most), MAX_KEPT):
            del kept[_least_useful(kept)]
        self.replace(kept)

    def take(self, n: int, n_most: int) -> None:
        """Copy the state of now, after `n` tokens, and leave the `n_most` latest copies of this kind."""
        new = self._copied(n)
        if new is not None:
            self._latest = [*self._latest, new][-n_most:]

    def cut(self, n: int) -> None:
        """Drop what is after the first `n` tokens."""
        self._latest = [each for each in self._latest if each.n <= n]
        if self.kept and self.kept[-1].n > n:
            self.replace([each for each in self.kept if each.n <= n])

    def replace(self, kept: Sequence[Checkpoint]) -> None:
        """Keep other states instead."""
        n_before, self.kept = _n_bytes(self.kept), kept
        if change := _n_bytes(kept) - n_before:
            self._store.lend(change)

    def restore(self, n: int) -> bool:
        """Return to the state after exactly `n` tokens; False if that fails."""
        state = next(each.state for each in (*self.kept, *self._latest) if each.n == n)
        return put_state(self._context, self._seq_id, state, _FLAGS)

    def _copied(self, n: int) -> Checkpoint | None:
        state = copy_state(self._context, self._seq_id, _FLAGS)
        return None if state is None else Checkpoint(n, state)


def _n_bytes(checkpoints: Sequence[Checkpoint]) -> int:
    return sum(each.state.nbytes for each in checkpoints)


def _least_useful(kept: Sequence[Checkpoint]) -> int:
    """Return the index of the checkpoint to drop; never the last.

    Without it, as many tokens as there are between its neighbours may have to be evaluated again, and the
    farther back it is, the less likely is a branch there.
    """
    borders, end = [0, *(each.n for each in kept)], kept[-1].n
    losses = [
        (after - before) / max(1, end - n)
        for before, n, after in zip(borders, borders[1:], borders[2:], strict=False)
    ]
    return losses.index(min(losses))
