"""A running completion, in three objects.

`RunningSequence` is what its reader and the scheduler share: the coroutine, the queue of events, the flag
that cancels. `Slot` is the scheduler's record of its next evaluation, and `Stopwatch` adds up the seconds of
a round; only the compute thread touches these two. tests/engine/test_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from llamaspec.values import NO_TOKENS, TARGET, Forward, ForwardRequest, Round, TokenArray

Event = TypeVar("Event")
Generating: TypeAlias = Generator[ForwardRequest | Round | Event, Any, Any]
Width: TypeAlias = Callable[[int], int | None]  # needed positions -> those to evaluate; None = not allowed
Clock: TypeAlias = Callable[[], float]  # seconds

MAX_UNREAD = 16  # events; a sequence with this many waits for its reader
INTERACTIVE_TOKENS = 128  # of an interactive sequence that go before others: the default limit of editors


@dataclass(slots=True, eq=False)
class RunningSequence(Generic[Event]):
    """A completion that is being generated."""

    completion: Generating[Event]
    width: Width = lambda n_positions: n_positions  # no padding
    n_prompt: int = 0  # tokens
    limit: int | None = None  # maximum length in tokens, prompt included
    is_interactive: bool = False  # goes before sequences that are not
    notify: Callable[[], object] | None = None  # called by the compute thread after each event
    events: SimpleQueue[Event | None] = field(default_factory=SimpleQueue)  # None = the end
    error: Exception | None = None  # the reason for a failed end, until it is raised to the reader
    number: int = -1  # set when it starts; later sequences have higher numbers
    is_done: bool = False
    is_cancelled: bool = False  # set from any thread; the scheduler ends the sequence at its next step
    is_swapped_out: bool = True  # holds no room in the KV cache and is not evaluated

    def put(self, event: Event | None) -> None:
        """Hand an event to the reader."""
        self.events.put(event)
        if self.notify is not None:
            with suppress(RuntimeError):  # the reader's event loop has ended
                self.notify()

    def next_event(self) -> Event | None:
        """Wait for the next event; None after the end. Raises the error that ended the sequence, once."""
        event = self.events.get()
        if event is None:
            self.events.put(None)  # for the next call
            if self.error is not None:
                error, self.error = self.error, None
                raise error
        return event

    def end(self, error: BaseException | None) -> None:
        """Close the coroutine and tell the reader."""
        try:
            self.completion.close()
        except BaseException as raised:  # noqa: BLE001  # a drafter may refuse to be closed
            error = error or raised
        self.error, self.is_done = None if error is None else as_exception(error), True
        with suppress(BaseException):  # `notify` may raise; the event is in the queue
            self.put(None)


def as_exception(raised: BaseException) -> Exception:
    """Wrap SystemExit and KeyboardInterrupt, which mean something else in the thread of the reader."""
    if isinstance(raised, Exception):
        return raised
    error = RuntimeError(f"{raised!r} ended the completion; drafters and policies must raise an Exception")
    error.__cause__ = raised
    return error


class Stopwatch:
    """The seconds of one sequence since its last round, by purpose."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = 0.0
        self._is_drafting = False  # else the coroutine's time is overhead
        self.request_seconds = 0.0  # evaluations of the current request: a long prompt takes several
        self._begin_round()

    def start(self, *, is_drafting: bool) -> None:
        """Start timing the coroutine: its request is answered."""
        self.request_seconds, self._is_drafting = 0.0, is_drafting
        self._since = self._clock()

    def lap(self) -> None:
        """Count the seconds since the start, or since the last lap, as the coroutine's own."""
        now = self._clock()
        if self._is_drafting:
            self._draft_seconds += now - self._since
        else:
            self._overhead_seconds += now - self._since
        self._since = now

    def restart(self) -> None:
        """Forget everything up to now: the prompt is not part of the first round."""
        self._begin_round()
        self._since = self._clock()

    def count_preparation(self, seconds: float) -> None:
        """Count this sequence's share of preparing a batch."""
        self._overhead_seconds += seconds

    def count_evaluation(self, request: ForwardRequest, seconds: float) -> None:
        """Count an evaluation of the request or of a part of it."""
        self.request_seconds += seconds
        if request.model == TARGET:
            self._verify_seconds += seconds
        else:
            self._draft_seconds += seconds
            self._n_draft_steps += bool(request.n_scored)

    def stamped(self, round_: Round) -> Round:
        """Return the round with its seconds; the next round starts here."""
        self.lap()
        stamped = replace(
            round_,
            n_draft_steps=self._n_draft_steps,
            draft_seconds=self._draft_seconds,
            verify_seconds=self._verify_seconds,
            overhead_seconds=self._overhead_seconds,
        )
        self._begin_round()
        return stamped

    def _begin_round(self) -> None:
        self._is_drafting = False
        self._draft_seconds = self._verify_seconds = self._overhead_seconds = 0.0
        self._n_draft_steps = 0


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence, the request that it waits for, and how much of that is evaluated next."""

    sequence: RunningSequence[Any]
    stopwatch: Stopwatch
    request: ForwardRequest | None = None
    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # of the last request to the target
    part: ForwardRequest | None = None  # the request, or the part of its prompt that is evaluated next
    n_cached: int = 0  # tokens of the request that are cached
    n_cached_before: int | None = None  # the same, before any part of the request was evaluated
    n_new: int = 0  # positions of the request that are not cached
    n_padding: int = 0  # positions of padding that the sequence would like
    fault: Exception | None = None  # raised by the length policy while a batch was put together
    has_rounds: bool = False
    last_step: int = 0  # the scheduler's last step that evaluated this sequence; 0 = none yet

    @property
    def goes_first(self) -> bool:
        """Whether the sequence goes before others: it is interactive and still short."""
        sequence = self.sequence
        return sequence.is_interactive and len(self.tokens) - sequence.n_prompt < INTERACTIVE_TOKENS

    @property
    def rank(self) -> tuple[bool, int]:
        """Order of claims to the KV cache, the lowest first."""
        return not self.goes_first, self.sequence.number

    @property
    def is_unread(self) -> bool:
        """Whether the sequence waits for its reader."""
        return self.sequence.events.qsize() >= MAX_UNREAD

    @property
    def n_cells(self) -> int:
        """KV cells that the prompt and the next evaluation need."""
        return max(self.sequence.n_prompt, 0 if self.request is None else self.request.n_tokens)

    def padded(self, n_positions: int) -> int | None:
        """The width that the length policy wants; if the policy fails, its sequence ends at the next step."""
        try:
            return self.sequence.width(n_positions)
        except BaseException as error:  # noqa: BLE001  # ends this sequence alone
            self.fault = as_exception(error)
            return n_positions

    def shorten(self, n: int) -> None:
        """Evaluate only the first `n` new tokens of the part."""
        assert self.part is not None
        self.part = self.part.prefill(self.n_cached + n)

    def advance(self, answer: Forward | None, error: Exception | None) -> None:
        """Resume the coroutine until its next request.

        With an error: the request cannot be evaluated. Raises StopIteration at the end of the completion, and
        any exception of the coroutine.
        """
        completion, stopwatch = self.sequence.completion, self.stopwatch
        stopwatch.start(is_drafting=self.request is not None and self.request.model != TARGET)
        self.request = self.part = self.n_cached_before = None
        self.fault = self.fault if error is None else None  # a fault that came meanwhile is raised next
        try:
            wanted = completion.send(answer) if error is None else completion.throw(error)
            while not isinstance(wanted, ForwardRequest):
                if isinstance(wanted, Round):
                    self.has_rounds = True
                    wanted = completion.send(stopwatch.stamped(wanted))
                else:
                    self.sequence.put(wanted)
                    if not self.has_rounds:
                        stopwatch.restart()
                    wanted = completion.send(None)
            self.request = wanted
            if wanted.model == TARGET:
                self.tokens = wanted.tokens
        finally:
            stopwatch.lap()
