"""Ways back for memories that keep a state instead of positions: copies, taken before it changes.

A state (Mamba, RWKV, the linear layers of hybrids) is overwritten by every token, so llama.cpp cannot forget
a part of it. But a copy can be put back, and the tokens that stood since then are read again in the next
evaluation. Keys and values of a hybrid stay where they are and are cut as always. Knows no tokens.
tests/llama/test_model.py compares every answer with that of a model that remembers nothing.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

MOST = 4  # copies of a lane
SPACING = 8  # tokens between two copies while positions are scored one by one, as a draft's are

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a lane after its first `n` tokens."""

    n: int
    state: Bytes


class Snapshots:
    """What each lane can go back to.

    Parameters
    ----------
    context : llama_context pointer
        Of a model that keeps states.
    n_lanes : int
    """

    def __init__(self, context: Any, n_lanes: int) -> None:
        self._context = context
        self._kept: list[list[Snapshot]] = [[] for _ in range(n_lanes)]  # ascending

    def nearest(self, lane: int, n: int) -> int:
        """The longest beginning, of at most `n` tokens, that a lane can go back to; 0 = none."""
        return max((snapshot.n for snapshot in self._kept[lane] if snapshot.n <= n), default=0)

    def take(self, lane: int, n: int, *, will_judge: bool) -> None:
        """Copy the state of a lane that holds `n` tokens, if it is worth while.

        `will_judge`: several positions are about to be scored at once, and some of them may be wrong.
        """
        kept = self._kept[lane]
        if n == 0 or n - self.nearest(lane, n) < (1 if will_judge else SPACING):
            return
        state = self._buffer(kept, self.size(lane))
        n_written = lib.llama_state_seq_get_data_ext(
            self._context, _pointer(state), len(state), lane, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        )
        if n_written == len(state):
            kept.append(Snapshot(n, state))

    def restore(self, lane: int, n: int) -> bool:
        """Put back the state after exactly `n` tokens; False where it cannot be put back."""
        for snapshot in self._kept[lane]:
            if snapshot.n == n:
                flags = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
                size = len(snapshot.state)
                return bool(
                    lib.llama_state_seq_set_data_ext(
                        self._context, _pointer(snapshot.state), size, lane, flags
                    )
                )
        return False

    def try_once(self, n: int) -> float:
        """Seconds to copy the state of lane 0, which holds `n` tokens, and to put it back."""
        start = time.perf_counter()
        self.take(0, n, will_judge=True)
        self.restore(0, n)
        return time.perf_counter() - start

    def forget_behind(self, lane: int, n: int) -> None:
        """Drop what is longer than `n` tokens: other tokens will stand there."""
        self._kept[lane] = [snapshot for snapshot in self._kept[lane] if snapshot.n <= n]

    def clear(self) -> None:
        """Drop everything."""
        self._kept = [[] for _ in self._kept]

    def size(self, lane: int) -> int:
        """Bytes of a copy of a lane's state."""
        return int(
            lib.llama_state_seq_get_size_ext(self._context, lane, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        )

    def _buffer(self, kept: list[Snapshot], size: int) -> Bytes:
        """Room for a copy: that of one whose neighbours are close, once there are enough."""
        if len(kept) < MOST:
            return np.empty(size, dtype=np.uint8)
        borders = [0, *(snapshot.n for snapshot in kept)]
        spans = [after - before for before, after in zip(borders, borders[2:], strict=False)]
        dropped = kept.pop(int(np.argmin(spans)))
        return dropped.state if len(dropped.state) == size else np.empty(size, dtype=np.uint8)


def _pointer(state: Bytes) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
