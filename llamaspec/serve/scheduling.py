"""Runs the requests of all clients on a pair: a queue, a thread that evaluates, and events for asyncio.

Everything of the server that depends on how evaluations are driven is here (`Pair.step`, `pause`, `ready`);
the rest sees `RequestQueue`, `Submission` and the events. A fault of one sequence ends only that sequence.
tests/serve/test_load.py.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from llamaspec.chat.answer_stream import AnswerPart, AnswerStream, ReasoningLimit
from llamaspec.chat.parse import AnswerParser
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.events import Completion, StopReason
from llamaspec.engine.stream import Progress, TextStream
from llamaspec.length.at_most import AtMost
from llamaspec.length.auto_length import AutoLength
from llamaspec.pair import Pair
from llamaspec.protocols import Constraint, Drafter, LengthPolicy
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.serve import PADDING
from llamaspec.serve.bodies import RequestError
from llamaspec.serve.metrics import Metrics
from llamaspec.serve.requests import GenerationRequest
from llamaspec.values import Round, TokenArray

MAX_UNREAD = 64  # events of a sequence that may wait for the client; then it is not asked for more
MIN_FREE_TOKENS = 256  # for which the KV cache must have room before a sequence begins or resumes
MAX_RETRY_SECONDS = 60


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Some of the prompt has been evaluated; without numbers: nothing happened for a while."""

    n_read: int | None = None
    n_to_read: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a text."""

    completion: Completion
    speedup: float | None  # estimated, against plain decoding
    n_reasoning: int = 0  # tokens

    @property
    def is_truncated(self) -> bool:
        """Whether the text is incomplete: at a limit, or with no continuation that its constraint allows."""
        return self.completion.stop_reason in (StopReason.LIMIT, StopReason.CONTEXT, StopReason.CONSTRAINT)


# Parts are more of the answer; the last event is a Finished, or the exception that ended the sequence.
Event: TypeAlias = "PromptProgress | tuple[AnswerPart, ...] | Finished | Exception"


@dataclass(slots=True, eq=False)
class SequenceState:
    """A generation request on its way. The decode thread writes it, but for `n_read`."""

    index: int  # among those of the submission
    request: GenerationRequest
    submission: Submission
    asked_at: float  # seconds, as the next two
    started_at: float | None = None
    first_text_at: float | None = None
    stream: AnswerStream | None = None  # once it runs
    unsent: list[Event] = field(default_factory=list)
    n_sent: int = 0  # events; written by the decode thread only
    n_read: int = 0  # events; written by the event loop only
    n_rounds_counted: int = 0

    @property
    def is_unread(self) -> bool:
        """Whether the client has not read what there is, and the sequence should wait."""
        return self.n_sent - self.n_read >= MAX_UNREAD

    @property
    def n_cells(self) -> int:
        """KV cells for the next evaluation, with its draft and padding."""
        return PADDING + (len(self.request.prompt) if self.stream is None else self.stream.n_cells)

    def n_growth(self, context_size: int) -> int:
        """KV cells that should be free beside `n_cells`, so that the sequence need not pause at once."""
        longest = min(len(self.request.prompt) + self.request.max_tokens, context_size)
        return max(0, min(MIN_FREE_TOKENS, longest + PADDING - self.n_cells))


class Submission:
    """The events of all sequences of one HTTP request, read in an asyncio event loop."""

    def __init__(self, requests: Sequence[GenerationRequest], wake: Callable[[], None], now: float) -> None:
        self.states = [SequenceState(i, request, self, now) for i, request in enumerate(requests)]
        self.is_cancelled = False
        self._wake = wake
        self._loop, self._arrived = asyncio.get_running_loop(), asyncio.Event()
        self._events: deque[tuple[SequenceState, Event]] = deque()
        self._n_open = len(self.states)

    @property
    def is_over(self) -> bool:
        """Whether every sequence has ended and all its events were read."""
        return self._n_open == 0

    async def next_event(self, timeout: float) -> tuple[int, Event] | None:
        """The next event and the index of its sequence; None if there is none for `timeout` seconds."""
        if not self._events:
            self._arrived.clear()
            timer = self._loop.call_later(timeout, self._arrived.set)  # cheaper than a task for each event
            try:
                await self._arrived.wait()
            finally:
                timer.cancel()
            if not self._events:
                return None
        state, event = self._events.popleft()
        was_unread = state.is_unread
        state.n_read += 1
        if was_unread:
            self._wake()
        self._n_open -= isinstance(event, (Finished, Exception))
        return state.index, event

    def cancel(self) -> None:
        """End the sequences within one evaluation. From the event loop; never waits."""
        if not self.is_over and not self.is_cancelled:
            self.is_cancelled = True
            self._wake()

    def send(self, state: SequenceState, events: Sequence[Event]) -> None:
        """Hand over events; from the decode thread."""
        state.n_sent += len(events)
        try:
            self._loop.call_soon_threadsafe(self._receive, [(state, event) for event in events])
        except RuntimeError:  # the event loop has ended, and the client with it
            self.is_cancelled = True

    def _receive(self, events: Sequence[tuple[SequenceState, Event]]) -> None:
        self._events.extend(events)
        self._arrived.set()


class RequestQueue:
    """Runs up to `parallel` sequences at once, first come, first served, until it is closed.

    `policy` is shared by all sequences, at most `max_queue` wait. No sequence reserves KV cells that it may
    come to need: when the KV cache is full, those that came last pause and leave their cells to the others;
    later their own text is evaluated again.
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
        self._context_size = pair.target.context_size
        self._n_cells = max(pair.target.options.n_cells or 0, self._context_size)
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        self._has_news = self._is_closed = False
        self.is_stopping = False  # no more requests are taken
        self.is_ending = False  # those that run end, too
        self._thread = threading.Thread(target=self._work, name="llamaspec-decode", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> Submission:
        """Queue sequences; from the event loop. RequestError 429: too many wait; 503: the server stops."""
        with self._changed:
            if self.is_stopping:
                raise _server_stopping()
            n_free = max(0, self._parallel - len(self._running))
            if len(self._waiting) + len(requests) > self._max_queue + n_free:
                self._metrics.refused()
                seconds = min(MAX_RETRY_SECONDS, 1 + len(self._waiting) // self._parallel)
                message = "too many requests wait already; try again later"
                raise RequestError(429, message, code="queue_full", retry_after=seconds)
            submission = Submission(requests, self._wake, self._clock())
            self._waiting.extend(submission.states)
            self._wake()
        return submission

    def stop(self) -> None:
        """Take no more requests and refuse those that wait; those that run go on."""
        self.is_stopping = True
        self._wake()

    def end(self) -> None:
        """End what runs, too."""
        self.is_stopping = self.is_ending = True
        self._wake()

    def close(self) -> None:
        """End everything and the thread; before the pair is closed."""
        self._is_closed = True
        self.end()
        self._thread.join()

    def sequences(self) -> tuple[list[SequenceState], int]:
        """The sequences that run, and how many wait."""
        with self._changed:
            return list(self._running), len(self._waiting)

    def _wake(self) -> None:
        with self._changed:  # reentrant
            self._has_news = True
            self._changed.notify()

    # In the decode thread.

    def _work(self) -> None:
        is_busy = False
        while self._wait(is_busy):
            try:
                is_busy = self._step()
            except Exception as error:  # noqa: BLE001, PERF203  # all clients are told; the thread goes on
                is_busy = False
                for state in list(self._running):
                    self._finish(state, error)

    def _wait(self, is_busy: bool) -> bool:
        """Wait until there is something to do; False when the queue is closed and empty."""
        with self._changed:
            while not (is_busy or self._has_news or self._is_closed):
                self._changed.wait()
            self._has_news = False
            return not self._is_closed or bool(self._running or self._waiting)

    def _step(self) -> bool:
        """One evaluation; whether anything happened."""
        for state in self._unwanted():
            self._finish(state, _server_stopping())
        while (admitted := self._admit()) is not None:
            self._start(admitted)
        running = list(self._running)
        self._share_cells(running)
        is_busy = bool(running) and self._pair.step()
        for state in running:
            is_busy |= self._hand_out(state)
        return is_busy

    def _unwanted(self) -> list[SequenceState]:
        """Sequences whose client has left or that must end; those that wait are removed."""
        with self._changed:
            waiting = list(self._waiting)
            unwanted = [state for state in waiting if self.is_stopping or state.submission.is_cancelled]
            self._waiting = deque(state for state in waiting if state not in unwanted)
            running = [state for state in self._running if self.is_ending or state.submission.is_cancelled]
        return [*unwanted, *running]

    def _admit(self) -> SequenceState | None:
        """The next sequence that begins to run: there must be KV cells for its prompt and some text."""
        with self._changed:
            if not self._waiting or len(self._running) >= self._parallel:
                return None
            state = self._waiting[0]
            n_taken = sum(other.n_cells for other in self._running)
            n_wanted = state.n_cells + state.n_growth(self._context_size)
            if self._running and n_taken + n_wanted > self._n_cells:
                return None
            self._running.append(self._waiting.popleft())
        state.started_at = self._clock()
        return state

    def _start(self, state: SequenceState) -> None:
        def on_prefill(n_read: int, n_to_read: int) -> None:
            state.unsent.append(PromptProgress(n_read, n_to_read))

        try:
            state.stream = open_stream(state.request, self._pair, self._policy, on_prefill)
            state.stream.ready()
        except Exception as error:  # noqa: BLE001  # the client is told
            self._finish(state, error)

    def _share_cells(self, running: Sequence[SequenceState]) -> None:
        """Pause the sequences that came last where the KV cache is full; unread ones pause before others."""
        n_taken, is_full = 0, False
        for state in sorted(running, key=lambda state: state.is_unread):
            if state.stream is None:
                continue
            growth = state.n_growth(self._context_size) if state.stream.is_paused else 0
            is_full |= n_taken > 0 and n_taken + state.n_cells + growth > self._n_cells
            if is_full:
                state.stream.pause()
            else:
                state.stream.go_on()
            n_taken += state.n_cells

    def _hand_out(self, state: SequenceState) -> bool:
        """Send what a sequence has produced; whether that was anything."""
        stream = state.stream
        if stream is None or state.is_unread:
            return False
        try:
            parts = tuple(stream.ready())
        except Exception as error:  # noqa: BLE001  # the client is told
            self._finish(state, error)
            return True
        rounds = stream.rounds[state.n_rounds_counted :]
        state.n_rounds_counted += len(rounds)
        self._metrics.rounds(rounds)
        if parts:
            state.first_text_at = self._clock() if state.first_text_at is None else state.first_text_at
            state.unsent.append(parts)
        if stream.is_over:
            done = stream.completion
            self._finish(state, Finished(done, speedup(done.rounds, self._policy), stream.n_thought))
            return True
        if not state.unsent:
            return bool(rounds)
        state.submission.send(state, state.unsent.copy())
        state.unsent.clear()
        return True

    def _finish(self, state: SequenceState, last: Event) -> None:
        if state.stream is not None:
            with suppress(Exception):  # whatever it is, the sequence has ended
                state.stream.close()
        with self._changed:
            if state in self._running:
                self._running.remove(state)
            self._has_news = True  # another may begin
        now, first = self._clock(), state.first_text_at
        completion = None if state.stream is None else state.stream.completion
        reason = StopReason.INTERRUPT.value if state.submission.is_cancelled else "error"
        if isinstance(last, Finished):
            reason = last.completion.stop_reason.value
        waited = (state.started_at or now) - state.asked_at
        self._metrics.ended(reason, completion, waited, None if first is None else first - state.asked_at)
        state.submission.send(state, [*state.unsent, last])


def _server_stopping() -> RequestError:
    return RequestError(503, "the server is stopping", code="server_stopping")


def open_stream(
    request: GenerationRequest, pair: Pair, policy: LengthPolicy, on_prefill: Progress
) -> AnswerStream:
    """The stream of a request, with its reasoning cut where the budget ends."""
    wanted, drafting, vocabulary = request.parameters, request.drafting, pair.target.vocabulary
    rule, reasoning = drafting.rule or DEFAULT_RULE, wanted.answer_format.reasoning
    constraints = iter((wanted.constraint, wanted.constraint_after_cut))

    def drafter(n_prompt: int, constraint: Constraint | None) -> Drafter | None:
        """None: the pair's own."""
        if drafting.enabled is not False and drafting.max_draft != 0:
            if drafting.ngram is not False or not pair.ngram:
                return None
            if pair.draft is not None:
                row = None if constraint is None else constraint.start_row()
                streams = SeededStreams(request.seed)
                return pair.model_drafter(request.sampling, rule, streams, n_prompt, row)
        return NoDrafter()

    def open_part(prompt: TokenArray, max_tokens: int) -> TextStream:
        constraint = next(constraints)
        return pair.stream(
            prompt,
            sampling=request.sampling,
            seed=request.seed,
            max_tokens=max_tokens,
            stops=request.stops,
            spelled=wanted.answer_format.spelled(vocabulary.controls),
            rule=rule,
            policy=policy if drafting.max_draft is None else AtMost(drafting.max_draft, policy),
            drafter=drafter(len(prompt), constraint),
            on_prefill=on_prefill,
            constraint=constraint,
            logprobs=request.n_logprobs,
        )

    budget = wanted.reasoning_budget
    limit = None if reasoning is None or budget is None else ReasoningLimit(reasoning, budget)
    parser = AnswerParser(wanted.answer_format, wanted.tools, thinking=wanted.starts_in_reasoning)
    return AnswerStream(request.prompt, request.max_tokens, open_part, parser, vocabulary, limit)


def speedup(rounds: Sequence[Round], policy: LengthPolicy) -> float | None:
    """How many times as fast as plain decoding a text was, by the expected time of plain rounds.

    Rounds that shared their evaluation with a prompt do not count: their own share is not known.
    """
    rounds = [round_ for round_ in rounds if not round_.n_beside]
    if not isinstance(policy, AutoLength) or not rounds:
        return None
    expected = [policy.plain_seconds(round_.n_rows) for round_ in rounds]
    seconds = sum(round_.seconds for round_ in rounds)
    plain = sum((round_.n_accepted + 1) * each for round_, each in zip(rounds, expected, strict=True) if each)
    return plain / seconds if seconds > 0 and None not in expected else None
