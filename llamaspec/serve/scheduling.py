"""Runs the requests of all clients on a pair: a queue in the event loop, and the events of each request.

The pair's compute thread evaluates; the rest of the server sees `RequestQueue`, `Submission` and its events.
The deltas of an answer are fetched when its client can take them. If it cannot, the engine lets its sequences
wait. A fault of one sequence ends only that sequence. tests/serve/test_load.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from llamaspec.chat.answer_stream import AnswerStream
from llamaspec.chat.deltas import Delta
from llamaspec.chat.parse import AnswerParser
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.generation import Completion, StopReason
from llamaspec.engine.stream import Progress, TextStream
from llamaspec.length.fixed import AtMost
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.serve.errors import RequestError
from llamaspec.serve.metrics import Metrics
from llamaspec.serve.requests import Job
from llamaspec.values import TokenArray

MAX_RETRY_SECONDS = 60


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """A part of the prompt has been processed; without numbers: nothing happened for a while."""

    n_read: int | None = None
    n_to_read: int | None = None
    n_cached: int = 0  # tokens of `n_read` that did not have to be evaluated
    seconds: float = 0.0  # since the sequence began to run


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sequence."""

    completion: Completion
    n_reasoning: int = 0  # tokens

    @property
    def is_truncated(self) -> bool:
        """Whether the answer is incomplete: at a limit, or because its constraint allows no continuation."""
        return self.completion.stop_reason in (StopReason.LIMIT, StopReason.CONTEXT, StopReason.CONSTRAINT)


Event: TypeAlias = "Delta | PromptProgress | Finished"  # the last of a sequence is a Finished
Events: TypeAlias = AsyncIterator[tuple[int, Event]]  # with the index of the sequence


@dataclass(slots=True, eq=False)
class SequenceState:
    """A job in the queue or running."""

    index: int  # among the jobs of the submission
    job: Job
    submission: Submission
    asked_at: float  # seconds, as the next two
    started_at: float | None = None
    first_text_at: float | None = None
    stream: AnswerStream | None = None  # once it runs
    n_rounds_counted: int = 0
    events: deque[Event | Exception] = field(default_factory=deque)  # for the client
    last: Finished | Exception | None = None  # set at the end

    @property
    def is_over(self) -> bool:
        """Whether it has ended; its client may have more to read."""
        return self.last is not None


class Submission:
    """The events of all sequences of one HTTP request."""

    def __init__(self, jobs: Sequence[Job], queue: RequestQueue, now: float) -> None:
        self.states = [SequenceState(i, job, self, now) for i, job in enumerate(jobs)]
        self.is_cancelled = False
        self.news = asyncio.Event()  # a sequence may have new events
        self._queue = queue

    def work(self) -> dict[str, Any]:
        """What was computed, for the log; the speed-up is that of the last completion."""
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
            "cancelled": self.is_cancelled,
        }

    async def events(self, deadline: float | None, keep_alive: float) -> Events:
        """All events; a PromptProgress without numbers after `keep_alive` seconds without one.

        Raises RequestError 504 after the deadline (`time.monotonic`), and whatever ended a sequence.
        """
        last, running = time.monotonic(), list(self.states)
        while running:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise RequestError(504, "the answer took too long; see --request-timeout", code="timeout")
            # Counted from the last event, not the last token: text may be held back, as in a call.
            if now - last >= keep_alive:
                last = now
                yield 0, PromptProgress()
            self.news.clear()
            for state in tuple(running):
                self._queue.fetch(state)
                while state.events:
                    event = state.events.popleft()
                    if isinstance(event, Exception):
                        raise event
                    last = time.monotonic()
                    yield state.index, event
                if state.is_over:
                    running.remove(state)
            if running:
                ends = last + keep_alive if deadline is None else min(last + keep_alive, deadline)
                await self._wait(ends - time.monotonic())

    async def _wait(self, timeout: float) -> None:
        """Wait for news, at most `timeout` seconds."""
        timer = asyncio.get_running_loop().call_later(timeout, self.news.set)  # cheaper than a task
        try:
            await self.news.wait()
        finally:
            timer.cancel()

    def cancel(self) -> None:
        """End the sequences within one evaluation; never waits."""
        is_over = all(state.is_over and not state.events for state in self.states)
        if not is_over and not self.is_cancelled:
            self.is_cancelled = True
            self._queue.drop(self.states)


