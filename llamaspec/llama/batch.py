"""llama.cpp's batch over numpy arrays of our own: filled by assignment, freed with the object."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.llama.trie import Node


class Batch:
    """Room for up to `size` positions, each in up to `n_lanes` lanes."""

    def __init__(self, size: int, n_lanes: int) -> None:
        self._token = np.zeros(size, dtype=np.int32)
        self._position = np.zeros(size, dtype=np.int32)
        self._n_lanes = np.zeros(size, dtype=np.int32)
        self._lanes = np.zeros((size, n_lanes), dtype=np.int32)
        self._wanted = np.zeros(size, dtype=np.int8)
        # llama.cpp wants one pointer per position; the rows of `_lanes` do not move.
        rows = self._lanes.ctypes.data + self._lanes.strides[0] * np.arange(size + 1)
        rows[size] = 0
        self._rows = rows.astype(np.uintp)

    def fill(self, nodes: Sequence[Node]) -> lib.llama_batch:
        """The batch that evaluates these positions; valid until the next call."""
        n = len(nodes)
        self._token[:n] = [node.token for node in nodes]
        self._position[:n] = [node.position for node in nodes]
        self._n_lanes[:n] = [len(node.lanes) for node in nodes]
        self._wanted[:n] = [node.wanted for node in nodes]
        for i, node in enumerate(nodes):
            self._lanes[i, : len(node.lanes)] = node.lanes
        return lib.llama_batch(
            n_tokens=n,
            token=_pointer(self._token, lib.llama_token),
            embd=None,
            pos=_pointer(self._position, lib.llama_pos),
            n_seq_id=_pointer(self._n_lanes, ctypes.c_int32),
            seq_id=ctypes.cast(self._rows.ctypes.data, ctypes.POINTER(ctypes.POINTER(lib.llama_seq_id))),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )


def _pointer(array: np.ndarray, kind: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
