"""Which requests are evaluated together, and how wide the evaluation is.

Pure decisions over sequences that have been prepared. Padding belongs to the batch: the sequences agree on a
width, and each has reserved what it would want alone. tests/engine/test_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llamaspec.engine.sequence import RunningSequence
from llamaspec.protocols import Model
from llamaspec.values import TARGET, ForwardRequest

SPARE = 2  # positions that each of several sequences reserves for padding of all: two may be padded to 6


class Group(NamedTuple):
    """Sequences that are evaluated together."""

    model: str
    sequences: list[RunningSequence[Any]]
    width: int  # positions to evaluate, with padding
    n_beside: int = 0  # of these, the last sequence's: chunked prefill beside the rounds of the others


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
        if prompts and (self._prompts_wait or not others):
            self._prompts_wait = False
            return _reading(min(prompts, key=_is_of_target))  # drafts read fast, and never beside a round
        name = next((name for name in self._order if name in others), None)
        if name is None:
            return None
        group = self._together(name, others[name])
        if name == TARGET and prompts:
            group = self._reading_beside(group, max(prompts, key=_is_of_target))
            self._prompts_wait = not group.n_beside or not all(map(_is_of_target, prompts))
        return group

    def part(self, request: ForwardRequest, n_cached: int) -> ForwardRequest:
        """A request, or what is to be read before it.

        That is a part of a prompt that is longer than a batch. And the target scores only what needs logits,
        because the width of that evaluation may be chosen so that its numbers are exact.
        """
        size, n_before = self._models[request.model].batch_size, len(request.tokens) - request.n_logits
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
        n = (sequence.padded(request.n_scored) or request.n_scored) - request.n_scored
        n = max(n, SPARE) if n_sequences > 1 else n
        return min(n, self._models[TARGET].context_size - request.n_tokens)

    def _reading_beside(self, group: Group, sequence: RunningSequence[Any]) -> Group:
        """Rounds that read a part of a prompt, too: one evaluation costs less than two (SARATHI, arXiv
        2308.16369).

        As it is where the others may not be evaluated at such a width.
        """
        part = sequence.part
        if part is None or part.model != TARGET or part.n_scored:
            return group
        n_new = sum(each.n_new for each in group.sequences)
        n_part, room = part.n_tokens - sequence.n_cached, self._models[TARGET].max_mixed - n_new
        if 2 * room < n_part:  # two evaluations cost no more
            return group
        n_beside = min(n_part, room)
        width = n_new + n_beside
        if any(each.padded(width) != width for each in group.sequences):
            return group
        if n_beside < n_part:
            sequence.part = ForwardRequest(
                part.model, part.tokens[: sequence.n_cached + n_beside], n_logits=0
            )
        return Group(TARGET, [*group.sequences, sequence], width, n_beside)

    def _together(self, name: str, sequences: list[RunningSequence[Any]]) -> Group:
        """As many sequences as fit one evaluation; those that came first, first."""
        model = self._models[name]
        for n in range(len(sequences), 1, -1):  # a narrower batch may be refused where a wider one is not
            together = sequences[:n]
            n_scored = sum(each.request.n_scored for each in together if each.request is not None)
            width = _width(name, together) if n_scored <= model.max_scored else None
            if width is not None and width <= model.batch_size:
                return Group(name, together, width)
        return Group(name, sequences[:1], _width(name, sequences[:1]) or sequences[0].n_new)


def _is_of_target(sequence: RunningSequence[Any]) -> bool:
    return sequence.part is not None and sequence.part.model == TARGET


def _reading(sequence: RunningSequence[Any]) -> Group:
    """One sequence reads a part of its prompt."""
    assert sequence.part is not None
    return Group(sequence.part.model, [sequence], sequence.part.n_tokens - sequence.n_cached)


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
