"""The cells of a KV cache: operations on llama.cpp's cells, and a table of the sequences that hold each.

Cells below the top are full; the others are empty. If no sequence holds a cell any more and it is the last
full one, it becomes empty. Otherwise it becomes garbage, which a separate llama.cpp sequence holds. So cells
are filled only at the top, and the cells of a sequence ascend with its positions: attention adds up in the
same order as if the sequence were alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.llama.batch import Segment
from llamaspec.llama.prefix_store import Bytes
from llamaspec.values import (
    NO_SCOPE,
    NO_TOKENS,
    PICTURE,
    ForwardRequest,
    Scope,
    TokenArray,
    before_picture,
    n_common,
    serves,
)

BLOCK = 256  # cells; llama.cpp's attention passes over whole blocks


@dataclass(slots=True, eq=False)
class CachedSequence:
    """A sequence of cached tokens, and their cells."""

    seq_id: int  # llama.cpp's
    scope: Scope = NO_SCOPE
    last_used: int = 0
    n_reserved: int = 0  # cells that the next evaluation fills
    n_padding: int = 0  # of these, cells for padding
    n_offered: int = 0  # tokens that the store was given since the sequence has finished
    n: int = 0
    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [capacity], of which the first n are used
    cells: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [capacity] index of each token's cell

    def append(self, tokens: TokenArray, cells: TokenArray) -> None:
        """Append tokens. The length is set last, so an exception leaves the sequence as it was."""
        end = self.n + len(tokens)
        if end > len(self.tokens):
            grown = np.empty((2, max(2 * end, 256)), dtype=np.int32)
            grown[0, : self.n], grown[1, : self.n] = self.tokens[: self.n], self.cells[: self.n]
            self.tokens, self.cells = grown
        self.tokens[self.n : end], self.cells[self.n : end] = tokens, cells
        self.n = end

    def shared(self, tokens: TokenArray) -> int:
        """Return the length of the common beginning with `tokens`, which cuts no picture."""
        return before_picture(tokens, n_common(self.tokens[: self.n], tokens))

    def known(self, tokens: TokenArray, scope: Scope) -> int:
        """Return how many of the first tokens of a sequence of some scope this one can supply."""
        return self.shared(tokens) if serves(self.scope, scope) else 0

    def segment(self, request: ForwardRequest) -> Segment:
        """Return what to evaluate for a request that begins with this sequence."""
        new = request.tokens[self.n :]
        if len(request.draft):
            new = np.concatenate((new, request.draft))
        return Segment(self.seq_id, self.n, new, request.n_scored)


class Cells:
    """llama.cpp's cells of one context.

    The seq_id `carrier` is for copying only. At most `block` positions are copied at once; 0 = the cells
    cannot be copied. In a layer with a sliding window, llama.cpp copies only the positions that the last one
    sees, so a block is at most as long as the window.
    """

    def __init__(self, context: Any, carrier: int, block: int = BLOCK) -> None:
        self._context, self._carrier, self.block = context, carrier, block
        self._memory = lib.llama_get_memory(context)

    def position(self, seq_id: int, n: int) -> int:
        """Return llama.cpp's position of the token after the first `n`."""
        return n

    def n_storable(self, tokens: TokenArray) -> int:
        """Return how many of the first tokens can be copied."""
        return len(tokens)

    def remove(self, seq_id: int, start: int) -> None:
        """Remove a sequence's positions from `start` on."""
        lib.llama_memory_seq_rm(self._memory, seq_id, start, -1)

    def share(self, source: int, seq_id: int, start: int, end: int) -> None:
        """Let `seq_id` also hold the cells of some positions of `source`."""
        lib.llama_memory_seq_cp(self._memory, source, seq_id, start, end)

    def copy_out(self, seq_id: int, start: int, end: int) -> Bytes | None:
        """Return the content of a block of positions; None if it cannot be copied."""
        if not self.block:
            return None
        self.share(seq_id, self._carrier, start, end)
        try:
            return copy_state(self._context, self._carrier)
        except MemoryError:
            return None
        finally:
            self.remove(self._carrier, 0)

    def copy_in(self, content: Bytes, parts: Sequence[tuple[int, int, int]]) -> bool:
        """Copy a block into the first empty cells, and give them to sequences; False if that failed.

        A part is (seq_id, start, end): a sequence and the positions that it gets.
        """
        is_in = put_state(self._context, self._carrier, content)
        if is_in:
            for seq_id, start, end in parts:
                self.share(self._carrier, seq_id, start, end)
        self.remove(self._carrier, 0)
        return is_in

    def clear(self) -> None:
        """Empty all cells."""
        lib.llama_memory_clear(self._memory, False)


