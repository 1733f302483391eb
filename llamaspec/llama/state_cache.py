"""The cache of a context whose layers keep states (Mamba, RWKV, hybrids): one row, rollback by snapshots.

A state is overwritten by every token, so llama.cpp cannot forget a part of it. It goes back to an earlier
state that llama.cpp kept itself (`n_rs_seq`; right only within the last evaluation, though llama.cpp allows
more), or to a snapshot taken before an evaluation, and the tokens since then are read again. Keys and
values of a hybrid are cut as always. Such memories cannot be shared by rows, so every row has a context of
its own. tests/llama/test_model.py compares every answer with that of a model that has cached nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.errors import ContextFullError
from llamaspec.llama.cached_sequence import CachedSequence
from llamaspec.llama.kv_cache import Prepared
from llamaspec.values import ForwardRequest, TokenArray

MOST = 4  # snapshots
SPACING = 8  # tokens between two snapshots while positions are scored one by one, as a draft's are
SEQUENCE = 0  # llama.cpp's seq_id
_FLAGS = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after the first `n` tokens."""

    n: int
    state: Bytes


class Snapshots:
    """States that a context can go back to.

    Parameters
    ----------
    context : llama_context pointer
        Of a model that keeps states.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._kept: list[Snapshot] = []  # ascending

    def nearest(self, n: int) -> int:
        """The longest beginning, of at most `n` tokens, that can be gone back to; 0 = none."""
        return max((snapshot.n for snapshot in self._kept if snapshot.n <= n), default=0)

    def take(self, n: int) -> None:
        """Copy the state after `n` tokens."""
        state = self._buffer(self.size())
        n_written = lib.llama_state_seq_get_data_ext(
            self._context, _pointer(state), len(state), SEQUENCE, _FLAGS
        )
        if n_written == len(state):
            self._kept.append(Snapshot(n, state))

    def restore(self, n: int) -> bool:
        """Put back the state after exactly `n` tokens; False where it cannot be put back."""
        for snapshot in self._kept:
            if snapshot.n == n:
                size = len(snapshot.state)
                return bool(
                    lib.llama_state_seq_set_data_ext(
                        self._context, _pointer(snapshot.state), size, SEQUENCE, _FLAGS
                    )
                )
        return False

    def forget_behind(self, n: int) -> None:
        """Drop what is longer than `n` tokens: other tokens will stand there."""
        self._kept = [snapshot for snapshot in self._kept if snapshot.n <= n]

    def size(self) -> int:
        """Bytes of a snapshot."""
        return int(lib.llama_state_seq_get_size_ext(self._context, SEQUENCE, _FLAGS))

    def _buffer(self, size: int) -> Bytes:
        """Room for a copy: that of one whose neighbours are close, once there are enough."""
        if len(self._kept) < MOST:
            return np.empty(size, dtype=np.uint8)
        borders = [0, *(snapshot.n for snapshot in self._kept)]
        spans = [after - before for before, after in zip(borders, borders[2:], strict=False)]
        dropped = self._kept.pop(int(np.argmin(spans)))
        return dropped.state if len(dropped.state) == size else np.empty(size, dtype=np.uint8)


class StateCache:
    """What a context with states holds, for one row at a time.

    Parameters
    ----------
    context : llama_context pointer
    size : int
        The longest text, in tokens.
    snapshots : Snapshots, optional
        None where a snapshot cannot be put back.
    """

    def __init__(self, context: Any, size: int, snapshots: Snapshots | None) -> None:
        self._memory = lib.llama_get_memory(context)
        self._size = size
        self._snapshots = snapshots
        self._held = CachedSequence(SEQUENCE)
        self._is_settled = True  # no evaluation was interrupted, so nothing lies behind what is noted
        self._n_states_back = int(lib.llama_n_rs_seq(context))  # that llama.cpp keeps itself
        self._n_last = 0  # tokens of the last evaluation, after which nothing was taken back

    @property
    def size(self) -> int:
        """Tokens of the longest text."""
        return self._size

    @property
    def n_used(self) -> int:
        """Tokens of the text that is held."""
        return self._held.n

    def prepare_all(self, batch: Sequence[Prepared]) -> list[int | ContextFullError]:
        """Prepare the row; answers how many of its tokens are cached."""
        ((_, request, _),) = batch
        if request.n_tokens > self._size:
            return [ContextFullError(f"the context of {self._size} tokens is full")]
        n_shared, n_before = self._held.shared(request.tokens), len(request.tokens) - request.n_logits
        if n_shared == n_before == request.n_tokens:
            return [n_shared]  # and keep what follows: it may be wanted next
        n = self._cut(min(n_shared, n_before))
        return [n]

    def take_snapshot(self, n_scored: int) -> None:
        """Before an evaluation that scores `n_scored` positions: a way back to here, if it is worth while."""
        n, several = self._held.n, n_scored - 1 > self._n_states_back
        if (
            self._snapshots is not None
            and n - self._snapshots.nearest(n) >= (1 if several else SPACING)
            and n
        ):
            self._snapshots.take(n)

    def reads_first(self, request: ForwardRequest, n_cached: int) -> bool:
        """Whether so much must be read again that it pays to do that first, and to take a snapshot there.

        Else the same tokens would be read again after the next rejection, and more with every round.
        """
        n_before = len(request.tokens) - request.n_logits
        return self._snapshots is not None and request.n_scored > 1 and n_before - n_cached >= SPACING

    def sequence(self, row: int) -> CachedSequence:
        """What is held."""
        return self._held

    def find(self, row: int) -> CachedSequence | None:
        """The same."""
        return self._held

    def shared(self, tokens: TokenArray) -> int:
        """How many of the first tokens are held, and can be gone back to."""
        return self._reachable(self._held.shared(tokens))

    def begin(self) -> None:
        """An evaluation starts."""
        self._is_settled = False

    def commit(self, evaluated: Sequence[tuple[int, TokenArray]], n_padding: int = 0) -> None:
        """Note what an evaluation has added."""
        ((_, tokens),) = evaluated
        self._n_last = len(tokens)
        self._held.append(tokens, np.zeros(len(tokens), dtype=np.int32))
        self._is_settled = True

    def release(self, row: int) -> None:
        """The row has ended; its text stays, for a row that begins alike."""
        self._held.hidden = self._held.hidden.tail(self._held.n)

    def forget(self) -> None:
        """Empty everything."""
        self._held.n, self._n_last, self._is_settled = 0, 0, False  # first, as in `_cut`
        if self._snapshots is not None:
            self._snapshots.forget_behind(0)
        lib.llama_memory_clear(self._memory, True)
        self._is_settled = True

    def try_snapshot(self) -> tuple[int, float]:
        """Bytes of a snapshot, and seconds to take it and put it back; zeros without any."""
        n, snapshots = self._held.n, self._snapshots
        if snapshots is None or not n:
            return 0, 0.0
        start = time.perf_counter()
        snapshots.take(n)
        snapshots.restore(n)
        return snapshots.size(), time.perf_counter() - start

    def _cut(self, n: int) -> int:
        """Go back to at most `n` tokens; answers how many are held then."""
        n_held, self._held.n = self._held.n, 0  # first, so that an interruption in between does no harm
        # Also where nothing seems to lie behind: an interrupted evaluation leaves positions unnoted.
        can_cut = n > 0 and self._can_cut(n_held, n)
        if not can_cut or not lib.llama_memory_seq_rm(self._memory, SEQUENCE, n, -1):
            n = self._go_back(n)
        if n < n_held:
            self._n_last = 0
        if self._snapshots is not None:
            self._snapshots.forget_behind(n)
        self._held.n, self._is_settled = n, True
        return n

    def _can_cut(self, n_held: int, n: int) -> bool:
        return self._is_settled and n_held - n <= max(0, min(self._n_states_back, self._n_last - 1))

    def _reachable(self, n: int) -> int:
        if self._can_cut(self._held.n, n):
            return n
        return self._snapshots.nearest(n) if self._snapshots is not None else 0

    def _go_back(self, n: int) -> int:
        if self._snapshots is not None:
            n = self._snapshots.nearest(n)
            if n and self._snapshots.restore(n) and lib.llama_memory_seq_rm(self._memory, SEQUENCE, n, -1):
                return n
        lib.llama_memory_seq_rm(self._memory, SEQUENCE, -1, -1)
        return 0


def _pointer(state: Bytes) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
