"""A slot: the scheduler's record of one running sequence and of its next evaluation.

Only the compute thread reads or writes it. It resumes the coroutine between two evaluations.
tests/engine/test_scheduler.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llamaspec.engine.sequence import MAX_UNREAD, RunningSequence, as_exception
from llamaspec.engine.stopwatch import Stopwatch
from llamaspec.values import NO_TOKENS, TARGET, Forward, ForwardRequest, Round, TokenArray

INTERACTIVE_TOKENS = 128  # of an interactive sequence that go before others: the default limit of editors


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
        self.part = ForwardRequest(self.part.model, self.part.tokens[: self.n_cached + n], n_logits=0)

    def advance(self, answer: Forward | None, error: Exception | None) -> None:
        """Resume the coroutine until its next request.

        With an error: the request cannot be evaluated. Raises StopIteration at the end of the completion, and
        any exception of the coroutine.
        """
        completion, stopwatch = self.sequence.completion, self.stopwatch
        is_drafting = self.request is not None and self.request.model != TARGET
        self.request = self.part = self.n_cached_before = None
        self.fault = self.fault if error is None else None  # a fault that came meanwhile is raised next
        stopwatch.start()
        try:
            wanted = completion.send(answer) if error is None else completion.throw(error)
            while not isinstance(wanted, ForwardRequest):
                if isinstance(wanted, Round):
                    stopwatch.lap(is_drafting=is_drafting)
                    is_drafting, self.has_rounds = False, True
                    wanted = completion.send(stopwatch.stamped(wanted))
                else:
                    self.sequence.put(wanted)
                    if not self.has_rounds:
                        stopwatch.restart()
                        is_drafting = False
                    wanted = completion.send(None)
            self.request = wanted
            if wanted.model == TARGET:
                self.tokens = wanted.tokens
        finally:
            stopwatch.lap(is_drafting=is_drafting)

    def end(self, error: BaseException | None) -> None:
        """End the sequence."""
        self.request = None
        self.sequence.end(error)
