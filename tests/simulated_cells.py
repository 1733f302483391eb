"""llama.cpp's KV cache as a table of cells, with their owners and positions.

It follows llama-kv-cache.cpp (`find_slot`, `apply_ubatch`, `seq_rm`, `seq_cp`, `state_read`). The content of
a cell is the tokens up to it, on which its keys and values depend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llamaspec.errors import ContextFullError
from llamaspec.llama.batch import Segment
from llamaspec.llama.cells import CachedSequence, Cells
from llamaspec.llama.kv_cache import KVCache
from llamaspec.llama.prefix_store import Bytes, PrefixStore
from llamaspec.values import ForwardRequest

CARRIER = 1000  # the sequence of cells that are being copied
Content = tuple[int, ...]  # the tokens up to and including the cell's


@dataclass
class Cell:
    position: int = -1
    content: Content = ()
    owners: set[int] = field(default_factory=set)


class SimulatedCells(Cells):
    """The cells of a context.

    Parameters
    ----------
    size : int
    block : int
        Positions of one copy; 0 = cells cannot be copied.
    """

    def __init__(self, size: int, block: int = 16) -> None:
        self.cells = [Cell() for _ in range(size)]
        self.block = block
        self.fails_to_copy_in = False
        self.head = 0
        self._copies: list[list[tuple[int, Content]]] = []

    def of(self, sequence: int) -> list[int]:
        """Return the cells of a sequence, in the order of positions."""
        held = [i for i, cell in enumerate(self.cells) if sequence in cell.owners]
        return sorted(held, key=lambda i: self.cells[i].position)

    @property
    def n_used(self) -> int:
        return sum(bool(cell.owners) for cell in self.cells)

    def evaluate(self, segment: Segment) -> None:
        """Put the positions of a segment into cells, as an evaluation does."""
        held = self.of(segment.seq_id)
        assert len(held) == segment.start, "positions must follow each other"  # as llama_decode checks
        content, new = self.cells[held[-1]].content if held else (), []
        for position, token in enumerate(segment.tokens.tolist(), segment.start):
            content = (*content, token)
            new.append((position, content))
        self._put(segment.seq_id, new)

    def _put(self, sequence: int, new: list[tuple[int, Content]]) -> list[int]:
        head = 0 if self.head > self.n_used + 2 * len(new) else self.head
        order = [(head + i) % len(self.cells) for i in range(len(self.cells))]
        places = [i for i in order if not self.cells[i].owners][: len(new)]
        assert len(places) == len(new), "no room: llama_decode would return 1"
        for i, (position, content) in zip(places, new, strict=True):
            self.cells[i] = Cell(position, content, {sequence})
        self.head = (places[-1] + 1) % len(self.cells) if places else head
        return places

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

    def copy_out(self, sequence: int, start: int, end: int) -> Bytes | None:
        if not self.block:
            return None
        assert end - start <= self.block
        held = [self.cells[i] for i in self.of(sequence) if start <= self.cells[i].position < end]
        assert len(held) == end - start
        self._copies.append([(cell.position, cell.content) for cell in held])
        return np.array([len(self._copies) - 1], dtype=np.int64).view(np.uint8)

    def copy_in(self, content: Bytes, parts: Sequence[tuple[int, int, int]]) -> bool:
        if self.fails_to_copy_in:
            return False
        block = self._copies[int(content.view(np.int64)[0])]
        end = max(end for _, _, end in parts)
        assert [position for position, _ in block][: end - parts[0][1]] == list(range(parts[0][1], end))
        self._put(CARRIER, block)
        for sequence, start, end in parts:
            self.share(CARRIER, sequence, start, end)
        self.remove(CARRIER, 0)
        return True

    def clear(self) -> None:
        self.cells = [Cell() for _ in self.cells]
        self.head = 0


class Checked:
    """A KV cache over simulated cells that checks everything after every operation."""

    def __init__(
        self,
        size: int = 64,
        n_sequences: int = 5,
        *,
        can_copy: bool = True,
        stored: int = 1 << 20,
        keeps_finished: bool = False,
    ) -> None:
        self.size, self.garbage = size, n_sequences
        self.cells = SimulatedCells(size, 16 if can_copy else 0)
        self.store = PrefixStore(stored)
        self.cache = KVCache(
            self.cells,
            size,
            n_sequences,
            store=self.store,
            keeps_finished=keeps_finished,
        )

    def held(self, row: int) -> CachedSequence:
        return self.cache.running[row]

    def prepare(self, *batch: tuple[int, ForwardRequest, int]) -> list[int | ContextFullError]:
        answers = self.cache.prepare_all(batch)
        for (row, wanted, n_padding), n_cached in zip(batch, answers, strict=True):
            if isinstance(n_cached, int):
                held = self.held(row)
                assert n_cached <= len(wanted.tokens) - wanted.n_logits
                assert np.array_equal(held.tokens[:n_cached], wanted.tokens[:n_cached])
                if n_cached < wanted.n_tokens:
                    assert n_cached == held.n
                    assert held.n_reserved == wanted.n_tokens - n_cached + n_padding
        self.check()
        return answers

    def evaluate(self, *batch: tuple[int, ForwardRequest], n_padding: int = 0) -> None:
        rows = [row for row, _ in batch]
        segments = [self.cache.segment(row, wanted) for row, wanted in batch]
        self.cache.begin(1)
        for segment in segments:
            self.cells.evaluate(segment)
        if n_padding:
            self.cells.evaluate(segments[-1].padding(n_padding, 0))
        self.cache.commit(
            [(row, segment.tokens) for row, segment in zip(rows, segments, strict=True)], n_padding
        )
        self.check()

    def interrupt(self, row: int, wanted: ForwardRequest, *, reached_llama: bool) -> None:
        """Begin an evaluation that fails: the cache never notes what it put into llama.cpp's cells."""
        segment = self.cache.segment(row, wanted)
        self.cache.begin(1)
        if reached_llama:
            self.cells.evaluate(segment)

    def run(self, row: int, wanted: ForwardRequest) -> int:
        (n_cached,) = self.prepare((row, wanted, 0))
        assert isinstance(n_cached, int)
        self.evaluate((row, wanted))
        return n_cached

    def check(self) -> None:
        """Check that noted cells are the simulated ones, ascend with positions, and have their content."""
        for held in self.cache.running.values():
            cells, text = self.cells.of(held.seq_id)[: held.n], tuple(held.tokens[: held.n].tolist())
            assert cells == held.cells[: held.n].tolist()
            assert [self.cells.cells[i].content for i in cells] == [text[: i + 1] for i in range(held.n)]
        full = [cell for cell in self.cells.cells if cell.owners]
        assert full == self.cells.cells[: self.cache.n_used]  # new cells come after all others
        numbers = {number for cell in full for number in cell.owners} - {self.garbage}
        for number in numbers:  # running and finished sequences
            cells = self.cells.of(number)
            assert cells == sorted(cells)
            contents = [self.cells.cells[i].content for i in cells]
            assert contents == [contents[-1][: i + 1] for i in range(len(cells))]
        assert all(self.garbage not in cell.owners or cell.owners == {self.garbage} for cell in full)
        n_reserved = sum(held.n_reserved for held in self.cache.running.values())
        assert self.cache.n_used + n_reserved <= self.size
        assert self.cache.fault() is None
