"""llama.cpp's cells as a table: who holds which, at which position, and where new ones are put.

Written from llama-kv-cache.cpp (`find_slot`, `apply_ubatch`, `seq_rm`, `seq_cp`, `state_read`). The content
of a cell is the sequence of tokens up to it: what its keys and values depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llamaspec.errors import ContextFullError
from llamaspec.llama.cells import Cells
from llamaspec.llama.kv_cache import KVCache
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.sequences import Bytes, CachedSequence
from llamaspec.llama.tree_cells import Tree
from llamaspec.values import ForwardRequest, TokenArray

CARRIER = 1000  # a sequence for what is copied
Content = tuple[int, ...]  # the tokens up to and with that of the cell


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
        Positions that are copied at once; 0 = none can be copied.
    """

    def __init__(self, size: int, block: int = 16) -> None:
        self.cells = [Cell() for _ in range(size)]
        self.block = block
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

    def evaluate_tree(self, growth: Tree, n_text: int, new: TokenArray) -> None:
        """Put new text, and a tree behind it, into cells."""
        numbers = list(growth.tips)
        before = [self.cells[i] for i in self.of(numbers[0])]
        start = min(len(before), n_text)
        content = before[start - 1].content if start else ()
        contents, n_new_text = [], n_text - start
        for position, token in enumerate(new[:n_new_text].tolist(), start):
            content = (*content, token)
            contents.append((position, content, set(numbers)))
        for i, (token, parent) in enumerate(
            zip(growth.tokens.tolist(), growth.parents.tolist(), strict=True)
        ):
            path = [token]
            while parent >= 0:
                path.append(int(growth.tokens[parent]))
                parent = int(growth.parents[parent])
            if i >= growth.n_old:
                owners = set(growth.owners[i])
                contents.append((n_text + growth.depths[i], (*content, *path[::-1]), owners))
        for number in numbers:  # as llama_decode checks
            held = [self.cells[i].position for i in self.of(number)]
            added = [position for position, _, owners in contents if number in owners]
            assert [*held, *added] == list(range(len(held) + len(added))), "positions must follow each other"
        places = self._put(numbers[0], [(position, made) for position, made, _ in contents])
        for i, (_, _, owners) in zip(places, contents, strict=True):
            self.cells[i].owners = owners

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
    """A cache over simulated cells; everything is checked after every operation."""

    def __init__(
        self,
        size: int = 64,
        n_sequences: int = 5,
        n_branches: int = 0,
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
            n_branches,
            store=self.store,
            keeps_finished=keeps_finished,
            min_garbage=20,
        )

    def held(self, row: int) -> CachedSequence:
        return self.cache.sequence(row)

    def prepare(self, *batch: tuple[int, ForwardRequest, int]) -> list[int | ContextFullError]:
        answers = self.cache.prepare_all(batch)
        for (row, wanted, n_padding), n_cached in zip(batch, answers, strict=True):
            if isinstance(n_cached, int):
                held = self.held(row)
                n_text = min(n_cached, len(wanted.tokens))
                assert n_text <= len(wanted.tokens) - wanted.n_logits
                assert np.array_equal(held.tokens[:n_text], wanted.tokens[:n_text])
                if n_cached < wanted.n_tokens:
                    assert n_cached - held.n in (0, wanted.n_read)
                    assert held.n_reserved == wanted.n_tokens - n_cached + n_padding
        self.check()
        return answers

    def evaluate(self, *batch: tuple[int, ForwardRequest], n_padding: int = 0) -> None:
        rows, new, end = [row for row, _ in batch], [], 0
        for row, wanted in batch:
            held = self.held(row)
            if wanted.is_tree:
                n_old = self.cache.grow(row, wanted, rows).n_old
                added = np.concatenate([wanted.tokens[held.n :], wanted.draft[n_old:]])
            else:
                added = np.concatenate([wanted.tokens[held.n :], wanted.draft])
            new.append((row, added))
        self.cache.begin(1)
        for (row, wanted), (_, added) in zip(batch, new, strict=True):
            held = self.held(row)
            growth = self.cache._trees.growing.get(held.number)
            if growth is None:
                self.cells.evaluate(held.number, held.n, added)
            else:
                self.cells.evaluate_tree(growth, len(wanted.tokens), added)
            end = len(self.cells.of(held.number))
        if n_padding:
            last = self.held(rows[-1])
            self.cells.evaluate(last.number, end, np.zeros(n_padding, dtype=np.int32))
        self.cache.commit(new, n_padding)
        self.check()

    def interrupt(self, row: int, wanted: ForwardRequest, *, reached_llama: bool) -> None:
        """Begin to evaluate one request; what reached llama.cpp's cells is never noted."""
        held = self.held(row)
        growth = self.cache.grow(row, wanted, [row]) if wanted.is_tree else None
        self.cache.begin(1)
        if not reached_llama:
            return
        if growth is None:
            self.cells.evaluate(held.number, held.n, wanted.tokens[held.n :])
        else:
            added = np.concatenate([wanted.tokens[held.n :], wanted.draft[growth.n_old :]])
            self.cells.evaluate_tree(growth, len(wanted.tokens), added)

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
        n_holders = [0] * self.size
        for sequence in self.cache._sequences:
            text = tuple(sequence.tokens[: sequence.n].tolist())
            cells = sequence.cells[: sequence.n].tolist()
            for i in cells:
                n_holders[i] += 1
            tree = self.cache._trees.cached.get(sequence.number)
            for i in [] if tree is None else tree.cells.tolist():
                n_holders[i] += 1
            for number in {sequence.number} if tree is None else tree.tips:
                path = [] if tree is None else tree.path(tree.tips[number])
                right, tokens = cells, text
                if tree is not None and path:
                    right, tokens = (
                        right + tree.cells[path].tolist(),
                        tokens + tuple(tree.tokens[path].tolist()),
                    )
                found = self.cells.of(number)
                assert found == right
                assert found == sorted(found)
                assert [self.cells.cells[i].content for i in found] == [
                    tokens[: i + 1] for i in range(len(tokens))
                ]
                assert [self.cells.cells[i].position for i in found] == list(range(len(found)))
        full = [i for i, cell in enumerate(self.cells.cells) if cell.owners]
        assert full == list(range(self.cache.n_used))  # new cells follow behind all others
        assert n_holders == self.cache._table._n_owners.tolist()
        assert self.cache._table.n_garbage == n_holders[: self.cache.n_used].count(0)
        trees = self.cache._trees.cached
        used = [number for own, tree in trees.items() for number in tree.tips if number != own]
        assert sorted([*self.cache._trees._free, *used]) == self.cache._trees._numbers
        n_reserved = sum(held.n_reserved for held in self.cache._of_row.values())
        assert self.cache.n_used + n_reserved <= self.size
