"""llama.cpp's batch over numpy arrays of our own: filled by assignment, freed with the object."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.llama.cells import Rows
from llamaspec.llama.tree_cells import Tree
from llamaspec.values import ForwardRequest, TokenArray


class TreePlaces(NamedTuple):
    """Positions of a segment that branches, and their sequences."""

    positions: TokenArray  # [n]
    owners: Sequence[Sequence[int]]  # [n] the sequences that hold each; at least one
    end: int  # position behind the last of the segment's own sequence


class Segment(NamedTuple):
    """Consecutive positions of one sequence, or of one with branches."""

    sequence: int
    start: int  # position of the first token
    tokens: TokenArray  # [n]
    n_scored: int  # the last of them whose logits are wanted
    hidden: Rows | None = None  # [n, E] what a prediction head gets with the tokens
    places: TreePlaces | None = None  # None = one after the other


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
            self._position[start:end] = np.arange(segment.start, segment.start + end - start, dtype=np.int32)
            self._sequence[start:end] = segment.sequence
            self._wanted[start:end] = 0
            self._wanted[end - segment.n_scored : end] = 1
            if self._hidden is not None and segment.hidden is not None:
                self._hidden[start:end] = segment.hidden
            if segment.places is not None:
                self._position[start:end] = segment.places.positions
                branches = True
        if branches:
            self._set_owners(segments)
        self._batch.n_tokens = end
        return self._batch

    def _set_owners(self, segments: Sequence[Segment]) -> None:
        """Let positions that branch belong to all their sequences."""
        lists = [segment.places.owners for segment in segments if segment.places is not None]
        self._owners = np.array([number for owners in lists for each in owners for number in each], np.int32)
        end, address = 0, self._owners.ctypes.data
        for segment in segments:
            start, end = end, end + len(segment.tokens)
            if segment.places is not None:
                for i, owners in enumerate(segment.places.owners, start):
                    self._n_sequences[i], self._pointers[i] = len(owners), address
                    address += self._owners.itemsize * len(owners)


def tree_segment(number: int, start: int, request: ForwardRequest, tree: Tree) -> Segment:
    """What of a tree is not cached: text of sequence `number` from `start` on, and draft tokens behind it."""
    n, n_old = len(request.tokens), tree.n_old
    behind = [n + depth for depth in tree.depths]
    positions = np.array([*range(start, n), *behind[n_old:]], dtype=np.int32)
    tip = tree.tips[number]
    owners = [list(tree.tips)] * (n - start) + tree.owners[n_old:]
    places = TreePlaces(positions, owners, n if tip < 0 else behind[tip] + 1)
    new = np.concatenate((request.tokens[start:], request.draft[n_old:]))
    return Segment(number, start, new, request.n_scored, places=places)


def padding(last: Segment, n: int, n_scorable: int) -> Segment:
    """Positions behind the last row that nobody looks at; scored like it, as far as that is possible."""
    tokens = np.full(n, last.tokens[-1], dtype=np.int32)
    end = last.start + len(last.tokens) if last.places is None else last.places.end
    return Segment(last.sequence, end, tokens, max(0, min(n, n_scorable)))


def _pointer(array: np.ndarray, kind: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
