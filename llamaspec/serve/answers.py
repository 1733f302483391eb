"""The way back from the decode thread to a request: events of its rows, in an asyncio event loop.

Bounded: a row whose events nobody reads is not asked for more, and pauses. Knows no models and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from llamaspec.chat.answer_stream import AnswerPart, AnswerStream
from llamaspec.engine.events import Completion
from llamaspec.serve.jobs import Job

UNREAD = 64  # events of a row that may wait for the client


@dataclass(frozen=True, slots=True)
class Reading:
    """Some of a prompt has been read."""

    n_read: int
    n_to_read: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """Some of the answer has become certain."""

    parts: tuple[AnswerPart, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """A text has ended."""

    completion: Completion
    speedup: float | None  # estimated, against plain decoding
    n_thought: int = 0  # tokens of reasoning


@dataclass(frozen=True, slots=True)
class Failed:
    """A text has ended because of an error."""

    error: Exception


Event: TypeAlias = "Reading | Wrote | Done | Failed"


@dataclass(slots=True, eq=False)
class Run:
    """A row that a request waits for. The decode thread fills it in; the event loop only reads."""

    index: int  # among the rows of the request
    job: Job
    answer: Answer
    asked_at: float  # seconds, as the next two
    started_at: float | None = None
    first_at: float | None = None  # the first text
    stream: AnswerStream | None = None  # once it runs
    made: list[Event] = field(default_factory=list)  # on their way to the event loop
    n_unread: int = 0
    n_rounds_counted: int = 0

    @property
    def is_clogged(self) -> bool:
        """Whether the client has enough to read."""
        return self.n_unread >= UNREAD


class Answer:
    """What becomes of one request: events of all its rows, in the order in which they happen.

    Parameters
    ----------
    jobs : sequence of Job
        One for each row.
    wake : callable
        Tells the decode thread that it may look again.
    now : float
        Seconds.
    """

    def __init__(self, jobs: Sequence[Job], wake: Callable[[], None], now: float) -> None:
        self.runs = [Run(i, job, self, now) for i, job in enumerate(jobs)]
        self.is_cancelled = False
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._events: deque[tuple[Run, Event]] = deque()
        self._n_open = len(self.runs)

    @property
    def is_over(self) -> bool:
        """Whether every row has ended and been read."""
        return self._n_open == 0

    async def next_event(self, patience: float) -> tuple[int, Event] | None:
        """The next event and the row that it is of; None if nothing happens for so many seconds."""
        if not self._events:
            self._arrived.clear()
            timer = self._loop.call_later(patience, self._arrived.set)  # cheaper than a task for each event
            try:
                await self._arrived.wait()
            finally:
                timer.cancel()
            if not self._events:
                return None
        run, event = self._events.popleft()
        was_clogged = run.is_clogged
        run.n_unread -= 1
        if was_clogged:
            self._wake()
        self._n_open -= isinstance(event, (Done, Failed))
        return run.index, event

    def close(self) -> None:
        """Nobody reads any more: the rows end within one evaluation. From the event loop; never waits."""
        if not self.is_over and not self.is_cancelled:
            self.is_cancelled = True
            self._wake()

    def post(self, events: Sequence[tuple[Run, Event]]) -> None:
        """Hand over events; from the decode thread."""
        for run, _ in events:
            run.n_unread += 1
        try:
            self._loop.call_soon_threadsafe(self._take_in, events)
        except RuntimeError:  # the event loop has ended, and with it whoever asked
            self.is_cancelled = True

    def _take_in(self, events: Sequence[tuple[Run, Event]]) -> None:
        self._events.extend(events)
        self._arrived.set()
