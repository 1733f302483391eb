"""Runs the requests of all clients, to any model: the queue, and the events of each request.

A client's deltas are fetched once the client can take them. Until then, its sequences pause; after a second,
others may run in their places. An error in one sequence ends only that sequence. tests/serve/test_load.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

from llamaspec.chat.answer_stream import AnswerStream
from llamaspec.chat.messages import Delta
from llamaspec.engine.completion import Completion, StopReason
from llamaspec.serve.http_errors import RequestError, bad_field
from llamaspec.serve.jobs import Job, Runner

MAX_RETRY_SECONDS = 60
READER_SECONDS = 1.0  # for which a paused sequence keeps its place


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """A part of a prompt has been processed; without numbers, a sign of life in a silent stream."""

    n_processed: int | None = None  # tokens
    n_total: int | None = None
    n_cached: int = 0  # of `n_processed`; they were not evaluated
    seconds: float = 0.0  # since the sequence began to run
    is_waiting: bool = False  # the sequence waits in the queue, or for room in the KV cache


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a sequence that has generated its answer."""

    completion: Completion
    n_reasoning: int = 0  # tokens

    @property
    def is_truncated(self) -> bool:
        """Whether the answer is incomplete: it reached a limit, or its constraint allows no continuation."""
        return self.completion.stop_reason in (StopReason.LIMIT, StopReason.CONTEXT, StopReason.CONSTRAINT)


Event: TypeAlias = "Delta | PromptProgress | Finished"
Events: TypeAlias = AsyncIterator[tuple[int, Event]]  # with the index of the sequence


