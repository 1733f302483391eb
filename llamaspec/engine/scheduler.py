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
from typing import Any, NamedTuple

import numpy as np

from llamaspec.engine.sequence import Clock, RunningSequence
from llamaspec.errors import ContextFullError, EvaluationAbortedError
from llamaspec.protocols import Model
from llamaspec.values import CHUNK, TARGET, WAIT_SECONDS, Forward, ForwardRequest, Logits, n_common

SPARE = 2  # positions that each of several sequences reserves for padding of all: two may be padded to 6


class Group(NamedTuple):
    """Sequences that are evaluated together."""

    model: str
    sequences: list[RunningSequence[Any]]
    width: int  # positions to evaluate, with padding
    n_prefill: int = 0  # of these, the last sequence's: chunked prefill beside the rounds of the others


class Batching:
    """Decides over the sequences of one scheduler.

    Parameters
    ----------
    models : mapping of name -> Model
        Asked in reverse order: drafts come before what they are for.
    """

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._order = tuple(reversed(list(models)))
        self._prompts_wait = False  # a round has been made since the last part of a prompt was read
        self._last_read: str | None = None  # the model that has read a part of a prompt last
        self._speeds: dict[str, float] = {}  # positions per second, of the last chunk that a model has read

    def next_group(self, waiting: Sequence[RunningSequence[Any]]) -> Group | None:
        """The sequences of the next evaluation; None where nobody waits."""
        prompts: list[RunningSequence[Any]] = []
        others: dict[str, list[RunningSequence[Any]]] = {}
        for each in waiting:
            request = each.request
            if request is not None and request is each.part and request.n_scored:
                others.setdefault(request.model, []).append(each)
            else:  # there is something to read before its logits
                prompts.append(each)
        if prompts and any(each.is_interactive for each in waiting):  # no other text begins meanwhile
            prompts = [each for each in prompts if each.is_interactive or each.has_rounds]
        if prompts and (self._prompts_wait or not others):
            self._prompts_wait = False
            return self._reading(prompts)
        name = next((name for name in self._order if name in others), None)
        if name is None:
            return None
        group = self._together(name, others[name])
        if name == TARGET and prompts:
            group = self._reading_beside(group, max(prompts, key=_is_of_target))
            self._last_read = TARGET if group.n_prefill else self._last_read
            self._prompts_wait = not group.n_prefill or not all(map(_is_of_target, prompts))
        return group

    def note_reading(self, group: Group, seconds: float) -> None:
        """Learn how fast a model reads."""
        part = group.sequences[-1].part
        if part is not None and not part.n_scored and group.width >= CHUNK:
            self._speeds[group.model] = group.width / max(seconds, 1e-9)

    def chunk(self, name: str, *, is_alone: bool) -> int:
        """Positions of a prompt that a model reads at once: others wait so long for a token, or their prompt.

        Of a sequence that is alone always as many, because its bits may depend on that.
        """
        model = self._models[name]
        most = min(model.prompt_chunk, model.batch_size)
        if is_alone:
            return most
        n = int(WAIT_SECONDS * self._speeds.get(name, 0.0)) // CHUNK * CHUNK
        return min(max(n, CHUNK), most)

    def part(self, request: ForwardRequest, n_cached: int, *, is_alone: bool) -> ForwardRequest:
        """A request, or what is to be read before it.

        That is a part of a prompt that is longer than a chunk. And the target scores only what needs logits,
        because the width of that evaluation may be chosen so that its numbers are exact.
        """
        size, n_before = self.chunk(request.model, is_alone=is_alone), len(request.tokens) - request.n_logits
        is_exact = request.model != TARGET or not request.n_scored or n_cached == n_before
        if (request.n_tokens - n_cached <= size and is_exact) or n_cached >= n_before:
            return request
        return ForwardRequest(request.model, request.tokens[: min(n_cached + size, n_before)], n_logits=0)

    def padding(self, sequence: RunningSequence[Any], request: ForwardRequest, n_sequences: int) -> int:
        """Positions that a sequence would want besides those of its request, alone or with others.

        Together a little more, so that sequences stay together where one position more is believed cheaper:
        apart they would never time whether it is.
        """
        if request.model != TARGET or not request.n_scored:
            return 0
        if not self._models[TARGET].can_share(sequence.number):
            return 0
        n = (sequence.padded(request.n_scored) or request.n_scored) - request.n_scored
        n = max(n, SPARE) if n_sequences > 1 else n
        return min(n, self._models[TARGET].context_size - request.n_tokens)

    def _reading(self, prompts: Sequence[RunningSequence[Any]]) -> Group:
        """One sequence reads a part of its prompt.

        Drafts read fast, and never beside a round. They come first, but not twice in a row where the target
        has prompts to read.
        """
        draft_is_next = self._last_read in (None, TARGET)
        sequence = min(prompts, key=lambda each: _is_of_target(each) == draft_is_next)
        assert sequence.part is not None
        self._last_read = sequence.part.model
        return Group(sequence.part.model, [sequence], sequence.part.n_tokens - sequence.n_cached)

    def _reading_beside(self, group: Group, sequence: RunningSequence[Any]) -> Group:
        """Rounds that read a part of a prompt, too: one evaluation costs less than two (SARATHI, arXiv
        2308.16369).

        As it is where the others may not be evaluated at such a width.
        """
        part = sequence.part
        if part is None or part.model != TARGET or part.n_scored:
            return group
        if not all(self._models[TARGET].can_share(each.number) for each in (*group.sequences, sequence)):
            return group
        n_new = sum(each.n_new for each in group.sequences)
        n_part, room = part.n_tokens - sequence.n_cached, self._models[TARGET].max_chunked_prefill - n_new
        if 2 * room < min(sequence.n_new, self._models[TARGET].batch_size):  # two evaluations cost no more
            return group
        n_prefill = min(n_part, room)
        width = n_new + n_prefill
        if any(each.padded(width) != width for each in group.sequences):
            return group
        if n_prefill < n_part:
            sequence.part = ForwardRequest(
                part.model, part.tokens[: sequence.n_cached + n_prefill], n_logits=0
            )
        return Group(TARGET, [*group.sequences, sequence], width, n_prefill)

    def _together(self, name: str, sequences: list[RunningSequence[Any]]) -> Group:
        """As many sequences as fit one evaluation; those that came first, first."""
        model = self._models[name]
        if not model.can_share(sequences[0].number):
            return Group(name, sequences[:1], sequences[0].n_new)
        sequences = [each for each in sequences if model.can_share(each.number)]
        for n in range(len(sequences), 1, -1):  # a narrower batch may be refused where a wider one is not
            together = sequences[:n]
            n_scored = sum(each.request.n_scored for each in together if each.request is not None)
            width = _width(name, together) if n_scored <= model.max_scored else None
            if width is not None and width <= model.batch_size:
                return Group(name, together, width)
        return Group(name, sequences[:1], _width(name, sequences[:1]) or sequences[0].n_new)


