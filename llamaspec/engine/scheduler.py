"""The scheduler: merges what running sequences want evaluated, and is the only one that touches models and
clock.

A step is one evaluation: of a draft model for all sequences that draft, in lock-step; of the target for all
whose drafts are done; or of a part of a prompt, between rounds or beside them. Sequences join and leave
between steps. Where the target's KV cache has no room for all, those that came last are swapped out: their
cells are copied to main memory and back later (preemption by swapping, as in vLLM, arXiv 2309.06180). One
thread calls this, see `engine/thread.py`. tests/engine/test_scheduler.py and tests/test_several_sequences.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llamaspec.engine.batching import Batching, Group
from llamaspec.engine.sequence import Clock, RunningSequence, told
from llamaspec.errors import ContextFullError, EvaluationAbortedError
from llamaspec.protocols import Model
from llamaspec.values import TARGET, Forward, ForwardRequest, Logits, n_common

MARGIN = 64  # KV cells that a sequence may need besides its text for a while: draft tokens and padding
HEADROOM = 256  # tokens that a sequence should be able to add before it is swapped in


class Scheduler:
    """Runs texts over models; not thread-safe, except `abort`.

    Parameters
    ----------
    models : mapping of name -> Model
        TARGET among them. Other models draft; they are asked in reverse order, so a draft's draft comes last.
    clock : callable
        Seconds.
    """

    def __init__(self, models: Mapping[str, Model], *, clock: Clock = time.perf_counter) -> None:
        self._models = dict(models)
        self._clock = clock
        self._sequences: list[RunningSequence[Any]] = []
        self._batching = Batching(self._models)
        self._evaluating: Sequence[RunningSequence[Any]] = ()
        self._serials = itertools.count(1)  # of evaluations
        self._n_steps = 0

    def add(self, sequence: RunningSequence[Any]) -> None:
        """A sequence joins: its text goes on to its first request."""
        self._sequences.append(sequence)
        self._sort()
        self._resume(sequence)

    def step(self) -> bool:
        """Make one evaluation; False where no sequence can go on."""
        for sequence in [each for each in self._sequences if each.is_cancelled]:
            self.end(sequence)
        # Asked twice where the first answer ended those that others waited for.
        group = self._batching.next_group(self._waiting() or self._waiting())
        if group is None:
            return False
        self._n_steps += 1
        for each in group.sequences:
            each.last_step = self._n_steps
        if len(group.sequences) < len(self._sequences):
            self._sort()
        self._evaluate(group)
        return True

    def end(self, sequence: RunningSequence[Any], error: BaseException | None = None) -> None:
        """A sequence is over; what is known of it may serve others. More than once is allowed."""
        if sequence.is_done:
            return
        if sequence in self._sequences:
            self._sequences.remove(sequence)
        for model in self._models.values():
            try:
                model.release(sequence.number)
            except BaseException as raised:  # noqa: BLE001, PERF203  # whoever reads the text is told
                error = error or raised
        sequence.end(error)

    def end_all(self, error: BaseException | None = None) -> None:
        """End every sequence."""
        for sequence in tuple(self._sequences):
            self.end(sequence, error)

    def forget(self) -> None:
        """Empty the KV caches; running sequences read their text again."""
        for model in self._models.values():
            model.forget()

    def abort(self, sequence: RunningSequence[Any] | None = None) -> None:
        """End the running evaluation, if there is one, and it is one of this sequence; from any thread."""
        evaluating = self._evaluating
        if sequence in evaluating or (sequence is None and evaluating):
            for model in self._models.values():
                model.abort()

    def _sort(self) -> None:
        """Who has waited longest comes first."""
        self._sequences.sort(key=lambda each: each.last_step)

    def _release(self, sequence: RunningSequence[Any]) -> None:
        for model in self._models.values():
            model.release(sequence.number)

    def _resume(
        self, sequence: RunningSequence[Any], answer: Forward | None = None, *, error: Exception | None = None
    ) -> None:
        """Let a text go on, or know why its request cannot be evaluated; what fails in it ends it alone."""
        try:
            sequence.advance(self._clock, answer, error)
        except StopIteration:
            self.end(sequence)
        except BaseException as raised:  # noqa: BLE001  # whoever reads the text is told
            self.end(sequence, raised)

    def _swap(self) -> None:
        """Swap sequences out for which the target's KV cache has no room, and in where there is room again.

        First come, first served, but interactive texts come first, and those whose reader is behind come
        last. One text alone always runs.
        """
        taken, is_full = 0, False
        n_cells = self._models[TARGET].n_cells
        order = sorted(self._sequences, key=lambda each: (each.is_unread, each.rank))
        for sequence, needed in zip(order, _needed(order, n_cells), strict=True):
            if n_cells is not None:
                is_full |= taken > 0 and taken + needed + self._headroom(sequence) > n_cells
            if is_full and not sequence.is_swapped_out:
                self._release(sequence)
            sequence.is_swapped_out = is_full
            taken += needed

    def _headroom(self, sequence: RunningSequence[Any]) -> int:
        """Tokens that a sequence should be able to add before it is swapped in."""
        if not sequence.is_swapped_out:
            return 0
        left = HEADROOM if sequence.limit is None else sequence.limit - sequence.n_cells
        return max(0, min(HEADROOM, left))

    def _waiting(self) -> list[RunningSequence[Any]]:
        """The sequences that wait for an evaluation, all prepared at once."""
        self._swap()
        while True:
            waiting: list[RunningSequence[Any]] = []
            asking: dict[str, list[tuple[RunningSequence[Any], ForwardRequest]]] = {}
            for each in self._sequences:
                if each.request is not None and not each.is_swapped_out and not each.is_unread:
                    waiting.append(each)
                    asking.setdefault(each.request.model, []).append((each, each.request))
            if sum(self._prepare(name, requests) for name, requests in asking.items()) == len(waiting):
                return waiting

    def _prepare(self, name: str, asking: Sequence[tuple[RunningSequence[Any], ForwardRequest]]) -> int:
        """Make room in a model for requests; how many of them are to be evaluated now."""
        model = self._models.get(name)
        if model is None:
            for each, _ in asking:
                self._resume(each, error=ValueError(f"there is no model {name!r} to ask"))
            return 0
        begin = self._clock()
        batch: list[tuple[int, ForwardRequest, int]] = []
        for each, request in asking:
            each.n_padding = self._batching.padding(each, request, len(asking))
            batch.append((each.number, request, each.n_padding))
        answers = _prepared(model, batch)
        share, n_prepared = (self._clock() - begin) / len(asking), 0
        for (each, request), n_cached in zip(asking, answers, strict=True):
            each.overhead_seconds += share
            n_cached = each.fault or n_cached
            if isinstance(n_cached, ContextFullError) and name == TARGET and self._can_wait(each):
                self._release(each)
                each.is_swapped_out = True  # until `_swap` finds room
            elif isinstance(n_cached, Exception):
                self._resume(each, error=n_cached)
            else:
                n_prepared += self._is_to_evaluate(each, request, n_cached)
        return n_prepared

    def _can_wait(self, sequence: RunningSequence[Any]) -> bool:
        """Whether a sequence is running that goes before it, and whose end makes room."""
        return any(
            other.rank < sequence.rank and not other.is_swapped_out and not other.is_unread
            for other in self._sequences
        )

    def _is_to_evaluate(self, sequence: RunningSequence[Any], request: ForwardRequest, n_cached: int) -> bool:
        """Note what a prepared request still needs; one that is cached as a whole is answered at once."""
        sequence.n_cached, sequence.n_new = n_cached, request.n_tokens - n_cached
        sequence.part = self._batching.part(request, n_cached, is_alone=len(self._sequences) == 1)
        if sequence.n_cached_before is None:
            sequence.n_cached_before = n_cached
        if not sequence.n_new:  # a prompt that is cached
            nothing = np.empty((0, self._models[request.model].vocabulary_size), dtype=np.float32)
            self._resume(sequence, Forward(nothing, sequence.seconds, 0, 1, n_cached, 0))
        return sequence.n_new > 0

    def _evaluate(self, group: Group) -> None:
        """Evaluate a group of prepared sequences, and let each go on with its logits."""
        batch: list[tuple[int, ForwardRequest]] = []
        n_padding = group.width
        for each in group.sequences:
            assert each.part is not None
            batch.append((each.number, each.part))
            n_padding -= each.part.n_tokens - each.n_cached
        self._evaluating = group.sequences
        begin = self._clock()
        try:
            logits = self._models[group.model].evaluate(batch, n_padding)
        except EvaluationAbortedError:
            return  # the sequences that were cancelled end at the next step, the others are evaluated again
        except BaseException as error:  # noqa: BLE001  # whoever reads one of the texts is told
            for each in group.sequences:
                self._resume(each, error=told(error))
            return
        finally:
            self._evaluating = ()
        self._hand_out(group, logits, self._clock() - begin)

    def _hand_out(self, group: Group, logits: Sequence[Logits], seconds: float) -> None:
        serial, sequences = next(self._serials), group.sequences
        self._batching.note(group, seconds)
        n_rounds = len(sequences) - bool(group.n_prefill)
        reading = seconds * group.n_prefill / group.width  # of the last sequence's prompt
        for i, (each, scores) in enumerate(zip(sequences, logits, strict=True)):
            request = each.request
            if request is None or each.is_cancelled:
                continue
            each.count(seconds - reading if i < n_rounds else reading)
            if each.part is request:
                n_cached = each.n_cached if each.n_cached_before is None else each.n_cached_before
                self._resume(
                    each,
                    Forward(scores, each.seconds, group.width, n_rounds, n_cached, serial, group.n_prefill),
                )


def _needed(order: Sequence[RunningSequence[Any]], n_cells: int | None) -> list[int]:
    """KV cells that each sequence needs besides those that it shares with the sequences before it."""
    margin = 0 if n_cells is None else min(MARGIN, n_cells // 16)
    needed = [each.n_cells + margin for each in order]
    if n_cells is None or sum(needed) + HEADROOM * len(needed) <= n_cells:
        return needed
    for i, each in enumerate(order):
        needed[i] -= max([n_common(each.tokens, other.tokens) for other in order[:i]], default=0)
    return needed


def _prepared(model: Model, batch: Sequence[tuple[int, ForwardRequest, int]]) -> Sequence[int | Exception]:
    """For each request how many of its tokens are cached, or why it cannot be evaluated."""
    try:
        return model.prepare(batch)
    except BaseException:  # noqa: BLE001  # find out whose request it is
        return [_prepared_alone(model, entry) for entry in batch]


def _prepared_alone(model: Model, entry: tuple[int, ForwardRequest, int]) -> int | Exception:
    try:
        return model.prepare([entry])[0]
    except BaseException as error:  # noqa: BLE001  # whoever reads the text is told
        return told(error)
