"""What a program iterates over, with `for` or `async for`: a prompt in, pieces of text out.

It may stop at any time, and what was produced until then stays available.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from llamaspec.engine.events import Completion, Ended, Piece, Prefilled, StopReason, TextEvent, Written
from llamaspec.engine.row import Row
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.statistics import summarize
from llamaspec.engine.timed_constraint import TimedConstraint
from llamaspec.engine.write import TextPlan, write
from llamaspec.values import Round

Progress = Callable[[int, int], None]  # (tokens read, tokens to read)


class TextStream:
    """Iterate to generate, with `for` or `async for`; `completion` tells what came of it, at any time.

    Parameters
    ----------
    plan : TextPlan
    scheduler : Scheduler
    on_prefill : callable, optional
        Told how many tokens of the prompt have been read, of how many.
    """

    def __init__(self, plan: TextPlan, scheduler: Scheduler, on_prefill: Progress | None = None) -> None:
        self._plan = plan
        self._scheduler = scheduler
        self._on_prefill = on_prefill
        self._row: Row[TextEvent] | None = None
        self._pieces: deque[Piece] = deque()  # made, and not handed out
        self._shown: list[str] = []
        self._tokens: list[int] = []
        self._rounds: list[Round] = []
        self._n_ended = 0  # 1 when the model's end-of-text token came
        self._prefilled = Prefilled(0, 0, 0, 0.0)
        self._stop_reason = StopReason.INTERRUPT
        self._is_over = False
        self._is_closed = False

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        while not self._pieces and not self._is_over:
            self._take_in(self._next_event())
        if self._is_closed or not self._pieces:
            raise StopIteration
        piece = self._pieces.popleft()
        self._shown.append(piece.text)
        if self._plan.vocabulary.is_end(piece.token):
            self._n_ended = 1
        elif self._stop_reason is StopReason.INTERRUPT:  # else it is what was held back
            self._tokens.append(piece.token)
        return piece

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        try:
            piece = await asyncio.to_thread(next, self, None)
        except BaseException:  # also when the task is cancelled
            self.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def ready(self) -> list[Piece]:
        """The pieces that exist by now; begins the text, and evaluates nothing: `Pair.step` does.

        Raises
        ------
        Exception
            Whatever ended the text.
        """
        pieces: list[Piece] = []
        while (piece := self.next_ready()) is not None:
            pieces.append(piece)
        return pieces

    def next_ready(self) -> Piece | None:
        """The next of them, or None. What follows it counts as not generated until it is asked for, too."""
        row = self._begun()
        while not self._is_closed:
            if self._pieces:
                return next(self)
            if self._is_over or not (row.events or row.is_done):
                break
            self._take_in(self._next_event())
        return None

    def pause(self) -> None:
        """Leave the room in the KV cache to others; for who steps (`Pair.step`) and nobody else."""
        if self._row is not None:
            self._scheduler.pause(self._row)

    def go_on(self) -> None:
        """After a pause: the text is read again, and stays the same."""
        if self._row is not None:
            self._scheduler.go_on(self._row)

    @property
    def is_paused(self) -> bool:
        """Whether it leaves its room to others."""
        return self._row is not None and self._row.is_paused

    @property
    def n_cells(self) -> int:
        """Tokens that the KV cache must hold for what is to be evaluated next, and for the prompt."""
        request = None if self._row is None else self._row.request
        return max(len(self._plan.prompt), 0 if request is None else request.n_tokens)

    def run(self) -> Completion:
        """Generate to the end."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        """Stop generating; from any thread, within one evaluation."""
        self._is_over = self._is_closed = True
        if self._row is not None:
            self._scheduler.cancel(self._row)
        if self._row is None or not self._row.is_started:  # else the text has done so
            self._plan.speculation.close()

    def __del__(self) -> None:
        if self._row is not None:
            self._row.is_cancelled = True  # ends at the next step: nobody can take a lock here
        elif not self._is_closed:
            self._plan.speculation.close()

    @property
    def is_over(self) -> bool:
        """Whether nothing follows what exists by now."""
        return self._is_over

    @property
    def rounds(self) -> Sequence[Round]:
        """The rounds up to now; the list grows."""
        return self._rounds

    @property
    def completion(self) -> Completion:
        """What has been generated up to now."""
        constraint = self._plan.speculation.constraint
        return Completion(
            text="".join(self._shown),
            tokens=tuple(self._tokens),
            n_prompt_tokens=len(self._plan.prompt),
            stop_reason=self._stop_reason,
            rounds=tuple(self._rounds),
            summary=summarize(self._rounds, len(self._tokens) + self._n_ended),
            prefill_seconds=self._prefilled.seconds,
            n_cached=self._prefilled.n_cached,
            mask_seconds=constraint.seconds if isinstance(constraint, TimedConstraint) else 0.0,
        )

    def _begun(self) -> Row[TextEvent]:
        if self._row is None:
            self._row = self._scheduler.start(write(self._plan), self._plan.speculation.length.width)
        return self._row

    def _next_event(self) -> TextEvent | None:
        row = self._begun()
        try:
            return self._scheduler.next_event(row)
        except BaseException:
            self._is_over = True
            self._scheduler.cancel(row)
            raise

    def _take_in(self, event: TextEvent | None) -> None:
        if isinstance(event, Prefilled):
            self._prefilled = event
            if self._on_prefill is not None and event.n_to_read:
                self._on_prefill(event.n_read, event.n_to_read)
            return
        self._is_over = not isinstance(event, Written)
        if isinstance(event, Written):
            self._rounds.append(event.round)
            self._pieces.extend(event.pieces)
        elif isinstance(event, Ended):
            self._stop_reason = event.reason
            self._pieces.extend(event.pieces)
