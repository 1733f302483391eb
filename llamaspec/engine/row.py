"""A row: a text that is running, what it waits for, and what its round has cost up to now.

Drives the text's coroutine between two evaluations. Knows no models. tests/engine/test_scheduler.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from llamaspec.values import TARGET, Forward, ForwardRequest, Round, Source

Event = TypeVar("Event")
Text: TypeAlias = Generator[ForwardRequest | Round | Event, Any, Any]
Width: TypeAlias = Callable[[int], int | None]  # needed positions -> those to evaluate; None = not allowed
Clock: TypeAlias = Callable[[], float]  # seconds


def unpadded(n_positions: int) -> int:
    """No padding."""
    return n_positions


@dataclass(slots=True, eq=False)
class Row(Generic[Event]):
    """A text that is running."""

    number: int
    text: Text[Event]
    width: Width
    request: ForwardRequest | None = None  # what it waits for
    part: ForwardRequest | None = None  # of it, what is evaluated next
    n_cached: int = 0  # tokens of the request that are cached
    n_cached_before: int | None = None  # the same, before a part of a long request was evaluated
    n_new: int = 0  # positions that the request still needs
    n_padding: int = 0  # positions that it would want besides
    events: deque[Event] = field(default_factory=deque)
    error: BaseException | None = None  # what ended it
    is_done: bool = False
    is_cancelled: bool = False
    is_started: bool = False
    is_paused: bool = False  # nothing is evaluated for it
    caller: int | None = None  # the thread that asked last for what it makes
    has_rounds: bool = False  # what came before the first round is not part of it
    seconds: float = 0.0  # of the request's parts that are evaluated
    draft_seconds: float = 0.0  # since the last round, as the next four
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0
    n_draft_steps: int = 0
    n_draft_scored: int = 0  # positions

    def cost(self, seconds: float) -> None:
        """Note that (a part of) the request has been evaluated."""
        request = self.request
        assert request is not None
        self.seconds += seconds
        if request.model == TARGET:
            self.verify_seconds += seconds
        else:
            self.draft_seconds += seconds
            self.n_draft_steps += bool(request.n_scored)
            self.n_draft_scored += request.n_scored

    def go_on(self, clock: Clock, answer: Forward | None, error: Exception | None) -> None:
        """Let the text go on until it wants something evaluated again.

        With an error: its request cannot be evaluated. Raises StopIteration where the text ends, and whatever
        goes wrong in it.
        """
        drafts = self.request is not None and self.request.model != TARGET
        self.request = self.part = self.n_cached_before = None
        self.seconds, self.is_started = 0.0, True
        begin = clock()
        try:
            wanted = self.text.send(answer) if error is None else self.text.throw(error)
            while not isinstance(wanted, ForwardRequest):
                if isinstance(wanted, Round):
                    now = clock()
                    self._count(now - begin, drafts)
                    begin, drafts = now, False
                    wanted = self.text.send(self._stamped(wanted))
                else:
                    self.events.append(wanted)
                    if not self.has_rounds:
                        self._begin_round()
                        begin, drafts = clock(), False
                    wanted = self.text.send(None)
            self.request = wanted
        finally:
            self._count(clock() - begin, drafts)

    def _count(self, seconds: float, drafts: bool) -> None:
        """Note what the text itself took."""
        if drafts:
            self.draft_seconds += seconds
        else:
            self.overhead_seconds += seconds

    def _stamped(self, round_: Round) -> Round:
        """A round with its seconds."""
        n_steps, n_scored = self.n_draft_steps, self.n_draft_scored
        if n_steps and round_.source is Source.STAGE:  # of which one makes several
            n_steps = n_scored = len(round_.draft) + round_.n_dropped
        stamped = Round(
            round_.draft,
            round_.path,
            round_.next_token,
            round_.width,
            round_.n_rows,
            round_.evaluation,
            n_steps,
            self.draft_seconds,
            self.verify_seconds,
            self.overhead_seconds,
            round_.logprobs,
            n_scored,
            round_.n_beside,
            round_.n_dropped,
            round_.shadow,
        )
        self.has_rounds = True
        self._begin_round()
        return stamped

    def _begin_round(self) -> None:
        self.draft_seconds = self.verify_seconds = self.overhead_seconds = 0.0
        self.n_draft_steps = self.n_draft_scored = 0
