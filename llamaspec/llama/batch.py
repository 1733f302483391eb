"""llama.cpp's batch over numpy arrays of our own: filled by assignment, freed with the object."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.llama.nextn import Rows
from llamaspec.values import TokenArray


class Segment(NamedTuple):
    """Positions of one sequence to evaluate: consecutive ones, or some text and a tree behind it."""

    sequence: int
    start: int  # position of the first token
    tokens: TokenArray  # [n]
    n_scored: int  # the last of them whose logits are wanted
    hidden: Rows | None = None  # [n, E] for a prediction head: a hidden row with each token
    positions: TokenArray | None = None  # [n] of a tree; None = one after the other
    owners: Sequence[Sequence[int]] = ()  # [n] the sequences that hold each position of a tree
    end: int = 0  # number of positions that `sequence` holds after it, if there is a tree

    def padding(self, n: int, n_scorable: int) -> Segment:
        """Positions behind this segment whose logits nobody reads, scored as far as that is possible."""
        tokens = np.full(n, self.tokens[-1], dtype=np.int32)
        end = self.end or self.start + len(self.tokens)
        return Segment(self.sequence, end, tokens, max(0, min(n, n_scorable)))


class Batch:
    """Room for `size` positions, each with a token and, if `width` > 0, a hidden row of that many numbers."""

    def __init__(self, size: int, width: int = 0) -> None:
        self._hidden = np.zeros((size, width), dtype=np.float32) if width else None
        self._token = np.zeros(size, dtype=np.int32)
        self._position = np.zeros(size, dtype=np.int32)
        self._wanted = np.zeros(size, dtype=np.int8)
        self._n_owners = np.zeros(size, dtype=np.int32)
        self._pointers = np.zeros(size, dtype=np.uintp)  # to the first owner of each position
        self._owners: npt.NDArray[np.int32]  # llama.cpp reads it during an evaluation
        self._batch = lib.llama_batch(
            n_tokens=0,
            token=_pointer(self._token, lib.llama_token),
            embd=None if self._hidden is None else _pointer(self._hidden, ctypes.c_float),
            pos=_pointer(self._position, lib.llama_pos),
            n_seq_id=_pointer(self._n_owners, ctypes.c_int32),
            seq_id=_pointer(self._pointers, ctypes.POINTER(lib.llama_seq_id)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(self, segments: Sequence[Segment]) -> lib.llama_batch:
        """Return the batch that evaluates these positions; valid until the next call."""
        end, owners = 0, list[Sequence[int]]()
        for segment in segments:
            n = len(segment.tokens)
            start, end = end, end + n
            self._token[start:end] = segment.tokens
            self._wanted[start:end] = 0
            self._wanted[end - segment.n_scored : end] = 1
            if segment.positions is None:
                self._position[start:end] = np.arange(segment.start, segment.start + n, dtype=np.int32)
            else:
                self._position[start:end] = segment.positions
            if self._hidden is not None and segment.hidden is not None:
                self._hidden[start:end] = segment.hidden
            owners += segment.owners or [(segment.sequence,)] * n
        self._owners = np.array([number for each in owners for number in each], dtype=np.int32)
        self._n_owners[:end] = n_owners = np.array([len(each) for each in owners], dtype=np.int32)
        offsets = np.cumsum(n_owners) - n_owners
        self._pointers[:end] = self._owners.ctypes.data + self._owners.itemsize * offsets
        self._batch.n_tokens = end
        return self._batch


def _pointer(array: np.ndarray, kind: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
