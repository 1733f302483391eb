"""Which requests are evaluated together, and how wide the evaluation is.

Pure decisions over rows that have been prepared. Padding belongs to the batch: the rows agree on a width, and
each has reserved what it would want alone. tests/engine/test_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llamaspec.engine.row import Row
from llamaspec.protocols import Model
from llamaspec.values import TARGET, ForwardRequest

SPARE = 2  # positions that each of several rows reserves for padding of all: two rows may be padded to 6


class Group(NamedTuple):
    """Rows that are evaluated together."""

    model: str
    rows: list[Row[Any]]
    width: int  # positions to evaluate, with padding
    n_beside: int = 0  # of these, the last row's: of a prompt, beside the rounds of the others


class Batching:
    """Decides over the rows of one scheduler.

    Parameters
    ----------
    models : mapping of name -> Model
        Asked in reverse order: drafts come before what they are for.
    concurrent : bool
        Several models may evaluate at once.
    """

    def __init__(self, models: Mapping[str, Model], *, concurrent: bool) -> None:
        self._models = models
        self._order = tuple(reversed(list(models)))
        self._concurrent = concurrent
        self._prompts_wait = False  # a round has been made since the last part of a prompt was read

    def groups(self, waiting: Sequence[Row[Any]]) -> list[Group]:
        """The rows of the next evaluation; of two, where models compute on different devices."""
        prompts: list[Row[Any]] = []
        others: dict[str, list[Row[Any]]] = {}
        for row in waiting:
            request = row.request
            if request is not None and request is row.part and request.n_scored:
                others.setdefault(request.model, []).append(row)
            else:  # there is something to read before its logits
                prompts.append(row)
        if prompts and (self._prompts_wait or not others):
            self._prompts_wait = False
            return [_reading(min(prompts, key=_is_of_target))]  # drafts read fast, and never beside a round
        groups: list[Group] = []
        for name in self._order:
            if name in others and (not groups or self._concurrent):
                group = self._together(name, others[name])
                if name == TARGET and prompts:
                    group = self._reading_beside(group, max(prompts, key=_is_of_target))
                    self._prompts_wait = not group.n_beside or not all(map(_is_of_target, prompts))
                groups.append(group)
        return groups

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

    def padding(self, row: Row[Any], request: ForwardRequest, n_rows: int) -> int:
        """Positions that a row would want besides those of its request, and what `n_rows` may want together.

        The latter, so that rows stay together where one position more is believed cheaper than theirs: apart
        they would never time whether it is.
        """
        if request.model != TARGET or not request.n_scored:
            return 0
        n = (row.width(request.n_scored) or request.n_scored) - request.n_scored
        n = max(n, SPARE) if n_rows > 1 else n
        return min(n, self._models[TARGET].context_size - request.n_tokens)

    def _reading_beside(self, group: Group, row: Row[Any]) -> Group:
        """A round of others that reads a part of this row's prompt, too: one evaluation costs less than two.

        As it is where the others may not be evaluated at such a width. (Agrawal et al. 2023, SARATHI.)
        """
        part = row.part
        if part is None or part.model != TARGET or part.n_scored:
            return group
        n_new = sum(each.n_new for each in group.rows)
        n_part, room = part.n_tokens - row.n_cached, self._models[TARGET].max_mixed - n_new
        if 2 * room < n_part:  # a round after it is no dearer
            return group
        n_beside = min(n_part, room)
        width = n_new + n_beside
        if any(each.width(width) != width for each in group.rows):
            return group
        if n_beside < n_part:
            row.part = ForwardRequest(part.model, part.tokens[: row.n_cached + n_beside], n_logits=0)
        return Group(TARGET, [*group.rows, row], width, n_beside)

    def _together(self, name: str, rows: list[Row[Any]]) -> Group:
        """As many rows as fit one evaluation; those that came first, first."""
        model = self._models[name]
        for n in range(len(rows), 1, -1):  # a narrower batch may be refused where a wider one is not
            together = rows[:n]
            n_scored = sum(row.request.n_scored for row in together if row.request is not None)
            width = _width(name, together) if n_scored <= model.max_scored else None
            if width is not None and width <= model.batch_size:
                return Group(name, together, width)
        return Group(name, rows[:1], _width(name, rows[:1]) or rows[0].n_new)


def _is_of_target(row: Row[Any]) -> bool:
    return row.part is not None and row.part.model == TARGET


def _reading(row: Row[Any]) -> Group:
    """One row reads a part of its prompt."""
    assert row.part is not None
    return Group(row.part.model, [row], row.part.n_tokens - row.n_cached)


def _width(name: str, rows: Sequence[Row[Any]]) -> int | None:
    """Positions to evaluate for some rows: the fewest that every row accepts; None if there are none."""
    n_new = room = 0
    for row in rows:
        n_new += row.n_new
        room += row.n_padding
    if name != TARGET:
        return n_new
    width = n_new
    while True:
        widest = 0
        for row in rows:
            wanted = row.width(width)
            if wanted is None or wanted > max(n_new + room, n_new):
                return None
            widest = max(widest, wanted)
        if widest == width:
            return width
        width = widest
