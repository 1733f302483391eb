"""One thread that looks after many streams: it steps them all, and takes what is ready."""

from __future__ import annotations

import pytest

from llamaspec.engine.events import StopReason
from llamaspec.engine.scheduler import AHEAD, Scheduler
from llamaspec.engine.stream import TextStream
from llamaspec.errors import ClosedError
from llamaspec.values import DRAFT, TARGET
from texts import alone, draft, stream, target


def started(n: int, max_tokens: int = 30) -> tuple[Scheduler, list[TextStream]]:
    models = {TARGET: target(), DRAFT: draft()}
    scheduler = Scheduler(models)
    return scheduler, [stream(scheduler, models, (1, i), seed=i, max_tokens=max_tokens) for i in range(n)]


def test_stepped_texts_are_those_that_are_waited_for() -> None:
    """Pieces that were taken late counted as held back, and their tokens were lost."""
    scheduler, streams = started(3)
    pieces: list[list[int]] = [[] for _ in streams]
    n_late = 0
    while not all(of.is_over for of in streams):
        n_late += 1
        for i, of in enumerate(streams):
            if i < 2 or n_late % 7 == 0:  # the third is looked at rarely
                pieces[i] += [piece.token for piece in of.ready()]
        scheduler.step()
    for i, of in enumerate(streams):
        expected = alone((1, i), seed=i, max_tokens=30)
        assert of.completion.tokens == expected == tuple(pieces[i])
        assert of.completion.stop_reason is StopReason.LIMIT
        assert of.ready() == []
        assert len(of.rounds) == len(of.completion.rounds)


def test_a_step_says_whether_one_was_needed() -> None:
    scheduler, (of,) = started(1, max_tokens=4 * AHEAD)
    assert not scheduler.step()
    of.ready()
    n = 0
    while scheduler.step():
        n += 1
    assert n > 0
    assert not of.is_over  # it pauses until somebody takes what there is
    assert of.ready()
    assert scheduler.step()
    of.close()
    assert of.ready() == []


def test_what_ends_a_text_is_raised_where_it_is_taken() -> None:
    scheduler, (of,) = started(1)
    of.ready()
    scheduler.close()
    assert of.ready() == []
    assert of.is_over
    with pytest.raises(ClosedError):
        scheduler.step()