def _is_of_target(sequence: RunningSequence[Any]) -> bool:
    return sequence.part is not None and sequence.part.model == TARGET


def _width(name: str, sequences: Sequence[RunningSequence[Any]]) -> int | None:
    """Positions to evaluate for some sequences: the fewest that each accepts; None if there are none."""
    n_new = room = 0
    for each in sequences:
        n_new += each.n_new
        room += each.n_padding
    if name != TARGET:
        return n_new
    width = n_new
    while True:
        widest = 0
        for each in sequences:
            wanted = each.padded(width)
            if wanted is None or wanted > n_new + max(room, 0):
                return None
            widest = max(widest, wanted)
        if widest == width:
            return width
        width = widest


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
        except Exception as error:  # noqa: BLE001  # whoever reads one of the texts is told
            for each in group.sequences:
                self._resume(each, error=error)
            return
        finally:
            self._evaluating = ()
        self._hand_out(group, logits, self._clock() - begin)

    def _hand_out(self, group: Group, logits: Sequence[Logits], seconds: float) -> None:
        serial, sequences = next(self._serials), group.sequences
        self._batching.note_reading(group, seconds)
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
    except Exception:  # noqa: BLE001  # find out whose request it is
        return [_prepared_alone(model, entry) for entry in batch]


def _prepared_alone(model: Model, entry: tuple[int, ForwardRequest, int]) -> int | Exception:
    try:
        return model.prepare([entry])[0]
    except Exception as error:  # noqa: BLE001  # whoever reads the text is told
        return error
