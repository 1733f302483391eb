"""Draft models go on while the target verifies, where both compute on different devices.

What rows want drafted meanwhile is answered step by step until the target is done. It is a bet: nobody waits
for it, and whatever goes wrong ends it without a word. tests/engine/test_ahead.py; PEARL, arXiv 2408.11850.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from llamaspec.engine.evaluation import prepared
from llamaspec.errors import LlamaspecError
from llamaspec.protocols import Model
from llamaspec.values import Forward, ForwardRequest, Meanwhile


def draft_ahead(
    models: Mapping[str, Model], rows: Sequence[tuple[int, Meanwhile]], is_wanted: Callable[[], bool]
) -> None:
    """Answer rows, all that ask the same model in one evaluation, for as long as it is wanted.

    Parameters
    ----------
    models : mapping of name -> Model
    rows : sequence of (row, coroutine)
    is_wanted : callable
        Asked before each step.
    """
    waiting: dict[int, tuple[Meanwhile, ForwardRequest]] = {}
    try:
        for row, text in rows:
            _note(waiting, row, text, None)
        while waiting and is_wanted():
            _step(models, waiting)
    finally:
        for _, text in rows:
            text.close()


def _step(models: Mapping[str, Model], waiting: dict[int, tuple[Meanwhile, ForwardRequest]]) -> None:
    """One evaluation; rows that cannot be answered wait no more."""
    name = next(request.model for _, request in waiting.values())
    model = models[name]
    asking = [(row, request) for row, (_, request) in waiting.items() if request.model == name]
    asking = asking[: model.max_scored]
    n_new, batch = 0, []
    for (row, request), n_cached in zip(
        asking, prepared(model, [(row, request, 0) for row, request in asking]), strict=True
    ):
        if isinstance(n_cached, Exception) or n_new + request.n_tokens - n_cached > model.batch_size:
            del waiting[row]
            continue
        n_new += request.n_tokens - n_cached
        batch.append((row, request))
    if not batch:
        return
    try:
        logits = model.evaluate(batch)
    except LlamaspecError:
        for row, _ in batch:
            del waiting[row]
        return
    for (row, _), scores in zip(batch, logits, strict=True):
        text, _ = waiting.pop(row)
        _note(waiting, row, text, Forward(scores, 0.0, n_new, len(batch), 0, 0))


def _note(
    waiting: dict[int, tuple[Meanwhile, ForwardRequest]], row: int, text: Meanwhile, answer: Forward | None
) -> None:
    """Let a row go on to its next request, if it has one."""
    with suppress(StopIteration):
        waiting[row] = text, next(text) if answer is None else text.send(answer)
