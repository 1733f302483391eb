"""Chooses what is evaluated next: rounds together, and prompts in chunks between or beside them.

Only `Scheduler` calls it. It sets which part of a request a sequence has evaluated next, and evaluates
nothing itself. tests/engine/test_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llamaspec.engine.sequence import RunningSequence
from llamaspec.protocols import Model
from llamaspec.values import CHUNK, TARGET, WAIT_SECONDS, ForwardRequest

INTERACTIVE_SECONDS = 3.0  # for which interactive texts may hold up the prompts of others at a stretch
SPARE = 2  # positions that each of several sequences reserves for padding of all: two may be padded to 6


class Group(NamedTuple):
    """Sequences that are evaluated together."""

    model: str
    sequences: list[RunningSequence[Any]]
    width: int  # positions to evaluate, with padding
    n_prefill: int = 0  # of these, the last sequence's: chunked prefill beside the rounds of the others


class Batching:
    """Chooses among the sequences of one scheduler.

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
        # That prompts have waited for interactive texts; None: none waits for one.
        self._held_seconds: float | None = None

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
        prompts = self._prompts_now(prompts, is_interactive=any(each.goes_first for each in waiting))
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

    def _prompts_now(
        self, prompts: list[RunningSequence[Any]], *, is_interactive: bool
    ) -> list[RunningSequence[Any]]:
        """The prompts that may be read: for a while only those of interactive texts, if one runs.

        Of texts that have begun, too: they only read again.
        """
        urgent = [each for each in prompts if each.goes_first or each.has_rounds]
        if not is_interactive or len(urgent) == len(prompts):
            self._held_seconds = None
        elif self._held_seconds is None:
            self._held_seconds = 0.0
        is_held = self._held_seconds is not None and self._held_seconds < INTERACTIVE_SECONDS
        return urgent if is_held else prompts

    def note(self, group: Group, seconds: float) -> None:
        """Learn from an evaluation how fast a model reads, and how long prompts have waited."""
        last = group.sequences[-1]
        is_reading = last.part is not None and not last.part.n_scored
        if is_reading and group.width >= CHUNK:
            self._speeds[group.model] = group.width / max(seconds, 1e-9)
        if self._held_seconds is not None:
            has_ended = is_reading and not (last.goes_first or last.has_rounds)
            self._held_seconds = 0.0 if has_ended else self._held_seconds + seconds

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
