"""A running sequence: one completion as its reader and the scheduler share it.

The scheduler resumes the coroutine and puts its events into a queue. The reader takes them out, and may
cancel. The state of an evaluation is in the scheduler's own record, see `engine/slot.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from llamaspec.values import ForwardRequest, Round

Event = TypeVar("Event")
Generating: TypeAlias = Generator[ForwardRequest | Round | Event, Any, Any]
Width: TypeAlias = Callable[[int], int | None]  # needed positions -> those to evaluate; None = not allowed

MAX_UNREAD = 16  # events; a sequence with this many waits for its reader


def unpadded(n_positions: int) -> int:
    """No padding."""
    return n_positions


@dataclass(slots=True, eq=False)
class RunningSequence(Generic[Event]):
    """A completion that is being generated."""

    number: int
    completion: Generating[Event]
    width: Width = unpadded
    n_prompt: int = 0  # tokens
    limit: int | None = None  # maximum length in tokens, prompt included
    is_interactive: bool = False  # goes before sequences that are not
    notify: Callable[[], object] | None = None  # called by the compute thread after each event
    events: SimpleQueue[Event | None] = field(default_factory=SimpleQueue)  # None = the end
    error: Exception | None = None  # the reason for a failed end, until it is raised to the reader
    is_done: bool = False
    is_cancelled: bool = False
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

    def cancel(self) -> None:
        """Have the scheduler end this sequence at its next step; from any thread."""
        self.is_cancelled = True

    def listen(self, notify: Callable[[], object] | None) -> None:
        """Replace the function that is called after each event."""
        self.notify = notify

    def swap(self, *, is_out: bool) -> None:
        """Record whether the sequence has lost its room in the KV cache."""
        self.is_swapped_out = is_out

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