class RequestQueue:
    """Runs up to `parallel` sequences at once, first come, first served; only for one asyncio event loop.

    An interactive sequence is the next to run, and the only one that may run beside `parallel` others.
    The pair's compute thread evaluates, and calls the event loop when a sequence has events. At most
    `max_queue` sequences wait; `policy` is shared by all.
    """

    def __init__(
        self,
        pair: Pair,
        policy: LengthPolicy,
        metrics: Metrics,
        parallel: int,
        max_queue: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pair, self._policy, self._metrics, self._clock = pair, policy, metrics, clock
        self._parallel, self._max_queue = parallel, max_queue
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        self.is_stopping = False  # no more requests are taken
        self.is_ending = False  # running ones end, too

    def submit(self, jobs: Sequence[Job]) -> Submission:
        """Queue sequences; RequestError 429: too many wait already, 503: the server is stopping."""
        if self.is_stopping:
            raise _server_stopping()
        n_free = max(0, self._n_slots(jobs[0]) - len(self._running))
        if len(self._waiting) + len(jobs) > self._max_queue + n_free:
            self._metrics.refused()
            seconds = min(MAX_RETRY_SECONDS, 1 + len(self._waiting) // self._parallel)
            message = "too many requests wait already; try again later"
            raise RequestError(429, message, code="queue_full", retry_after=seconds)
        submission = Submission(jobs, self, self._clock())
        if jobs[0].options.is_interactive:  # the last key first
            self._waiting.extendleft(reversed(submission.states))
        else:
            self._waiting.extend(submission.states)
        self._admit()
        return submission

    def stop(self) -> None:
        """Take no more requests and refuse waiting ones; running ones continue."""
        self.is_stopping = True
        self.drop(tuple(self._waiting))

    def end(self) -> None:
        """End running sequences, too, before the pair is closed."""
        self.is_ending = True
        self.stop()
        self.drop(tuple(self._running))

    def sequences(self) -> tuple[list[SequenceState], int]:
        """Return the running sequences, and the number of waiting ones."""
        return list(self._running), len(self._waiting)

    def drop(self, states: Sequence[SequenceState]) -> None:
        """End sequences, because their client has left or the server stops."""
        for state in states:
            self._finish(state, _server_stopping())

    def fetch(self, state: SequenceState) -> None:
        """Add what a sequence has generated to its events; end it if that was all."""
        stream = state.stream
        if stream is None or state.is_over:
            return
        try:
            state.events.extend(stream.ready())
            self._count_rounds(state, stream)
            if state.first_text_at is None and stream.rounds:
                state.first_text_at = self._clock()
            if stream.is_over or self._is_late(state, stream):
                self._finish(state, Finished(stream.completion, stream.n_thought))
        except Exception as error:  # noqa: BLE001  # the client gets the error
            self._finish(state, error)

    def _is_late(self, state: SequenceState, stream: AnswerStream) -> bool:
        """Whether a sequence has used its time and has a whole line."""
        limit, first = state.job.options.max_seconds, state.first_text_at
        is_late = limit is not None and first is not None and self._clock() - first > limit
        return is_late and "\n" in stream.completion.text

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._n_slots(self._waiting[0].job):
            state = self._waiting.popleft()
            self._running.append(state)
            state.started_at = self._clock()
            self._start(state)

    def _n_slots(self, job: Job) -> int:
        """Sequences that may run at once, this one included."""
        return self._parallel + job.options.is_interactive

    def _start(self, state: SequenceState) -> None:
        loop = asyncio.get_running_loop()
        begin = self._clock()

        def note(n_read: int, n_to_read: int) -> None:
            n_cached = 0 if state.stream is None else state.stream.completion.n_cached
            state.events.append(PromptProgress(n_read, n_to_read, n_cached, self._clock() - begin))

        try:
            state.stream = open_stream(state.job, self._pair, self._policy, note)
            state.stream.begin(lambda: loop.call_soon_threadsafe(state.submission.news.set))
        except Exception as error:  # noqa: BLE001  # the client gets the error
            self._finish(state, error)

    def _count_rounds(self, state: SequenceState, stream: AnswerStream) -> None:
        rounds = stream.rounds[state.n_rounds_counted :]
        state.n_rounds_counted += len(rounds)
        self._metrics.rounds(rounds)

    def _finish(self, state: SequenceState, last: Finished | Exception) -> None:
        if state.is_over:
            return
        state.last = last
        if state in self._running:
            self._running.remove(state)
        else:
            with suppress(ValueError):
                self._waiting.remove(state)
        state.events.append(last)
        with suppress(RuntimeError):  # the event loop has ended, and the client with it
            state.submission.news.set()
        with suppress(Exception):  # the client has its error, and other sequences must continue
            self._end(state, last)
        if not self.is_stopping:
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
        self._metrics.ended(reason, completion, waited, None if first is None else first - state.asked_at)


def _server_stopping() -> RequestError:
    return RequestError(503, "the server is stopping", code="server_stopping")


def open_stream(job: Job, pair: Pair, policy: LengthPolicy, on_prefill: Progress) -> AnswerStream:
    """The stream of a job."""
    wanted, drafting, vocabulary = job.parameters, job.drafting, pair.target.vocabulary
    is_plain = drafting.enabled is False or drafting.max_draft == 0
    constraints = iter((wanted.constraint, wanted.constraint_after_cut))

    def open_part(prompt: TokenArray, max_tokens: int) -> TextStream:
        return pair.stream(
            prompt,
            sampling=job.sampling,
            seed=job.seed,
            max_tokens=max_tokens,
            stops=job.options.stops,
            spelled=wanted.answer_format.spelled(vocabulary.controls),
            rule=drafting.rule or DEFAULT_RULE,
            policy=policy if drafting.max_draft is None else AtMost(drafting.max_draft, policy),
            drafter=NoDrafter() if is_plain else None,
            copies=drafting.ngram is not False,
            on_prefill=on_prefill,
            constraint=next(constraints),
            logprobs=job.options.n_logprobs,
            prediction=job.prediction,
            is_interactive=job.options.is_interactive,
        )

    parser = AnswerParser(wanted.answer_format, wanted.tools, thinking=wanted.starts_in_reasoning)
    return AnswerStream(job.prompt, job.max_tokens, open_part, parser, vocabulary, wanted.reasoning_budget)
