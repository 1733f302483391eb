"""A completion that is being generated, in three objects.

Reader and scheduler share a `RunningSequence`: the coroutine, the queue of events, and the flag that cancels.
Only the compute thread touches the other two: `Slot` is the scheduler's record of the next evaluation, and
`Stopwatch` adds up the seconds of a round. tests/engine/test_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from llamaspec.protocols import SequenceLength
from llamaspec.values import (
    NO_SCOPE,
    NO_TOKENS,
    TARGET,
    Forward,
    ForwardRequest,
    HiddenRows,
    Round,
    Scope,
    TokenArray,
)

Event = TypeVar("Event")
Generating: TypeAlias = Generator[ForwardRequest | Round | Event, Any, Any]
Clock: TypeAlias = Callable[[], float]  # seconds

MAX_UNREAD = 16  # events; a sequence with this many waits for its reader
INTERACTIVE_TOKENS = 128  # first tokens of an interactive sequence, which has priority for so long


@dataclass(slots=True, eq=False)
class RunningSequence(Generic[Event]):
    """A completion that is being generated."""

    coroutine: Generating[Event]
    length: SequenceLength | None = None  # its length policy
    n_prompt: int = 0  # tokens
    limit: int | None = None  # maximum length in tokens, prompt included
    is_interactive: bool = False  # a person waits for it
    scope: Scope = NO_SCOPE  # of all its requests
    notify: Callable[[], object] | None = None  # called by the compute thread after each event
    events: SimpleQueue[Event | None] = field(default_factory=SimpleQueue)  # None = the end
    error: Exception | None = None  # the error that ended it, until the reader has received it
    number: int = -1  # set when it starts; later sequences have higher numbers
    is_done: bool = False
    is_cancelled: bool = False  # set from any thread; the scheduler ends the sequence at its next step
    is_swapped_out: bool = True  # it has no cells in the KV cache and is not evaluated

    @property
    def waits_for_reader(self) -> bool:
        """Whether it has paused, because too many of its events are unread; may be called from any thread."""
        return not self.is_done and self.events.qsize() >= MAX_UNREAD

    def put(self, event: Event | None) -> None:
        """Send an event to the reader."""
        self.events.put(event)
        if self.notify is not None:
            with suppress(RuntimeError):  # the event loop of the reader has ended
                self.notify()

    def next_event(self) -> Event | None:
        """Wait for the next event; None after the end. The error that ended the sequence is raised once."""
        event = self.events.get()
        if event is None:
            self.events.put(None)  # for further calls
            if self.error is not None:
                error, self.error = self.error, None
                raise error
        return event

    def end(self, error: BaseException | None) -> None:
        """Close the coroutine and send the end to the reader."""
        try:
            self.coroutine.close()
        except BaseException as raised:  # noqa: BLE001  # a drafter may refuse to be closed
            error = error or raised
        self.error, self.is_done = None if error is None else as_exception(error), True
        with suppress(BaseException):  # `notify` may raise, but the event is already in the queue
            self.put(None)


def as_exception(raised: BaseException) -> Exception:
    """Wrap SystemExit and KeyboardInterrupt, which would have another meaning in the reader's thread."""
    if isinstance(raised, Exception):
        return raised
    error = RuntimeError(f"{raised!r} ended the completion; drafters and policies must raise an Exception")
    error.__cause__ = raised
    return error


