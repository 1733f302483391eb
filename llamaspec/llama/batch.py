"""A llama.cpp batch over numpy arrays: filled by assignment, freed with the object."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.values import Rows, TokenArray


class Segment(NamedTuple):
    """Consecutive tokens of one sequence to evaluate."""

    seq_id: int  # llama.cpp's
    start: int  # position of the first token
    tokens: TokenArray  # [n]
    n_scored: int  # number of tokens, the last ones, that get logits
    hidden: Rows | None = None  # [n, E] for a prediction head: the hidden row that goes with each token

    def padding(self, n: int, n_scorable: int) -> Segment:
        """Return `n` unused positions after this segment, of which at most `n_scorable` get logits."""
        tokens = np.full(n, self.tokens[-1], dtype=np.int32)
        return Segment(self.seq_id, self.start + len(self.tokens), tokens, max(0, min(n, n_scorable)))


class Batch:
    """A batch of at most `size` positions: a token for each, a hidden row if `hidden_size` > 0, or both.

    Without tokens, llama.cpp expects `n_axes` positions for each hidden row, as M-RoPE has them.
    """

    def __init__(self, size: int, hidden_size: int = 0, *, has_tokens: bool = True, n_axes: int = 1) -> None:
        self.size, self._n_axes = size, n_axes
        self._hidden = np.zeros((size, hidden_size), dtype=np.float32) if hidden_size else None
        self._token = np.zeros(size, dtype=np.int32)
        self._position = np.zeros(n_axes * size, dtype=np.int32)
        self._wanted = np.zeros(size, dtype=np.int8)
        self._n_owners = np.ones(size, dtype=np.int32)
        self._owner = np.zeros(size, dtype=np.int32)  # the seq_id of each position
        offsets = self._owner.itemsize * np.arange(size, dtype=np.uintp)
        self._pointers = self._owner.ctypes.data + offsets  # to the owner of each position
        self._batch = lib.llama_batch(
            n_tokens=0,
            token=_pointer(self._token, lib.llama_token) if has_tokens else None,
            embd=None if self._hidden is None else _pointer(self._hidden, ctypes.c_float),
            pos=_pointer(self._position, lib.llama_pos),
            n_seq_id=_pointer(self._n_owners, ctypes.c_int32),
            seq_id=_pointer(self._pointers, ctypes.POINTER(lib.llama_seq_id)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(self, segments: Sequence[Segment]) -> lib.llama_batch:
        """Return the batch that evaluates some segments; valid until the next call."""
        end = 0
        for segment in segments:
            n = len(segment.tokens)
            start, end = end, end + n
            self._token[start:end] = segment.tokens
            self._wanted[start:end] = 0
            self._wanted[end - segment.n_scored : end] = 1
            self._position[start:end] = np.arange(segment.start, segment.start + n, dtype=np.int32)
            self._owner[start:end] = segment.seq_id
            if self._hidden is not None and segment.hidden is not None:
                self._hidden[start:end] = segment.hidden
        for axis in range(1, self._n_axes):  # text has the same position on all axes but the last
            self._position[axis * end : (axis + 1) * end] = self._position[:end] if axis < 3 else 0
        self._batch.n_tokens = end
        return self._batch


def _pointer(array: np.ndarray, kind: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
