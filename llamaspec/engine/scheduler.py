"""Batches the requests of running sequences into evaluations.

One step is one evaluation: a draft step for every sequence that is drafting, a verification for every
sequence whose draft is complete, or a chunk of a prompt. Sequences join and leave between steps. If the
target's KV cache has no room for all, the newest are swapped out: their cells are copied to main memory, and
back later (preemption by swapping, as in vLLM, arXiv 2309.06180). Only the compute thread calls this module;
nothing else may use a model or the clock. tests/engine/test_scheduler.py, tests/test_several_sequences.py.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llamaspec.engine.batching import Batching, Group
from llamaspec.engine.sequence import Clock, RunningSequence, Slot, Stopwatch, as_exception
from llamaspec.errors import EVALUATION_FAULTS, ContextFullError, EvaluationAbortedError
from llamaspec.protocols import Model
from llamaspec.values import TARGET, Attention, Evaluation, Forward, ForwardRequest, Logits, n_common

MARGIN = 64  # KV cells that a sequence may need for draft tokens and padding
HEADROOM = 256  # tokens that a sequence must have room to generate before it is swapped in

logger = logging.getLogger(__name__)


class Scheduler:
    """Runs sequences over models; not thread-safe, except `abort`.

    If an evaluation of several sequences fails, each is evaluated alone, so that only the one at fault ends.

    One of the models is TARGET. The others draft, each for the model before it; the last goes first. Without
    models, it only calls functions.
    """

    def __init__(self, models: Mapping[str, Model], *, clock: Clock = time.perf_counter) -> None:
        self._models = dict(models)
        self._clock = clock
        self._slots: list[Slot] = []
        self._batching = Batching(self._models)
        self._evaluating: Sequence[Slot] = ()
        self._serials = itertools.count(1)  # of evaluations
        self._n_steps = self._n_checked = 0  # steps, and those before the latest check of the caches

    def add(self, sequence: RunningSequence[Any]) -> None:
        """Start a sequence: run its coroutine to the first request."""
        slot = Slot(sequence, Stopwatch(self._clock))
        self._slots.append(slot)
        self._resume(slot)

    def step(self) -> bool:
        """Make one evaluation; False if no sequence can continue."""
        self.end_cancelled()
        self._slots.sort(key=lambda each: each.last_step)  # longest wait first
        # Ask again: ending the first group may have unblocked others.
        group = self._batching.next_group(self._admit() or self._admit())
        if group is None:
            return False
        self._n_steps += 1
        for slot in group.slots:
            slot.last_step = self._n_steps
        self._evaluate(group)
        return True

    def end_cancelled(self) -> None:
        """End the sequences that were cancelled."""
        for slot in [each for each in self._slots if each.sequence.is_cancelled]:
            self._end(slot)

    def end_all(self, error: BaseException | None = None) -> None:
        """End every sequence."""
        for slot in tuple(self._slots):
            self._end(slot, error)

    def forget(self) -> None:
        """Empty the KV caches; running sequences process their tokens again."""
        for model in self._models.values():
            model.forget()

    def abort(self, sequence: RunningSequence[Any] | None = None) -> None:
        """Abort the running evaluation if this sequence takes part in it; from any thread."""
        evaluating = self._evaluating
        if evaluating and (sequence is None or any(each.sequence is sequence for each in evaluating)):
            for model in self._models.values():
                model.abort()

    # Admission: choose the sequences that may run, and make room for their requests.

    def _admit(self) -> list[Slot]:
        """Return the sequences that wait for an evaluation, all of them prepared."""
        self._swap()
        while True:
            waiting: list[Slot] = []
            by_model: dict[str, list[tuple[Slot, ForwardRequest]]] = {}
            for each in self._slots:
                if each.request is not None and each.is_running:
                    waiting.append(each)
                    by_model.setdefault(each.request.model, []).append((each, each.request))
            if sum(self._prepare(name, asking) for name, asking in by_model.items()) == len(waiting):
                return waiting

    def _swap(self) -> None:
        """Swap out the sequences for which the target's KV cache has no room; swap in those that fit again.

        First come, first served; but interactive sequences come first, and sequences that wait for their
        reader come last. A sequence that is alone always runs.
        """
        taken, is_full = 0, False
        target = self._models.get(TARGET)
        n_cells = None if target is None else target.n_cells
        order = sorted(self._slots, key=lambda each: (each.waits_for_reader, each.rank))
        for slot, needed in zip(order, _needed(order, n_cells), strict=True):
            if n_cells is not None:
                is_full |= taken > 0 and taken + needed + _headroom(slot) > n_cells
            if is_full != slot.sequence.is_swapped_out:
                self._swap_one(slot, is_out=is_full)
            taken += needed

    def _swap_one(self, slot: Slot, *, is_out: bool) -> None:
        if is_out:
            for model in self._models.values():
                model.release(slot.sequence.number)
        slot.sequence.is_swapped_out = is_out

    def _prepare(self, name: str, asking: Sequence[tuple[Slot, ForwardRequest]]) -> int:
        """Make room in a model for requests; return the number that can be evaluated now."""
        model = self._models.get(name)
        if model is None:
            for slot, _ in asking:
                self._resume(slot, error=ValueError(f"there is no model {name!r} to ask"))
            return 0
        begin = self._clock()
        batch: list[tuple[int, ForwardRequest, int]] = []
        for slot, request in asking:
            slot.n_padding = self._batching.padding(slot, request, len(asking))
            batch.append((slot.sequence.number, request, slot.n_padding))
        answers = _prepared(model, batch)
        share, n_prepared = (self._clock() - begin) / len(asking), 0
        for (slot, request), answer in zip(asking, answers, strict=True):
            slot.stopwatch.count_preparation(share)
            n_cached = slot.fault or answer
            if isinstance(n_cached, ContextFullError) and self._make_room(name):
                continue  # ask again
            if isinstance(n_cached, Exception):
                self._resume(slot, error=n_cached)
            else:
                n_prepared += self._plan(slot, request, n_cached)
        return n_prepared

    def _make_room(self, name: str) -> bool:
        """Swap out the sequences that wait for their reader, or the newest; False if there is none."""
        held = [each for each in self._slots if not each.sequence.is_swapped_out]
        paused = [each for each in held if each.waits_for_reader]
        newest = [max(held, key=lambda each: each.rank)] if name == TARGET and len(held) > 1 else []
        for each in paused or newest:
            self._swap_one(each, is_out=True)
        return bool(paused or newest)

    def _plan(self, slot: Slot, request: ForwardRequest, n_cached: int) -> bool:
        """Choose the part of a prepared request to evaluate; answer it at once if all of it is cached."""
        slot.n_cached, slot.n_new = n_cached, request.n_tokens - n_cached
        slot.part = self._batching.part(request, n_cached, is_alone=len(self._slots) == 1)
        if slot.n_cached_before is None:
            slot.n_cached_before = n_cached
        if not slot.n_new:
            nothing = np.empty((0, self._models[request.model].vocabulary_size), dtype=np.float32)
            self._resume(slot, Forward(nothing, slot.stopwatch.request_seconds, n_cached, Evaluation(0)))
        return slot.n_new > 0

    # Evaluation: evaluate a group, and answer its requests.

    def _evaluate(self, group: Group) -> None:
        batch: list[tuple[int, ForwardRequest]] = []
        n_padding = group.width
        for slot in group.slots:
            assert slot.part is not None
            batch.append((slot.sequence.number, slot.part))
            n_padding -= slot.part.n_tokens - slot.n_cached
        self._evaluating = group.slots
        begin = self._clock()
        try:
            logits = self._models[group.model].evaluate(batch, n_padding)
        except EvaluationAbortedError:
            return  # the next step ends the cancelled sequences and repeats the evaluation for the others
        except BaseException as error:  # noqa: BLE001  # raised to the reader of each sequence
            is_of_one = isinstance(error, EVALUATION_FAULTS) and len(group.slots) > 1
            for slot in group.slots:
                if is_of_one:
                    slot.is_suspect = True
                else:
                    self._resume(slot, error=as_exception(error))
            return
        finally:
            self._evaluating = ()
        self._hand_out(group, logits, self._clock() - begin)

    def _hand_out(self, group: Group, logits: Sequence[Logits], seconds: float) -> None:
        """Answer the requests that have been evaluated completely."""
        slots = group.slots
        self._batching.note(group, seconds)
        n_rounds = len(slots) - bool(group.n_prefill)
        model, serial = self._models[group.model], next(self._serials)
        attention = _attention(model, slots)
        evaluation = Evaluation(group.width, n_rounds, serial, group.n_prefill, attention, model.is_disturbed)
        prefill_seconds = seconds * group.n_prefill / group.width  # for the prompt chunk of the last slot
        for i, (slot, scores) in enumerate(zip(slots, logits, strict=True)):
            request, watch = slot.request, slot.stopwatch
            if request is None or slot.sequence.is_cancelled:
                continue
            watch.count_evaluation(request, seconds - prefill_seconds if i < n_rounds else prefill_seconds)
            if request.rows_from is not None or request.hidden is not None:
                slot.collect(model.hidden(slot.sequence.number))
            if slot.part is not request:
                slot.keep_rows()
                continue
            assert slot.n_cached_before is not None
            answer = Forward(scores, watch.request_seconds, slot.n_cached_before, evaluation, slot.hidden)
            self._resume(slot, answer)

    def _resume(self, slot: Slot, answer: Forward | None = None, *, error: Exception | None = None) -> None:
        """Resume a sequence with an answer or an error. An exception of its coroutine ends only this one."""
        try:
            self._tell_length(slot)
            slot.advance(answer, error)
        except StopIteration:
            self._end(slot)
        except BaseException as raised:  # noqa: BLE001  # raised to the reader
            self._end(slot, raised)

    def _tell_length(self, slot: Slot) -> None:
        """Tell a length policy which sequences take part in the round that may begin."""
        length, request = slot.sequence.length, slot.request
        if length is None or request is None or request.model != TARGET:
            return
        taking_part = [each.sequence.length for each in self._slots if each.takes_part and each is not slot]
        others = [each for each in taking_part if each is not None]
        length.begin_round(self._models[TARGET].attended(request.n_tokens), others)

    def _end(self, slot: Slot, error: BaseException | None = None) -> None:
        """End a sequence; others may use its cached tokens. May be called more than once."""
        if slot.sequence.is_done:
            return
        if slot in self._slots:
            self._slots.remove(slot)
        is_idle = not self._slots and self._n_checked < self._n_steps
        for name, model in self._models.items():
            try:
                model.release(slot.sequence.number)
                if is_idle:
                    self._n_checked = self._n_steps
                    _recover(name, model)
            except BaseException as raised:  # noqa: BLE001, PERF203  # raised to the reader
                error = error or raised
        slot.request = None
        slot.sequence.end(error)


def _recover(name: str, model: Model) -> None:
    """Check the cache of an idle model, so that later sequences do not begin with a broken one."""
    fault = model.recover()
    if fault is not None:
        logger.error("the KV cache of the %s was emptied: %s; please report this", name, fault)


def _attention(model: Model, slots: Sequence[Slot]) -> Attention:
    """Return how many cached tokens the positions of an evaluation attend to."""
    attention = Attention()
    for slot in slots:
        assert slot.part is not None
        n_new = slot.part.n_tokens - slot.n_cached
        attention = attention.plus(model.attended(slot.n_cached + n_new // 2), n_new)
    return attention


def _headroom(slot: Slot) -> int:
    """Return the number of tokens that a sequence must have room to generate before it is swapped in."""
    sequence = slot.sequence
    if not sequence.is_swapped_out:
        return 0
    left = HEADROOM if sequence.limit is None else sequence.limit - slot.n_cells
    return max(0, min(HEADROOM, left))


def _needed(order: Sequence[Slot], n_cells: int | None) -> list[int]:
    """Return the KV cells that each sequence needs, without those shared with sequences before it."""
    margin = 0 if n_cells is None else min(MARGIN, n_cells // 16)
    needed = [each.n_cells + margin for each in order]
    if n_cells is None or sum(needed) + HEADROOM * len(needed) <= n_cells:
        return needed
    for i, each in enumerate(order):
        sharing = [other for other in order[:i] if other.sequence.scope == each.sequence.scope]
        needed[i] -= max([n_common(each.tokens, other.tokens) for other in sharing], default=0)
    return needed


def _prepared(model: Model, batch: Sequence[tuple[int, ForwardRequest, int]]) -> Sequence[int | Exception]:
    """Return for each request the number of cached tokens, or the error if it cannot be evaluated."""
    try:
        return model.prepare(batch)
    except BaseException as error:  # noqa: BLE001  # raised to the reader
        if len(batch) == 1:
            return [as_exception(error)]
        return [_prepared(model, [entry])[0] for entry in batch]  # to find the request that failed