class Stopwatch:
    """The seconds of a sequence since its last round, by purpose."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = 0.0
        self._is_drafting = False  # whether the coroutine's own time counts as drafting, or else as overhead
        self.request_seconds = 0.0  # of all evaluations for the current request; a long prompt takes several
        self._begin_round()

    def start(self, *, is_drafting: bool) -> None:
        """Start timing the coroutine, because its request is answered."""
        self.request_seconds, self._is_drafting = 0.0, is_drafting
        self._since = self._clock()

    def lap(self) -> None:
        """Count the seconds since the start or the last lap as the coroutine's own time."""
        now = self._clock()
        if self._is_drafting:
            self._draft_seconds += now - self._since
        else:
            self._overhead_seconds += now - self._since
        self._since = now

    def restart(self) -> None:
        """Discard all seconds so far, because the prompt is not part of the first round."""
        self._begin_round()
        self._since = self._clock()

    def count_preparation(self, seconds: float) -> None:
        """Count the sequence's share of the time to prepare a batch."""
        self._overhead_seconds += seconds

    def count_evaluation(self, request: ForwardRequest, seconds: float) -> None:
        """Count an evaluation of a request or of a part of it."""
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
    """The scheduler's record of a sequence: its request, and the part that is evaluated next."""

    sequence: RunningSequence[Any]
    stopwatch: Stopwatch
    request: ForwardRequest | None = None
    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # of the last request to the target
    part: ForwardRequest | None = None  # evaluated next: the request, or a chunk of its prompt
    hidden: HiddenRows | None = None  # computed for the request so far
    n_cached: int = 0  # tokens of the request that the KV cache holds now
    n_cached_before: int | None = None  # tokens of the request that it held before the first evaluation
    n_new: int = 0  # positions of the request that are not cached
    n_padding: int = 0  # positions of padding
    fault: Exception | None = None  # of the length policy; ends the sequence at the next step
    has_rounds: bool = False
    is_suspect: bool = False  # an evaluation of several sequences failed, so this one is evaluated alone
    last_step: int = 0  # number of the last step that evaluated the sequence; 0 = none

    @property
    def goes_first(self) -> bool:
        """Whether the sequence has priority: it is interactive and still short."""
        sequence = self.sequence
        return sequence.is_interactive and len(self.tokens) - sequence.n_prompt < INTERACTIVE_TOKENS

    @property
    def rank(self) -> tuple[bool, int]:
        """Sort key for the room in the KV cache; the lowest rank gets room first."""
        return not self.goes_first, self.sequence.number

    @property
    def waits_for_reader(self) -> bool:
        """Whether the sequence waits for its reader."""
        return self.sequence.waits_for_reader

    @property
    def is_running(self) -> bool:
        """Whether the sequence is not swapped out and does not wait for its reader."""
        return not self.sequence.is_swapped_out and not self.waits_for_reader

    @property
    def takes_part(self) -> bool:
        """Whether one of the target's next evaluations includes a round of the sequence."""
        return self.is_running and self.request is not None and (self.has_rounds or self.request.n_scored > 0)

    @property
    def n_cells(self) -> int:
        """KV cells that the prompt, or the next evaluation, needs."""
        return max(self.sequence.n_prompt, 0 if self.request is None else self.request.n_tokens)

    def timed_width(self) -> int:
        """Return the width that the length policy wants to time, or 0; note the error if the policy fails."""
        try:
            return 0 if self.sequence.length is None else self.sequence.length.timed_width() or 0
        except BaseException as error:  # noqa: BLE001  # ends this sequence alone
            self.fault = as_exception(error)
            return 0

    def shorten(self, n: int) -> None:
        """Evaluate only the first `n` new tokens of the part."""
        assert self.part is not None
        self.part = self.part.prefill(self.n_cached + n)

    def collect(self, hidden: HiddenRows | None) -> None:
        """Add the hidden rows of an evaluation of the part to those of the request."""
        if hidden is not None and self.hidden is not None and self.hidden.end == hidden.start:
            hidden = HiddenRows(self.hidden.start, np.concatenate((self.hidden.rows, hidden.rows)))
        self.hidden = hidden

    def keep_rows(self) -> None:
        """Keep the rows collected so far while the rest of the request is evaluated."""
        request, hidden = self.request, self.hidden
        if request is None or hidden is None:
            return
        self.hidden = hidden._replace(rows=hidden.rows.copy())
        if request.rows_from is not None:
            self.request = replace(request, rows_from=max(request.rows_from, hidden.end))

    def advance(self, answer: Forward | None, error: Exception | None) -> None:
        """Resume the coroutine with an answer, or the error of an evaluation, until its next request.

        Raises StopIteration at the end of the completion, and any exception of the coroutine.
        """
        coroutine, stopwatch = self.sequence.coroutine, self.stopwatch
        stopwatch.start(is_drafting=self.request is not None and self.request.model != TARGET)
        self.request = self.part = self.n_cached_before = self.hidden = None
        self.is_suspect = False
        self.fault = self.fault if error is None else None  # a new fault is raised at the next step
        try:
            wanted = coroutine.send(answer) if error is None else coroutine.throw(error)
            while not isinstance(wanted, ForwardRequest):
                if isinstance(wanted, Round):
                    self.has_rounds = True
                    wanted = coroutine.send(stopwatch.stamped(wanted))
                else:
                    self.sequence.put(wanted)
                    if not self.has_rounds:
                        stopwatch.restart()
                    wanted = coroutine.send(None)
            scope = self.sequence.scope  # here, so that no drafter can leave it out
            self.request = wanted if wanted.scope == scope else replace(wanted, scope=scope)
            if wanted.model == TARGET:
                self.tokens = wanted.tokens
        finally:
            stopwatch.lap()
