"""llama.cpp's cells as a table: who holds which, at which position, and where new ones are put.

Written from llama-kv-cache.cpp (`find_slot`, `apply_ubatch`, `seq_rm`, `seq_cp`, `state_read`). The content
of a cell is the sequence of tokens up to it: what its keys and values depend on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from llamaspec.errors import ContextFullError
from llamaspec.llama.cached_sequence import CachedSequence
from llamaspec.llama.cells import Bytes
from llamaspec.llama.kv_cache import KVCache
from llamaspec.values import ForwardRequest, TokenArray

Content = tuple[int, ...]  # the tokens up to and with that of the cell


@dataclass
class Cell:
    position: int = -1
    content: Content = ()
    owners: set[int] = field(default_factory=set)


class SimulatedCells:
    """The cells of a context.

    Parameters
    ----------
    size : int
    can_copy : bool
    """

    def __init__(self, size: int, *, can_copy: bool = True) -> None:
        self.cells = [Cell() for _ in range(size)]
        self.can_copy = can_copy
        self.fails_to_copy_in = False
        self.head = 0
        self._copies: list[list[tuple[int, Content]]] = []

    def of(self, sequence: int) -> list[int]:
        """The cells that a sequence holds, by position."""
        held = [i for i, cell in enumerate(self.cells) if sequence in cell.owners]
        return sorted(held, key=lambda i: self.cells[i].position)

    @property
    def n_used(self) -> int:
        return sum(bool(cell.owners) for cell in self.cells)

    def evaluate(self, sequence: int, start: int, tokens: TokenArray) -> None:
        """Put positions of a sequence into cells, as an evaluation does."""
        before = [self.cells[i] for i in self.of(sequence)]
        assert [cell.position for cell in before] == list(range(start)), "positions must follow each other"
        content = before[-1].content if before else ()
        new = []
        for i, token in enumerate(tokens.tolist()):
            content = (*content, token)
            new.append((start + i, content))
        self._put(sequence, new)

    def _put(self, sequence: int, new: list[tuple[int, Content]]) -> None:
        head = 0 if self.head > self.n_used + 2 * len(new) else self.head
        order = [(head + i) % len(self.cells) for i in range(len(self.cells))]
        places = [i for i in order if not self.cells[i].owners][: len(new)]
        assert len(places) == len(new), "no room: llama_decode would return 1"
        for i, (position, content) in zip(places, new, strict=True):
            self.cells[i] = Cell(position, content, {sequence})
        self.head = (places[-1] + 1) % len(self.cells) if places else head

    def remove(self, sequence: int, start: int) -> None:
        freed = []
        for i, cell in enumerate(self.cells):
            if sequence in cell.owners and cell.position >= start:
                cell.owners.discard(sequence)
                freed += [i] if not cell.owners else []
        if freed:
            self.head = min(self.head, freed[0])

    def share(self, source: int, sequence: int, start: int, end: int) -> None:
        for cell in self.cells:
            if source in cell.owners and start <= cell.position < end:
                cell.owners.add(sequence)

    def copy_out(self, sequence: int, start: int) -> Bytes | None:
        if not self.can_copy:
            return None
        for cell in self.cells:
            if sequence in cell.owners and cell.position < start:
                cell.owners.discard(sequence)
        self._copies.append([(self.cells[i].position, self.cells[i].content) for i in self.of(sequence)])
        return np.array([len(self._copies) - 1], dtype=np.int64).view(np.uint8)

    def copy_in(self, sequence: int, content: Bytes) -> bool:
        self.remove(sequence, 0)
        if self.fails_to_copy_in:
            return False
        self._put(sequence, self._copies[int(content.view(np.int64)[0])])
        return True

    def clear(self) -> None:
        self.cells = [Cell() for _ in self.cells]
        self.head = 0


class Checked:
    """A cache over simulated cells; everything is checked after every operation."""

    def __init__(self, size: int = 64, n_sequences: int = 6, *, can_copy: bool = True) -> None:
        self.size, self.garbage = size, n_sequences - 1
        self.cells = SimulatedCells(size, can_copy=can_copy)
        self.cache = KVCache(self.cells, size, n_sequences)

    def held(self, row: int) -> CachedSequence:
        return self.cache.sequence(row)

    def prepare(self, *batch: tuple[int, ForwardRequest, int]) -> list[int | ContextFullError]:
        answers = self.cache.prepare_all(batch)
        for (row, wanted, n_padding), n_cached in zip(batch, answers, strict=True):
            if isinstance(n_cached, int):
                held = self.held(row)
                assert n_cached <= len(wanted.tokens) - wanted.n_logits
                assert np.array_equal(held.tokens[:n_cached], wanted.tokens[:n_cached])
                if n_cached < wanted.n_tokens:
                    assert held.n == n_cached
                    assert held.n_reserved == wanted.n_tokens - n_cached + n_padding
        self.check()
        return answers

    def evaluate(self, *batch: tuple[int, ForwardRequest], n_padding: int = 0) -> None:
        new = [
            (row, np.concatenate([wanted.tokens[self.held(row).n :], wanted.draft])) for row, wanted in batch
        ]
        self.cache.begin()
        for row, added in new:
            self.cells.evaluate(self.held(row).number, self.held(row).n, added)
        if n_padding:
            last = self.held(new[-1][0])
            self.cells.evaluate(last.number, last.n + len(new[-1][1]), np.zeros(n_padding, dtype=np.int32))
        self.cache.commit(new, n_padding)
        self.check()

    def run(self, row: int, wanted: ForwardRequest) -> int:
        (n_cached,) = self.prepare((row, wanted, 0))
        assert isinstance(n_cached, int)
        self.evaluate((row, wanted))
        return n_cached

    def check(self) -> None:
        """Noted cells are the simulated ones, ascend with positions, and hold the right content.

        Not so between what was interrupted and the next request.
        """
        if self.cache._is_evaluating or self.cache._is_changing:
            return
        for sequence in self.cache._sequences:
            cells = self.cells.of(sequence.number)
            assert cells == sequence.cells[: sequence.n].tolist()
            assert cells == sorted(cells)
            contents = [self.cells.cells[i].content for i in cells]
            tokens = tuple(sequence.tokens[: sequence.n].tolist())
            assert contents == [tokens[: i + 1] for i in range(sequence.n)]
            assert [self.cells.cells[i].position for i in cells] == list(range(sequence.n))
        full = [i for i, cell in enumerate(self.cells.cells) if cell.owners]
        assert full == list(range(self.cache.n_used))  # new cells follow behind all others
        owners = [len(cell.owners - {self.garbage}) for cell in self.cells.cells]
        assert owners == self.cache._n_owners.tolist()
        n_reserved = sum(held.n_reserved for held in self.cache._of_row.values())
        assert self.cache.n_used + n_reserved <= self.size
