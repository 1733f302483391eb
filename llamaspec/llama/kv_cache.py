"""The KV cache of a context: the sequences that it holds, and where it finds their tokens again.

The cells hold what running sequences need. Before an evaluation, a sequence is cut to what it has in common
with its request. If another sequence holds more of the requested tokens, their cells are shared, at no cost;
otherwise the store may have them to copy back. A finished sequence moves to the store: at once if others are
running, because their attention passes over its cells; otherwise when the next sequence starts.
tests/llama/test_kv_cache.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from llamaspec.errors import ContextFullError
from llamaspec.llama.batch import Segment
from llamaspec.llama.cells import CachedSequence, Cells, CellTable
from llamaspec.llama.prefix_store import Bytes, KnownPrefix, PrefixStore
from llamaspec.values import NO_SCOPE, ForwardRequest, Scope, TokenArray, before_picture

Prepared: TypeAlias = tuple[int, ForwardRequest, int]  # number of a sequence, its request, padding positions
MIN_SHARED = 32  # minimum number of tokens to share with another sequence once the prompt is processed
MIN_COPIED = 8  # minimum number of tokens to copy to the store or back: fewer are evaluated faster
MAX_PASSES = 2  # over a batch in which tokens are copied back: a compaction may lose them again
MAX_GARBAGE = 0.25  # of the full cells; above it, a compaction saves its own time within 50 steps


class KVCache:
    """The sequences of a context and the cells that each holds.

    Of llama.cpp's sequences, the first `n_sequences` are for completions, and the next is for garbage.
    Finished sequences go to `store`. With `keeps_finished` they keep their cells until the room is needed: on
    a GPU, attention passes over them fast, and moving them is slow.
    """

    def __init__(
        self,
        cells: Cells,
        size: int,
        n_sequences: int,
        *,
        store: PrefixStore | None = None,
        keeps_finished: bool = False,
    ) -> None:
        self._store = store or PrefixStore()
        self._keeps_finished = keeps_finished
        self._table = CellTable(cells, size, garbage=n_sequences)
        self._sequences = [CachedSequence(i) for i in range(n_sequences)]
        self.running: dict[int, CachedSequence] = {}  # by the number of the running sequence
        self._clock = itertools.count(1)
        self._is_evaluating = False  # llama.cpp may hold more than is recorded here
        self._is_changing = False  # this record and llama.cpp's cells may differ
        self._copies_back = True  # from the store
        self.n_compactions = 0

    @property
    def size(self) -> int:
        """Number of cells."""
        return self._table.size

    @property
    def cells(self) -> Cells:
        """llama.cpp's cells."""
        return self._table.cells

    @property
    def n_used(self) -> int:
        """Number of full cells."""
        return self._table.top

    def prepare_all(self, batch: Sequence[Prepared]) -> list[int | ContextFullError]:
        """Prepare several requests; return for each its number of cached tokens, or why it has no room."""
        self._start_change()
        for i in itertools.count():
            n_before = self.n_compactions
            self._copies_back = i < MAX_PASSES
            answers = [self._answer(*entry) for entry in batch]
            if self._has_much_garbage():
                self.compact()
            if self.n_compactions == n_before:  # otherwise repeat: a compaction may have lost cached tokens
                break
        self._is_changing = False
        return answers

    def _answer(self, number: int, request: ForwardRequest, n_padding: int) -> int | ContextFullError:
        try:
            return self._prepare(number, request, n_padding)
        except ContextFullError as error:
            if number in self.running:
                self.running[number].n_reserved = 0
            return error

    def _prepare(self, number: int, request: ForwardRequest, n_padding: int) -> int:
        """Cut the sequence to its request, add tokens known elsewhere, and reserve cells for the rest."""
        n_before = request.n_reusable  # the most that the cache can supply
        sequence = self.running.get(number) or self._assign(number, request.tokens[:n_before], request.scope)
        n = min(sequence.shared(request.tokens), n_before)
        sequence.n_reserved = 0
        if n < request.n_tokens:  # otherwise keep the tokens after these: the next request may want them
            self._table.cut(sequence, n)
            # While a prompt is processed, a single token is enough to share.
            least = n + (MIN_SHARED if n and request.n_logits else 1)
            if n_before >= least:
                self._take_over(sequence, request.tokens[:n_before], least)
            sequence.n_reserved = request.n_tokens - sequence.n + n_padding
            sequence.n_padding = n_padding
            self._make_room(sequence)
            if self._copies_back and n_before >= max(least, sequence.n + MIN_COPIED):
                self._restore(sequence, request.tokens[:n_before])
            n = before_picture(request.tokens, sequence.n)
            if n < sequence.n:  # the room for a block was missing
                sequence.n_reserved += sequence.n - n
                self._table.cut(sequence, n)
        sequence.last_used = next(self._clock)
        return n

    def _assign(self, number: int, tokens: TokenArray, scope: Scope) -> CachedSequence:
        """Start a sequence, with the beginning of `tokens` that a finished one holds."""
        unused = self._unused()
        if not unused:
            n_running = len(self._sequences)
            raise ContextFullError(f"{n_running} completions are running already; wait for one to end")
        finished = [sequence for sequence in unused if sequence.n]
        if len(finished) == len(unused):
            oldest = min(finished, key=lambda each: each.last_used)
            self._move_to_store(oldest)
            finished.remove(oldest)
        sequence = self.running[number] = min(unused, key=lambda each: each.n)  # an empty one
        sequence.scope = scope
        if finished and not self._keeps_finished:
            best = max(finished, key=lambda each: each.known(tokens, scope))
            n = best.known(tokens, scope)
            if n > 0 and n >= self._find(tokens, scope).n:
                self._table.take_over(sequence, best, n)
            for each in finished:  # what is taken over belongs to the new sequence's scope from now on
                self._move_to_store(each, n if each is best and each.scope == scope else 0)
        return sequence

    def _unused(self) -> list[CachedSequence]:
        """The sequences that are not running: empty or finished."""
        running = set(self.running.values())
        return [sequence for sequence in self._sequences if sequence not in running]

    def _take_over(self, sequence: CachedSequence, tokens: TokenArray, least: int) -> None:
        """Share the longest beginning of `tokens` that another sequence holds, if it has `least` tokens."""
        others = [other for other in self._sequences if other is not sequence]
        n_shared = [other.known(tokens, sequence.scope) for other in others]
        n = max(n_shared, default=0)
        if n >= least:
            other = others[n_shared.index(n)]
            self._table.take_over(sequence, other, n)
            other.last_used = next(self._clock)

    def _restore(self, sequence: CachedSequence, tokens: TokenArray) -> None:
        """Copy the tokens that a sequence lacks back from the store."""
        found, start = self._find(tokens, sequence.scope), 0
        if found.n < sequence.n + MIN_COPIED:
            return
        self._store.touch(found)
        for node in found.nodes:
            end, n = min(start + len(node.tokens), found.n), sequence.n
            if end > n:
                # A block can only be copied as a whole, to the cells after the last full one.
                fits = self._n_free() >= len(node.tokens) - (end - n)
                if not fits or not self._table.put_in(sequence, tokens[n:end], start, node.content):
                    return
                sequence.n_reserved -= end - n
            start = end

    def n_known(self, tokens: TokenArray, scope: Scope = NO_SCOPE) -> int:
        """Return how many of the first tokens need not be evaluated again for a sequence of some scope."""
        n_held = [sequence.known(tokens, scope) for sequence in self._sequences]
        return max([self._find(tokens, scope).n, *n_held])

    def segment(self, number: int, request: ForwardRequest) -> Segment:
        """Return what to evaluate for a prepared request."""
        segment = self.running[number].segment(request)
        return segment._replace(start=self._table.cells.position(segment.seq_id, segment.start))

    def begin(self, n_scored: int) -> None:
        """Start an evaluation: until `commit`, cells may hold tokens that are not recorded."""
        self._is_evaluating = True

    def commit(self, evaluated: Sequence[tuple[int, TokenArray]], n_padding: int = 0) -> None:
        """Record the new tokens of an evaluation: (number, tokens) of each sequence, in batch order."""
        self._is_changing = True
        for number, tokens in evaluated:
            sequence = self.running[number]
            sequence.append(tokens, self._table.take(len(tokens)))
            sequence.n_reserved -= len(tokens)
            if sequence.n_reserved <= sequence.n_padding:
                sequence.n_reserved = 0
        if n_padding:  # it follows the tokens of the last sequence
            last = self.running[evaluated[-1][0]]
            self._table.cells.remove(last.seq_id, last.n)
        self._is_evaluating = self._is_changing = False

    def release(self, number: int) -> None:
        """End a sequence; its tokens stay, in their cells or in the store."""
        self._start_change()
        sequence = self.running.pop(number, None)
        if sequence is not None:
            sequence.n_reserved = sequence.n_offered = 0
            if self.running and not self._keeps_finished:
                self._move_to_store(sequence)
            else:
                self._store.touch(self._stored(sequence))
        self._is_changing = False

    def store_finished(self, n_most: int) -> int:
        """Copy at most `n_most` tokens of a finished sequence to the store; return how many (0: all is done).

        What the store has dropped since then, or had no room for, is not copied again before its next use.
        """
        self._start_change()
        n_copied = 0
        for sequence in sorted(self._unused(), key=lambda each: each.last_used):  # the newest drop others
            n_known = self._stored(sequence).n
            if sequence.n >= n_known + MIN_COPIED and n_known >= sequence.n_offered:
                sequence.n_offered = min(sequence.n, n_known + n_most)
                self._copy_to_store(sequence, sequence.n_offered)
                n_copied = sequence.n_offered - n_known
                break
        self._is_changing = False
        return n_copied

    def forget(self) -> None:
        """Empty all cells. Running sequences find their tokens in the store, or evaluate them again."""
        self._is_changing = True
        self._table.clear()
        for sequence in self._sequences:
            sequence.n = 0
        self._is_evaluating = self._is_changing = False

    def clear(self) -> None:
        """Empty all cells and the store."""
        self.forget()
        self._store.clear()

    def fault(self) -> str | None:
        """Return how the records of cells and store contradict each other; None if they do not.

        None, too, after an interrupted change, because the next change empties all cells. llama.cpp is not
        asked, since another thread may be closing the context.
        """
        if self._is_changing or self._is_evaluating:
            return None
        return self._table.fault(self._sequences) or self._store.fault()

    def reset(self) -> None:
        """End all sequences, and empty all cells and the store."""
        self._is_changing = True
        self._start_change()
        self._is_changing = False
        self._store.clear()

    def compact(self) -> None:
        """Move full cells down over the garbage; drop what cannot be moved."""
        self.n_compactions += 1
        held = [sequence for sequence in self._sequences if sequence.n]
        self._table.compact(sorted(held, key=lambda each: each.last_used))

    def _move_to_store(self, sequence: CachedSequence, n_known: int = 0) -> None:
        """Empty a finished sequence; store it if it has enough tokens beyond the first `n_known`."""
        if sequence.n >= n_known + MIN_COPIED:
            self._copy_to_store(sequence, sequence.n)
        self._table.cut(sequence, 0)

    def _copy_to_store(self, sequence: CachedSequence, n: int) -> None:
        """Store the first `n` tokens of a sequence."""
        cells = self._table.cells

        def copy(start: int, end: int) -> Bytes | None:
            return cells.copy_out(sequence.seq_id, start, end)

        n = cells.n_storable(sequence.tokens[:n])
        if cells.block and n:
            self._store.put(sequence.tokens[:n], cells.block, copy, sequence.scope)

    def _find(self, tokens: TokenArray, scope: Scope) -> KnownPrefix:
        """Return the longest stored beginning of `tokens` that cuts no picture."""
        found = self._store.find(tokens, scope)
        return found._replace(n=before_picture(tokens, found.n))

    def _stored(self, sequence: CachedSequence) -> KnownPrefix:
        """Return what the store has of a sequence."""
        return self._store.find(sequence.tokens[: sequence.n], sequence.scope)

    def _has_much_garbage(self) -> bool:
        """Whether a compaction saves time: never for less than a block."""
        table, block = self._table, self._table.cells.block
        if self._keeps_finished or not block:
            return False
        return table.n_garbage > max(block, MAX_GARBAGE * table.top)

    def _start_change(self) -> None:
        """Remove what an interrupted evaluation or change has left, and start a change."""
        if self._is_changing:
            self.forget()
            self.running.clear()
            for sequence in self._sequences:
                sequence.n_reserved = 0
        self._is_changing = True
        if self._is_evaluating:
            for sequence in self._sequences:
                self._table.cells.remove(sequence.seq_id, sequence.n)
            self._is_evaluating = False

    def _n_free(self) -> int:
        """Number of empty cells that no sequence has reserved."""
        return self.size - self._table.top - sum([each.n_reserved for each in self.running.values()])

    def _make_room(self, asking: CachedSequence) -> None:
        """Empty as many cells as running sequences have reserved, or raise ContextFullError."""
        table, size = self._table, self.size
        if self._n_free() >= 0:
            return
        n_reserved = sum([sequence.n_reserved for sequence in self.running.values()])
        finished = [sequence for sequence in self._unused() if sequence.n]
        for sequence in sorted(finished, key=lambda each: each.last_used):
            if table.n_live + n_reserved <= size:
                break
            self._move_to_store(sequence)
        n_wanted = table.n_live + n_reserved
        if n_wanted > size:
            n_own = asking.n + asking.n_reserved
            others = f", other completions hold {n_wanted - n_own}" if n_wanted > n_own else ""
            raise ContextFullError(
                f"the context of {size} tokens is full: this completion needs {n_own}{others}"
            )
        if table.top + n_reserved > size:
            self.compact()