class Place(Enum):
    """Whether a sequence that has begun counts among those that run at once."""

    HELD = auto()
    GIVEN_UP = auto()  # its client does not read
    WANTED = auto()  # its client reads again


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence of a request: waiting, running or ended."""

    job: Job
    submission: Submission
    asked_at: float  # seconds of the queue's clock, as the next two
    started_at: float | None = None
    first_text_at: float | None = None
    stream: AnswerStream | None = None  # None while it waits
    n_rounds_counted: int = 0
    pending: list[Event] = field(default_factory=list)  # not fetched yet
    last: Finished | Exception | None = None  # the end; events may still be pending then
    place: Place = Place.HELD
    pause: asyncio.TimerHandle | None = None  # until it gives up its place

    @property
    def waits_for_room(self) -> bool:
        """Whether it has begun, but has no room in the KV cache."""
        return self.stream is not None and self.stream.is_swapped_out


class Submission:
    """The sequences of one HTTP request, and their events."""

    def __init__(self, jobs: Sequence[Job], queue: RequestQueue, now: float) -> None:
        self.states = [SequenceState(job, self, now) for job in jobs]
        self.is_cancelled = False
        self.news = asyncio.Event()  # set if a sequence may have new events
        self._queue = queue

    def work(self) -> dict[str, Any]:
        """Return the figures for the log; the speed-up is that of the last completion."""
        done = [state.stream.completion for state in self.states if state.stream is not None]
        ends = [state.last for state in self.states if isinstance(state.last, Finished)]
        n_generated = sum(each.summary.n_tokens for each in done)
        seconds = sum(each.summary.decode_seconds for each in done)
        return {
            "prompt_tokens": sum(each.n_prompt_tokens for each in done),
            "cached_tokens": sum(each.n_cached for each in done),
            "generated_tokens": n_generated,
            "tokens_per_second": round(n_generated / seconds, 3) if seconds else None,
            "speedup_estimate": ends[-1].completion.summary.speed_up if ends else None,
            "draft_fault": next((each.draft_fault for each in done if each.draft_fault is not None), None),
            "cancelled": self.is_cancelled,
            "failed": any(isinstance(state.last, Exception) for state in self.states),
        }

    async def events(self, timeout: float | None, keep_alive: float) -> Events:
        """Yield all events, and signs of life: a PromptProgress without numbers.

        One comes at once, one when the request leaves the queue, and one after `keep_alive` seconds without
        an event. Raises a RequestError (504) after `timeout` seconds, and the error that ended a sequence.
        """
        last, running = time.monotonic(), dict(enumerate(self.states))
        deadline = last + (math.inf if timeout is None else timeout)
        is_queued: bool | None = None
        while running:
            now = time.monotonic()
            if now >= deadline:
                raise too_late()
            was_queued, is_queued = is_queued, all(each.started_at is None for each in running.values())
            # Since the last event, not the last token: the text of a call may be held back.
            is_silent = now - last >= keep_alive
            if is_silent or is_queued != was_queued:
                last = now
                has_no_room = is_silent and all(each.waits_for_room for each in running.values())
                yield 0, PromptProgress(is_waiting=is_queued or has_no_room)
            self.news.clear()
            for index, state in tuple(running.items()):
                for event in self._queue.fetch(state):
                    yield index, event
                    last = time.monotonic()
                if isinstance(state.last, Exception):
                    raise state.last
                if state.last is not None:
                    del running[index]
                    yield index, state.last
            if running:
                await self._wait(min(last + keep_alive, deadline) - time.monotonic())

    async def _wait(self, timeout: float) -> None:
        """Wait for news, at most `timeout` seconds."""
        timer = asyncio.get_running_loop().call_later(timeout, self.news.set)  # cheaper than a task
        try:
            await self.news.wait()
        finally:
            timer.cancel()

    def cancel(self) -> None:
        """End the sequences that still run, within one evaluation. Never waits."""
        if any(state.last is None for state in self.states):
            self.is_cancelled = True
            self._queue.drop(self.states)


class RequestQueue:
    """Runs up to `parallel` sequences at once, first come, first served. Belongs to one asyncio event loop.

    An interactive sequence is the next to run, and one of them may run beside `parallel` others. The compute
    thread evaluates, and wakes the event loop when a sequence has events. At most `max_queue` sequences wait.
    The limits hold for the sequences of all models together.
    """

    def __init__(self, parallel: int, max_queue: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._parallel, self._max_queue, self._clock = parallel, max_queue, clock
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        self.is_stopping = False  # new requests are refused

    def check_number(self, n: int) -> None:
        """Raise a RequestError (400) if one request may not have `n` sequences."""
        if n > self._parallel:
            refused = f"{n} sequences are more than the {self._parallel} that this server runs at once"
            raise bad_field("n", f"{refused}; ask for fewer, or start it with a larger --parallel")

    def submit(self, jobs: Sequence[Job]) -> Submission:
        """Queue the sequences of a request.

        RequestError: there are more of them than may run at once (400), too many others wait (429), or the
        server is stopping (503).
        """
        if self.is_stopping:
            raise server_stopping()
        self.check_number(len(jobs))
        n_free = max(0, self._n_slots(jobs[0]) - self._n_held)
        if len(self._waiting) + len(jobs) > self._max_queue + n_free:
            jobs[0].runner.metrics.refused()
            raise queue_full(len(self._waiting) // self._parallel)
        submission = Submission(jobs, self, self._clock())
        if jobs[0].options.is_interactive:  # the latest keystroke goes first
            self._waiting.extendleft(reversed(submission.states))
        else:
            self._waiting.extend(submission.states)
        self._admit()
        return submission

    def stop(self) -> None:
        """Refuse new requests and those that wait; running ones continue."""
        self.is_stopping = True
        self.drop(tuple(self._waiting))

    def end(self) -> None:
        """Refuse all requests and end running ones, before the models are closed."""
        self.stop()
        self.drop(tuple(self._running))

    def sequences(self, runner: Runner | None = None) -> tuple[list[SequenceState], int]:
        """Return the running sequences and the number of waiting ones, of one model or of all."""
        running, waiting = (
            [each for each in states if runner in (None, each.job.runner)]
            for states in (self._running, self._waiting)
        )
        return running, len(waiting)

    def drop(self, states: Sequence[SequenceState]) -> None:
        """End sequences whose client has left, or because the server is stopping."""
        for state in states:
            self._finish(state, server_stopping())

    def fetch(self, state: SequenceState) -> list[Event]:
        """Return the events of a sequence since the last call. If it is over, record its end."""
        stream = state.stream
        if state.pause is not None:
            state.pause.cancel()
            state.pause = None
        if state.place is not Place.HELD:
            state.place = Place.WANTED
            self._admit()
        if stream is not None and state.last is None and state.place is Place.HELD:
            try:
                state.pending += stream.ready()
                self._count_rounds(state, stream)
                if state.first_text_at is None and stream.rounds:
                    state.first_text_at = self._clock()
                if stream.is_over and stream.completion.stop_reason is StopReason.INTERRUPT:
                    raise RequestError(503, "the model was unloaded; send the request again")
                if stream.is_over or self._is_overdue(state, stream):
                    self._finish(state, Finished(stream.completion, stream.n_thought))
            except Exception as error:  # noqa: BLE001  # the client gets the error
                self._finish(state, error)
        events, state.pending = state.pending, []
        return events

    def _is_overdue(self, state: SequenceState, stream: AnswerStream) -> bool:
        """Whether a sequence has exceeded its time limit and has a whole line."""
        limit, first = state.job.options.max_seconds, state.first_text_at
        is_overdue = limit is not None and first is not None and self._clock() - first > limit
        return is_overdue and "\n" in stream.completion.text

    @property
    def _n_held(self) -> int:
        """Number of places that are taken."""
        return sum(each.place is Place.HELD for each in self._running)

    def _admit(self) -> None:
        for state in self._running:
            if state.place is Place.WANTED and self._n_held < self._n_slots(state.job):
                state.place = Place.HELD
                state.submission.news.set()
        while self._waiting and not self.is_stopping and self._n_held < self._n_slots(self._waiting[0].job):
            self._start(self._waiting.popleft())

    def _notice(self, state: SequenceState) -> None:
        """Let the client fetch the events of a sequence. If it does not, the sequence gives up its place."""
        state.submission.news.set()
        stream = state.stream
        if state.pause is None and stream is not None and stream.waits_for_reader:
            state.pause = asyncio.get_running_loop().call_later(READER_SECONDS, self._give_up_place, state)

    def _give_up_place(self, state: SequenceState) -> None:
        state.place = Place.GIVEN_UP
        self._admit()

    def _n_slots(self, job: Job) -> int:
        """Return how many sequences may run at once if this job is one of them."""
        return self._parallel + job.options.is_interactive

    def _start(self, state: SequenceState) -> None:
        loop = asyncio.get_running_loop()
        begin = state.started_at = self._clock()
        self._running.append(state)
        state.submission.news.set()

        def on_progress(n_processed: int, n_total: int) -> None:
            n_cached = 0 if state.stream is None else state.stream.completion.n_cached
            state.pending.append(PromptProgress(n_processed, n_total, n_cached, self._clock() - begin))

        try:
            state.stream = state.job.open(on_progress)
            state.stream.begin(lambda: loop.call_soon_threadsafe(self._notice, state))
        except Exception as error:  # noqa: BLE001  # the client gets the error
            self._finish(state, error)

    def _count_rounds(self, state: SequenceState, stream: AnswerStream) -> None:
        rounds = stream.rounds[state.n_rounds_counted :]
        state.n_rounds_counted += len(rounds)
        state.job.runner.metrics.rounds(rounds)

    def _finish(self, state: SequenceState, last: Finished | Exception) -> None:
        if state.last is not None:
            return
        state.last = last
        if state.pause is not None:
            state.pause.cancel()
        for states in (self._running, self._waiting):
            with suppress(ValueError):
                states.remove(state)
        with suppress(RuntimeError):  # the event loop has ended, and the client with it
            state.submission.news.set()
        with suppress(Exception):  # the client knows the end already, and other sequences must continue
            self._end(state, last)
        self._admit()

    def _end(self, state: SequenceState, last: Finished | Exception) -> None:
        """Stop generating, and count what was generated."""
        completion = None
        if state.stream is not None:
            state.stream.close()
            self._count_rounds(state, state.stream)
            completion = state.stream.completion
        now, first = self._clock(), state.first_text_at
        reason = StopReason.INTERRUPT.value if state.submission.is_cancelled else "error"
        if isinstance(last, Finished):
            reason = last.completion.stop_reason.value
        waited = (state.started_at or now) - state.asked_at
        seconds = None if first is None else first - state.asked_at
        state.job.runner.metrics.ended(reason, completion, waited, seconds)


def too_late() -> RequestError:
    """Return the error for a request whose time is over."""
    return RequestError(504, "the answer took too long; see --request-timeout", code="timeout")


def queue_full(n_turns: int) -> RequestError:
    """Return the error for a request that comes when too many wait, for so many turns."""
    message = "too many requests are waiting; try again later"
    return RequestError(429, message, code="queue_full", retry_after=min(MAX_RETRY_SECONDS, 1 + n_turns))


def server_stopping() -> RequestError:
    """Return the error for a request that arrives or waits while the server stops."""
    return RequestError(503, "the server is stopping", code="server_stopping")
