"""A running sequence: one text's coroutine, what it waits for, and what its round has cost up to now.

The scheduler drives it between two evaluations; whoever reads the text takes its events from a queue. Knows
no models. tests/engine/test_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from llamaspec.values import NO_TOKENS, TARGET, Forward, ForwardRequest, Round, TokenArray

Event = TypeVar("Event")
Text: TypeAlias = Generator[ForwardRequest | Round | Event, Any, Any]
Width: TypeAlias = Callable[[int], int | None]  # needed positions -> those to evaluate; None = not allowed
Clock: TypeAlias = Callable[[], float]  # seconds

INTERACTIVE_TOKENS = 128  # of an interactive text that go before others; editors ask for no more by default
MAX_UNREAD = 16  # events; a sequence with as many waits for its reader


def unpadded(n_positions: int) -> int:
    """No padding."""
    return n_positions


@dataclass(slots=True, eq=False)
class RunningSequence(Generic[Event]):
    """A text that is being written.

    Only `events`, `error`, `is_cancelled` and `notify` may be touched by other threads than the one that
    computes.
    """

    number: int
    text: Text[Event]
    width: Width = unpadded
    n_prompt: int = 0  # tokens
    limit: int | None = None  # tokens that it has at most
    is_interactive: bool = False  # goes before those that are not
    notify: Callable[[], object] | None = None  # called by the computing thread after it has put events
    events: SimpleQueue[Event | None] = field(default_factory=SimpleQueue)  # None = the end
    error: Exception | None = None  # what ended it
    is_done: bool = False
    is_cancelled: bool = False
    is_swapped_out: bool = True  # nothing of it is evaluated, or kept in the KV cache
    request: ForwardRequest | None = None  # what it waits for
    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # of its last request to the target
    part: ForwardRequest | None = None  # of it, what is evaluated next
    n_cached: int = 0  # tokens of the request that are cached
    n_cached_before: int | None = None  # the same, before a part of a long request was evaluated
    n_new: int = 0  # positions that the request still needs
    n_padding: int = 0  # positions that it would want besides
    fault: Exception | None = None  # of its length policy, while a batch was put together
    has_rounds: bool = False  # what came before the first round is not part of it
    seconds: float = 0.0  # of the request's parts that are evaluated
    draft_seconds: float = 0.0  # since the last round, as the next four
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0
    n_draft_steps: int = 0
    n_draft_scored: int = 0  # positions
    last_step: int = 0  # the last step of the scheduler that it had a part in; 0 = none yet

    @property
    def goes_first(self) -> bool:
        """Whether it goes before others: it is interactive, and not long yet."""
        return self.is_interactive and len(self.tokens) - self.n_prompt < INTERACTIVE_TOKENS

    @property
    def rank(self) -> tuple[bool, int]:
        """Who is to have room in the KV cache: the lowest."""
        return not self.goes_first, self.number

    @property
    def is_unread(self) -> bool:
        """Whether it waits for its reader."""
        return self.events.qsize() >= MAX_UNREAD

    @property
    def n_cells(self) -> int:
        """KV cells that its next evaluation and its prompt need."""
        return max(self.n_prompt, 0 if self.request is None else self.request.n_tokens)

    def padded(self, n_positions: int) -> int | None:
        """The width that its length policy wants; a policy that fails is told of at the next step."""
        try:
            return self.width(n_positions)
        except BaseException as error:  # noqa: BLE001  # it ends this sequence alone
            self.fault = told(error)
            return n_positions

    def count(self, seconds: float) -> None:
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

    def advance(self, clock: Clock, answer: Forward | None, error: Exception | None) -> None:
        """Let the text go on until it wants something evaluated again.

        With an error: its request cannot be evaluated. Raises StopIteration where the text ends, and whatever
        goes wrong in it.
        """
        drafts = self.request is not None and self.request.model != TARGET
        self.request = self.part = self.n_cached_before = None
        self.fault = self.fault if error is None else None  # one that came meanwhile is told next
        self.seconds = 0.0
        begin = clock()
        try:
            wanted = self.text.send(answer) if error is None else self.text.throw(error)
            while not isinstance(wanted, ForwardRequest):
                if isinstance(wanted, Round):
                    now = clock()
                    self._count_own(now - begin, drafts)
                    begin, drafts = now, False
                    wanted = self.text.send(self._stamped(wanted))
                else:
                    self._put(wanted)
                    if not self.has_rounds:
                        self._begin_round()
                        begin, drafts = clock(), False
                    wanted = self.text.send(None)
            self.request = wanted
            if wanted.model == TARGET:
                self.tokens = wanted.tokens
        finally:
            self._count_own(clock() - begin, drafts)

    def end(self, error: BaseException | None) -> None:
        """Close the text and tell the reader."""
        try:
            self.text.close()
        except BaseException as raised:  # noqa: BLE001  # of a drafter that does not let itself be closed
            error = error or raised
        self.request, self.error, self.is_done = None, None if error is None else told(error), True
        with suppress(BaseException):  # of `notify`; the event is there
            self._put(None)

    def _put(self, event: Event | None) -> None:
        self.events.put(event)
        if self.notify is not None:
            with suppress(RuntimeError):  # the event loop of the reader has ended
                self.notify()

    def _count_own(self, seconds: float, drafts: bool) -> None:
        """Note what the text itself took."""
        if drafts:
            self.draft_seconds += seconds
        else:
            self.overhead_seconds += seconds

    def _stamped(self, round_: Round) -> Round:
        """A round with its seconds."""
        stamped = replace(
            round_,
            n_draft_steps=self.n_draft_steps,
            n_draft_scored=self.n_draft_scored,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            overhead_seconds=self.overhead_seconds,
        )
        self.has_rounds = True
        self._begin_round()
        return stamped

    def _begin_round(self) -> None:
        self.draft_seconds = self.verify_seconds = self.overhead_seconds = 0.0
        self.n_draft_steps = self.n_draft_scored = 0


def told(raised: BaseException) -> Exception:
    """What is raised to the reader: in its thread, SystemExit and KeyboardInterrupt mean something else."""
    if isinstance(raised, Exception):
        return raised
    error = RuntimeError(f"{raised!r} ended the text; what a text calls must raise an Exception")
    error.__cause__ = raised
    return error
