"""Which requests are evaluated together, and how wide the evaluation is.

Pure decisions over rows that have been prepared. Padding belongs to the batch: the rows agree on a width, and
each has reserved what it would want alone. tests/engine/test_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llamaspec.engine.row import Row
from llamaspec.protocols import Model
from llamaspec.values import TARGET, ForwardRequest


def model_of(rows: Iterable[Row[Any]]) -> str:
    """The model that some rows ask for, all the same."""
    return next(row.request.model for row in rows if row.request is not None)


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
        self._concurrent = concurrent
        self._prompts_wait = False  # a round has been made since the last part of a prompt was read

    def groups(self, waiting: Sequence[Row[Any]]) -> list[list[Row[Any]]]:
        """The rows of the next evaluation; of two, where models compute on different devices."""
        prompts = [row for row in waiting if self._is_prompt(row)]
        others = [row for row in waiting if row not in prompts]
        if prompts and (self._prompts_wait or not others):
            self._prompts_wait = False
            return [prompts[:1]]
        groups: list[list[Row[Any]]] = []
        for name in reversed(list(self._models)):
            rows = [row for row in others if row.request is not None and row.request.model == name]
            if rows and (not groups or self._concurrent):
                groups.append(self._together(rows))
        self._prompts_wait = bool(prompts) and any(model_of(group) == TARGET for group in groups)
        return groups

    def part(self, row: Row[Any]) -> ForwardRequest:
        """A row's request, or what is to be read before it.

        That is a part of a prompt that is longer than a batch. And the target scores only what needs logits,
        because the width of that evaluation may be chosen so that its numbers are exact.
        """
        request = row.request
        assert request is not None
        size, n_before = self._models[request.model].batch_size, len(request.tokens) - request.n_logits
        is_exact = request.model != TARGET or not request.n_scored or row.n_cached == n_before
        if (row.n_new <= size and is_exact) or row.n_cached >= n_before:
            return request
        return ForwardRequest(request.model, request.tokens[: min(row.n_cached + size, n_before)], n_logits=0)

    def padding_of(self, row: Row[Any]) -> int:
        """Positions that a row would want besides its own."""
        request = row.request
        if request is None or request.model != TARGET or not request.n_scored:
            return 0
        width = row.width(request.n_scored) or request.n_scored
        return min(width - request.n_scored, self._models[TARGET].context_size - request.n_tokens)

    def width(self, group: Sequence[Row[Any]]) -> int | None:
        """Positions to evaluate for some rows: the fewest that every row accepts; None if there are none."""
        width = n = sum(row.n_new for row in group)
        if model_of(group) != TARGET:
            return n
        room = n + sum(self.padding_of(row) for row in group)
        while True:
            wanted = [row.width(width) for row in group]
            widest = max((w for w in wanted if w is not None), default=0)
            if None in wanted or widest > max(room, n):
                return None if len(group) > 1 else n
            if widest == width:
                return width
            width = widest

    def _is_prompt(self, row: Row[Any]) -> bool:
        """Whether a row has something to read before its logits."""
        request = row.request
        return request is not None and not (request.n_scored and self.part(row) is request)

    def _together(self, rows: list[Row[Any]]) -> list[Row[Any]]:
        """As many rows as fit one evaluation; those that came first, first."""
        model, group = self._models[model_of(rows)], rows[:1]
        for row in rows[1:]:
            wider = [*group, row]
            n_scored = sum(row.request.n_scored for row in wider if row.request is not None)
            width = self.width(wider)
            if width is None or width > model.batch_size or n_scored > model.max_scored:
                break
            group = wider
        return group
