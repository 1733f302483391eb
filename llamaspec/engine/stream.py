"""Generation as an iterator, for `for` and `async for`: a prompt in, pieces of text out.

A reader may stop at any time and keeps what it has read. tests/engine/test_stream.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from llamaspec.drafters.calling import fault_of
from llamaspec.engine.completion import Completion, StopReason, summarize
from llamaspec.engine.detokenizer import Detokenizer, Piece
from llamaspec.engine.prefill_decode import Ended, Prefilled, TextEvent, Written, generate
from llamaspec.engine.sequence import RunningSequence
from llamaspec.engine.speculate import Speculation
from llamaspec.engine.thread import ComputeThread
from llamaspec.protocols import SequenceConstraint
from llamaspec.values import Round, TokenArray

Answer = TypeVar("Answer")
Progress = Callable[[int, int], None]  # (prompt tokens processed, prompt tokens to process)


class TextStream:
    """Iterate to generate, with `for` or `async for`; `completion` is the result so far, at any time.

    The thread that iterates calls `on_prefill`. The prompt and first tokens of an interactive sequence go
    before those of others.

    Attributes
    ----------
    is_over : bool
        Whether generation has ended; there may still be pieces to read.
    """

    def __init__(
        self,
        speculation: Speculation,
        text: Detokenizer,
        thread: ComputeThread,
        on_prefill: Progress | None = None,
        *,
        is_interactive: bool = False,
    ) -> None:
        self.is_over = False
        self._speculation, self._text, self._thread = speculation, text, thread
        self._on_prefill, self._is_interactive = on_prefill, is_interactive
        self._sequence: RunningSequence[TextEvent] | None = None  # None before the start
        self._pieces: deque[Piece] = deque()  # generated, but not read yet
        self._received = _Received(speculation, text)
        self._is_closed = False

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        while not self._pieces and not self.is_over:
            self._take_event()
        if self._is_closed or not self._pieces:
            raise StopIteration
        piece = self._pieces.popleft()
        self._received.add(piece)
        return piece

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        import asyncio  # takes longer to import than the rest of this package

        news, loop = asyncio.Event(), asyncio.get_running_loop()
        self.begin(lambda: loop.call_soon_threadsafe(news.set))
        try:
            while (piece := self.next_ready()) is None and not self.is_over:
                await news.wait()
                news.clear()
        except BaseException:  # also when the task is cancelled
            self.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def begin(self, notify: Callable[[], object] | None = None) -> None:
        """Start generating without waiting. May be called more than once.

        The compute thread calls `notify` if `ready` may have new pieces.
        """
        self._begun(notify).notify = notify

    def ready(self) -> list[Piece]:
        """Return the pieces that exist now. Starts generating, but does not wait.

        Raises the error that ended the completion.
        """
        pieces: list[Piece] = []
        while (piece := self.next_ready()) is not None:
            pieces.append(piece)
        return pieces

    def next_ready(self) -> Piece | None:
        """Return the next piece that exists now, or None. `completion` has only the returned pieces."""
        sequence = self._begun()
        while not self._is_closed:
            if self._pieces:
                return next(self)
            if self.is_over or sequence.events.empty():
                break
            self._take_event()
        return None

    @property
    def rounds(self) -> list[Round]:
        """The rounds so far."""
        return self._received.rounds

    @property
    def is_swapped_out(self) -> bool:
        """Whether the sequence waits for room in the KV cache."""
        return self._sequence is not None and self._sequence.is_swapped_out

    @property
    def waits_for_reader(self) -> bool:
        """Whether the sequence has paused until its events are read."""
        return self._sequence is not None and self._sequence.waits_for_reader

    def run(self) -> Completion:
        """Generate to the end."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        """Stop generating, from any thread. Aborts a running evaluation, and does not wait for its end."""
        self.is_over = self._is_closed = True
        if self._sequence is None:
            self._speculation.close()
        else:
            self._thread.cancel(self._sequence)

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()

    @property
    def completion(self) -> Completion:
        """The completion as far as it was read."""
        return self._received.completion

    def _begun(self, notify: Callable[[], object] | None = None) -> RunningSequence[TextEvent]:
        if self._sequence is None:
            speculation = self._speculation
            sequence: RunningSequence[TextEvent] = RunningSequence(
                generate(speculation, self._text),
                speculation.length,
                n_prompt=len(speculation.prompt),
                limit=speculation.limit,
                is_interactive=self._is_interactive,
                scope=speculation.scope,
                notify=notify,  # from its first event on
            )
            self._thread.start(sequence)
            self._sequence = sequence
        return self._sequence

    def _take_event(self) -> None:
        """Wait for the next event and apply it."""
        sequence = self._begun()
        try:
            self._apply(self._thread.next_event(sequence))
        except BaseException as error:
            self.is_over = True
            self._thread.cancel(sequence)
            if not isinstance(error, Exception):  # Ctrl-C: wait until the evaluation has ended
                with suppress(Exception):
                    while self._thread.next_event(sequence) is not None:
                        pass
            raise

    def _apply(self, event: TextEvent | None) -> None:
        received = self._received
        if isinstance(event, Prefilled):
            received.prefilled = event
            if self._on_prefill is not None and event.n_total:
                self._on_prefill(event.n_processed, event.n_total)
            return
        self.is_over = not isinstance(event, Written)
        if isinstance(event, Written):
            received.rounds.append(event.round)
            self._pieces.extend(event.pieces)
        elif isinstance(event, Ended):
            received.stop_reason = event.reason
            self._pieces.extend(event.pieces)


class _Received:
    """The part of a completion that the reader of its stream has received."""

    def __init__(self, speculation: Speculation, text: Detokenizer) -> None:
        self.rounds: list[Round] = []
        self.prefilled = Prefilled(0, 0, 0, 0.0)
        self.stop_reason = StopReason.INTERRUPT  # until the completion ends
        self._speculation, self._text = speculation, text
        self._shown: list[str] = []
        self._tokens: list[int] = []  # end-of-text token included

    def add(self, piece: Piece) -> None:
        """Add a piece that was read."""
        self._shown.append(piece.text)
        if self.stop_reason is StopReason.INTERRUPT:  # else the piece is text that was held back
            self._tokens.append(piece.token)

    @property
    def completion(self) -> Completion:
        """The completion as far as it was read."""
        tokens, speculation = tuple(self._tokens), self._speculation
        constraint, reading = speculation.constraint, speculation.length.reading
        return Completion(
            text="".join(self._shown),
            tokens=tokens[:-1] if tokens and self._text.is_end(tokens[-1]) else tokens,
            n_prompt_tokens=len(speculation.prompt),
            stop_reason=self.stop_reason,
            rounds=tuple(self.rounds),
            summary=summarize(self.rounds, len(tokens)),
            prefill_seconds=self.prefilled.seconds,
            n_cached=self.prefilled.n_cached,
            unused_draft=None if reading is None else reading.unused,
            draft_fault=fault_of(speculation.drafter),
            mask_seconds=constraint.seconds if isinstance(constraint, TimedConstraint) else 0.0,
        )


@dataclass(slots=True, eq=False)
class TimedConstraint:
    """Measures the time that another constraint takes, for all drafts and the target."""

    constraint: SequenceConstraint
    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0

    def allowed(self, generated: TokenArray) -> TokenArray:
        """Return the tokens that may come next."""
        return self._timed(self.constraint.allowed, generated)

    def forced(self, generated: TokenArray) -> TokenArray:
        """Return the tokens that must come next."""
        return self._timed(self.constraint.forced, generated)

    def is_complete(self, generated: TokenArray) -> bool:
        """Whether the completion may end here."""
        return self._timed(self.constraint.is_complete, generated)

    def _timed(self, ask: Callable[[TokenArray], Answer], generated: TokenArray) -> Answer:
        begin = self.clock()
        try:
            return ask(generated)
        finally:
            self.seconds += self.clock() - begin
