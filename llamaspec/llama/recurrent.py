"""The cache of a context whose layers keep recurrent states (Mamba, RWKV, hybrids): one row, checkpoints.

Every token overwrites a state, so llama.cpp cannot forget a part of it. It goes back to an earlier state that
llama.cpp kept itself (`n_rs_seq`; right only within the last evaluation, though llama.cpp allows more), or to
a checkpoint copied before an evaluation; the tokens since then are evaluated again. Keys and values of a
hybrid are cut as always. Rows cannot share such a memory, so every row has a context of its own. When another
row takes the context, the state of the sequence before it goes to the store, with its checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import ContextFullError
from llamaspec.llama.batch import Segment
from llamaspec.llama.cells import CachedSequence, copy_state, put_state
from llamaspec.llama.kv_cache import WORTH_COPYING, Prepared
from llamaspec.llama.prefix_store import Checkpoint, Node, PrefixStore
from llamaspec.values import ForwardRequest, TokenArray

MOST = 4  # checkpoints
SPACING = 8  # tokens between two checkpoints while positions are scored one by one, as a draft's are
SEQUENCE = 0  # llama.cpp's seq_id
_FLAGS = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class RecurrentCache:
    """What a context with recurrent states holds, for one row at a time; the methods are the KV cache's.

    `size` is the length of the longest sequence; `can_restore` says whether llama.cpp can put a state back.
    """

    def __init__(self, context: Any, size: int, *, can_restore: bool, store: PrefixStore) -> None:
        self._context, self._memory = context, lib.llama_get_memory(context)
        self.size = size
        self._store, self._can_restore = store, can_restore
        self._checkpoints: list[Checkpoint] = []  # ascending
        self._held = CachedSequence(SEQUENCE)
        self.of_row: dict[int, CachedSequence] = {}  # at most one
        self._is_settled = True  # no evaluation was interrupted, so llama.cpp holds only what is noted
        self.shares = True  # a row takes over what an earlier one has computed
        self._n_states_back = int(lib.llama_n_rs_seq(context))  # that llama.cpp keeps itself
        self._n_last = 0  # tokens of the last evaluation, after which nothing was taken back

    @property
    def n_used(self) -> int:
        """Tokens of the sequence that is held."""
        return self._held.n

    def prepare_all(self, batch: Sequence[Prepared]) -> list[int | ContextFullError]:
        """Prepare the row; return how many of its tokens are cached."""
        ((row, request, _),) = batch
        n_before = request.n_before
        if row not in self.of_row:
            self._start_row(request.tokens[:n_before])
            self.of_row = {row: self._held}
        n_shared = self._held.shared(request.tokens)
        if n_shared == n_before == request.n_tokens:
            return [n_shared]  # and keep what follows: it may be wanted next
        return [self._cut(min(n_shared, n_before))]

    def reads_first(self, request: ForwardRequest) -> bool:
        """Whether so much must be evaluated again that it pays to do that first, and take a checkpoint there.

        Otherwise the same tokens would be evaluated again after the next rejection, more in every round.
        """
        return self._can_restore and request.n_scored > 1 and request.n_before - self._held.n >= SPACING

    def shared(self, tokens: TokenArray) -> int:
        """How many of the first tokens are held, and can be gone back to."""
        n = self._held.shared(tokens)
        return n if self._can_cut(self._held.n, n) else self._nearest(n)

    def n_known(self, tokens: TokenArray) -> int:
        """How many of the first of some tokens need not be evaluated again."""
        return max(self.shared(tokens), self._store.find(tokens).n) if self.shares else 0

    def segment(self, row: int, request: ForwardRequest, rows: Collection[int]) -> Segment:
        """What must be evaluated of a prepared request."""
        return self._held.segment(request)

    def begin(self, n_scored: int) -> None:
        """Start an evaluation that scores some positions: copy the state if it may be wanted again."""
        n, verifies = self._held.n, n_scored - 1 > self._n_states_back
        if self._can_restore and n and n - self._nearest(n) >= (1 if verifies else SPACING):
            self._take_checkpoint()
        self._is_settled = False

    def commit(self, evaluated: Sequence[tuple[int, TokenArray]], n_padding: int = 0) -> None:
        """Note what an evaluation has added."""
        ((_, tokens),) = evaluated
        self._n_last = len(tokens)
        self._hold(tokens)
        self._is_settled = True

    def release(self, row: int) -> None:
        """End the row; its sequence stays until another begins."""
        self.of_row.clear()
        self._held.hidden = self._held.hidden.tail(self._held.n)

    def forget(self) -> None:
        """Empty everything."""
        self._held.n, self._n_last, self._is_settled = 0, 0, False  # first, as in `_cut`
        self._checkpoints = []
        lib.llama_memory_clear(self._memory, True)
        self._is_settled = True

    def clear(self) -> None:
        """Forget everything, including what is in the store."""
        self.forget()
        self._store.clear()

    def store_finished(self) -> None:
        """Copy a finished sequence to the store."""
        if not self.of_row:
            self._put()

    def _put(self) -> None:
        held = self._held
        is_wanted = held.n >= WORTH_COPYING and self._store.limit and self.shares
        if not (self._can_restore and self._is_settled and is_wanted):
            return
        state = copy_state(self._context, SEQUENCE)
        if state is not None:
            self._store.put_whole(held.tokens[: held.n], state, tuple(self._checkpoints))

    def _start_row(self, tokens: TokenArray) -> None:
        """Let another row take this context: store what it would lose, and copy back what is known of it."""
        if not self.shares:
            self.forget()
            return
        n, found = self.shared(tokens), self._store.find(tokens)
        is_better = found.n >= n + WORTH_COPYING
        if is_better or self._held.n >= n + WORTH_COPYING:
            self._put()
        if is_better:
            self._store.touch(found)
            self._put_back(found.nodes[-1])

    def _put_back(self, node: Node) -> None:
        """Hold a stored sequence."""
        self.forget()
        self._is_settled = False
        if not put_state(self._context, SEQUENCE, node.content):
            self.forget()
            return
        self._hold(node.tokens)
        self._checkpoints = list(node.checkpoints)
        self._is_settled = True

    def _hold(self, tokens: TokenArray) -> None:
        self._held.append(tokens, np.zeros(len(tokens), dtype=np.int32))

    def _cut(self, n: int) -> int:
        """Go back to at most `n` tokens; return how many are held then."""
        n_held, self._held.n = self._held.n, 0  # first, so that an exception in between does no harm
        # Also if nothing seems to lie behind: an interrupted evaluation leaves positions unnoted.
        if not n or not self._can_cut(n_held, n) or not self._remove(n):
            n = self._nearest(n)
            if not (n and self._restore(n) and self._remove(n)):
                lib.llama_memory_seq_rm(self._memory, SEQUENCE, -1, -1)
                n = 0
        if n < n_held:
            self._n_last = 0
        self._checkpoints = [checkpoint for checkpoint in self._checkpoints if checkpoint.n <= n]
        self._held.n, self._is_settled = n, True
        return n

    def _can_cut(self, n_held: int, n: int) -> bool:
        return self._is_settled and n_held - n <= max(0, min(self._n_states_back, self._n_last - 1))

    def _remove(self, n: int) -> bool:
        return bool(lib.llama_memory_seq_rm(self._memory, SEQUENCE, n, -1))

    def _nearest(self, n: int) -> int:
        """The longest beginning, of at most `n` tokens, that has a checkpoint; 0 = none."""
        return max((checkpoint.n for checkpoint in self._checkpoints if checkpoint.n <= n), default=0)

    def _restore(self, n: int) -> bool:
        """Put back the checkpoint after exactly `n` tokens; False if that fails."""
        (state,) = [checkpoint.state for checkpoint in self._checkpoints if checkpoint.n == n]
        return put_state(self._context, SEQUENCE, state, _FLAGS)

    def _take_checkpoint(self) -> None:
        """Copy the state; if there are enough, in place of the checkpoint whose neighbours are closest."""
        self._checkpoints = [each for each in self._checkpoints if each.n != self._held.n]
        if len(self._checkpoints) == MOST:
            borders = [0, *(checkpoint.n for checkpoint in self._checkpoints)]
            spans = [after - before for before, after in zip(borders, borders[2:], strict=False)]
            del self._checkpoints[int(np.argmin(spans))]
        state = copy_state(self._context, SEQUENCE, _FLAGS)
        if state is not None:
            self._checkpoints.append(Checkpoint(self._held.n, state))
