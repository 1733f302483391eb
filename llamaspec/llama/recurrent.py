"""The cache of a context whose layers keep recurrent states (Mamba, RWKV, hybrids): one sequence.

A state is overwritten with every token, so llama.cpp cannot forget a part of it. To roll back, the cache
returns to an earlier state and the tokens since then are evaluated again. The earlier state is one that
llama.cpp kept (`n_rs_seq`; it is right only within the last evaluation, though llama.cpp allows more), or a
checkpoint. The keys and values of a hybrid are cut as usual. Sequences cannot share such a memory, so each
has its own context. When another sequence starts in a context, the state of the previous one goes to the
store, with its checkpoints.

Checkpoints are kept where later requests probably branch off: near the end of a prompt, where it has left
what was seen before, at the end of its first message, and here and there along a long one. The evaluation
of a prompt pauses at these places. The state after the first message goes to the store at once, so that
conversations with the same system prompt share it. tests/test_kept_states.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import ContextFullError
from llamaspec.llama.batch import Segment
from llamaspec.llama.cells import CachedSequence, copy_state, put_state
from llamaspec.llama.checkpoints import Checkpoints
from llamaspec.llama.kv_cache import MIN_COPIED, Prepared
from llamaspec.llama.prefix_store import Node, PrefixStore
from llamaspec.values import NO_SCOPE, TARGET, ForwardRequest, Scope, TokenArray, serves

HEADER = 32  # last tokens of a prompt that a template may write in another way in the next request
FAR = 2048  # tokens without a kept checkpoint
SPACING = 8  # tokens between two checkpoints of a draft model, whose last tokens may be rejected at any time
N_DRAFTED = 4  # latest checkpoints of a draft model: enough for a draft of 32 tokens
MAX_REPEATED = 512  # maximum tokens that are evaluated again because their hidden rows are wanted
SEQUENCE = 0  # llama.cpp's seq_id


class RecurrentCache:
    """The memory of a context with recurrent states: one sequence at a time. Its methods are the KV cache's.

    `size` is the length of the longest sequence. `can_restore` says whether llama.cpp can restore a state.
    `marks` are tokens between messages: those that end one, and those to look for in a prompt without these.
    """

    def __init__(
        self,
        context: Any,
        size: int,
        *,
        can_restore: bool,
        store: PrefixStore,
        marks: Sequence[Sequence[int]] = (),
    ) -> None:
        self._context, self._memory = context, lib.llama_get_memory(context)
        self.size = size
        self._store, self._can_restore, self._marks = store, can_restore, [list(each) for each in marks]
        self._border = 0  # tokens of the first message of the sequence; 0 = short
        self._places: Sequence[int] = ()  # where the state of the sequence is kept, ascending
        self._checkpoints = Checkpoints(context, SEQUENCE, store)
        self._is_drafting = False  # the sequence is a draft model's
        self._held = CachedSequence(SEQUENCE)
        self.running: dict[int, CachedSequence] = {}  # by the number of the running sequence; at most one
        self._is_settled = True  # llama.cpp holds what is recorded here: no evaluation was interrupted
        self._n_states_back = int(lib.llama_n_rs_seq(context))  # earlier states that llama.cpp keeps
        self._n_last = 0  # tokens of the last evaluation; 0 once some of them were removed

    @property
    def n_used(self) -> int:
        """Number of tokens of the sequence."""
        return self._held.n

    def prepare_all(self, batch: Sequence[Prepared]) -> list[int | ContextFullError]:
        """Prepare the only request; return its number of cached tokens."""
        ((number, request, _),) = batch
        n_before = request.n_reusable
        self._is_drafting = request.model != TARGET
        if number not in self.running:
            self._start(request)
            self.running = {number: self._held}
        n_shared = self._held.shared(request.tokens)
        if n_shared == n_before == request.n_tokens:
            return [n_shared]  # and keep the tokens after these: the next request may want them
        if n_shared > n_before and not self._can_cut(self._held.n, n_before):
            n_kept = min(n_shared, request.n_before)
            n_repeated = n_kept - self._checkpoints.nearest(n_before)
            if n_repeated > MAX_REPEATED and self._can_cut(self._held.n, n_kept):
                return [self._cut(n_kept)]  # rather have some hidden rows missing
        return [self._cut(min(n_shared, n_before))]

    def pause(self, request: ForwardRequest) -> int | None:
        """Return after how many tokens of a request to pause, so that the state there is kept; None: never.

        A pause between the missing tokens and the draft is for a checkpoint. Otherwise they would be
        evaluated again after the next rejection, with more of them every round.
        """
        n = self._held.n
        is_long = request.n_before - n >= SPACING
        pause = request.n_before if is_long and self._verifies(request.n_scored) else None
        return next((place for place in self._places if n < place < request.n_before), pause)

    def known(self, tokens: TokenArray, scope: Scope) -> int:
        """Return how many of the first tokens the cache holds, can return to, and may give to a scope."""
        n = self._held.known(tokens, scope)
        return n if self._can_cut(self._held.n, n) else self._checkpoints.nearest(n)

    def n_known(self, tokens: TokenArray, scope: Scope = NO_SCOPE) -> int:
        """Return how many of the first tokens need not be evaluated again for a sequence of some scope."""
        return max(self.known(tokens, scope), self._store.find(tokens, scope).n)

    def segment(self, number: int, request: ForwardRequest) -> Segment:
        """Return what to evaluate for a prepared request."""
        return self._held.segment(request)

    def begin(self, n_scored: int) -> None:
        """Start an evaluation that scores some positions: take a checkpoint if it may be needed."""
        n, taken = self._held.n, self._checkpoints
        if self._can_restore and n:
            n_since = n - taken.nearest(n)
            if n - taken.nearest(n, only_kept=True) >= (1 if n in self._places else FAR):
                taken.keep(n)
                if n == self._border:
                    self._put(is_shared=True)
            elif n_since and self._verifies(n_scored):
                taken.take(n, 1)
            elif n_since >= SPACING and self._is_drafting:
                taken.take(n, N_DRAFTED)
        self._is_settled = False

    def commit(self, evaluated: Sequence[tuple[int, TokenArray]], n_padding: int = 0) -> None:
        """Record the new tokens of an evaluation."""
        ((_, tokens),) = evaluated
        self._n_last = len(tokens)
        self._hold(tokens)
        self._is_settled = True

    def release(self, number: int) -> None:
        """End the sequence; its tokens stay until another one starts."""
        self._held.n_offered = 0
        self.running.clear()

    def forget(self) -> None:
        """Empty the memory."""
        self._held.n, self._n_last, self._is_settled = 0, 0, False  # first, as in `_cut`
        self._checkpoints.cut(0)
        lib.llama_memory_clear(self._memory, True)
        self._is_settled = True

    def clear(self) -> None:
        """Empty the memory and the store."""
        self.forget()
        self._store.clear()

    def close(self) -> None:
        """Give up the checkpoints."""
        self._checkpoints.cut(0)

    def fault(self) -> str | None:
        """Return how the records of the store contradict themselves; None if they do not."""
        return self._store.fault()

    def reset(self) -> None:
        """End the sequence, and empty the memory and the store."""
        self.running.clear()
        self.clear()

    def store_finished(self, n_most: int) -> int:
        """Copy a finished sequence to the store, once and as a whole; return its number of new tokens."""
        held = self._held
        n_new = held.n - self._store.find(held.tokens[: held.n], held.scope).n
        if self.running or held.n_offered or not n_new:
            return 0
        held.n_offered = held.n
        self._put()
        return n_new

    def _put(self, *, is_shared: bool = False) -> None:
        held = self._held
        is_wanted = held.n >= MIN_COPIED and self._store.limit
        if not (self._can_restore and self._is_settled and is_wanted):
            return
        state = copy_state(self._context, SEQUENCE)
        if state is not None:
            checkpoints = () if is_shared else tuple(self._checkpoints.kept)
            tokens = held.tokens[: held.n]
            self._store.put_whole(tokens, state, checkpoints, is_shared=is_shared, scope=held.scope)

    def _start(self, request: ForwardRequest) -> None:
        """Make room for another sequence: store the previous one, and restore the beginning of this one."""
        tokens, scope, held = request.reusable, request.scope, self._held
        n, found = self.known(tokens, scope), self._store.find(tokens, scope)
        whole = request.tokens if request.whole is None else request.whole
        n_shared = max(held.known(whole, scope), self._store.n_shared(whole, scope))
        is_better = found.n >= n + MIN_COPIED
        if is_better or held.n >= n + MIN_COPIED or held.scope != scope:
            self._put()
        if is_better:
            self._store.touch(found)
            self._put_back(found.nodes[-1])
        elif not serves(held.scope, scope):
            self.forget()
        held.scope = scope
        self._border = self._end_of_first_message(whole)
        # A draft with hidden rows needs that of the token before the branch.
        places = {self._border, n_shared - 1, len(whole) - HEADER} if self._can_restore else ()
        self._places = sorted(each for each in places if each >= max(n, found.n) + HEADER)

    def _end_of_first_message(self, tokens: TokenArray) -> int:
        """Return the length of the first message of a prompt, without the mark behind it; 0 = short."""
        for marks in self._marks:
            found = np.flatnonzero(np.isin(tokens[MIN_COPIED:], marks))
            if len(found):
                return MIN_COPIED + int(found[0])
        return 0

    def _verifies(self, n_scored: int) -> bool:
        """Whether rejected tokens of an evaluation may take a sequence farther back than llama.cpp can."""
        return self._can_restore and n_scored - 1 > self._n_states_back

    def _put_back(self, node: Node) -> None:
        """Restore a stored sequence."""
        self.forget()
        self._is_settled = False
        if not put_state(self._context, SEQUENCE, node.content):
            self.forget()
            return
        self._hold(node.tokens)
        self._checkpoints.replace(node.checkpoints)
        self._is_settled = True

    def _hold(self, tokens: TokenArray) -> None:
        self._held.append(tokens, np.zeros(len(tokens), dtype=np.int32))

    def _cut(self, n: int) -> int:
        """Return to at most `n` tokens; return how many remain."""
        n_held, self._held.n = self._held.n, 0  # first, so that an exception in between does no harm
        # Also if there seems to be nothing to remove: an interrupted evaluation leaves unrecorded positions.
        if not n or not self._can_cut(n_held, n) or not self._remove(n):
            n = self._checkpoints.nearest(n)
            if not (n and self._checkpoints.restore(n) and self._remove(n)):
                lib.llama_memory_seq_rm(self._memory, SEQUENCE, -1, -1)
                n = 0
        if n < n_held:
            self._n_last = 0
        self._checkpoints.cut(n)
        self._held.n, self._is_settled = n, True
        return n

    def _can_cut(self, n_held: int, n: int) -> bool:
        return self._is_settled and n_held - n <= max(0, min(self._n_states_back, self._n_last - 1))

    def _remove(self, n: int) -> bool:
        return bool(lib.llama_memory_seq_rm(self._memory, SEQUENCE, n, -1))
