"""llama.cpp's batch over numpy arrays of our own: filled by assignment, freed with the object."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.llama.sequences import Rows
from llamaspec.llama.tree_cells import Tree
from llamaspec.values import ForwardRequest, TokenArray


class Segment(NamedTuple):
    """Positions of one sequence: consecutive ones, or a text and a tree behind it."""

    sequence: int
    start: int  # position of the first token
    tokens: TokenArray  # [n]
    n_scored: int  # the last of them whose logits are wanted
    hidden: Rows | None = None  # [n, E] what a prediction head gets with the tokens
    positions: TokenArray | None = None  # [n] of a tree; None = one after the other
    owners: Sequence[Sequence[int]] = ()  # [n] the sequences that hold each position of a tree
    end: int = 0  # position behind the last of `sequence`, where there is a tree


class Batch:
    """Room for `size` positions: tokens, hidden rows of `width` numbers (0 = none), or both."""

    def __init__(self, size: int, width: int = 0) -> None:
        self._hidden = np.zeros((size, width), dtype=np.float32) if width else None
        self._token = np.zeros(size, dtype=np.int32)
        self._position = np.zeros(size, dtype=np.int32)
        self._n_sequences = np.ones(size, dtype=np.int32)
        self._sequence = np.zeros(size, dtype=np.int32)
        self._wanted = np.zeros(size, dtype=np.int8)
        # llama.cpp wants one pointer per position; the entries of `_sequence` do not move.
        pointers = self._sequence.ctypes.data + self._sequence.itemsize * np.arange(size + 1)
        pointers[size] = 0
        self._pointers = pointers.astype(np.uintp)
        self._own_pointers = self._pointers.copy()
        self._owners: npt.NDArray[np.int32] | None = None  # of positions in several sequences
        self._batch = lib.llama_batch(
            n_tokens=0,
            token=_pointer(self._token, lib.llama_token),
            embd=None if self._hidden is None else _pointer(self._hidden, ctypes.c_float),
            pos=_pointer(self._position, lib.llama_pos),
            n_seq_id=_pointer(self._n_sequences, ctypes.c_int32),
            seq_id=ctypes.cast(self._pointers.ctypes.data, ctypes.POINTER(ctypes.POINTER(lib.llama_seq_id))),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(self, segments: Sequence[Segment]) -> lib.llama_batch:
        """The batch that evaluates these positions; valid until the next call."""
        end, branches = 0, False
        if self._owners is not None:
            self._pointers[:], self._n_sequences[:], self._owners = self._own_pointers, 1, None
        for segment in segments:
            start, end = end, end + len(segment.tokens)
            self._token[start:end] = segment.tokens
            self._sequence[start:end] = segment.sequence
            self._wanted[start:end] = 0
            self._wanted[end - segment.n_scored : end] = 1
            if self._hidden is not None and segment.hidden is not None:
                self._hidden[start:end] = segment.hidden
            if segment.positions is None:
                positions = np.arange(segment.start, segment.start + end - start, dtype=np.int32)
            else:
                positions, branches = segment.positions, True
            self._position[start:end] = positions
        if branches:
            self._set_owners(segments)
        self._batch.n_tokens = end
        return self._batch

    def _set_owners(self, segments: Sequence[Segment]) -> None:
        """Let positions of trees belong to all their sequences."""
        numbers = [number for segment in segments for owners in segment.owners for number in owners]
        self._owners = np.array(numbers, dtype=np.int32)
        end, address = 0, self._owners.ctypes.data
        for segment in segments:
            start, end = end, end + len(segment.tokens)
            for i, owners in enumerate(segment.owners, start):
                self._n_sequences[i], self._pointers[i] = len(owners), address
                address += self._owners.itemsize * len(owners)


def tree_segment(number: int, start: int, request: ForwardRequest, tree: Tree) -> Segment:
    """What is not cached of a tree: text of sequence `number` from `start` on, and draft tokens behind it."""
    n, n_old = len(request.tokens), tree.n_old
    places = [*range(start, n), *[n + depth for depth in tree.depths[n_old:]]]
    owners = [list(tree.tips)] * (n - start) + tree.owners[n_old:]
    new = np.concatenate((request.tokens[start:], request.draft[n_old:]))
    tip, positions = tree.tips[number], np.array(places, dtype=np.int32)
    end = n if tip < 0 else n + tree.depths[tip] + 1
    return Segment(number, start, new, request.n_scored, None, positions, owners, end)


def padding(last: Segment, n: int, n_scorable: int) -> Segment:
    """Positions behind the last row that nobody looks at; scored like it, as far as that is possible."""
    end = last.end or last.start + len(last.tokens)
    tokens = np.full(n, last.tokens[-1], dtype=np.int32)
    return Segment(last.sequence, end, tokens, max(0, min(n, n_scorable)))


def _pointer(array: np.ndarray, kind: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