class MropeCells(Cells):
    """Cells of a model with M-RoPE, where a picture has fewer positions than tokens.

    A sequence is never cut inside a picture, so only the positions between pictures matter. What follows the
    beginning of a picture is shared between sequences, but not copied.
    """

    def __init__(self, context: Any, carrier: int, block: int = BLOCK) -> None:
        super().__init__(context, carrier, block)
        # Of each seq_id: where the tokens of a picture start and end, and how many positions fewer it has.
        self._pictures: dict[int, list[tuple[int, int, int]]] = {}

    def add_picture(self, seq_id: int, start: int, end: int, n_positions: int) -> None:
        """Record the tokens of a picture that has `n_positions`."""
        self._pictures.setdefault(seq_id, []).append((start, end, end - start - n_positions))

    def position(self, seq_id: int, n: int) -> int:
        """Return llama.cpp's position of the token after the first `n`."""
        return n - sum([left_out for _, end, left_out in self._pictures.get(seq_id, ()) if end <= n])

    def n_storable(self, tokens: TokenArray) -> int:
        """Return the number of tokens before the first picture."""
        is_picture = tokens >= PICTURE
        return int(is_picture.argmax()) if is_picture.any() else len(tokens)

    def remove(self, seq_id: int, start: int) -> None:
        """Remove a sequence's tokens from `start` on."""
        super().remove(seq_id, self.position(seq_id, start))
        if seq_id in self._pictures:
            self._pictures[seq_id] = [each for each in self._pictures[seq_id] if each[1] <= start]

    def share(self, source: int, seq_id: int, start: int, end: int) -> None:
        """Let `seq_id` also hold the cells of some tokens of `source`."""
        super().share(source, seq_id, self.position(source, start), self.position(source, end))
        shared = [each for each in self._pictures.get(source, ()) if start < each[1] <= end]
        if shared:
            self._pictures.setdefault(seq_id, []).extend(shared)

    def copy_out(self, seq_id: int, start: int, end: int) -> Bytes | None:
        """Return the content of a block before the first picture; None after it."""
        if any(first < end for first, _, _ in self._pictures.get(seq_id, ())):
            return None
        return super().copy_out(seq_id, start, end)

    def clear(self) -> None:
        """Empty all cells."""
        super().clear()
        self._pictures.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A sequence that is being moved to lower cells, with the content of its old ones."""

    sequence: CachedSequence
    n: int  # tokens that it had
    trunk: CachedSequence | None  # a sequence that is moved earlier and has the same first `n_shared` cells
    n_shared: int
    blocks: Sequence[Bytes]  # content of the other cells


class CellTable:
    """The sequences that hold each of `size` cells; each change is made in llama.cpp and in the table."""

    def __init__(self, cells: Cells, size: int, garbage: int) -> None:
        self.cells, self.size = cells, size
        self.garbage = garbage  # seq_id of the sequence that holds the garbage
        self.top = 0  # cells below are full, cells from here on are empty
        self.n_garbage = 0
        self._n_owners = np.zeros(size, dtype=np.int16)  # [size] sequences that hold each cell

    @property
    def n_live(self) -> int:
        """Number of full cells that are not garbage."""
        return self.top - self.n_garbage

    def fault(self, sequences: Sequence[CachedSequence]) -> str | None:
        """Return which invariant does not hold if these sequences are all there are; None if all hold."""
        held = np.concatenate([each.cells[: each.n] for each in sequences])
        n_owners = np.bincount(held, minlength=self.size)
        if not np.array_equal(n_owners, self._n_owners):
            return "cells have other owners than recorded"
        n_used, n_free = np.count_nonzero(n_owners), self.size - self.top
        if n_used + self.n_garbage + n_free != self.size:
            return f"{n_used} used cells, {self.n_garbage} of garbage and {n_free} free ones of {self.size}"
        return None

    def clear(self) -> None:
        """Empty all cells; the caller empties the sequences."""
        self.cells.clear()
        self._n_owners[:] = 0
        self.top = self.n_garbage = 0

    def take(self, n: int) -> TokenArray:
        """Record that the next empty cells have been filled; return them in order: [n] int32."""
        taken = np.arange(self.top, self.top + n, dtype=np.int32)
        self._n_owners[taken] = 1
        self.top += n
        return taken

    def cut(self, sequence: CachedSequence, n: int) -> None:
        """Remove the tokens from `n` on from a sequence."""
        n_held = sequence.n
        if n >= n_held:
            return
        cells = sequence.cells[n:n_held]
        owners = self._n_owners[cells]
        n_top = 0
        if cells[-1] == self.top - 1:
            is_top = (cells == np.arange(self.top - len(cells), self.top)) & (owners == 1)
            n_top = len(cells) if is_top.all() else int(is_top[::-1].argmin())
        is_garbage = owners[: len(cells) - n_top] == 1
        for start, end in _runs(is_garbage):
            self.cells.share(sequence.seq_id, self.garbage, n + start, n + end)
        sequence.n = n
        self.cells.remove(sequence.seq_id, n)
        self._n_owners[cells] = owners - 1
        self.top -= n_top
        self.n_garbage += int(np.count_nonzero(is_garbage))

    def take_over(self, sequence: CachedSequence, other: CachedSequence, n: int) -> None:
        """Share the first `n` tokens of another sequence, which begins with the tokens of this one."""
        start = sequence.n
        if start and other.cells[start] < sequence.cells[start - 1]:
            self.cut(sequence, 0)  # otherwise the cells would not ascend: share the beginning, too
            start = 0
        self.cells.share(other.seq_id, sequence.seq_id, start, n)
        cells = other.cells[start:n]
        self._n_owners[cells] += 1
        sequence.append(other.tokens[start:n], cells)

    def put_in(self, sequence: CachedSequence, tokens: TokenArray, start: int, content: Bytes) -> bool:
        """Append tokens from a stored block that begins at position `start`; False if that failed.

        The sequence may already hold the first tokens of the block: their new cells become garbage.
        """
        n = sequence.n
        parts = (self.garbage, start, n), (sequence.seq_id, n, n + len(tokens))
        if not self.cells.copy_in(content, parts):
            return False
        self._n_owners[self.take(n - start)] = 0
        self.n_garbage += n - start
        sequence.append(tokens, self.take(len(tokens)))
        return True

    def compact(self, sequences: Sequence[CachedSequence]) -> None:
        """Move full cells down over the garbage. If a block cannot be moved, its sequence ends before it."""
        first = int((self._n_owners[: self.top] == 0).argmax())  # cells below stay where they are
        for held in sequences:
            n = int(np.searchsorted(held.cells[: held.n], first))
            if n < held.n and (start := before_picture(held.tokens[: held.n], n)) < n:
                first = int(held.cells[start])  # sequences share pictures as a whole
        moved: list[Moved] = []
        for sequence in sequences:
            moved.append(self._copy_out(sequence, first, [each.sequence for each in moved]))
        for each in moved:
            sequence = each.sequence
            sequence.n = int(np.searchsorted(sequence.cells[: sequence.n], first))
            self.cells.remove(sequence.seq_id, sequence.n)
        self.cells.remove(self.garbage, 0)
        self._n_owners[first:] = 0
        self.top, self.n_garbage = first, 0
        for each in moved:
            self._copy_in(each)

    def _copy_out(self, sequence: CachedSequence, first: int, earlier: Sequence[CachedSequence]) -> Moved:
        """Copy out the cells of a sequence from cell `first` on, except those that an earlier one shares."""
        n, cells = sequence.n, sequence.cells[: sequence.n]
        n_shared = [n_common(other.cells[: other.n], cells) for other in earlier]
        n_most = max(n_shared, default=0)
        n_before, blocks = max(n_most, int(np.searchsorted(cells, first))), list[Bytes]()
        for start in range(n_before, n, self.cells.block or n):
            content = self.cells.copy_out(sequence.seq_id, start, min(start + self.cells.block, n))
            if content is None:
                break
            blocks.append(content)
        return Moved(sequence, n, earlier[n_shared.index(n_most)] if n_most else None, n_most, blocks)

    def _copy_in(self, moved: Moved) -> None:
        """Put a sequence into the first empty cells, as far as that succeeds."""
        sequence, trunk, n_shared = moved.sequence, moved.trunk, moved.n_shared
        if n_shared > sequence.n and trunk is not None:
            if trunk.n < n_shared:
                return
            self.cells.share(trunk.seq_id, sequence.seq_id, sequence.n, n_shared)
            cells = trunk.cells[sequence.n : n_shared]
            self._n_owners[cells] += 1
            sequence.cells[sequence.n : n_shared] = cells
            sequence.n = n_shared
        for content in moved.blocks:
            start, end = sequence.n, min(sequence.n + self.cells.block, moved.n)
            if not self.cells.copy_in(content, [(sequence.seq_id, start, end)]):
                return
            sequence.cells[start:end] = self.take(end - start)
            sequence.n = end


def _runs(is_in: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the runs of True: (start, end) each."""
    edges = np.flatnonzero(np.diff(is_in, prepend=False, append=False))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def copy_state(context: Any, seq_id: int, flags: int = 0) -> Bytes | None:
    """Return a copy of llama.cpp's memory of a sequence; None if it cannot be copied."""
    size = int(lib.llama_state_seq_get_size_ext(context, seq_id, flags))
    content = np.empty(size, dtype=np.uint8)
    n = lib.llama_state_seq_get_data_ext(context, _pointer(content), size, seq_id, flags)
    return content if n == size else None


def put_state(context: Any, seq_id: int, content: Bytes, flags: int = 0) -> bool:
    """Replace llama.cpp's memory of a sequence by a copy; False if that failed."""
    n = lib.llama_state_seq_set_data_ext(context, _pointer(content), len(content), seq_id, flags)
    return bool(n == len(content))


def _pointer(content: Bytes) -> Any:
    return content.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
